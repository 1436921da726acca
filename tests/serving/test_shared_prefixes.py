"""What prompts begin with is found by `generate()`, by `generate_batch` and in files, whoever has computed it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import continuous_api

import ballonet
from ballonet.allocator import runtime
from ballonet.hooks.managed import Managed

from ..models import build
from ..pool import take_out
from ..tuned import Tuned
from .batches import BLOCK, Answer, answers, prompts

PAGE = 65536
NEW = 6  # tokens of a turn's answer, and of what is said next


@pytest.fixture(autouse=True)
def _blocks(tuned: Tuned) -> None:
    tuned(prefixes={"block": BLOCK})


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each step of a loop computed."""
    found: list[int] = []
    processor = continuous_api.ContinuousBatchProcessor
    step = processor._generation_step

    def watched(self: Any, model: Any) -> None:
        found.append(sum(each.query_length for each in self.inputs_and_outputs.requests_in_batch))
        step(self, model)

    monkeypatch.setattr(processor, "_generation_step", watched)
    return found


@contextmanager
def managing(model: Any, pages: int = 256, **options: Any) -> Iterator[Managed]:
    """As in a process of its own: nothing is left afterwards but files."""
    ballonet.install(pages * PAGE, page_size=PAGE, host_budget=pages * PAGE, device="cpu")
    managed = ballonet.manage(model, **options)
    try:
        yield managed
    finally:
        managed.release()
        del managed
        gc.collect()
        device = runtime.require()
        device.reap(wait=True)
        device.check()
        assert device.snapshot()["pages"]["kv"] == 0
        take_out()


def batch(model: Any, asked: list[list[int]]) -> list[list[int]]:
    return [each.tokens for each in checked(answers(model, asked, NEW, num_blocks=96))]


def checked(found: list[Answer]) -> list[Answer]:
    assert [each.error for each in found] == [None] * len(found)
    return found


def single(model: Any, asked: list[list[int]]) -> list[list[int]]:
    """By `generate()`, one after the other."""
    found = []
    for prompt in asked:
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def longer(asked: list[list[int]], said: list[list[int]], turn: int) -> list[list[int]]:
    return [[*prompt, *each, *range(3 + turn, 3 + turn + NEW)] for prompt, each in zip(asked, said, strict=True)]


def needed(asked: list[list[int]]) -> int:
    """Tokens that a turn has to compute: its new ones, the last of the answer before, and of each sequence what lies
    behind its last full block; and of its own answer all but the last."""
    before = [len(each) - NEW - 1 for each in asked]  # tokens that were computed
    return sum(len(each) - done // BLOCK * BLOCK + NEW - 1 for each, done in zip(asked, before, strict=True))


def questions() -> list[list[int]]:
    """Prompts, one of which fills its last block with its answer."""
    return [*prompts(3, 60), list(range(3, 3 + 2 * BLOCK - NEW + 1))]


WAYS = {"batch": batch, "generate": single}


@pytest.mark.parametrize("ways", [("batch", "batch"), ("generate", "batch"), ("batch", "generate")])
def test_a_turn_finds_the_one_before(ways: tuple[str, str], seen: list[int]) -> None:
    model, asked = build("llama"), questions()
    turns = [asked]
    said = [batch(model, asked)]
    for turn in range(2):
        turns.append(longer(turns[-1], said[-1], turn))
        said.append(batch(model, turns[-1]))
    with managing(model, prefix_cache=True) as managed:
        for turn, (each, right) in enumerate(zip(turns, said, strict=True)):
            way = ways[turn % 2]
            del seen[:]
            counts, before = managed.prefixes.counts, managed.prefixes.counts.hits
            if way == "batch":
                assert batch(model, each) == right
                computed = sum(seen)
            else:
                assert single(model, each) == right
                computed = sum(map(len, each)) - (counts.hits - before) + len(each) * (NEW - 1)
            if turn:
                assert computed == needed(each), (turn, way)


@pytest.mark.parametrize("ways", [("batch", "batch"), ("generate", "batch"), ("batch", "generate")])
def test_the_next_process_finds_it_in_files(ways: tuple[str, str], seen: list[int], tmp_path: Path) -> None:
    model, asked = build("llama"), questions()
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
