"""Cached ranges for ranges to come: the background maps their pages while the first is in use (eLLM §5.1)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable

import pytest

from ballonet.allocator import _native

from .core import (
    PAGE,
    Core,
    Gate,
    backings,
    behind,
    calls,
    eventually,
    holds,
    maps,
    opened,
    page_calls,
    physical,
    refused,
    together,
    write,
)
from .faulting import faults_at_every_call

PIECES = 6  # of each range


class Layers:
    """Ranges of one group, as those of a cache with a range per layer."""

    def __init__(self, core: Core, count: int, mapped: int = 3, pieces: int = PIECES) -> None:
        """Reserves the first and maps it so far. `count`: in all."""
        self.core = core
        self.group = core.device.group()
        self.mapped = mapped
        self.pieces = pieces
        self.ranges: list[_native.Range] = []
        self.add(count - 1)
        self.map(0)

    def add(self, more: int = 0) -> _native.Range:
        made = self.core.range(self.pieces, "kv", self.group, expected=self.mapped * self.core.page, more=more)
        self.ranges.append(made)
        return made

    def map(self, index: int) -> None:
        self.ranges[index].map(0, self.mapped)

    def close(self) -> None:
        for range_ in self.ranges:
            range_.close()


def without_driver(core: Core, work: Callable[[], object]) -> None:
    """The thread calls no driver for that; the background may, meanwhile, for what follows."""
    before = core.device.driver_ns()
    work()
    assert core.device.driver_ns() == before


def settled(core: Core) -> None:
    """What the background was asked for is done, as far as it can be."""
    core.device.reap(wait=True)
    core.device.check()


@pytest.mark.parametrize(
    ("cached", "count", "ahead", "kept", "created"),
    [
        ([], 4, 9, 0, 12),
        ([(PIECES, 4)] * 4, 4, 0, 13, 16),  # there is nothing to do
        ([(PIECES, 1), (PIECES, 3)], 2, 2, 1, 6),  # one has too few pages, and gets more
        ([(2, 2)] * 3, 2, 3, 0, 6),  # they are too short: their pages serve before new ones are made
    ],
)
def test_those_that_follow_find_their_pages_mapped_and_no_others_are_made(
    core: Core, cached: list[tuple[int, int]], count: int, ahead: int, kept: int, created: int
) -> None:
    """`cached`: pieces and pages of the cached ranges that there are."""
    core.cached_ranges(*cached)
    layers = Layers(core, count)
    settled(core)
    assert (core.ahead(), core.kept(), core.created()) == (ahead, kept, created)
    for index in range(1, count):
        without_driver(core, layers.add)
        some = layers.ranges[index]
        assert backings(some)[:3] == ["kept"] * 3
        without_driver(core, lambda index=index: layers.map(index))
        write(some.address, index, 3 * PAGE)
        assert cached or len(maps(some.address, 3 * PAGE)) == 1  # neighbours in address are neighbours in the pool
        settled(core)
    assert [holds(layers.ranges[index].address, index, 3 * PAGE) for index in range(1, count)] == [True] * (count - 1)
    assert (core.ahead(), physical()) == (0, created * PAGE)


def test_the_heap_opens_pages_side_by_side_by_one_call(core: Core) -> None:
    blocks: list[int] = []
    made = page_calls(lambda: blocks.append(core.device.allocate(16 * PAGE)))
    assert made == {"cuMemCreate": 16, "cuMemMap": 16, "cuMemSetAccess": 1}
    core.device.deallocate(blocks[0])


@pytest.mark.parametrize(("page", "most"), [(2**24, 2), (2**26, 1)])
def test_no_more_is_mapped_ahead_than_fifty_megabytes_or_a_page(page: int, most: int) -> None:
    with opened(page=page, budget=4) as core:
        layers = Layers(core, 4, mapped=1, pieces=2)
        for index in (1, 2, 3):
            settled(core)
            assert core.ahead() == min(most, 4 - index)
            assert layers.add().leads_to(0) == "kept"
            layers.map(index)
        assert core.ahead() == 0


def test_what_a_range_takes_makes_room_for_the_next_by_itself() -> None:
    with opened(page=2**25, budget=3) as core:
        layers = Layers(core, 3, mapped=1, pieces=1)
        eventually(lambda: core.ahead() == 1)
        layers.add()
        assert core.ahead() == 1
        layers.map(1)
        eventually(lambda: core.ahead() == 1)


def test_no_more_is_made_than_the_budget_allows_and_whoever_needs_pages_gets_them() -> None:
    with opened(budget=5) as core:
        layers = Layers(core, 3)
        settled(core)
        assert (core.ahead(), physical()) == (2, 5 * PAGE)
        other = core.range(2, "weights")
        assert page_calls(lambda: other.map(0, 2)) == {"cuMemUnmap": 2, "cuMemMap": 2, "cuMemSetAccess": 1}
        settled(core)
        assert (core.ahead(), physical()) == (0, 5 * PAGE)
        other.close()
        settled(core)
        assert (core.ahead(), physical()) == (2, 5 * PAGE)  # it has not given up
        layers.add()
        refused(lambda: layers.map(1))


def test_the_heap_moves_its_own_idle_pages_before_it_counts_on_them(core: Core) -> None:
    stream = core.stream()
    Layers(core, 4)
    settled(core)
    core.device.deallocate(core.device.allocate(8 * PAGE))
    before = core.created()
    core.device.allocate(8 * PAGE, stream)  # not beside the first one
    assert (core.created(), core.ahead()) == (before, 9)


def test_they_go_after_all_others() -> None:
    with opened(budget=11) as core:
        core.cached_ranges((2, 2))
        Layers(core, 2)  # whose addresses are longer: it takes the pages
        settled(core)
        assert (core.ahead(), core.kept(), core.created()) == (3, 0, 6)
        core.cached_ranges((2, 2))
        other = core.range(8, "weights")
        other.map(0, 5)  # those of the cached range, and new ones
        assert (core.ahead(), core.created()) == (3, 11)
        other.map(5, 1)
        assert core.ahead() == 2


def test_cached_ranges_of_those_that_were_there_before_belong_to_everybody(core: Core) -> None:
    """Nobody has to make new pages for them."""
    core.cached_ranges(*[(PIECES, 3)] * 4)
    Layers(core, 4)
    settled(core)
    core.range(6, "weights", mapped=6)
    settled(core)  # what is missing now is made anew
    assert (core.ahead(), core.created()) == (6, 18)


@pytest.mark.parametrize("shrink", ["budget", "trim"])
def test_a_lower_budget_and_a_trim_take_all_of_it_and_no_more_is_made(shrink: str) -> None:
    with opened(budget=16) as core:
        Layers(core, 4)
        settled(core)
        assert physical() == 12 * PAGE
        core.device.set_budget(3 * PAGE) if shrink == "budget" else core.device.trim()
        assert (physical(), core.ahead()) == (3 * PAGE, 0)
        core.device.set_budget(16 * PAGE)
        settled(core)
        assert physical() == 3 * PAGE


def test_once_the_first_range_is_gone_what_was_promised_is_cached_like_any(core: Core) -> None:
    layers = Layers(core, 3)
    settled(core)
    layers.close()
    settled(core)
    assert (core.ahead(), core.kept(), core.pages()["free"]) == (0, 9, 9)
    Layers(core, 3)
    settled(core)
    assert (core.ahead(), core.created()) == (0, 9)


def test_the_newest_is_served(core: Core) -> None:
    one, other = Layers(core, 5), Layers(core, 2, mapped=2, pieces=PIECES + 2)
    settled(core)
    assert core.ahead() == 2  # what was made for the first cache is too short for the other one
    other.add()
    without_driver(core, lambda: other.map(1))
    for _ in range(4):
        one.add()
    for index in (1, 2, 3, 4):
        one.map(index)


def test_what_grows_in_step_is_mapped_ahead_too(core: Core) -> None:
    """A prompt in chunks: each layer grows by several pages, one after the other."""
    layers = Layers(core, 3)
    for index in (1, 2):
        layers.add()
        layers.map(index)
    settled(core)
    assert (core.ahead(), core.created()) == (0, 9)
    layers.ranges[0].map(3, 2)
    for some in layers.ranges[1:]:
        settled(core)
        assert backings(some) == ["device"] * 3 + ["kept"] * 2 + ["none"]
        without_driver(core, lambda some=some: some.map(3, 2))
    settled(core)
    assert (core.ahead(), core.created()) == (0, 15)
    layers.ranges[1].close()  # then nobody follows the first
    layers.ranges[0].map(5, 1)
    settled(core)
    assert (core.ahead(), backings(layers.ranges[2])[5]) == (0, "none")


def test_only_ranges_of_the_same_size_and_group_that_want_a_cached_one_are_those(core: Core) -> None:
    layers = Layers(core, 2)
    settled(core)
    taken = [
        core.device.reserve((PIECES + 1) * PAGE, "kv", layers.group, expected=3 * PAGE),
        core.device.reserve(PIECES * PAGE, "kv", layers.group, reuse=False),
        core.device.reserve(PIECES * PAGE, "weights", layers.group),
    ]
    assert core.ahead() == 3
    taken.append(core.device.reserve(PIECES * PAGE, "kv", core.device.group(), expected=3 * PAGE))
    assert taken[-1].leads_to(0) == "kept"  # another cache may have it; then one more is made
    settled(core)
    assert core.ahead() == 6
    assert layers.add().leads_to(2) == "kept"
    for some in taken:
        some.close()


def test_a_fault_ends_it_and_nobody_hears_of_it() -> None:
    def prepare(core: Core) -> Layers:
        layers = Layers(core, 1)
        layers.add(3)
        return layers

    def work(layers: Layers) -> None:
        layers.map(1)
        layers.core.device.reap(wait=True)

    ended = 0
    for layers, _ in faults_at_every_call(prepare, work):
        core = layers.core
        if core.pages()["kv"] < 6:  # it was the thread's own call
            layers.map(1)
            settled(core)
        assert core.ahead() in (0, 9)
        ended += core.ahead() == 0
        for index in (2, 3, 4):
            layers.add()
            layers.map(index)
            address = layers.ranges[index].address
            write(address, index, 3 * PAGE)
            assert {behind(address + piece * PAGE)[:2] for piece in range(3)} == {("device", "rw-s")}
    assert ended


def test_a_child_has_what_was_there_and_makes_no_more(core: Core, gate: Gate) -> None:
    layers = Layers(core, 4)
    settled(core)
    gate.library.set_slow(100_000)
    Layers(core, 4, mapped=5)
    before = calls()["cuMemCreate"]
    eventually(lambda: calls()["cuMemCreate"] > before)  # the thread is in the driver, and holds the lock
    if (child := os.fork()) == 0:
        signal.alarm(600)  # kills a child that waits for a thread that it does not have
        layers.add()
        layers.close()
        core.device.snapshot()
        core.device.reap()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.library.set_slow(0)


def test_several_threads_whose_layers_come_at_once() -> None:
    with opened(budget=96) as core:

        def work(seed: int) -> None:
            drawn = random.Random(seed)
            for turn in range(12):
                count, mapped = drawn.randint(2, 5), drawn.randint(1, 4)
                layers = Layers(core, count, mapped)
                for index in range(1, count - drawn.randint(0, 1)):  # the last one may never come
                    layers.add()
                    layers.map(index)
                for index, some in enumerate(layers.ranges):
                    write(some.address, turn + index, mapped * PAGE)
                for index, some in enumerate(layers.ranges):
                    assert holds(some.address, turn + index, mapped * PAGE)
                layers.close()

        together(core, work, range(4))
        settled(core)
        assert physical() <= 96 * PAGE
        assert (core.ahead(), core.pages()["retiring"], core.pages()["kv"]) == (0, 0, 0)
