"""A range of KV, the keys and values of a group of layers, mapped to the longest of them; and which layers of a cache
share a range, and how long the ranges are.

Note [Interrupts]
    Ctrl-C may end any call between any two lines. So lengths change last when tokens come and first when they go: the
    pieces under them are mapped at any time. Further pieces are noted before they are mapped (`_most`); mapping and
    retiring them again does no harm. The tensor over the range is replaced in one assignment, or made again where it is
    missing.

Note [Released prefix]
    A cache that is kept for later prompts, and begins with tokens that another one holds as well, gives back the pages
    of those (`release_prefix`): whole pages only, as a token may lie on two. Only a `part` behind them can be shown
    then. Before the cache is used again these tokens are written anew (`restoring_prefix`).

Note [Prefills over the host]
    A kernel reads keys and values once per block of its rows, over the link where they lie on the host: with few rows
    that is as fast as copying them, with many it is a multiple. So what many rows read is copied to the device once per
    layer (`copied_in`).

Note [One place at a time]
    The driver tells from the first address of a copy whether its source is the device or the host, and may have the CPU
    make it. What CUDA does where later bytes lie elsewhere is not documented. So no copy of torch's, which is one call
    of the driver where both sides are contiguous, spans pages of both; kernels may read any.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch

from ...allocator import devices
from ...allocator._native import Device, Group, Lease, Range
from ...offload.manager.kv_tier import KVTier
from ...offload.policy.geometry import Geometry, choose, longest
from ..compat import longest_sequence, one_shape
from ..device import managers
from ..device.streams import raw_stream, torch_device
from ..forward.lease import ForwardLease, GroupLease, ThreadLease, current, on_this_thread
from .pages import KVPages
from .tensors import KVShape, Pair, RangeTensors, ShownTokens

_cat: Final = torch.cat
_ALIGNMENT: Final = 512  # bytes: kernels are chosen by no more


class KVRange:
    """The range of a group of layers. A layer has a place in it (its index in the geometry) and its own length."""

    def __init__(
        self,
        device: Device,
        group: Group,
        geometry: Geometry,
        shape: KVShape,
        tier: KVTier | None = None,
        thread_lease: ThreadLease | None = None,
        expected: int = 0,
        more: int = 0,
    ) -> None:
        """Reserves addresses for `geometry`; maps nothing. `tier`, `thread_lease`: see KVPages.
        `expected`: tokens, and `more`: further ranges like this one, that are likely to come. DriverError."""
        self.geometry: Final = geometry
        self.shape: Final = shape
        self.group: Final = group
        self.range: Final = device.reserve(
            geometry.reservation,
            "kv",
            group,
            expected=min(expected, geometry.tokens) * geometry.token_bytes,
            more=more,
        )
        self.shown: Final = ShownTokens(geometry, RangeTensors(self.range, geometry, shape, _STORAGES))
        alone = weakref.WeakMethod(self.shown.exclusive)  # or it would refer to itself
        self.pages: Final = KVPages(
            device, group, self.range, geometry, tier, thread_lease, lambda: (ask := alone()) is None or ask()
        )
        self.device: Final = device
        self._tier = tier
        self._standin = device.kind == "standin"
        self._one_key = torch.Size((shape.batch, shape.heads, 1, shape.k_dim))
        self._one_value = torch.Size((shape.batch, shape.heads, 1, shape.v_dim))
        self._forward = 0  # the number of the last lease that was told of an append
        self._joined = 0  # places given out; one that was left is not given out again
        self._most = 0  # pieces that may be mapped, from the start of the range

    def join(self, number: int) -> int | None:
        """Gives a place to one more layer, None where all are taken. `number`: of the layer in its model, for logs."""
        if self._joined == self.geometry.layers:
            return None
        self._joined += 1
        self.pages.joined(number)
        return self._joined - 1

    def leave(self, place: int) -> None:
        """Gives up the layer's place and tokens."""
        self.shown.left.add(place)
        self.cut(place, 0)

    def takes(self, place: int, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Can these tokens be appended at this place, in their shape and without overwriting tokens that other views
        show?"""
        shown = self.shown
        start = shown.latest[place].length
        return (
            self.shape.fits(keys, values)
            and start + keys.shape[2] <= self.geometry.tokens
            and (start >= shown.until[place] or shown.exclusive())
            and self.reaches(start + keys.shape[2])
        )

    def reaches(self, tokens: int) -> bool:
        """Can so many tokens be mapped?"""
        mapped = self.shown.mapped or self.shown.open()
        return tokens <= mapped.capacity or self.pages.reachable(mapped.pieces, self.geometry.pieces(tokens))

    def append_next(
        self, place: int, keys: torch.Tensor, values: torch.Tensor, stream: int | None = None
    ) -> Pair | None:
        """Fast path of `append`, called for every layer, per token: one token, on a mapped page, in a forward for which
        all of the cache is resident (`KVTurns.forward`), or the first one of such. `stream`: the current one, where
        that is known. None, and nothing has changed, where that does not hold or `takes` would return False."""
        tier, shown = self._tier, self.shown
        mapped, latest = shown.mapped, shown.latest[place]
        if tier is None or mapped is None or not tier.turns.forward:
            return None
        leases, start = on_this_thread.leases, latest.length
        lease = leases[-1]() if leases else None  # inlined `current`, for the usual case
        end = start + 1
        if (
            lease is None
            or lease.closed
            or end >= mapped.capacity
            or end >= self.pages.fills
            or start < shown.until[place]
            or (views := mapped.views[place]) is None
            or keys.shape != self._one_key
            or values.shape != self._one_value
            or not keys.dtype == values.dtype == self.shape.dtype
            or not keys.device == values.device == self.shape.device
        ):
            return None
        if stream is None or self._standin:
            stream = 0 if self._standin else raw_stream(self.device.ordinal)
        turns, number = tier.turns, self.pages.number
        if (number, place) == turns.first:
            if lease.number == turns.forward or not tier.continues(lease.number):
                return None
            lease.entered.enter(self.group)
            turns.since, turns.order, turns.appended = 0, turns.appended, [number]
        elif lease.number != turns.forward or turns.since >= turns.layers:
            return None
        else:
            turns.since += 1
            turns.appended.append(number)
        if self._standin:
            step = self.geometry.token_bytes
            self.device.note_use(self.range.address + start * step, step, 0, True)
        elif stream != turns.stream:  # else the core knows it since another layer's token
            self.device.note_stream(stream)
        turns.stream = stream
        if self._forward != lease.number:
            self._forward = lease.number
            lease.written_pages[id(self.pages)] = weakref.ref(self.pages)  # `touched`, without its call
        if views.write_both is not None:  # inlined `ShownTokens.write`, by one kernel
            _cat((keys, values), out=views.write_both.narrow(2, start, 1))
        else:
            views.write_keys.narrow(2, start, 1).copy_(keys)
            views.write_values.narrow(2, start, 1).copy_(values)
        pair = views.keys.narrow(2, 0, end), views.values.narrow(2, 0, end)
        latest.length, shown.until[place], (latest.keys, latest.values) = end, end, pair
        return pair

    def append(self, place: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Copies the tokens behind the layer's last one and returns all of its keys and values, to be read now; as
        copies where many rows will read pages that are on the host.

        Called after `takes` has returned True. Raises torch.OutOfMemoryError or DriverError, and has changed nothing,
        where no page is left to map.
        """
        shown, count = self.shown, keys.shape[2]
        start = shown.latest[place].length
        end = start + count
        lease, alone = current(), Lease()
        if lease is not None:
            lease.enter_group(self.group)  # until that ends
        else:
            alone.enter(self.group)
        try:
            self.pages.begin(place, count, end, lease)
            mapped = shown.mapped or shown.open()
            took = end > mapped.capacity
            if took:
                pieces = self.geometry.pieces(end)
                self._most = max(self._most, pieces)
                self.pages.map(mapped.pieces, pieces, end)
                mapped = shown.open(pieces)
            views = mapped.views[place] or shown.views(mapped, place)
            self._note(start, count, lease)
            pair = shown.write(place, views, keys, values, end)
        finally:
            alone.close()
        if end >= self.pages.fills:
            self.pages.filled(shown.lengths(), soon=count > 1)
        if count == 1 and (took or end == mapped.capacity):
            self.pages.appended(took=took, next_takes=end == mapped.capacity < self.geometry.tokens)
        if count > 1 and self.pages.worth_copying(count):
            return copied_in(self.device, self.range, self.geometry, mapped.flat, pair) or pair
        return pair

    def pair(self, place: int) -> Pair:
        """The layer's keys, [batch, heads, length, k_dim], and values. Raises as `KVPages.show`."""
        if self.pages.needs_wait_or_remap:
            _show_pages(self.pages)
        return self.shown.pair(place)

    def cut(self, place: int, length: int, then: int = 0) -> None:
        """Forgets the layer's tokens from `length` on, and gives back pages that no layer needs, as `fit` does."""
        latest = self.shown.latest[place]
        self.pages.lower((*self.shown.lengths(place), length))
        latest.length, latest.keys, latest.values = length, None, None
        if not self.fit(then):
            self._show(place)

    def fit(self, then: int = 0) -> bool:
        """Gives back the pages that no token lies on, such as a failed extension leaves, except those that `then`
        tokens, which are expected soon, will need. Returns whether there were any."""
        shown, pieces = self.shown, self.shown.needed()
        soon = min(self._most, self.geometry.pieces(min(then, self.geometry.tokens)))
        if all(self.range.leads_to(piece) == "device" for piece in range(pieces, soon)):
            pieces = max(pieces, soon)
        if pieces >= self._most:
            return False
        if shown.mapped is not None and shown.mapped.pieces > pieces:
            shown.mapped = None
        shown.exclusive()  # drops its own views
        self.pages.retire(pieces, self._most)
        self._most, shown.lost = pieces, min(shown.lost, pieces)
        for place in range(self._joined):
            self._show(place)
        return True

    def keep(self, kept: bool) -> None:
        """Lets the last pages leave too, if `kept`, as nothing is appended until a call with False. On the thread that
        uses the cache, or before another one may. DriverError."""
        if kept:
            self.pages.final(self.shown.lengths())
        else:
            self.pages.lower(self.shown.lengths())

    def part(self, place: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's keys and values of the tokens [start, end), as views of a new tensor, on any thread.
        BallonetError where some of them have no page, or are in a slot while another thread uses the cache."""
        self.pages.show()
        self.device.note_stream(self.pages.stream)
        return self.shown.part(place, start, end)

    @property
    def held(self) -> int:
        """Pieces that have a page."""
        return self._most - self.shown.lost

    @property
    def missing(self) -> int:
        """Tokens, from the first one on, that the range has lost: see Note [Released prefix]."""
        return -(-self.shown.lost * self.geometry.page // self.geometry.token_bytes)

    def release_prefix(self, tokens: int) -> None:
        """Gives the pages back on which there is nothing but the first so many tokens. See Note [Released prefix]."""
        shown, first = self.shown, tokens * self.geometry.token_bytes // self.geometry.page
        if first > shown.lost:
            shown.drop()
            before, shown.lost = shown.lost, first
            shown.open()
            self.pages.release_prefix(before, first)

    @property
    def prefix_restorable(self) -> bool:
        """Is no tensor left over the pages that were given up?"""
        return self.pages.reachable(0, self.shown.lost)

    @contextmanager
    def restoring_prefix(self) -> Iterator[int]:
        """Backs the released prefix again and yields its number of tokens, which the caller writes in the block
        (`write`). torch.OutOfMemoryError, DriverError; the prefix is then released as before."""
        first = self.shown.lost
        with GroupLease(self.group):
            try:
                self.pages.map_prefix(first, self.missing)
                yield self.missing
            except BaseException:
                self.pages.release_prefix(0, first)
                raise
        self.pages.prefix_restored()
        self.shown.drop()  # shows nothing, and is opened by whoever comes where Ctrl-C comes first
        self.shown.lost = 0
        self.shown.open()
        for place in range(self._joined):
            self._show(place)

    def write(self, place: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copies tokens to where they were missing, or are not yet shown. Under a lease."""
        end = start + keys.shape[2]
        to_keys, to_values = self.part(place, start, end)
        self._note(start, end - start, current())
        to_keys.copy_(keys)
        to_values.copy_(values)

    def reorder(self, place: int, rows: torch.Tensor) -> None:
        """Replaces sequence i by sequence rows[i] (int64[batch]), after `ShownTokens.exclusive` has returned True."""
        mapped, length = self.shown.mapped or self.shown.open(), self.shown.latest[place].length
        views = mapped.views[place] or self.shown.views(mapped, place)
        shape = self.shape
        token = shape.batch * shape.heads * max(shape.k_dim, shape.v_dim)
        chunk = max(1, min(length, _SCRATCH // (token * shape.dtype.itemsize)))
        # Allocated before anything is written: nothing after this line needs memory.
        scratch = torch.empty(chunk * token, dtype=shape.dtype, device=shape.device)
        with GroupLease(self.group):
            self.pages.lower((0,))
            self._note(0, length, current())
            for whole in (views.write_keys, views.write_values):
                by_token = whole.permute(2, 0, 1, 3).flatten(2)  # [tokens, batch, heads x dim], a view
                for start in range(0, length, chunk):
                    part = by_token[start : min(start + chunk, length)]
                    picked = scratch[: part.numel()].view(part.shape)
                    part.copy_(torch.ops.aten.index.Tensor_out(part, [None, rows], out=picked))
        self._show(place)
        self.pages.filled(self.shown.lengths())

    def _show(self, place: int) -> None:
        if not self.shown.lost and not self.pages.needs_wait_or_remap:
            latest = self.shown.latest[place]
            latest.keys, latest.values = self.pair(place)

    def _note(self, start: int, tokens: int, lease: ForwardLease | None) -> None:
        """Tells the core, and the lease of the forward, which tokens are about to be written."""
        if self.device.kind == "standin":
            step = self.geometry.token_bytes
            self.device.note_use(self.range.address + start * step, tokens * step, 0, True)
            if self.pages.needs_wait_or_remap:
                self.range.note_use(0, False)  # all of it is read
        else:
            self.device.note_stream(self.pages.stream)
        if lease is not None:
            lease.touched(self.pages)


@torch.compiler.disable(reason="pages of this KV cache are on their way from the host, which a graph cannot wait for")  # type: ignore[untyped-decorator]
def _show_pages(pages: KVPages) -> None:
    pages.show()


def copied_in(device: Device, range_: Range, geometry: Geometry, flat: torch.Tensor, shown: Pair) -> Pair | None:
    """Copies the keys and values of one layer, `shown`, which lie in `flat`, the first pieces of `range_`, to tensors
    with the strides of a layer alone in its range. None where the copies would take pages from others."""
    one = replace(geometry, layers=1)
    keys, values = shown
    size = keys.shape[2] * one.token_bytes + _ALIGNMENT
    if (device.available + device.idle) * device.page_size < size:
        return None
    try:
        memory = torch.empty(size // geometry.itemsize, dtype=flat.dtype, device=flat.device)
    except torch.OutOfMemoryError:
        return None
    start = -memory.data_ptr() % _ALIGNMENT // geometry.itemsize
    copies = (
        memory.as_strided(keys.shape, one.k_strides, start + one.k_offset(0)),
        memory.as_strided(values.shape, one.v_strides, start + one.v_offset(0)),
    )
    if geometry == one:
        length, page = keys.shape[2] * one.token_stride, geometry.page // geometry.itemsize
        pieces = range(geometry.pieces(keys.shape[2]))
        for _, alike in groupby(pieces, range_.place):
            first, *others = alike
            part = flat[first * page : min(length, (first + 1 + len(others)) * page)]
            memory[start + first * page :][: part.numel()].copy_(part)  # at the speed of the link
    else:
        for copy, original in zip(copies, shown, strict=True):
            copy.copy_(original)
    return copies


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
        """The cache's side of the manager; None before it has a range, and where there are no host pages."""
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
            self._tier, self._thread_lease = KVTier(device, group, managers.of(device), self.whose), ThreadLease(group)
        more = 0 if self._ranges else -(-self._layers // geometry.layers) - 1
        expected = max(self._expected, tokens)
        kv_range = KVRange(device, group, geometry, shape, self._tier, self._thread_lease, expected, more)
        self._ranges.append(weakref.ref(kv_range))
        if self._tier is not None:
            self._tier.client.grows_by = max(self._tier.client.grows_by, len(self._ranges), 1 + more)
        place = kv_range.join(number)
        assert place is not None
        return kv_range, place


_SCRATCH: Final = 32 * 2**20  # bytes in which sequences are reordered at a time: 0.6 ms of the link. Chosen
_STORAGES: Final = 64  # remembered before those that are gone are sorted out. Chosen


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
    least: int = 4096,
) -> Geometry | None:
    """The geometry of the range that layers of these sizes get when the first of them is to hold `tokens` tokens; None
    where attention kernels could not index so many.

    `budget`: bytes of all pages. `longest_known`: tokens that a sequence may reach, 0 if unknown. `least`: tokens that
    are reserved for in any case (chosen: addresses cost next to nothing). The others as in `geometry.choose`.
    """
    most = longest(*sizes)
    if tokens > most:
        return None
    # No sequence outgrows the budget, so that reserving more would only cost bookkeeping.
    affordable = max(budget // Geometry(1, *sizes, page, 1).token_bytes, 2 * tokens)
    room = min(max(longest_known, least, 2 * tokens), affordable, most)
    return choose(layers, *sizes, page, room, expected=max(expected, tokens), alone=alone)
