"""The pages under a vLLM engine's blocks, without vLLM: what the kernel counts as steps open and close them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

import ballonet
from ballonet.allocator.config import Config
from ballonet.hooks.batching.pages import RESERVED
from ballonet.hooks.vllm.cache import EngineCache

from ..pool import bytes_that_exist, installing

PAGE = 2**14
BLOCKS = 32  # of a page each
BUDGET = 16 * PAGE


@pytest.fixture
def make() -> Iterator[Callable[[], EngineCache]]:
    """Makes the cache of an engine with a budget for a part of its blocks."""
    with installing(BUDGET, PAGE) as install:
        install()
        yield lambda: EngineCache(Config(), BLOCKS, PAGE, [(0, PAGE, PAGE)], "tiny")


def step(cache: EngineCache, opens: range, closes: Iterable[int], idle: bool) -> tuple[int, ...]:
    """What the worker does in a step; returns the blocks that were opened."""
    cache.close(closes)
    cache.begin()
    opened = cache.open(opens)
    cache.end(idle)
    return opened


NONE = range(0)


@pytest.mark.counts
def test_pages_go_back_to_the_driver_only_when_no_request_is_left(make: Callable[[], EngineCache]) -> None:
    cache = make()
    idle, some = bytes_that_exist(), range(RESERVED, RESERVED + 8)
    assert step(cache, some, NONE, idle=False) == tuple(some)
    assert bytes_that_exist() == idle + 8 * PAGE
    step(cache, NONE, some, idle=False)
    assert bytes_that_exist() == idle + 8 * PAGE  # for the next request
    step(cache, NONE, NONE, idle=True)
    assert bytes_that_exist() == idle


@pytest.mark.counts
def test_no_more_is_opened_than_the_budget_has_pages_for(make: Callable[[], EngineCache]) -> None:
    cache = make()
    opened = step(cache, range(RESERVED, BLOCKS), NONE, idle=False)
    assert opened == tuple(range(RESERVED, RESERVED + len(opened)))
    assert RESERVED + len(opened) >= cache.limit
    assert len(opened) < BLOCKS - RESERVED
    assert bytes_that_exist() <= BUDGET


def test_a_block_is_not_opened_at_the_cost_of_another(make: Callable[[], EngineCache]) -> None:
    """Under a smaller budget blocks go to the host. They are said to be there until they are closed."""
    cache = make()
    opened = step(cache, range(RESERVED, BLOCKS), NONE, idle=False)
    assert not cache.away
    ballonet.set_budget(BUDGET // 2)
    rest = range(opened[-1] + 1, BLOCKS)
    assert step(cache, rest, NONE, idle=False) == ()
    away = cache.away
    assert BUDGET // 2 // PAGE <= len(away) < len(opened)
    step(cache, NONE, away, idle=False)
    assert not cache.away
    assert step(cache, rest, NONE, idle=False) == ()
    ballonet.set_budget(BUDGET)
    assert step(cache, rest, NONE, idle=False)
