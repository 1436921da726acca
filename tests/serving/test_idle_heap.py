"""When the heap of a loop gives its idle pages back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ballonet.offload.policy.admission import IdleHeap

STEPS = 4


class Heap:
    """Keeps what the largest step took since it was trimmed. `ratio`: what steps take over what is estimated."""

    def __init__(self, ratio: float) -> None:
        self._looks, self._ratio = IdleHeap(STEPS), ratio
        self.holds, self.trims = 0.0, 0

    def runs(self, needs: Iterable[int], streams: bool = True) -> None:
        for needed in needs:
            if self._looks.passed(needed) and self._looks.gives(round(self.holds), streams):
                self.holds, self.trims = 0, self.trims + 1
            self.holds = max(self.holds, self._ratio * needed)


def test_pages_of_a_burst_go_when_steps_need_less() -> None:
    heap = Heap(0.5)
    heap.runs([10, 1000, 10, 10] + 3 * STEPS * [10])
    assert (heap.holds, heap.trims) == (5, 1)
    heap.runs([*(2 * STEPS * [10]), 1000, *(3 * STEPS * [10])])
    assert (heap.holds, heap.trims) == (5, 2)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 1.9, 8.0])
def test_a_load_that_stays_costs_one_trim(ratio: float) -> None:
    """However poor the estimate is: page calls in each step would cost more than the pages are worth."""
    heap = Heap(ratio)
    heap.runs([1000, *(100 * STEPS * [100, 60, 80])])
    assert heap.trims == 1


def test_where_no_layer_streams_the_heap_keeps_its_pages() -> None:
    """What lies idle then says nothing of what steps take."""
    heap = Heap(1.0)
    heap.runs([1000, *(10 * STEPS * [10])], streams=False)
    assert (heap.holds, heap.trims) == (1000, 0)
    heap.runs(2 * STEPS * [10])
    assert (heap.holds, heap.trims) == (10, 1)
