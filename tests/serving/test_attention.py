"""Attention of batches by request: its own keys and no mask, stock's tokens, and nobody else's attention is changed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import input_outputs
from transformers.modeling_utils import AttentionInterface

import ballonet
from ballonet.hooks.batching import attention

from ..models import build
from .batches import answers, install, kv_to_the_host, prompts, stock

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """(rows, keys, has it a mask?) of each call of attention."""
    calls: list[tuple[int, int, bool]] = []
    one = attention.attend_one

    def watched(query: torch.Tensor, key: torch.Tensor, *args: Any) -> torch.Tensor:
        calls.append((len(query), key.shape[2], args[1] is not None))
        return one(query, key, *args)

    monkeypatch.setattr(attention, "attend_one", watched)
    return calls


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Does a loop hold masks, as each of its steps is prepared?"""
    masked = list[bool]()
    prepare = input_outputs.ContinuousBatchingIOs.prepare_batch_tensors

    def prepared(self: Any, *args: Any, **kwargs: Any) -> None:
        masked.append(self.attention_mask is not None)
        prepare(self, *args, **kwargs)

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "prepare_batch_tensors", prepared)
    return masked


def test_keys_per_row_do_not_grow_with_the_batch(attended: list[tuple[int, int, bool]], masks: list[bool]) -> None:
    """Requests of 20 tokens and 8 new ones, in 2 blocks: 4 of them, and 16."""
    model, asked = build("llama"), [[*range(3 + n, 23 + n)] for n in range(16)]
    expected = stock(model, asked, 8)
    masks.clear()
    install(256)
    work = list[float]()
    with ballonet.manage(model):
        for count in (4, 16):
            attended.clear()
            assert answers(model, asked[:count], 8, allow_block_sharing=False) == expected[:count]
            assert max(keys for _, keys, _ in attended) < 28
            work.append(sum(rows * keys for rows, keys, _ in attended) / count)
    assert work[1] <= 1.2 * work[0], "prompts that a full step cuts in two have a call more"
    assert masks
    assert not any(masks)


@pytest.mark.parametrize(
    ("name", "window", "settings"),
    [
        *(("llama", 0, settings) for settings in ({"max_batch_tokens": 16}, {"page_size": 4}, {"page_size": 128})),
        ("mistral-window", 1, {"page_size": 4}),
        ("gemma3_text", 1, {"max_batch_tokens": 16}),
    ],
)
def test_tokens_are_stocks_however_prompts_are_cut_and_lie(
    name: str, window: int, settings: dict[str, int], attended: list[tuple[int, int, bool]]
) -> None:
    """Prompts in parts, keys in many blocks, keys in one."""
    model, asked = build(name), prompts(6, 60)
    expected = stock(model, asked)
    install(256)
    with ballonet.manage(model):
        assert answers(model, asked, **settings) == expected
    in_parts = any(1 < rows < keys for rows, keys, _ in attended)
    assert any(masked for *_, masked in attended) == (in_parts or bool(window)), "a mask only where one is needed"


def test_tokens_are_stocks_with_shared_beginnings_and_forks() -> None:
    """Blocks of a request that others computed lie anywhere."""
    model, begin = build("llama"), prompts(1, 60)[0] + [*range(3, 43)]
    asked = [[*begin, *prompt] for prompt in prompts(6, 30)]
    expected = stock(model, asked)
    install(256)
    with ballonet.manage(model):
        for _ in range(2):
            assert answers(model, asked) == expected
        forked = answers(model, asked[:2], children=3)
    assert [forked[n].tokens for n in range(0, 6, 3)] == [answer.tokens for answer in expected[:2]]


def test_tokens_are_stocks_where_new_keys_go_to_the_host() -> None:
    model, asked = build("llama"), prompts(8, 60)
    expected = stock(model, asked)
    ballonet.install(512 * 65536, page_size=65536, host_budget=512 * 65536, device="cpu")
    with kv_to_the_host(), ballonet.manage(model, interval=None):
        assert answers(model, asked) == expected


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemma2", lambda model: model.set_attn_implementation("eager")),  # softcap
        ("llama", lambda model: model.set_attn_implementation("eager")),
    ],
)
def test_other_attention_keeps_its_masks(
    name: str, change: Callable[[Any], None], attended: list[tuple[int, int, bool]], masks: list[bool]
) -> None:
    model, asked = build(name), prompts(4, 30)
    change(model)
    expected = stock(model, asked)
    install(256)
    masks.clear()
    with ballonet.manage(model):
        assert answers(model, asked) == expected
    assert masks
    assert all(masks)
    assert not attended


def test_loops_of_other_models_keep_their_masks(attended: list[tuple[int, int, bool]], masks: list[bool]) -> None:
    managed, other = build("llama"), build("mixtral")
    asked = prompts(4, 30)
    expected = stock(other, asked)
    install(256)
    masks.clear()
    with ballonet.manage(managed):
        assert answers(other, asked, num_blocks=64) == expected
        assert masks
        assert all(masks)
        assert not attended
        ids = torch.tensor([asked[0]])
        managed.generate(ids, max_new_tokens=3, do_sample=False)
    assert not attended, "nor does generate() attend otherwise"


def test_attention_that_finds_no_memory_is_computed_again_and_stocks_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    functions, needed = AttentionInterface._global_mapping, input_outputs.attn_mask_is_needed
    before, alone, calls = functions["sdpa"], attention.attend_alone, itertools.count()
    model, asked = build("llama"), prompts(4, 30)
    expected = stock(model, asked)
    install(256)

    def lacking(*args: Any) -> torch.Tensor:
        if next(calls) == 5:
            raise torch.OutOfMemoryError("no memory for a copy of keys")
        return alone(*args)

    monkeypatch.setattr(attention, "attend_alone", lacking)
    with ballonet.manage(model):
        assert answers(model, asked) == expected
        assert functions["sdpa"] is not before
    assert next(calls) > 6
    assert functions["sdpa"] is before
    assert input_outputs.attn_mask_is_needed is needed
    assert answers(model, asked, num_blocks=64) == expected


def test_half_precision_on_a_cpu_attends_by_request(attended: list[tuple[int, int, bool]]) -> None:
    """Nearly stock's tokens: a row is rounded as if its request were alone."""
    model, asked = build("llama").to(torch.bfloat16), prompts(6, 40)
    expected = stock(model, asked)
    install(256)
    with ballonet.manage(model):
        results = answers(model, asked)
    assert attended
    assert [answer.error for answer in results] == [None] * 6
    assert sum(one == other for one, other in zip(results, expected, strict=True)) >= 3
