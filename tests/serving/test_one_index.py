"""Blocks of continuous batching and cached sequences are entries of one index: it says what transformers' ledger says,
and what it is worth decides what leaves, whoever has it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from transformers.generation.continuous_batching.requests import RequestState

import ballonet
from ballonet.hooks.batching.blocks import KeptBlocks
from ballonet.hooks.batching.cache import ElasticPagedCache
from ballonet.hooks.managed import Managed
from ballonet.hooks.prefix.index import PAGED
from ballonet.hooks.prefix.sequence import Gone
from ballonet.hooks.prefix.store import PrefixStore

from ..models import build
from ..tuned import Tuned
from .batches import BLOCK, PAGE, answers, ask, install, looping, prompts
from .test_shared_prefixes import kept_by

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TOKENS = st.lists(st.sampled_from((3, 4)), min_size=1, max_size=4)  # of each block of a prompt


@pytest.fixture(autouse=True)
def _blocks(tuned: Tuned) -> None:
    tuned(prefixes={"block": 8})  # others than those of the paged cache


def prompt_of(tokens: list[int]) -> list[int]:
    """Full blocks, each of one token, and the beginning of another."""
    return [*(token for token in tokens for _ in range(BLOCK)), 7, 8]


class Lives(RuleBasedStateMachine):
    """Requests of a cache whose loop has ended, one call after the other as a loop makes them, beside `generate()`."""

    model: Any
    managed: Managed

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, RequestState] = {}
        self.old: set[str] = set()  # requests that are there since before all went
        self.reading, self.read = ExitStack(), set[int]()  # the blocks
        self.was_there: list[tuple[KeptBlocks, int]] = []  # what was read, and to where
        self.count = 0
        self.step()

    @property
    def cache(self) -> ElasticPagedCache:
        return kept_by(self.model)

    @property
    def store(self) -> PrefixStore:
        assert self.managed.prefixes is not None
        return self.managed.prefixes

    @property
    def blocks(self) -> Any:
        assert self.cache.kept is not None
        return self.cache.kept

    def step(self) -> None:
        """The next batch begins: the model is looked at again."""
        self.cache.begins(self.requests)
        self.cache.renew()

    def compute(self, state: RequestState, count: int) -> None:
        if self.cache.can_store_request_tokens(state, count):
            full = self.cache.count_new_complete_blocks(state, count)
            state.position_offset += count
            self.cache.mark_complete_blocks(state, full)

    @rule(tokens=TOKENS)
    def comes(self, tokens: list[int]) -> None:
        self.step()
        self.count += 1
        state = RequestState(f"{self.count}", prompt_of(tokens))
        state.position_offset = self.cache.search_prefix_match(state.request_id, state.initial_tokens)
        self.requests[state.request_id] = state
        self.compute(state, len(state.initial_tokens) - state.position_offset)

    def some(self, data: st.DataObject) -> RequestState:
        return self.requests[data.draw(st.sampled_from([*self.requests]))]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), token=st.sampled_from((3, 4)))
    def goes_on(self, data: st.DataObject, token: int) -> None:
        state = self.some(data)
        state.generated_tokens += [token] * BLOCK
        self.compute(state, BLOCK)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), no_cache=st.booleans())
    def ends(self, data: st.DataObject, no_cache: bool) -> None:
        state = self.some(data)
        self.cache.free_blocks(state.request_id, no_cache)
        del self.requests[state.request_id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        state, self.count = self.some(data), self.count + 1
        if state.request_id in self.blocks._allocator.block_table:
            copies: dict[str, tuple[list[int], list[int]]] = {name: ([], []) for name in self.cache.cache_allocators}
            for name in self.cache.prepare_fork_request(state, [f"{self.count}"], copies):
                child = RequestState(name, [*state.initial_tokens])
                child.generated_tokens = [*state.generated_tokens]
                child.position_offset = state.position_offset
                self.requests[name] = child
                if state.request_id in self.old:
                    self.old.add(name)

    @rule(tokens=TOKENS, room=st.integers(-1, 8), meanwhile=st.booleans())
    def is_filled(self, tokens: list[int], room: int, meanwhile: bool) -> None:
        """With what others have computed: blocks of a prompt that none holds, as many as there is room for; what they
        hang on may be gone then."""
        self.step()
        hashes = [*self.blocks.hashes(prompt_of(tokens))]
        first = self.blocks.found(hashes)
        self.blocks.used(hashes)
        self.cache.pool.try_to_free_sectors()
        most = self.cache.pool.count_free_blocks(0) + max(0, room) * self.blocks._allocator.blocks_per_sector
        placed = self.blocks.blocks.place(len(hashes) - first, room * self.cache.bytes_per_sector)
        assert len(placed) == min(len(hashes) - first, most)
        if meanwhile:
            self.gives_up_all()
        self.blocks.keep(hashes, first, placed)

    @contextmanager
    def keeping_what_is_used(self) -> Iterator[None]:
        known = self.blocks._ledger.block_to_hash
        used = {block for block in known if block not in self.blocks._ledger.cached_blocks}
        yield
        assert used <= known.keys()

    @rule(count=st.integers(1, 4))
    def gives_up(self, count: int) -> None:
        with self.keeping_what_is_used():
            self.cache.evict_kept(count * self.cache.bytes_per_sector)

    @rule()
    def gives_up_all(self) -> None:
        with self.keeping_what_is_used():
            self.cache.evict_cached_blocks()
        assert not self.blocks._ledger.cached_blocks

    @rule(tokens=TOKENS)
    def generates(self, tokens: list[int]) -> None:
        self.model.generate(torch.tensor([prompt_of(tokens)]), do_sample=False, max_new_tokens=2, pad_token_id=0)

    @rule(tokens=TOKENS)
    def is_read(self, tokens: list[int]) -> None:
        """By another thread, for a while: meanwhile they stay."""
        find, settings = self.store.contents.index.blocks.find, self.store.identity().settings
        assert not any(isinstance(run.source, KeptBlocks) for run in find(prompt_of(tokens), b"other settings"))
        for run in find(prompt_of(tokens), settings):
            if isinstance(run.source, KeptBlocks):
                self.reading.enter_context(run.source.leased(run.end))
                self.read.update(run.source._held or ())
                self.was_there.append((run.source, run.end))

    @rule()
    def was_read(self) -> None:
        self.reading.close()
        self.read.clear()

    @rule(pages=st.none() | st.integers(0, 8))
    def has_a_limit(self, pages: int | None) -> None:
        with self.keeping_what_is_used():
            self.store.limit = None if pages is None else pages * PAGE
        assert pages is None or self.read or self.store.nbytes <= pages * PAGE

    @rule(how=st.sampled_from(("weights", "ledgers", "reset", "clear", "interrupt")))
    def all_goes(self, how: str) -> None:
        """But for a reset, as transformers makes one after the warmup of its graphs: that takes requests alone."""
        before = self.blocks.count
        if how == "weights":
            with torch.no_grad():
                next(self.model.model.layers[0].self_attn.parameters()).mul_(1.0)
            self.step()
        elif how == "clear":
            self.store.clear()
        elif how == "interrupt":  # in the middle of a change: the next one forgets everything
            with pytest.raises(KeyboardInterrupt), self.store.contents.change():
                raise KeyboardInterrupt
            self.store.enforce()
        else:
            if how == "reset":
                self.cache.reset()
            else:
                self.cache.free_all_requests(clear_ledgers=True)
            self.requests.clear()
        if how != "reset":
            self.old.update(self.requests)
            assert self.blocks.count == 0
        elif self.store.limit is None:
            assert self.blocks.count == before

    @invariant()
    def the_index_says_what_the_ledger_says(self) -> None:
        ledger, index = self.blocks._ledger, self.store.contents.index.blocks.index
        entries = {key for key in index if index.owner(key) is PAGED}
        assert entries == ledger.hash_to_block.keys()
        assert {block: key for key, block in ledger.hash_to_block.items()} == ledger.block_to_hash
        assert ledger.cached_blocks.keys() <= ledger.block_to_hash.keys()

    @invariant()
    def nobody_finds_what_requests_compute_that_are_older(self) -> None:
        tables, known = self.blocks._allocator.block_table, self.blocks._ledger.block_to_hash
        assert not [block for name in self.old & tables.keys() for block in tables[name] if block in known]

    @invariant()
    def what_hangs_on_a_block_leaves_before_it(self) -> None:
        index, known = self.store.contents.index.blocks.index, self.blocks._ledger.block_to_hash
        below = [key for owner, key in index.after(None) if owner is PAGED]
        for key in below:  # grows
            below += [other for owner, other in index.after(key) if owner is PAGED]
        assert sorted(below) == sorted(known.values()), "each is reached"
        for table in self.blocks._allocator.block_table.values():
            keys = [known.get(block) for block in table]
            full = [key for key in keys if key is not None]
            assert keys[: len(full)] == full, "no full block behind one that is not"
            for before, key in pairwise(full):
                assert (PAGED, key) in index.after(before)

    @invariant()
    def each_block_is_somewhere(self) -> None:
        """Free, of requests, or only kept."""
        allocator = self.blocks._allocator
        free = [block for tree in self.cache.pool._free_blocks[0].trees.values() for block in tree]
        used = {block for table in allocator.block_table.values() for block in table}
        kept = self.blocks._ledger.cached_blocks.keys()
        assert len(free) == len(set(free))
        assert used.isdisjoint(free)
        assert used.isdisjoint(kept)
        assert kept.isdisjoint(free)
        assert self.read.isdisjoint(free), "what is read stays"
        assert self.blocks.unused_pages >= 0

    def teardown(self) -> None:
        self.reading.close()
        self.cache.free_all_requests()
        self.store.limit = None
        self.store.clear()
        self.cache.pool.try_to_free_sectors()
        assert self.cache.pool.used == set()
        assert self.blocks.count == 0
        for source, end in self.was_there:
            with pytest.raises(Gone), source.leased(end):
                pass


def test_the_index_and_the_ledger_agree_whatever_comes() -> None:
    model = build("llama")
    install(256)
    with ballonet.manage(model, prefix_cache=True) as managed:
        answers(model, prompts(2, 40))
        machine = type("LivesOfOneModel", (Lives,), {"model": model, "managed": managed})
        run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=50, deadline=None))


HOT, COLD = [3] * (4 * BLOCK + 1), [4] * (4 * BLOCK + 1)


def say(model: Any, way: str, prompt: list[int]) -> None:
    if way == "batch":
        assert answers(model, [prompt], 1, num_blocks=96)[0].error is None
    else:
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=1)


def use(model: Any, often: str, once: str) -> None:
    """One prompt returns again and again, others do not; the last of these comes last."""
    for number in range(12):
        say(model, often, HOT)
        say(model, once, [10 + number] * (6 * BLOCK + 1))
    say(model, often, HOT)
    say(model, once, COLD)


@pytest.mark.parametrize(("often", "once"), [("batch", "generate"), ("generate", "batch")])
def test_blocks_worth_least_leave_for_the_limit_whoever_has_them(tuned: Tuned, often: str, once: str) -> None:
    """A prompt that returns stays although one that does not came later; of that the end goes first."""
    tuned(prefixes={"doubt": 0.0})  # too few evictions to prove what is learned
    model = build("llama", num_hidden_layers=8)
    install(256)
    with ballonet.manage(model, prefix_cache=True) as managed:
        store = managed.prefixes
        assert store is not None
        use(model, often, once)
        assert [store.get_num_new_matched_tokens(prompt) for prompt in (HOT, COLD)] == [4 * BLOCK] * 2
        left = []
        while store.get_num_new_matched_tokens(COLD):
            store.limit = limit = store.nbytes - 1
            assert store.nbytes <= limit
            assert store.get_num_new_matched_tokens(HOT) == 4 * BLOCK
            left.append(store.get_num_new_matched_tokens(COLD))
        assert left == sorted(left, reverse=True)
        assert len(left) > 1
        store.limit = 0
        assert store.nbytes == 0


def test_blocks_stay_for_the_limit_while_their_pages_do_not_count() -> None:
    """While requests run sequences alone are cut to the limit, and once they have ended all that is kept."""
    model = build("llama", num_hidden_layers=8)
    install(256)
    with ballonet.manage(model, prefix_cache=True) as managed:
        store = managed.prefixes
        assert store is not None
        say(model, "batch", HOT)
        say(model, "generate", COLD)
        cache = kept_by(model)
        running = RequestState("running", [9] * 20)
        assert cache.can_store_request_tokens(running, 20)
        store.limit = 0
        assert store.get_num_new_matched_tokens(COLD) == store.nbytes == 0
        assert store.get_num_new_matched_tokens(HOT) == 4 * BLOCK
        cache.free_blocks("running")
        assert store.nbytes == 0
        assert store.get_num_new_matched_tokens(HOT) < 4 * BLOCK
        del cache


def test_kv_of_requests_is_counted_whichever_blocks_are_free() -> None:
    """Blocks that an ended request has left are no fewer bytes for the next, nor a reason not to refuse one that is
    too large."""
    model = build("llama", num_hidden_layers=8)
    install(256)
    with ballonet.manage(model, prefix_cache=True):
        say(model, "batch", HOT)
        cache = kept_by(model)
        sector, blocks = cache.bytes_per_sector, max(it.blocks_per_sector for it in cache.cache_allocators.values())
        assert cache.can_store_request_tokens(RequestState("ended", [9] * 20), 20)
        for allocator in cache.cache_allocators.values():
            allocator.free_blocks("ended", no_cache=True)
        assert cache.pool.count_free_blocks(0) > 0, "until the next step"
        assert cache.bytes_of(BLOCK) == sector
        assert cache.bytes_of(*[BLOCK] * (blocks + 1)) == 2 * sector, "requests share a sector"
        del cache


def test_blocks_worth_least_leave_for_requests(tuned: Tuned) -> None:
    """Blocks of a prompt that returns stay longer than those of one that came last; sequences are not the loop's to
    drop."""
    tuned(prefixes={"doubt": 0.0})  # too few evictions to prove what is learned
    model = build("llama", num_hidden_layers=8)
    install(256)
    with ballonet.manage(model, prefix_cache=True) as managed:
        store = managed.prefixes
        assert store is not None
        say(model, "generate", [5] * 40)
        use(model, "batch", "batch")
        cache, left = kept_by(model), []
        while store.get_num_new_matched_tokens(COLD):
            assert cache.evict_kept(cache.bytes_per_sector)
            assert store.get_num_new_matched_tokens(HOT) == 4 * BLOCK
            left.append(store.get_num_new_matched_tokens(COLD))
        assert sorted({*left}) == [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 4 * BLOCK]
        assert left == sorted(left, reverse=True)
        assert cache.evict_cached_blocks()
        assert not cache.evict_cached_blocks()
        assert store.get_num_new_matched_tokens(HOT) == 0
        assert store.get_num_new_matched_tokens([5] * 40) >= 32
        assert store.counts.evicted == 12 * 6 + 4 + 4
        del cache


def test_a_limit_that_is_set_while_a_loop_waits_for_requests() -> None:
    """Any thread cuts what is kept while no request runs; what runs next has what it needs, and the same tokens."""
    model, asked = build("llama", num_hidden_layers=4), prompts(8, 60)
    expected = [answer.tokens for answer in answers(model, asked, 6, num_blocks=128)]
    install(256)
    with ballonet.manage(model, prefix_cache=True) as managed, looping(model, 6) as loop:
        store = managed.prefixes
        assert store is not None
        for turn in range(4):
            for number, prompt in enumerate(asked):
                loop.add_request(prompt, request_id=f"{turn} {number}")
            if turn % 2:
                store.limit = 4 * PAGE  # while they run
            by_id = {(it := loop.get_result(timeout=600)).request_id: it.generated_tokens for _ in asked}
            assert [by_id[f"{turn} {number}"] for number in range(len(asked))] == expected
            store.limit = 2 * PAGE
            while kept_by(model).request_pages.requests():
                pass
            store.enforce()
            assert store.nbytes <= 2 * PAGE
            store.limit = None
        del loop


def test_another_cache_takes_the_place_of_the_one_before(seen: list[int]) -> None:
    """With blocks of another size; a second loop beside the first has an index of its own."""
    model, asked = build("llama"), prompts(3, 60)
    expected = [answer.tokens for answer in answers(model, asked, 6, num_blocks=96)]
    install(256)
    with ballonet.manage(model, prefix_cache=True) as managed:
        store = managed.prefixes
        assert store is not None
        for size in (16, 32, 16):
            assert [answer.tokens for answer in answers(model, asked, 6, num_blocks=96, page_size=size)] == expected
            index = store.contents.index.blocks
            assert index.paged is kept_by(model).kept
            assert index.paged is not None
            assert index.paged.tokens == size
            assert sum(index.index.owner(key) is PAGED for key in index.index) == index.paged.count > 0
        with looping(model, 6, page_size=64) as loop:
            assert loop.batch_processor.cache is kept_by(model)
            assert not len(index.index)
        with looping(model, 6) as first, looping(model, 6) as second:
            for loop in (second, second, first):
                assert [answer.tokens for answer in ask(loop, asked)] == expected
            assert first.batch_processor.cache.kept is store.contents.index.blocks.paged
            assert second.batch_processor.cache.kept is not first.batch_processor.cache.kept
        del first, second, loop, index


def test_other_threads_read_and_cut_while_a_loop_runs() -> None:
    model, asked = build("llama", num_hidden_layers=4), prompts(8, 60)
    expected = [answer.tokens for answer in answers(model, asked, 6, num_blocks=128)]
    install(256)
    ended, counts, errors = threading.Event(), Counter[str](), list[BaseException]()
    with ballonet.manage(model, prefix_cache=True) as managed, looping(model, 6) as loop:
        store = managed.prefixes
        assert store is not None

        def others() -> None:
            try:
                while not ended.wait(0.001):  # without a pause the loop would not get the interpreter
                    for prompt in asked:
                        now, end = store.identity(), store.get_num_new_matched_tokens(prompt)
                        with store.read(prompt, now, 0, end) as tokens:
                            if tokens is not None:
                                counts["read"] += tokens(0)[0].shape[2] == end
                    if counts["read"]:  # not before: a round would find what came since the last one
                        store.limit = 2 * PAGE
                        store.limit = None
                        counts["cleared"] += 1
                        store.clear()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=others)
        thread.start()
        try:
            for turn in range(40):
                assert [answer.tokens for answer in ask(loop, asked)] == expected
                if counts["read"] and counts["cleared"] and turn > 5:
                    break
        finally:
            ended.set()
            thread.join()
        assert errors == []
        assert counts["read"]
        index, kept = store.contents.index.blocks.index, kept_by(model).kept
        assert kept is not None
        assert {key for key in index if index.owner(key) is PAGED} == kept._ledger.hash_to_block.keys()
        del loop, kept
