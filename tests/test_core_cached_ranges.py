"""Cached ranges: addresses of closed ranges of KV whose pages are free and still mapped there (eLLM §4.2.2)."""

from __future__ import annotations

import gc
import random
from typing import NamedTuple

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError

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
    page_calls,
    physical,
    refused,
    write,
)
from .faulting import faults_at_every_call

LONG = 0.1


class Cached(NamedTuple):
    address: int
    pieces: int
    mapped: int


def closed(core: Core, *sizes: tuple[int, int]) -> list[Cached]:
    return [Cached(address, *size) for address, size in zip(core.cached_ranges(*sizes), sizes, strict=True)]


def test_pages_of_a_closed_range_are_free_and_stay_and_the_next_claims_them_without_the_driver(core: Core) -> None:
    [(address, _, _)] = closed(core, (6, 4))
    assert core.pages() == {"free": 4, "weights": 0, "activations": 0, "kv": 0, "retiring": 0}
    assert core.kept() == 4
    assert {(one.place, one.access) for one in maps(address, 4 * PAGE)} == {("device", "rw-s")}
    before = calls()
    some = core.range(6)
    assert some.address == address
    assert [some.leads_to(piece) for piece in range(6)] == ["kept"] * 4 + ["none"] * 2
    assert (some.backed, some.pieces, some.nbytes) == (0, 6, 6 * PAGE)
    with pytest.raises(BallonetError, match="not all backed"):
        some.tensor(0, (1,), (1,), 1, 8)
    assert page_calls(lambda: some.map(0, 3)) == {}
    write(some.address, 5, 3 * PAGE)
    assert (core.pages()["kv"], core.pages()["free"], core.kept()) == (3, 1, 1)
    assert page_calls(lambda: some.map(3, 2)) == {"cuMemCreate": 1, "cuMemMap": 1, "cuMemSetAccess": 1}
    assert holds(some.address, 5, 3 * PAGE)
    assert calls()["cuMemAddressReserve"] == before["cuMemAddressReserve"]


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
    fitting = [each for each in cached if each.pieces >= pieces and each.mapped >= expected]
    if fitting:
        return min(reversed(fitting), key=lambda each: (each.mapped, each.pieces))
    others = [each for each in cached if each.pieces >= pieces]
    return min(reversed(others), key=lambda each: (-each.mapped, each.pieces), default=None)


def test_the_cached_range_taken_is_the_smallest_that_fits() -> None:
    random_of = random.Random(5)
    with opened(budget=400) as core:
        taken = 0
        for _ in range(60):
            sizes = [random_of.randint(1, 8) for _ in range(random_of.randint(0, 6))]
            cached = closed(core, *((pieces, random_of.randint(1, pieces)) for pieces in sizes))
            for _ in range(3):
                pieces, expected = random_of.randint(1, 9), random_of.randint(0, 9)
                some = core.device.reserve(pieces * PAGE, "kv", core.device.group(), expected=expected * PAGE)
                wanted = best(cached, pieces, expected)
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


def test_expected_bytes_are_counted_in_whole_pages(core: Core) -> None:
    small, large = closed(core, (4, 1), (4, 2))
    for expected, fitting in [(PAGE + 1, large), (PAGE, small), (1, small), (0, small), (2 * PAGE, large)]:
        some = core.device.reserve(PAGE, "kv", core.device.group(), expected=expected)
        assert some.address == fitting.address
        some.close()


def test_a_cached_range_is_for_kv_that_wants_one(core: Core) -> None:
    [(address, _, _)] = closed(core, (4, 2))
    weights = core.range(4, "weights")
    twin = core.device.reserve(4 * PAGE, "kv", core.device.group(), reuse=False)
    assert address not in (weights.address, twin.address)
    weights.map(0, 2)
    weights.close()
    core.device.reap(wait=True)
    assert core.kept() <= 2  # weights are not cached, and what they took they took from this one
    assert core.pages()["free"] >= 2
    twin.close()


def test_what_is_still_in_use_is_not_cached(core: Core) -> None:
    """Work that was submitted may touch the old pages: another stream's writes would not be ordered after it."""
    stream = core.stream()
    some = core.range(3)
    address = some.address
    some.map(0, 2)
    core.device.note_use(address, PAGE, stream, write=True)
    core.occupy(stream, LONG)
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


def test_a_range_under_a_tensor_is_cached_with_its_last_one(core: Core) -> None:
    some = core.range(3)
    address = some.address
    some.map(0, 3)
    write(address, 9, 3 * PAGE)
    held = [some.tensor(PAGE, (PAGE,), (1,), 1, 8)]
    some.close()
    core.device.reap(wait=True)
    assert (core.kept(), core.pages()["kv"]) == (2, 1)
    other = core.range(3)
    assert other.address != address
    assert holds(address + PAGE, 9)
    held.clear()
    core.device.reap(wait=True)
    assert core.kept() == 3
    assert core.range(3).address == address


def test_pieces_that_lead_elsewhere_are_not_kept(core: Core) -> None:
    some, host, slot = core.range(4), core.range(4), core.range(2, "weights")
    some.map(0, 1)
    some.map_host(1, 1)
    slot.map(0, 2)
    some.alias(2, slot, 0, 1)
    host.map_host(0, 2)
    address = some.address
    some.close()
    host.close()
    core.device.reap(wait=True)
    assert core.kept() == 1
    again = core.range(4)
    assert again.address == address
    assert [again.leads_to(piece) for piece in range(4)] == ["kept", "none", "none", "none"]
    assert core.device.snapshot()["host_free"] == 3


