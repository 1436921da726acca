"""`Device.events`: what the core decided by itself, when, for whom, and how long it took. `Device.timeline`: who owned
how many pages, and when; and the peaks."""

from __future__ import annotations

import threading
import time

import pytest

from ballonet.allocator.errors import BudgetInUse

from .core import PAGE, Core, Other, opened, page_calls, refused
from .entries import layer


def rows(core: Core) -> list[tuple[str, int, int]]:
    """(kind, pages, key)"""
    return [(kind, pages, key) for _, kind, pages, key, _, _ in core.device.events()]


def test_page_found_without_effort_is_no_event() -> None:
    with opened(budget=8) as core:
        core.device.deallocate(core.device.allocate(2 * PAGE))
        for _ in range(100):
            core.device.deallocate(core.device.allocate(2 * PAGE))
        core.range(4).map(0, 4)
        assert rows(core) == []


def test_pages_go_to_the_cache_and_back() -> None:
    with opened(budget=4) as core:
        core.device.deallocate(core.device.allocate(3 * PAGE))
        kv = core.range(4)
        assert page_calls(lambda: kv.map(0, 4))["cuMemCreate"] == 1
        assert rows(core) == [("inflate", 3, -1)]
        kv.retire(0, 4)
        core.device.reap(wait=True)
        assert "cuMemCreate" not in page_calls(lambda: core.device.deallocate(core.device.allocate(2 * PAGE)))
        assert rows(core) == [("deflate", 2, -1)]


def test_a_taking_says_which_entry_and_who_asked() -> None:
    with opened(budget=4) as core:
        one, two = layer(core), layer(core)
        core.device.publish([two.entry(7), one.entry(5)])
        before = time.monotonic_ns()
        core.range(3).map(0, 3)
        first, second = (row for row in core.device.events() if row[1] == "take")
        assert [first[2:4], second[2:4]] == [(2, 7), (2, 5)]
        for when, _, _, _, thread, duration in (first, second):
            assert thread == threading.get_ident()
            assert before <= when <= when + duration <= time.monotonic_ns()
        assert first[0] + first[5] <= second[0]
        assert rows(core) == []


def test_a_request_and_who_yields(other: Other) -> None:
    with opened(budget=2) as core:
        one = layer(core)
        core.device.publish([one.entry(3)])
        other.does(one.group.enter)
        more = core.range(1)
        for _ in range(3):
            refused(lambda: more.map(0, 1))
        assert rows(core) == [("request", 1, -1), *[("refuse", 1, -1)] * 3]  # the request is the same one
        other.does(core.device.yield_pages)
        (yielded,) = core.device.events()
        assert yielded[1:4] == ("yield", 2, 3)
        assert yielded[4] == other.does(threading.get_ident) != threading.get_ident()
        other.does(one.group.leave)


def test_refusals_are_events() -> None:
    with opened(budget=2, host_budget=1) as core:
        refused(lambda: core.device.allocate(3 * PAGE))
        refused(lambda: core.range(5).map(0, 5))
        refused(lambda: core.range(2).map_host(0, 2))
        assert rows(core) == [("refuse", 3, -1), ("refuse", 5, -1), ("refuse", 2, -1)]


def test_spilled_block_is_an_event_and_so_is_its_end() -> None:
    told: list[bool] = []
    with opened(budget=2, spill=True) as core:
        core.device.on_spill(lambda: told.append(True))
        core.range(2).map(0, 2)
        block = core.device.allocate(3 * PAGE)
        assert rows(core) == [("spill", 3, -1)]
        core.device.deallocate(block)
        assert rows(core) == [("unspill", 3, -1)]
        core.device.deallocate(core.device.allocate(3 * PAGE))
        assert told == [True]


def test_budgets_with_the_one_before() -> None:
    with opened(budget=8) as core:
        core.range(4).map(0, 4)
        core.device.set_budget(5 * PAGE)
        with pytest.raises(BudgetInUse):
            core.device.set_budget(3 * PAGE)
        core.device.set_budget(6 * PAGE)
        assert rows(core) == [("budget", 5, 8), ("budget refused", 3, -1), ("budget", 6, 5)]


def test_the_oldest_go_where_nobody_asks() -> None:
    with opened(budget=2) as core:
        for pages in range(8192 + 10):
            core.device.set_budget((pages + 2) * PAGE)
        events = rows(core)
        assert len(events) == 8192
        assert (events[0][1], events[-1][1]) == (12, 8192 + 11)


def inflated(core: Core) -> list[int]:
    """The pages that went from activations to caches, each time that there were any."""
    return [pages for _, kind, pages, *_ in core.device.events() if kind == "inflate"]


def test_pages_that_activations_need_no_more_are_given_soon(core: Core) -> None:
    """Twice as much each time, until some of it is needed again."""
    core.device.deallocate(core.device.allocate(64 * PAGE))
    cache = core.range(64)
    for piece in range(31):
        cache.map(piece, 1)
    assert inflated(core) == [1, 2, 4, 8, 16]
    cache.retire(0, 8)
    core.device.deallocate(core.device.allocate(41 * PAGE))  # eight more than it had
    cache.map(0, 1)
    cache.map(1, 1)
    assert inflated(core) == [1, 2]


# -- the timeline


def pause() -> None:
    """Longer than the journal's resolution: what follows is a sample of its own."""
    time.sleep(0.001)


def newest(core: Core) -> tuple[int, ...]:
    pages = core.pages()
    return tuple(pages[owner] for owner in ("free", "weights", "activations", "kv", "pending_free"))


def test_every_change_of_owners_is_a_sample(core: Core) -> None:
    assert core.device.timeline() == []
    begin, seen, blocks = time.monotonic_ns(), [], []
    kv, weights = core.range(4, "kv"), core.range(3, "weights")

    def retire() -> None:
        kv.retire(1, 2)
        core.device.reap(wait=True)  # or a thread of the core's does so, a moment later

    for step in (
        lambda: kv.map(0, 4),
        lambda: weights.map(0, 3),
        lambda: blocks.append(core.device.allocate(2 * PAGE)),
        retire,
        core.device.trim,
    ):
        pause()
        step()
        seen.append(newest(core))
    rows = core.device.timeline()
    times = [row[0] for row in rows]
    assert times == sorted(set(times))
    assert begin <= times[0] <= times[-1] <= time.monotonic_ns()
    assert [row[1:] for row in rows if row[1:] in seen] == seen
    assert seen == [(0, 0, 0, 4, 0), (0, 3, 0, 4, 0), (0, 3, 2, 4, 0), (2, 3, 2, 2, 0), (0, 3, 2, 2, 0)]
    assert core.device.timeline() == []
    core.device.deallocate(blocks[0])


def test_a_burst_is_one_sample_or_few_and_ends_with_the_truth() -> None:
    with opened(budget=600) as core:
        some = core.range(512)
        begin = time.monotonic_ns()
        for piece in range(512):
            some.map(piece, 1)
        took = time.monotonic_ns() - begin
        rows = core.device.timeline()
        assert len(rows) <= took // 50_000 + 2
        assert rows[-1][1:] == newest(core) == (0, 0, 0, 512, 0)


def test_the_peak_is_of_what_existed_and_can_be_reset(core: Core) -> None:
    some = core.range(20, mapped=20)
    some.retire(5, 15)
    core.device.reap(wait=True)
    core.device.trim()
    assert core.created() == 5
    assert core.device.snapshot()["physical_peak"] == 20 * PAGE
    core.device.reset_peaks()
    assert core.device.snapshot()["physical_peak"] == 5 * PAGE
