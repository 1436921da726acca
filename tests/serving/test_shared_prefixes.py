"""What prompts begin with is found by `generate()`, by `generate_batch` and in files, whoever has computed it."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.hooks.batching import patches
from ballonet.hooks.batching.cache import ElasticPagedCache
from ballonet.hooks.batching.pages import SectorPages
from ballonet.hooks.managed import Managed
from ballonet.hooks.prefix import saving
from ballonet.hooks.prefix.sequence import StoredTokens

from ..models import build
from ..pool import take_out
from ..tuned import Tuned
from .batches import BLOCK, Answer, answers, ask, looping, prompts

PAGE = 65536
NEW = 6  # tokens of a turn's answer, and of what is said next


@pytest.fixture(autouse=True)
def _blocks(tuned: Tuned) -> None:
    tuned(prefixes={"block": BLOCK, "again": 0})  # files are read, however slow they are on a loaded machine


@pytest.fixture(autouse=True)
def _purged_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """No page is given back that a hash leads to."""
    hold, give, caches = ElasticPagedCache._hold, SectorPages.give, list[weakref.ref[ElasticPagedCache]]()

    def held(cache: ElasticPagedCache, *args: Any) -> None:
        hold(cache, *args)
        caches.append(weakref.ref(cache))

    def given(pages: SectorPages, sectors: Iterable[int]) -> None:
        gone = set(sectors)
        for cache in (alive for reference in caches if (alive := reference()) is not None and alive.pages is pages):
            for allocator in cache.cache_allocators.values():
                assert gone.isdisjoint(block // allocator.blocks_per_sector for block in allocator.ledger.block_to_hash)
        give(pages, gone)

    monkeypatch.setattr(ElasticPagedCache, "_hold", held)
    monkeypatch.setattr(SectorPages, "give", given)


@contextmanager
def managing(
    model: Any, pages: int = 256, manage: Callable[..., Managed] = ballonet.manage, peer: int = 0, **options: Any
) -> Iterator[Managed]:
    """As in a process of its own: nothing is left afterwards but files. `peer`: pages of a second pool."""
    budget = pages * PAGE
    more = {"peer_budget": peer * PAGE} if peer else {}
    ballonet.install(budget, page_size=PAGE, host_budget=budget, device="cpu", **more)
    managed = manage(model, **options)
    try:
        yield managed
    finally:
        managed.release()
        del managed
        gc.collect()
        device = devices.require()
        device.reap(wait=True)
        device.check()
        assert device.snapshot()["pages"]["kv"] == 0
        take_out()


def batch(model: Any, asked: list[list[int]]) -> list[list[int]]:
    return [answer.tokens for answer in checked(answers(model, asked, NEW, num_blocks=96))]


def checked(found: list[Answer]) -> list[Answer]:
    assert [answer.error for answer in found] == [None] * len(found)
    return found


def single(model: Any, asked: list[list[int]]) -> list[list[int]]:
    """By `generate()`, one after the other."""
    texts = []
    for prompt in asked:
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
        texts.append(tokens[0, len(prompt) :].tolist())
    return texts


def longer(asked: list[list[int]], said: list[list[int]], turn: int) -> list[list[int]]:
    return [[*prompt, *answer, *range(3 + turn, 3 + turn + NEW)] for prompt, answer in zip(asked, said, strict=True)]


def needed(asked: list[list[int]]) -> int:
    """Tokens that a turn has to compute: its new ones, the last of the answer before, and of each sequence what lies
    behind its last full block; and of its own answer all but the last."""
    before = [len(prompt) - NEW - 1 for prompt in asked]  # tokens that were computed
    return sum(len(prompt) - done // BLOCK * BLOCK + NEW - 1 for prompt, done in zip(asked, before, strict=True))


def questions() -> list[list[int]]:
    """Prompts, one of which fills its last block with its answer."""
    return [*prompts(3, 60), list(range(3, 3 + 2 * BLOCK - NEW + 1))]


WAYS = {"batch": batch, "generate": single}


@pytest.mark.skipif(
    "use_inference_mode" not in inspect.signature(ContinuousBatchingManager._run_generation_loop).parameters,
    reason="in inference mode no loop of this transformers runs, stock's neither",
)
def test_kept_blocks_serve_loops_in_and_outside_of_inference_mode() -> None:
    """A loop runs in the mode of who started it, and its cache goes to the next one."""
    model, asked = build("llama"), questions()
    expected = single(model, asked)
    with managing(model, prefix_cache=True):
        for inference in (True, False, True):
            with torch.inference_mode(inference):
                assert batch(model, asked) == expected
            with torch.inference_mode(not inference):
                assert single(model, asked) == expected


@pytest.mark.parametrize("ways", [("batch", "batch"), ("generate", "batch"), ("batch", "generate")])
def test_a_turn_finds_the_one_before(ways: tuple[str, str], seen: list[int]) -> None:
    model, asked = build("llama"), questions()
    turns = [asked]
    said = [batch(model, asked)]
    for turn in range(2):
        turns.append(longer(turns[-1], said[-1], turn))
        said.append(batch(model, turns[-1]))
    with managing(model, prefix_cache=True) as managed:
        for turn, (turn_prompts, right) in enumerate(zip(turns, said, strict=True)):
            way = ways[turn % 2]
            del seen[:]
            counts, before = managed.prefixes.counts, managed.prefixes.counts.hits
            if way == "batch":
                assert batch(model, turn_prompts) == right
                computed = sum(seen)
            else:
                assert single(model, turn_prompts) == right
                computed = sum(map(len, turn_prompts)) - (counts.hits - before) + len(turn_prompts) * (NEW - 1)
            if turn:
                assert computed == needed(turn_prompts), (turn, way)


def test_a_turn_finds_the_one_before_in_the_same_loop(seen: list[int]) -> None:
    model, asked = build("llama"), questions()
    first = batch(model, asked)
    again = longer(asked, first, 0)
    right = batch(model, again)
    with managing(model, prefix_cache=True), looping(model, NEW) as loop:
        for asking, said in ((asked, first), (again, right)):
            del seen[:]
            assert [answer.tokens for answer in ask(loop, asking)] == said
        assert sum(seen) == needed(again)
        del loop


def test_with_windows_nothing_is_shared() -> None:
    """As transformers does; a loop goes on with the cache of the one before all the same."""
    model, asked = build("olmo3"), questions()
    first = batch(model, asked)
    again = longer(asked, first, 0)
    second = batch(model, again)
    with managing(model, prefix_cache=True):
        assert [batch(model, asked), batch(model, again)] == [first, second]


@pytest.mark.parametrize(
    ("ways", "attention"),
    [(("batch", "batch"), "eager"), (("generate", "batch"), "sdpa"), (("batch", "generate"), "sdpa")],
)
def test_the_next_process_finds_it_in_files(
    ways: tuple[str, str], attention: str, seen: list[int], tmp_path: Path
) -> None:
    model, asked = build("llama"), questions()
    model.set_attn_implementation(attention)
    first = batch(model, asked)
    again = longer(asked, first, 0)
    second = batch(model, again)
    with managing(model, prefix_dir=tmp_path):
        assert WAYS[ways[0]](model, asked) == first
    with managing(model, prefix_dir=tmp_path) as managed:
        del seen[:]
        assert WAYS[ways[1]](model, again) == second
        counts = managed.prefixes.counts
        assert counts.on_disk > 0
        computed = sum(map(len, again)) - counts.hits + len(again) * (NEW - 1)
        assert computed == needed(again)
        if ways[1] == "batch":
            assert sum(seen) == computed


def test_a_damaged_file_is_a_miss(tmp_path: Path) -> None:
    model, asked = build("llama"), questions()
    first = batch(model, asked)
    with managing(model, prefix_dir=tmp_path):
        batch(model, asked)
    for file in tmp_path.iterdir():
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    with managing(model, prefix_dir=tmp_path) as managed:
        with pytest.warns(RuntimeWarning, match="damaged"):
            assert batch(model, asked) == first
        assert managed.prefixes.counts.on_disk == 0


def test_a_file_of_another_shape_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the right checksum: nobody but ballonet writes such files, and another version of it could."""
    model, asked = build("llama"), questions()
    first = batch(model, asked)
    with managing(model, prefix_dir=tmp_path):
        batch(model, asked)
    part = saving.SavedRun.part
    monkeypatch.setattr(saving.SavedRun, "part", lambda *args: tuple(tensor.transpose(1, 3) for tensor in part(*args)))
    with managing(model, prefix_dir=tmp_path):
        assert batch(model, asked) == first


