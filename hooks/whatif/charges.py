"""What a step of a managed model takes beside its compute, by what has really happened to its pages.

Note [What is charged]
    Streamed layers have it wait as long as the schedule says of passes that repeat (offload/policy/schedule.py). What
    is read in place goes over the link in each step, which hides nothing of it: layers without a slot, KV of the batch
    on the host. And what was moved since the last step, of any model, has to be waited for: layers and KV that went to
    the host, KV and layers that came back. On a GPU a part of that hides behind compute; here none does.
"""

from __future__ import annotations

import torch

from ...allocator._native import Device
from ...allocator.errors import PoolExhausted
from ...offload.policy.interval import Costs
from ..batching.cache import ElasticPagedCache
from ..forward.lease import GroupLease
from ..managed import Managed, pace_of, residency_of
from ..sectors.client import SectorClient
from ..streaming.model_residency import ModelResidency
from .loops import VirtualLoop
from .machine import Machine
from .pretending import Clock


class Charges:
    """The charges of all models of one device."""

    def __init__(self, device: Device, machine: Machine, clock: Clock, in_place: float) -> None:
        """`machine`: as this one has it; `in_place`: the part of the link that reads in place have."""
        self.moved = 0.0  # seconds of the link so far for what was moved, and for what was read in place
        self.stalls = 0.0
        self._device = device
        self._page = machine.page_size / machine.link
        self._link = machine.link
        self._in_place = in_place
        self._clock = clock
        self._copied = 0
        self._streamed: dict[int, frozenset[int]] = {}
        self.begin()

    def begin(self) -> None:
        """What was moved before costs nothing."""
        self._copied = self._total()

    def step(self, loop: VirtualLoop, handle: Managed) -> None:
        """The step of that loop is computed: activations have pages, and time passes. torch.OutOfMemoryError."""
        cache: ElasticPagedCache = loop.processor.cache
        residency = residency_of(handle)
        self._device.synchronize()  # what comes has come, or it would depend on this machine when that is known
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
        away = client.read_away + residency.arrangement.read_in_place
        self._streamed[id(residency)] = frozenset(plan.streamed)
        back = sum(plan.pages[layer] for layer in before.difference(plan.streamed))
        copied, self._copied = self._copied, self._total()
        moved = (self._copied - copied) / self._link + back * self._page
        self.stalls += stall + away * self._page / self._in_place
        self.moved += moved
        return stall + away * self._page / self._in_place + moved

    def _total(self) -> int:
        """Bytes that went over the link, without layers that came over: those are in the stalls, or counted."""
        copied = self._device.snapshot()["copied"]
        return sum(nbytes for what, nbytes in copied.items() if what != "weights_h2d")
