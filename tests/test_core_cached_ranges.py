"""Cached ranges: addresses of closed ranges of KV whose pages are free and still mapped there (eLLM §4.2.2)."""

from __future__ import annotations

import gc
import random
from typing import NamedTuple

from ballonet.allocator import _native

from .core import (
    PAGE,
    Core,
    backings,
    calls,
    eventually,
    holds,
    make,
    maps,
    opened,
    physical,
    refused,
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
        for _ in range(60):
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
        assert taken > 60


def test_a_cached_range_is_for_kv_that_wants_one(core: Core) -> None:
    [some] = closed(core, (4, 2))
    others = core.range(4, "weights"), core.range(4, reuse=False)
    assert some.address not in {other.address for other in others}


def test_what_is_still_in_use_is_not_cached(core: Core) -> None:
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
    [some] = closed(core, (4, 3))
    core.range(2, "weights", mapped=2)
    assert [one.place for one in maps(some.address, 3 * PAGE)] == ["device", None]


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


def test_what_was_claimed_for_a_request_that_fails_is_free_again() -> None:
    with opened(budget=8) as core:
        closed(core, (9, 4))
        some = core.range(9)
        refused(lambda: some.map(0, 9))
        assert core.pages()["kv"] == 0
        assert [some.leads_to(piece) for piece in range(4)] == ["kept"] * 4
        core.range(8, "weights").map(0, 8)


def test_other_pages_go_where_something_is_kept() -> None:
    """Pages of the host, and what a layer that is taken leaves on the host."""
    with opened(budget=7) as core:
        closed(core, (4, 2), (4, 2))
        group = core.device.group()
        on_host, twin = core.range(4), core.range(4)
        assert {some.leads_to(0) for some in (on_host, twin)} == {"kept"}
        on_host.map_host(0, 2)
        assert backings(on_host)[:2] == ["host", "host"]
        assert (core.kept(), core.pages()["free"]) == (2, 4)
        weights = core.range(2, "weights", group, mapped=2, value=6)
        core.device.publish([(1, group, [(weights, 0, 2, twin, 0, [])])])
        assert core.device.take([1]) == 2
        assert holds(weights.address, 6, 2 * PAGE)
        assert weights.leads_to(0) == "alias"


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
        closed(core, (4, 4))
        again = core.range(4)
        use(scene, again, 2)
        again.map_ahead(2, 2)
        core.device.reap(wait=True)
        use(scene, core.range(8, "weights"), 6)
        core.device.trim()

    for (_, used), _ in faults_at_every_call(lambda core: (core, {}), live, budget=8):
        for value, (address, pieces) in enumerate(used.items(), 1):
            assert holds(address, value, pieces * PAGE)