def test_tokens_are_stocks_while_pages_move(tmp_path: Path) -> None:
    """Holds while another thread writes blocks to files, too."""
    model, asked = build("llama", num_hidden_layers=4), prompts(10, 60)
    turns = [asked]
    said = [batch(model, asked)]
    for turn in range(2):
        turns.append(longer(turns[-1], said[-1], turn))
        said.append(batch(model, turns[-1]))
    for _ in range(2):
        with managing(model, 64, chaos=1, prefix_dir=tmp_path, manage=testing.manage):
            for turn, (turn_prompts, right) in enumerate(zip(turns, said, strict=True)):
                assert (batch if turn % 2 else single)(model, turn_prompts) == right
    assert list(tmp_path.iterdir())


def test_little_room(tmp_path: Path) -> None:
    """No more is copied from files than there is room for, and what runs has its memory."""
    model, asked = build("llama", num_hidden_layers=8), prompts(16, 60)
    first = batch(model, asked)
    again = longer(asked, first, 0)
    second = batch(model, again)
    with managing(model, prefix_dir=tmp_path):
        assert batch(model, asked) == first
    with managing(model, 26, prefix_dir=tmp_path) as managed:
        assert batch(model, again) == second
        assert managed.prefixes.counts.on_disk > 0


def test_generate_beside_a_loop_that_lives(tmp_path: Path) -> None:
    """Either finds what the other has computed, and another thread writes both to files meanwhile. In transformers
    generate() gives other tokens while a step of a loop is computed: so it is called between them."""
    model, asked = build("llama", num_hidden_layers=4), prompts(8, 60)
    first = batch(model, asked)
    again = longer(asked, first, 0)
    right = batch(model, again)
    with managing(model, prefix_dir=tmp_path) as managed, looping(model, NEW) as loop:
        for _ in range(3):
            assert single(model, asked) == first
            assert [answer.tokens for answer in ask(loop, [*asked, *again])] == first + right
            assert single(model, again) == right
        assert managed.prefixes.counts.hits > 0
        del loop


