"""Which layers of a cache share a range, and how long the ranges are."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from ...allocator import devices
from ...allocator._native import Device, Group
from ...offload.governor.kv_tier import KVTier
from ...offload.policy.geometry import Geometry, choose, longest
from ...offload.policy.tuning import DEFAULT
from ..compat import longest_sequence, one_shape
from ..device import governors
from ..device.streams import torch_device
from ..forward.lease import ThreadLease
from .range import KVRange
from .tensors import KVShape


class CacheSizes(NamedTuple):
    """The sizes of one layer: sequences, heads, elements of a key and of a value, bytes of an element."""

    batch: int
    heads: int
    k_dim: int
    v_dim: int
    itemsize: int


class CacheRanges:
    """The ranges and the lease group that the layers of one cache share. A copy of a cache gets its own."""

    def __init__(
        self,
        layers: int = 1,
        longest: int = 0,
        expected: int = 0,
        alone: bool = False,
        device: Device | None = None,
    ) -> None:
        """`layers`: how many may share a range. `longest`: tokens to reserve for, `expected`: tokens likely to come; 0
        if unknown. `alone`: single layers are moved apart. `device`: whose pages the cache gets while that has a
        runtime; else those of the device that the tokens are on."""
        self.whose = ""  # the name of the model, for logs
        self._wanted = device
        self._layers = max(1, layers)
        self._longest = longest
        self._expected = expected
        self._alone = alone
        self._device: Device | None = None
        self._group: Group | None = None
        self._tier: KVTier | None = None
        self._thread_lease: ThreadLease | None = None
        self._ranges: list[weakref.ref[KVRange]] = []
        self._numbered = 0  # layers that were told their number

    @classmethod
    def of(
        cls,
        config: Any,
        layers: int = 1,
        expected: int = 0,
        alone: bool = False,
        device: Device | None = None,
    ) -> CacheRanges:
        """Makes the ranges of a cache with so many elastic layers, of a model of this configuration (None:
        unknown)."""
        if config is None:
            return cls(1, expected, expected, alone, device)
        return cls(layers if one_shape(config) else 1, expected or longest_sequence(config), expected, alone, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheRanges:
        make, settings = self.__reduce__()
        made = make(*settings, self._wanted)
        made.whose, made._numbered = self.whose, self._numbered
        return made

    def __reduce__(self) -> tuple[type[CacheRanges], tuple[int, int, int, bool]]:
        return CacheRanges, (self._layers, self._longest, self._expected, self._alone)

    def number(self) -> int:
        """Numbers the layers of a cache that are made in order."""
        self._numbered += 1
        return self._numbered - 1

    def device_at(self, place: torch.device) -> Device | None:
        """The device whose pages hold tokens that torch has at `place`; None where there is none."""
        ours = next((owner for owner in devices.every() if owner.device is self._wanted), None)  # None if it was closed
        runtime = ours or devices.current(place.index)
        return runtime.device if runtime is not None and torch_device(runtime.device) == place else None

    def group(self, device: Device) -> Group:
        """The lease group of this cache on `device`."""
        if self._group is None or self._device is not device:
            self._device, self._group, self._tier = device, device.group(), None
        return self._group

    @property
    def tier(self) -> KVTier | None:
        """The cache's side of the governor; None before it has a range, and where there are no host pages."""
        return self._tier

    def join(self, device: Device, shape: KVShape, tokens: int, number: int) -> tuple[KVRange, int] | None:
        """Gives a place to a layer of this shape and at least `tokens` tokens: in a range that has one, else in a new
        one.
        `number`: of the layer in its model.

        None where attention kernels could not index so many tokens (geometry.py, Note [int32]). DriverError.
        """
        self._ranges = [range_ for range_ in self._ranges if range_() is not None]
        for kv_range in (range_() for range_ in self._ranges):
            if (
                kv_range is not None
                and kv_range.shape == shape
                and kv_range.geometry.tokens >= tokens
                and kv_range.reaches(tokens)
            ):
                place = kv_range.join(number)
                if place is not None:
                    return kv_range, place
        geometry = geometry_for(
            CacheSizes(shape.batch, shape.heads, shape.k_dim, shape.v_dim, shape.dtype.itemsize),
            self._layers,
            tokens,
            device.page_size,
            device.budget,
            longest_known=self._longest,
            expected=self._expected,
            alone=self._alone,
        )
        if geometry is None:
            return None
        group = self.group(device)
        if self._tier is None and device.host_pages:
            self._tier, self._thread_lease = KVTier(device, group, governors.of(device), self.whose), ThreadLease(group)
        more = 0 if self._ranges else -(-self._layers // geometry.layers) - 1
        expected = max(self._expected, tokens)
        kv_range = KVRange(device, group, geometry, shape, self._tier, self._thread_lease, expected, more)
        self._ranges.append(weakref.ref(kv_range))
        if self._tier is not None:
            self._tier.client.grows_by = max(self._tier.client.grows_by, len(self._ranges), 1 + more)
        place = kv_range.join(number)
        assert place is not None
        return kv_range, place


def geometry_for(
    sizes: CacheSizes,
    layers: int,
    tokens: int,
    page: int,
    budget: int,
    *,
    longest_known: int,
    expected: int,
    alone: bool,
    least: int = DEFAULT.kv_growth.tokens,
) -> Geometry | None:
    """The geometry of the range that layers of these sizes get when the first of them is to hold `tokens` tokens; None
    where attention kernels could not index so many.

    `budget`: bytes of all pages. `longest_known`: tokens that a sequence may reach, 0 if unknown. `least`: tokens that
    are reserved for in any case. The others as in `geometry.choose`.
    """
    most = longest(*sizes)
    if tokens > most:
        return None
    # No sequence outgrows the budget, so that reserving more would only cost bookkeeping.
    affordable = max(budget // Geometry(1, *sizes, page, 1).token_bytes, 2 * tokens)
    room = min(max(longest_known, least, 2 * tokens), affordable, most)
    return choose(layers, *sizes, page, room, expected=max(expected, tokens), alone=alone)
