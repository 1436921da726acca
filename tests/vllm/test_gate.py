"""Blocks of a vLLM engine are handed out only while they have pages: the gate, with a worker that may refuse or lag."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ballonet.hooks.vllm.cache import BlockGate

FIRST = 2  # blocks whose pages are always there
BLOCKS = 24


@dataclass
class Block:
    block_id: int
    block_hash: int | None = None


@dataclass
class Queue:
    """vLLM's queue of free blocks, as a list."""

    free: list[Block] = field(default_factory=list)

    def remove(self, block: Any) -> None:
        self.free.remove(block)

    def prepend_n(self, blocks: list[Any]) -> None:
        self.free[:0] = blocks

    def get_all_free_blocks(self) -> list[Any]:
        return list(self.free)


class Pool:
    """vLLM's pool of blocks; the null block is never free."""

    def __init__(self) -> None:
        self.blocks = [Block(number) for number in range(BLOCKS)]
        self.num_gpu_blocks = BLOCKS
        self.free_block_queue = Queue(self.blocks[1:])

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block in block_ids:
            self.blocks[block].block_hash = None

    def get_num_free_blocks(self) -> int:
        return len(self.free_block_queue.free)


class Engine(RuleBasedStateMachine):
    """A scheduler that takes and frees blocks, some steps ahead of a worker that backs as many as its pages allow."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.gate = BlockGate(self.pool, FIRST)
        self.limit = FIRST
        self.pages = 9  # blocks that the worker can back beside the first
        self.backed = set(range(FIRST))
        self.used: list[Block] = []
        self.sent: deque[tuple[int, tuple[int, ...], tuple[int, ...]]] = deque()
        self.answers: deque[tuple[int, frozenset[int], int]] = deque()

    @rule(need=st.integers(0, 8), cached=st.booleans())
    def schedule(self, need: int, cached: bool) -> None:
        closed = self.gate.close(2 * need, self.limit, FIRST, cached)
        self.sent.append((*self.gate.ask(need, self.limit), closed))

    @precondition(lambda self: self.sent)
    @rule()
    def work(self) -> None:
        number, wanted, closed = self.sent.popleft()
        assert not {block.block_id for block in self.used} & set(closed), "a block in use loses its pages"
        self.backed -= set(closed)
        done = []
        for block in wanted:
            if block not in self.backed and len(self.backed) >= self.pages + FIRST:
                break
            self.backed.add(block)
            done.append(block)
        self.answers.append((number, frozenset(done), self.pages + FIRST))

    @precondition(lambda self: self.answers)
    @rule()
    def hear(self) -> None:
        number, done, self.limit = self.answers.popleft()
        self.gate.answered(number, done)

    @precondition(lambda self: self.pool.get_num_free_blocks())
    @rule()
    def take(self) -> None:
        block = self.pool.free_block_queue.free.pop(0)
        block.block_hash = None
        self.used.append(block)

    @precondition(lambda self: self.used)
    @rule(cached=st.booleans(), which=st.integers(0, BLOCKS))
    def free(self, cached: bool, which: int) -> None:
        block = self.used.pop(which % len(self.used))
        block.block_hash = block.block_id if cached else None
        self.pool.free_block_queue.free.append(block)

    @rule(pages=st.integers(0, BLOCKS - FIRST))
    def budget(self, pages: int) -> None:
        self.pages = pages

    @invariant()
    def what_may_be_handed_out_has_pages(self) -> None:
        closing = {block for _, _, closed in self.sent for block in closed}
        reachable = {block.block_id for block in (*self.pool.free_block_queue.free, *self.used)} | {0}
        assert reachable <= self.backed - closing

    @invariant()
    def the_pool_is_as_large_as_what_is_open(self) -> None:
        assert self.pool.num_gpu_blocks == self.gate.open == 1 + len(self.used) + self.pool.get_num_free_blocks()


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def settled(need: int, pages: int) -> Engine:
    """After as many steps as it takes to open what is needed."""
    engine = Engine()
    engine.pages = pages
    for _ in range(3):
        engine.schedule(need, True)
        engine.work()
        engine.hear()
    return engine


def test_needed_blocks_are_opened_lowest_first() -> None:
    engine = settled(5, pages=20)
    assert sorted(block.block_id for block in engine.pool.free_block_queue.free) == [1, 2, 3, 4, 5]


def test_where_no_page_is_left_nothing_more_is_free() -> None:
    engine = settled(8, pages=3)
    assert engine.pool.get_num_free_blocks() == 4  # and block 1


def test_idle_it_closes_all_and_keeps_prefixes_where_told() -> None:
    for cached, left in ((True, [1]), (False, [1, 3])):
        engine = settled(6, pages=20)
        engine.pool.blocks[3].block_hash = 3
        assert engine.gate.gives(FIRST, cached)
        engine.schedule(0, cached)
        assert not engine.gate.gives(FIRST, cached)
        assert sorted(block.block_id for block in engine.pool.free_block_queue.free) == left


def test_a_smaller_budget_takes_prefixes_too() -> None:
    engine = settled(6, pages=20)
    for block in engine.pool.free_block_queue.free:
        block.block_hash = block.block_id
    engine.limit = 4
    engine.schedule(6, cached=False)
    assert engine.gate.open == 4
    assert all(block.block_hash is None for block in engine.gate._closed.values())


def test_free_blocks_on_the_host_are_closed_whatever_they_hold() -> None:
    engine = settled(6, pages=20)
    engine.take()
    (used,) = engine.used
    engine.pool.blocks[3].block_hash = 3
    away = {used.block_id, 3, 5}
    assert sorted(engine.gate.close(20, 20, FIRST, False, away)) == [3, 5]
    assert engine.pool.blocks[3].block_hash is None
