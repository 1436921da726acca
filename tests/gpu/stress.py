"""Threads that allocate on several streams each, and verify what they wrote before they let go of it."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from .scene import Lane, Place

MOST = 40  # tensors that a thread holds


class Held(NamedTuple):
    """A tensor filled with a number of its own, and the lane that filled it."""

    tensor: torch.Tensor
    number: int
    lane: Lane


class Worker:
    """A thread that allocates on its own lanes, fills, hands to another lane, verifies and frees."""

    def __init__(self, place: Place, number: int, largest: int) -> None:
        self._place = place
        self._random = random.Random(number)
        self._next = number << 20
        self._largest = largest
        self._lanes = [place.lane() for _ in range(3)]
        self._wrong = [torch.zeros((), dtype=torch.int64, device=place.kind) for _ in self._lanes]
        self._held: list[Held] = []
        self._wrong_on_host = 0

    def work(self, operations: int) -> None:
        for _ in range(operations):
            if len(self._held) == MOST or (self._held and self._random.random() < 0.45):
                self._free(self._held.pop(self._random.randrange(len(self._held))))
            else:
                self._take()
        while self._held:
            self._free(self._held.pop())

    def _take(self) -> None:
        lane = self._random.choice(self._lanes)
        count = int(2 ** self._random.uniform(0, self._largest.bit_length() - 1))
        self._next += 1
        try:
            with lane():
                tensor = torch.full((count,), self._next, dtype=torch.int32, device=self._place.kind)
        except torch.OutOfMemoryError:
            for held in self._held[::2]:
                self._free(held)
            del self._held[::2]
            return
        self._held.append(Held(tensor, self._next, lane))

    def _free(self, held: Held) -> None:
        """Verifies on a lane of its choice, tells the allocator of it, and lets go before that is done."""
        chosen = self._random.randrange(len(self._lanes))
        reader = self._lanes[chosen]
        if reader is not held.lane:
            reader.follow(held.lane)
        with reader():
            try:
                self._wrong[chosen] += (held.tensor != held.number).sum()
            except torch.OutOfMemoryError:  # no room even for the comparison
                self._wrong_on_host += int((held.tensor.cpu() != held.number).sum())
        if reader is not held.lane:
            reader.uses(held.tensor)

    def wrong(self) -> int:
        return self._wrong_on_host + sum(int(count.item()) for count in self._wrong)


def threads_and_streams(place: Place, threads: int, operations: int, largest: int) -> None:
    """Blocks of 4 bytes to several pages, freed while other streams still read them, near the budget."""
    before = place.device.snapshot()["heap"]["live"]
    workers = [Worker(place, number, largest) for number in range(1, threads + 1)]
    place.synchronize()
    with ThreadPoolExecutor(threads) as running:
        list(running.map(Worker.work, workers, [operations] * threads))
    place.synchronize()
    assert not any(worker.wrong() for worker in workers), "a block held what another had written"
    assert place.device.snapshot()["heap"]["allocations"] > threads * operations // 4
    workers.clear()
    place.device.check()
    place.device.trim()
    assert place.device.snapshot()["heap"]["live"] <= before + 4096
