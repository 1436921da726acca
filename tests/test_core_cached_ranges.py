"""Cached ranges: addresses of closed ranges of KV whose pages are free and still mapped there (eLLM §4.2.2)."""

from __future__ import annotations

import gc
import os
import random
import signal
from collections.abc import Callable
from typing import NamedTuple

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
    make,
    maps,
    opened,
    page_calls,
    physical,
    refused,
    together,
    write,
)
from .faulting import faults_at_every_call


class Cached(NamedTuple):
    address: int
    pieces: int
    mapped: int


def closed(core: Core, *sizes: tuple[int, int]) -> list[Cached]:
    return [Cached(address, *size) for address, size in zip(core.cached_ranges(*sizes), sizes, strict=True)]


def request(core: Core, pages: int, group: _native.Group) -> None:
    """As a cache lives: page by page, the next one asked for ahead."""
    layers = [core.device.reserve(16 * PAGE, "kv", group) for _ in range(4)]
    for piece in range(pages):
        for layer in layers:
            layer.map(piece, 1)
            write(layer.address + piece * PAGE, piece)
    for layer in layers:
        assert all(holds(layer.address + piece * PAGE, piece) for piece in range(pages))


def test_serving_one_request_after_the_other_comes_to_call_the_driver_no_more(core: Core) -> None:
    group = core.device.group()
    request(core, 8, group)
    gc.collect()
    core.device.reap(wait=True)
    before = {name: count for name, count in calls().items() if name.startswith("cuMem")}
    for pages in (3, 8, 1, 5, 8, 2):
        request(core, pages, group)
        gc.collect()
        core.device.reap(wait=True)
    assert {name: count for name, count in calls().items() if name.startswith("cuMem")} == before
    assert physical() == 32 * PAGE


def best(cached: list[Cached], pieces: int, expected: int) -> Cached | None:
    """The paper's rule over all of them; where none has so much mapped, the one with most."""
    fitting = [range_ for range_ in cached if range_.pieces >= pieces and range_.mapped >= expected]
    if fitting:
        return min(reversed(fitting), key=lambda each: (each.mapped, each.pieces))
    others = [range_ for range_ in cached if range_.pieces >= pieces]
    return min(reversed(others), key=lambda other: (-other.mapped, other.pieces), default=None)


def test_the_cached_range_taken_is_the_smallest_that_fits() -> None:
    random_of = random.Random(5)
    with opened(budget=400) as core:
        taken = 0
        for _ in range(40):
            sizes = [random_of.randint(1, 8) for _ in range(random_of.randint(0, 6))]
            cached = closed(core, *((pieces, random_of.randint(1, pieces)) for pieces in sizes))
            for _ in range(3):
                pieces, expected = random_of.randint(1, 9), random_of.randint(0, 9 * PAGE)
                some = core.device.reserve(pieces * PAGE, "kv", core.device.group(), expected=expected)
                wanted = best(cached, pieces, -(-expected // PAGE))
                if wanted is None:
                    assert [some.leads_to(piece) for piece in range(pieces)] == ["none"] * pieces
                else:
                    assert some.address == wanted.address
                    assert some.pieces == pieces
                    cached.remove(wanted)
                    taken += 1
                some.close()
                if wanted is not None:
                    cached.append(wanted)  # closed again, and now the newest
                core.device.check()
            core.device.trim()
            assert physical() == 0
        assert taken > 40


def test_range_that_is_still_in_use_is_not_cached(core: Core) -> None:
    """Work that was submitted may touch the old pages: another stream's writes would not be ordered after it."""
    stream = core.stream()
    some = core.range(3)
    address = some.address
    some.map(0, 2)
    core.device.note_use(address, PAGE, stream, write=True)
    with core.occupied(stream):
        some.close()
        other = core.range(3)
        assert other.address != address
        assert core.kept() == 0
    core.device.reap(wait=True)
    assert core.kept() == 2
    third = core.range(3)
    assert third.address == address
    third.map(0, 2)
    core.device.note_use(address, PAGE, 0, write=True)  # the order checker has nothing to say
    write(address, 1, 2 * PAGE)


def test_the_last_pages_of_a_cached_range_go_first(core: Core) -> None:
    [address] = core.cached_ranges((4, 3))
    core.range(2, "weights", mapped=2)
    assert [one.place for one in maps(address, 3 * PAGE)] == ["device", None]


def test_pages_that_a_range_keeps_go_once_no_new_ones_may_be_made_and_before_those_of_entries() -> None:
    with opened(budget=8) as core:
        some, other, group = core.range(6, keeps=True, mapped=4), core.range(6, "weights"), core.device.group()
        some.retire(1, 3)
        core.device.reap(wait=True)
        twin, published = core.range(2), core.range(2, group=group, mapped=1)
        core.device.publish([(1, group, [(published, 0, 1, twin, 0, [])])])
        other.map(0, 3)
        assert backings(some)[3] == "kept"
        other.map(3, 1)
        assert (backings(some)[3], published.leads_to(0)) == ("none", "device")


def test_pages_claimed_for_a_request_that_fails_are_free_again() -> None:
    with opened(budget=8) as core:
        core.cached_ranges((9, 4))
        some = core.range(9)
        refused(lambda: some.map(0, 9))
        assert core.pages()["kv"] == 0
        assert [some.leads_to(piece) for piece in range(4)] == ["kept"] * 4
        core.range(8, "weights").map(0, 8)


def test_a_device_that_is_dropped_leaves_no_cached_range(core: Core) -> None:
    one = make(budget=16)
    some, open_one = (one.reserve(4 * PAGE, "kv", one.group()) for _ in range(2))
    some.map(0, 4)
    open_one.map(0, 2)
    some.close()
    assert physical() == 6 * PAGE
    del one, some
    gc.collect()
    open_one.close()
    del open_one
    eventually(lambda: physical() == 0)
    assert core.created() == 0


def test_a_fault_at_every_driver_call_of_their_lives() -> None:
    """Ranges: made, claimed, get pages ahead, give them up and are emptied; what is in use holds what was written."""
    Scene = tuple[Core, dict[int, int]]

    def use(scene: Scene, some: _native.Range, pieces: int) -> None:
        some.map(0, pieces)
        scene[1][some.address] = pieces
        write(some.address, len(scene[1]), pieces * PAGE)

    def live(scene: Scene) -> None:
        core, _ = scene
        core.cached_ranges((4, 4))
        again = core.range(4)
        use(scene, again, 2)
        again.map_ahead(2, 2)
        core.device.reap(wait=True)
        use(scene, core.range(8, "weights"), 6)
        core.device.trim()

    for (_, used), _ in faults_at_every_call(lambda core: (core, {}), live, budget=8):
        for value, (address, pieces) in enumerate(used.items(), 1):
            assert holds(address, value, pieces * PAGE)


# -- for ranges to come: the background maps their pages while the first is in use (eLLM §5.1)


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
def test_later_ranges_find_their_pages_mapped_and_no_others_are_made(
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


def test_ranges_that_grow_in_step_are_mapped_ahead_too(core: Core) -> None:
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
        assert (core.ahead(), core.pages()["pending_free"], core.pages()["kv"]) == (0, 0, 0)
