"""Slots that layers of a cache take turns in are taken in the middle of a forward, by an operator that finds no other
pages, while copies to them and kernels that read them may be on their way: attention reads its own bytes."""

from __future__ import annotations

from typing import Any, Final, Literal

import pytest
import torch

from ballonet.offload.governor.kv_read_plan import KVReadPlan

from ..tuned import tuning
from .scene import Place, scene
from .test_balloon_tokens import spilling as spilling
from .test_kv_stream import LAYERS, Cache, decided

When = Literal["before", "after"]  # attention is launched
POISON: Final = 0xFF  # not a number, in every type
LEFT: Final = 16  # free pages that are not asked for at once; whoever compares afterwards has them


class Operator:
    """Allocates, in the middle of whatever this thread does, until it has half of the pages of the slots of a cache,
    every other time three quarters; and writes there at once, on a stream that waits for nobody."""

    def __init__(self, place: Place) -> None:
        self.taken: list[int] = []  # pages of slots, each time
        self._place = place
        self._lane = place.lane()
        self._held: list[torch.Tensor] = []

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def take(self, way: KVReadPlan) -> None:
        device, before = self._place.device, in_slots(way)
        left = before // (4 if len(self.taken) % 2 else 2)
        spilled = device.snapshot()["spilled"]
        assert before > 2, "of each slot the last page is nobody's, and goes first"
        self._allocate(max(1, device.available - LEFT))
        while in_slots(way) > left:
            assert device.snapshot()["spilled"] == spilled, "it got pages of the host, and there were slots"
            self._allocate(1)
        del self._held[1 : LEFT + 1]
        self.taken.append(before - in_slots(way))
        device.check()

    def give_back(self) -> None:
        """Nobody has written to what it has."""
        self._place.synchronize()
        assert all(bool(each[::61].eq(POISON).all()) for each in self._held), "somebody took it for a slot"
        self._held.clear()
        self._place.empty_cache()

    def _allocate(self, pages: int) -> None:
        with self._lane():
            size = pages * self._place.page
            self._held.append(torch.full((size,), POISON, dtype=torch.uint8, device=self._place.kind))


def in_slots(way: KVReadPlan) -> int:
    """Pages that they have."""
    return sum(each.range.backed for each in way._slots._slots)


class Interrupted(Cache):
    """Layers in whose attention an operator may need pages: before or after the kernels that read are launched."""

    def __init__(self, place: Place, when: When) -> None:
        self.operator = Operator(place)
        self._when = when
        self._due = False
        super().__init__(place)

    def interrupted(self, number: int) -> None:
        """As `update`, with the operator. What comes before it is slow to begin, so that nothing has arrived yet."""
        self._place.sleep()
        self._due = True
        self.update(number)
        self._due = False
        self.operator.give_back()

    def compare(self, found: Any, right: Any) -> None:
        if self._due and self._when == "before":
            self.operator.take(self.tier.client.way)
        super().compare(found, right)
        if self._due and self._when == "after":
            self.operator.take(self.tier.client.way)

    def fly(self) -> None:
        """Iterations until all layers do."""
        for _ in range(16):
            for number in range(LAYERS):
                self.update(number)
            if all(home.pages._extent.mover.in_slot for home in self.homes):
                return
        raise AssertionError(self.tier.client.streamed)


@scene(needs_host=True, pages=256, host_pages=128)
@pytest.mark.parametrize("when", ["before", "after"])
def test_slots_are_taken_while_a_layer_is_read(place: Place, when: When) -> None:
    """Of each layer in turn; what others had in the slot is right as well."""
    rounds = 3 if place.cuda else 2
    with torch.no_grad(), decided(), tuning(kv_reads={"again": 1}):
        cache = Interrupted(place, when)
        for home in cache.homes:
            assert home.pages.displace(0)
        for step in range(rounds * LAYERS):
            cache.fly()
            for number in range(LAYERS):
                if number == step % LAYERS:
                    cache.interrupted(number)
                else:
                    cache.update(number)
        assert len(cache.operator.taken) == rounds * LAYERS
        cache.finish()