def test_a_page_that_another_range_shows_is_not_kept(core: Core) -> None:
    some, other = core.range(2), core.range(2)
    some.map(0, 2)
    write(some.address, 3, 2 * PAGE)
    other.alias(0, some, 1, 1)
    some.close()
    core.device.reap(wait=True)
    assert (core.kept(), core.pages()["retiring"]) == (1, 1)
    assert holds(other.address, 3)


# -- who needs pages --


def test_pages_are_taken_out_of_the_oldest_cached_range_before_new_ones_are_made(core: Core) -> None:
    idle = core.range(2, "weights", mapped=2)
    first, second = (each.address for each in closed(core, (4, 3), (4, 3)))
    idle.retire(0, 2)
    core.device.reap(wait=True)
    other = core.range(20, "weights")
    assert page_calls(lambda: other.map(0, 2)) == {"cuMemMap": 2, "cuMemSetAccess": 1}  # what is idle
    assert page_calls(lambda: other.map(2, 2)) == {"cuMemUnmap": 2, "cuMemMap": 2, "cuMemSetAccess": 1}
    assert [one.place for one in maps(first, 3 * PAGE)] == ["device", None]  # the last ones first
    assert [one.place for one in maps(second, 3 * PAGE)] == ["device"]
    assert page_calls(lambda: other.map(4, 5))["cuMemCreate"] == 1
    assert (core.kept(), physical()) == (0, 9 * PAGE)


def test_a_range_that_keeps_its_pages_claims_them_again_and_others_take_them_before_anything_else() -> None:
    with opened(budget=8) as core:
        some, other, group = core.range(6, keeps=True), core.range(6, "weights"), core.device.group()
        some.map(0, 4)

        def again() -> None:
            some.retire(1, 3)
            core.device.reap(wait=True)
            assert backings(some) == ["device", "kept", "kept", "kept", "none", "none"]
            assert (core.kept(), core.pages()["free"], core.device.available) == (3, 3, 7)
            some.map(1, 2)

        assert page_calls(again) == {}
        twin, cached = core.range(2), core.range(2, group=group)
        cached.map(0, 1)
        core.device.publish([(1, group, [(cached, 0, 1, twin, 0, [])])])
        assert page_calls(lambda: other.map(0, 3))["cuMemCreate"] == 3, "while new ones may be made"
        assert backings(some)[3] == "kept"
        assert page_calls(lambda: other.map(3, 1)) == {"cuMemUnmap": 1, "cuMemMap": 1, "cuMemSetAccess": 1}
        assert (backings(some)[3], cached.leads_to(0)) == ("none", "device")
        core.device.check()


def test_a_page_that_is_kept_leaves_where_that_is_asked(core: Core) -> None:
    some = core.range(3, keeps=True, mapped=2)
    some.retire(1, 1)
    core.device.reap(wait=True)
    assert [some.drop_kept(piece) for piece in range(3)] == [False, True, False]
    assert backings(some) == ["device", "none", "none"]
    assert [each.place for each in maps(some.address, 2 * PAGE)] == ["device", None]
    core.device.check()


def test_what_was_claimed_for_a_request_that_fails_is_free_again() -> None:
    with opened(budget=8) as core:
        closed(core, (9, 4))
        some = core.range(9)
        refused(lambda: some.map(0, 9))
        assert core.pages()["kv"] == 0
        assert [some.leads_to(piece) for piece in range(4)] == ["kept"] * 4
        core.range(8, "weights").map(0, 8)


def test_other_pages_go_where_something_is_kept() -> None:
    """Pages of the host, of another range, and what a layer that is taken leaves on the host."""
    with opened(budget=9) as core:
        closed(core, (4, 2), (4, 2), (4, 2))
        group = core.device.group()
        on_host, leads, twin = core.range(4), core.range(4), core.range(4)
        assert {some.leads_to(0) for some in (on_host, leads, twin)} == {"kept"}
        on_host.map_host(0, 2)
        assert backings(on_host)[:2] == ["host", "host"]
        assert (core.kept(), core.pages()["free"]) == (4, 6)
        weights = core.range(2, "weights", group, mapped=2, value=6)
        assert leads.alias(0, weights, 0, 1)
        assert holds(leads.address, 6)
        leads.close()
        core.device.reap(wait=True)
        core.device.publish([(1, group, [(weights, 0, 2, twin, 0, [])])])
        assert core.device.take([1]) == 2
        assert holds(weights.address, 6, 2 * PAGE)
        assert weights.leads_to(0) == "alias"


def test_a_lower_budget_a_trim_and_the_end_empty_the_cached_ranges() -> None:
    with opened(budget=16) as core:
        closed(core, (8, 8))
        core.device.set_budget(5 * PAGE)
        assert physical() == 5 * PAGE
        core.device.trim()
        assert (physical(), core.kept()) == (0, 0)
        core.device.set_budget(16 * PAGE)
        closed(core, (8, 8))


def test_addresses_come_back_with_the_last_page_of_a_cached_range(core: Core) -> None:
    [(address, _, _)] = closed(core, (4, 2))
    before = calls()["cuMemAddressFree"]
    core.device.trim()
    assert calls()["cuMemAddressFree"] == before + 1
    assert all(one.place is None and one.access != "---p" for one in maps(address, 4 * PAGE))


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
