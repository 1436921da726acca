"""`Device.events`: what the core decided by itself, when, for whom, and how long it took."""

from __future__ import annotations

import threading
import time

import pytest

from ballonet.allocator.errors import BudgetInUse

from .core import PAGE, Core, opened, refused
from .test_core_reclaim import Other, layer


def rows(core: Core) -> list[tuple[str, int, int]]:
    """(kind, pages, key)"""
    return [(kind, pages, key) for _, kind, pages, key, _, _ in core.device.events()]


def test_what_is_found_without_effort_is_no_event() -> None:
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
        kv.map(0, 4)
        assert rows(core) == [("inflate", 3, -1)]
        kv.retire(0, 4)
        core.device.reap(wait=True)
        core.device.deallocate(core.device.allocate(2 * PAGE))
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


def test_a_request_and_who_yields() -> None:
    with opened(budget=2) as core:
        one, other = layer(core), Other()
        try:
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
        finally:
            other.end()


def test_what_is_refused() -> None:
    with opened(budget=2, host_budget=1) as core:
        refused(lambda: core.device.allocate(3 * PAGE))
        refused(lambda: core.range(5).map(0, 5))
        refused(lambda: core.range(2).map_host(0, 2))
        assert rows(core) == [("refuse", 3, -1), ("refuse", 5, -1), ("refuse", 2, -1)]


def test_what_is_spilled_and_comes_back() -> None:
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
        found = rows(core)
        assert len(found) == 8192
        assert (found[0][1], found[-1][1]) == (12, 8192 + 11)
