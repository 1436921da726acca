"""What prompts begin with outlives generation loops, where prefixes are kept: the next computes only what is new."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices

from ..models import build
from .batches import BLOCK, answers, install, prompts, stock

pytestmark = pytest.mark.usefixtures("nothing_is_left")

PAGE = 65536
NEW = 6  # tokens of a turn's answer, and of what is said next


def conversation(model: Any, turns: int, first: list[list[int]], seen: list[int]) -> tuple[list[Any], list[int]]:
    """Answers of a few conversations at once, each turn in a loop of its own, and the tokens that each computed."""
    asked, said, tokens = [list(each) for each in first], [], []
    for turn in range(turns):
        del seen[:]
        found = answers(model, asked, NEW, num_blocks=96)
        said.append(found)
        tokens.append(sum(seen))
        said_next = range(3 + turn, 3 + turn + NEW)
        asked = [[*prompt, *each.tokens, *said_next] for prompt, each in zip(asked, found, strict=True)]
    return said, tokens


@pytest.mark.parametrize("name", ["llama", "olmo3"])
def test_a_turn_computes_what_is_new(name: str, seen: list[int]) -> None:
    """A turn computes less than a block beside that. With windows transformers shares nothing."""
    model, first = build(name), prompts(4, 60)
    expected, _ = conversation(model, 4, first, seen)
    install(256)
    with ballonet.manage(model, prefix_cache=True):
        found, tokens = conversation(model, 4, first, seen)
        assert found == expected
        if name == "llama":
            assert all(count <= len(first) * (2 * NEW + BLOCK + NEW) for count in tokens[1:])
        kept = devices.require().snapshot()["pages"]["kv"]
        assert kept > 0


def test_without_prefixes_nothing_is_kept(seen: list[int]) -> None:
    model, first = build("llama"), prompts(4, 60)
    install(256)
    with ballonet.manage(model):
        _, tokens = conversation(model, 3, first, seen)
        gc.collect()
        assert devices.require().snapshot()["pages"]["kv"] == 0
    assert tokens[2] > tokens[1] > tokens[0]


def test_changed_weights_make_it_void(seen: list[int]) -> None:
    model, asked = build("llama"), prompts(6, 60)
    install(256)
    with ballonet.manage(model, prefix_cache=True):
        answers(model, asked)
        with torch.no_grad():
            next(model.model.layers[0].self_attn.parameters()).mul_(-1.5)
        del seen[:]
        found = answers(model, asked)
        assert sum(seen) >= sum(map(len, asked))
    assert found == stock(model, asked)


@pytest.mark.parametrize("limit", [True, 8 * PAGE])
def test_what_is_kept_has_a_limit(limit: bool | int) -> None:
    model, asked = build("llama", num_hidden_layers=8), prompts(24, 60)
    expected = stock(model, asked)
    install(256)
    with ballonet.manage(model, prefix_cache=limit):
        assert answers(model, asked) == expected
        gc.collect()
        kept = devices.require().snapshot()["pages"]["kv"]
        assert kept > 14 if limit is True else kept <= 12  # and the guard


def test_the_limit_is_that_of_blocks_and_sequences_together() -> None:
    model, asked = build("llama", num_hidden_layers=8), prompts(24, 60)
    install(256)
    with ballonet.manage(model, prefix_cache=8 * PAGE) as managed:
        for seed in range(6):
            if seed == 2:
                assert 0 < managed.prefixes.nbytes <= 8 * PAGE
                answers(model, asked)
            ids = torch.randint(3, 60, (1, 60), generator=torch.Generator().manual_seed(seed))
            model.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=0)
            gc.collect()
            assert devices.require().snapshot()["pages"]["kv"] <= 12
            assert managed.prefixes.nbytes <= 8 * PAGE


def test_pages_that_are_kept_serve_others_meanwhile() -> None:
    """Kept pages go to the host, and are found there again."""
    model, other, asked = build("llama", num_hidden_layers=4), build("llama", num_hidden_layers=6), prompts(12, 60)
    expected = stock(model, asked, 30), stock(other, asked, 60)
    install(34)
    with ballonet.manage(model, prefix_cache=True), ballonet.manage(other):
        assert answers(model, asked, 30) == expected[0]
        assert answers(other, asked, 60) == expected[1]
        assert answers(model, asked, 30) == expected[0]
