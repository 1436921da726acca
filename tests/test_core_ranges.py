"""Ranges: what lies behind their addresses, as the kernel sees it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, DriverError

from .core import (
    EVENTS,
    PAGE,
    Core,
    Gate,
    backings,
    behind,
    eventually,
    holds,
    maps,
    opened,
    page_calls,
    physical,
    write,
)
from .faulting import arm


def tensor(owner: _native.Range, first: int, count: int = 1) -> object:
    """Bytes of whole pieces."""
    return owner.tensor(first * PAGE, (count * PAGE,), (1,), 1, 8)


def test_growth_at_the_tail_stays_one_memory_map() -> None:
    """Else vm.max_map_count is reached: pages that are neighbours in address are neighbours in the memfd."""
    with opened(budget=400) as core:
        some = core.range(300)
        for piece in range(300):
            some.map(piece, 1)
        assert len(maps(some.address, some.nbytes)) == 1
        some.retire(100, 200)
        core.device.reap(wait=True)
        for piece in range(100, 300, 4):
            some.map(piece, 4)
        assert len(maps(some.address, some.nbytes)) == 1


def test_growth_takes_the_page_after_its_last_one_where_that_is_free(core: Core) -> None:
    first, grows, third = core.range(10), core.range(8), core.range(4)
    first.map(0, 10)
    grows.map(0, 4)
    third.map(0, 4)
    first.retire(0, 10)
    third.retire(0, 4)
    core.device.reap(wait=True)  # they are free, on both sides of the range's pages
    grows.map(4, 4)
    assert len(maps(grows.address, grows.nbytes)) == 1


def test_growth_of_the_heap_stays_one_memory_map() -> None:
    with opened(budget=400) as core:
        blocks = [core.device.allocate(PAGE * 3 // 2) for _ in range(200)]
        assert max(blocks) - min(blocks) < 302 * PAGE
        assert len(maps(min(blocks), max(blocks) - min(blocks))) == 1


def test_a_retired_page_goes_back_once_its_streams_have_passed(core: Core, gate: Gate) -> None:
    some = core.range(2, mapped=2)
    gate.close(EVENTS)
    some.retire(0, 1)
    assert some.leads_to(0) == "pending_free"
    assert core.device.reap() == 0
    assert behind(some.address)[:2] == ("device", "rw-s")  # work that is still to come may touch it
    assert core.pages()["pending_free"] == 1
    gate.open()
    core.device.reap(wait=True)
    assert some.leads_to(0) == "none"
    assert behind(some.address)[:2] == (None, "---p")
    assert core.pages()["free"] == 1
    assert some.leads_to(1) == "device"


def test_a_retiring_piece_takes_its_page_back_without_touching_the_page_tables(core: Core, gate: Gate) -> None:
    some = core.range(3, mapped=3, value=9)
    pages = [some.page(piece) for piece in range(3)]
    gate.close(EVENTS)
    some.retire(0, 3)
    assert page_calls(lambda: some.map(0, 3)) == {}
    assert [some.leads_to(piece) for piece in range(3)] == ["device"] * 3
    assert [some.page(piece) for piece in range(3)] == pages
    gate.open()
    assert core.device.reap(wait=True) == 0
    assert holds(some.address, 9, 3 * PAGE)


def test_pages_taken_back_stay_while_the_rest_waits_for_pages(gate: Gate) -> None:
    """The wait for other pages completes every retirement, but not of those that this call has taken back."""
    with opened(budget=6, path=gate.path) as core, ThreadPoolExecutor(1) as pool:
        some, other = core.range(6), core.range(1)
        some.map(0, 4)
        other.map(0, 1)
        write(some.address, 8, 4 * PAGE)
        gate.close(EVENTS)
        some.retire(0, 4)
        other.retire(0, 1)
        opening = pool.submit(lambda: (eventually(gate.waiting), gate.open()))
        some.map(0, 6)
        opening.result()
        assert [some.leads_to(piece) for piece in range(6)] == ["device"] * 6
        assert {one.access for one in maps(some.address, 6 * PAGE)} == {"rw-s"}
        assert holds(some.address, 8, 4 * PAGE)
        assert core.device.reap(wait=True) == 0


def test_a_page_that_never_got_access_is_not_taken_back_closed(core: Core, gate: Gate) -> None:
    """A mapping that fails half way leaves retiring pages that nobody can read; mapping again must open them."""
    some = core.range(2)
    gate.close(EVENTS)
    arm("cuMemSetAccess")
    with pytest.raises(DriverError) as caught:
        some.map(0, 2)
    assert caught.value.function == "cuMemSetAccess"
    assert some.leads_to(0) == "pending_free"
    some.map(0, 2)
    assert {one.access for one in maps(some.address, 2 * PAGE)} == {"rw-s"}
    write(some.address, 3, 2 * PAGE)
    gate.open()


def test_a_piece_goes_with_its_last_tensor_and_the_others_stay(core: Core) -> None:
    some = core.range(4, "weights", auto_retire=True, mapped=4)
    first, second = tensor(some, 0, 2), tensor(some, 1, 2)
    assert some.backed == 4
    del first
    core.device.reap(wait=True)
    assert backings(some) == ["none", "device", "device", "device"]
    assert some.backed == 3
    assert behind(some.address)[:2] == (None, "---p")
    assert physical() == 4 * PAGE  # it is free
    assert core.pages()["weights"] == 3
    del second
    assert (some.backed, some.leads_to(3)) == (1, "device")  # nobody ever looked at the last one
    some.close()
    core.device.reap(wait=True)
    assert core.pages()["weights"] == 0


def test_use_is_noted_of_what_is_backed_and_of_nothing_else(core: Core) -> None:
    some = core.range(6, "weights")
    some.note_use(0, False)  # nothing is there yet
    some.map(1, 2)
    some.map(5, 1)
    lane = core.stream()
    some.note_use(lane, True)
    core.occupy(lane, 0.05)
    some.retire(2, 1)
    some.note_use(lane, False)  # what is retiring is used by no one
    core.device.synchronize()
    core.device.reap(wait=True)
    assert [some.leads_to(piece) for piece in range(6)] == ["none", "device", "none", "none", "none", "device"]


def test_a_closed_range_gives_back_its_pages_and_then_its_addresses(core: Core, gate: Gate) -> None:
    some = core.range(3, "weights")
    address = some.address
    some.map(0, 3)
    gate.close(EVENTS)
    some.close()
    some.close()
    assert some.closed
    with pytest.raises(BallonetError, match="closed"):
        some.map(0, 1)
    assert behind(address, 3 * PAGE)[0] == "device"
    gate.open()
    core.device.reap(wait=True)
    assert core.pages()["free"] == 3
    assert all(one.place is None for one in maps(address, 3 * PAGE))


def test_a_tensor_needs_every_byte_backed(core: Core) -> None:
    some = core.range(4, mapped=2)
    kept = [
        some.tensor(0, (2, PAGE), (PAGE, 1), 1, 8),
        some.tensor(PAGE, (4, 8), (0, 1), 2, 32),
        some.tensor(3 * PAGE, (0, 5), (5, 1), 1, 8),  # empty: spans nothing
        some.tensor(2 * PAGE - 4, (), (), 2, 32),
    ]
    for offset, shape, strides, bits in [
        (0, (3, PAGE), (PAGE, 1), 8),
        (2 * PAGE - 2, (1,), (1,), 32),
        (0, (2,), (2 * PAGE,), 8),
        (4 * PAGE, (1,), (1,), 8),
        (2**63, (1,), (1,), 8),
        (0, (2**62, 2**62), (2**62, 1), 8),
        (0, (2**61 + 1,), (1,), 64),
        (0, (1,), (1, 1), 8),
        (0, (-1,), (1,), 8),
        (0, (1,), (-1,), 8),
        (0, (1,), (1,), 4),
    ]:
        with pytest.raises(BallonetError):
            some.tensor(offset, shape, strides, 1, bits)
    kept.clear()
    some.retire(0, 4)
    core.device.reap(wait=True)
    assert core.pages()["free"] == 2  # nothing is pinned by what was refused


@pytest.mark.parametrize(
    "wrong",
    [
        lambda some, _: some.map(4, 1),
        lambda some, _: some.map(0, 5),
        lambda some, _: some.map(2**63, 2**63),
        lambda some, _: some.map_host(3, 2),
        lambda some, _: some.retire(5, 0),
        lambda some, _: some.move(4, "host"),
        lambda some, _: some.move(0, "elsewhere"),
        lambda some, _: some.map_peer(0, 1),
        lambda some, other: some.alias(0, other, 3, 2),
        lambda some, other: some.alias(3, other, 0, 2),
        lambda some, other: other.alias(0, some, 0, 1),
        lambda _, other: (other.close(), other.retire(0, 1)),
    ],
)
def test_range_calls_that_make_no_sense_are_refused_and_change_nothing(
    core: Core, wrong: Callable[[object, object], object]
) -> None:
    some, other = core.range(4), core.range(4)
    with pytest.raises(BallonetError):
        wrong(some, other)
    assert core.pages()["free"] == core.created() == 0


def test_a_range_needs_a_page_and_a_known_owner(core: Core) -> None:
    with pytest.raises(BallonetError, match="one page"):
        core.device.reserve(0, "kv", core.device.group())
    with pytest.raises(BallonetError, match="owner"):
        core.device.reserve(PAGE, "activation", core.device.group())  # type: ignore[arg-type]
    assert core.device.reserve(1, "kv", core.device.group()).nbytes == PAGE
