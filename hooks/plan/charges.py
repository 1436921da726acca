"""The seconds of a managed model's step beside its compute, from what has happened to its pages.

Note [What is charged]
    For streamed layers a step waits as long as the schedule predicts for repeated passes (offload/policy/schedule.py).
    Bytes that are read in place cross the link in each step, and nothing hides that: layers without a slot, KV of the
    batch on the host. A step also waits for everything moved since the last one, of any model: layers and KV to the
    host and back. On a GPU a part of that hides behind compute; here none does.
"""

from __future__ import annotations

import torch

from ...allocator._native import Device
from ...allocator.errors import PoolExhausted
from ...offload.policy.plan import Costs
from ..batching.cache import ElasticPagedCache
from ..batching.client import SectorClient
from ..forward.lease import GroupLease
from ..managed import Managed, pace_of, residency_of
from ..streaming.model_residency import ModelResidency
from .loops import VirtualLoop
from .machine import Machine
from .virtual_model import Clock


class Charges:
    """The charges of all models of one device. `moved`, `stalls`: seconds so far of copies, and of reads."""

    def __init__(self, device: Device, machine: Machine, clock: Clock, in_place: float) -> None:
        """`machine`: scaled, `Machine.here`; `in_place`: fraction of the link's bandwidth that reads in
        place reach."""
        self.moved = 0.0
        self.stalls = 0.0  # of streamed layers, and of reads in place
        self._device = device
        self._page = machine.page_size / machine.link
        self._link = machine.link
        self._in_place = in_place
        self._clock = clock
        self._copied = 0
        self._streamed: dict[int, frozenset[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Starts counting copies: earlier ones cost nothing."""
        self._copied = self._total()

    def step(self, loop: VirtualLoop, handle: Managed) -> None:
        """Computes a step of a loop: allocates its activations, and advances the clock. torch.OutOfMemoryError."""
        cache: ElasticPagedCache = loop.processor.cache
        residency = residency_of(handle)
        self._device.synchronize()  # all copies have ended: otherwise the figures depended on this machine's speed
        with GroupLease(cache.group):
            cache.pages.client.uses()
            nbytes = sum(cache.sizes.of(new, held) for new, held in loop.sequences)
            try:
                block = self._device.allocate(nbytes)
            except PoolExhausted as error:
                raise torch.OutOfMemoryError(f"no room for activations: {error}") from error
            try:
                seconds = loop.seconds
                self._clock.now += seconds
                with pace_of(handle).waiting():
                    self._clock.now += self._waits(cache.pages.client, residency, seconds)
            finally:
                self._device.deallocate(block)

    def _waits(self, client: SectorClient, residency: ModelResidency, seconds: float) -> float:
        plan, before = residency.plan, self._streamed.get(id(residency), frozenset())
        stall = Costs(plan.pages, seconds, self._page).expected(plan) - seconds
        away = client.read_displaced + residency.arrangement.read_in_place
        self._streamed[id(residency)] = frozenset(plan.streamed)
        back = sum(plan.pages[layer] for layer in before.difference(plan.streamed))
        copied, self._copied = self._copied, self._total()
        moved = (self._copied - copied) / self._link + back * self._page
        self.stalls += stall + away * self._page / self._in_place
        self.moved += moved
        return stall + away * self._page / self._in_place + moved

    def _total(self) -> int:
        """Returns the bytes copied so far, without weights to the device: streamed layers are in the stalls, and
        restored ones are counted by `_waits`."""
        copied = self._device.snapshot()["copied"]
        return sum(nbytes for what, nbytes in copied.items() if what != "weights_h2d")