def test_weights_that_change_between_requests_of_a_loop(seen: list[int]) -> None:
    """A loop that goes on forgets what it has computed before."""
    model, asked = build("llama"), questions()
    with managing(model, prefix_cache=True), looping(model, NEW) as loop:
        for round in range(2):
            if round:
                with torch.no_grad():
                    next(model.model.layers[0].self_attn.parameters()).mul_(-1.5)
            del seen[:]
            outcomes = ask(loop, asked)
            assert sum(seen) >= sum(map(len, asked))
        del loop
    assert [answer.tokens for answer in outcomes] == batch(model, asked)


def test_hashes_go_before_pages(seen: list[int]) -> None:
    """With a limit on what is kept; the end of a prompt goes before its beginning."""
    model, asked = build("llama", num_hidden_layers=8), prompts(24, 60)
    first = batch(model, asked)
    with managing(model, prefix_cache=8 * PAGE):
        for _ in range(2):
            del seen[:]
            assert batch(model, asked) == first
        assert sum(map(len, asked)) - 400 < sum(seen) - len(asked) * (NEW - 1) < sum(map(len, asked))


@pytest.mark.parametrize("peer", [0, 64])
def test_two_models_lend_to_each_other(peer: int, seen: list[int]) -> None:
    """What one keeps goes to the peer or the host while the other needs its pages, and is found there."""
    model, other = build("llama", num_hidden_layers=4), build("llama", num_hidden_layers=6)
    asked = prompts(12, 60)
    first, busy = batch(model, asked), [answer.tokens for answer in answers(other, asked, 60, num_blocks=192)]
    again = longer(asked, first, 0)
    second = batch(model, again)
    with managing(model, 26, peer=peer, prefix_cache=True) as managed, ballonet.manage(other):
        assert batch(model, asked) == first
        assert [answer.tokens for answer in answers(other, asked, 60, num_blocks=192)] == busy
        copied, counts = ballonet.stats().copied, managed.prefixes.counts
        assert (copied.kv_d2p if peer else copied.kv_d2h) > 0
        del seen[:]
        assert batch(model, again) == second
        assert sum(seen) == needed(again)
        assert (counts.on_peer > 0, counts.on_host > 0) == (peer > 0, not peer)


def kept_by(model: Any) -> ElasticPagedCache:
    known = patches.batched(model)
    assert known is not None
    assert known.loop_caches is not None
    assert known.loop_caches._cache is not None
    return known.loop_caches._cache


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_copy_of_a_prefix_leaves_no_block(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = build("llama"), questions()
    read = StoredTokens.__call__

    def fails(tokens: StoredTokens, layer: int) -> Any:
        if layer == failing:
            raise torch.OutOfMemoryError("no memory")
        return read(tokens, layer)

    with managing(model, prefix_cache=True) as managed:
        first = single(model, asked)
        monkeypatch.setattr(StoredTokens, "__call__", fails)
        assert batch(model, asked) == first
        managed.prefixes.clear()
        cache = kept_by(model)
        assert cache.pool.used == set()
        del cache
