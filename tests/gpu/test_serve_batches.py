"""Continuous batching on the device: stock's tokens with as many kernels of attention as it has, in little memory, with
graphs, and while pages move."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

import ballonet
from ballonet import testing
from ballonet.hooks.batching.patches import batched as batched_facts
from ballonet.hooks.pieces.runner import PieceRunner

from ..models import build
from ..serving.batches import BLOCK, answers, kv_to_the_host, prompts
from ..tuned import tuning
from .scene import Place, play, scene

NEW = 24


@contextmanager
def in_order() -> Iterator[None]:
    """Stock as it is meant: a step begins when its inputs are there (hooks/batching/steps.py, Note [Inputs of a
    step])."""
    stock = ContinuousBatchProcessor._generation_step

    def step(self: Any, model: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        stock(self, model)

    ContinuousBatchProcessor._generation_step = step
    try:
        yield
    finally:
        ContinuousBatchProcessor._generation_step = stock


def batched(place: Place, asked: list[list[int]], layers: int = 4, **settings: Any) -> tuple[Any, list[Any]]:
    """A model, and what stock answers."""
    sizes = {} if layers == 4 else {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
    model = build("llama", num_hidden_layers=layers, **sizes).to(place.kind)
    with in_order():
        expected = answers(model, asked, NEW, num_blocks=16 * len(asked), **settings)
    place.synchronize()
    gc.collect()
    return model, expected


@scene(pages=256)
def test_tokens_are_stocks(place: Place) -> None:
    asked = prompts(8, 60)
    for settings in ({}, {"use_cuda_graph": True}, {"use_async_batching": True}) if place.cuda else ({},):
        model, expected = batched(place, asked, **settings)
        with ballonet.manage(model):
            assert answers(model, asked, NEW, **settings) == expected, settings
        del model


@scene(pages=256)
def test_tokens_are_stocks_while_pages_move(place: Place) -> None:
    asked = prompts(8, 60)
    model, expected = batched(place, asked)
    with testing.manage(model, chaos=3):
        assert answers(model, asked, NEW) == expected


@scene(only="cuda", pages=256)
def test_graphs_of_a_loop_are_given_up_once_it_has_no_requests(place: Place) -> None:
    asked = prompts(8, 60)
    model, expected = batched(place, asked)
    gave = list[int]()
    with ballonet.manage(model) as managed:
        pieces, step = managed._pieces, PieceRunner.step

        def asking(self: Any, *more: Any) -> Any:
            gave.append(self.give_up(10))
            return step(self, *more)

        with mock.patch.object(PieceRunner, "step", asking):
            assert answers(model, asked, NEW) == expected
        assert not any(gave)
        assert managed.report().pieces.replayed > 0
        assert pieces.give_up(10) > 0
        assert answers(model, asked, NEW) == expected


@scene(pages=256)
def test_a_step_waits_for_inputs_that_come_late(place: Place) -> None:
    """The device has much to do before it writes them, and the step begins meanwhile."""
    if not place.cuda:
        pytest.skip("on the stand-in nothing comes late")
    asked = prompts(4, 30)
    model, expected = batched(place, asked)
    stock, much = ContinuousBatchingIOs.prepare_batch_tensors, torch.randn(512, 512, device=place.kind)

    def late(self: Any, *args: Any, **settings: Any) -> None:
        stock(self, *args, **settings)
        ids = self.input_ids.clone()
        self.input_ids.zero_()
        for _ in range(20):
            torch.mm(much, much)
        self.input_ids.copy_(ids)

    ContinuousBatchingIOs.prepare_batch_tensors = late
    try:
        with ballonet.manage(model):
            assert answers(model, asked, NEW) == expected
    finally:
        ContinuousBatchingIOs.prepare_batch_tensors = stock


@scene(pages=1024, host_pages=1024, needs_host=True)
def test_prompts_whose_kv_goes_to_the_host(place: Place) -> None:
    """Full blocks of it are copied beside the layers that follow, and decoding reads them afterwards."""
    asked = prompts(8, 60)
    for settings in ({}, {"use_cuda_graph": True}, {"use_async_batching": True}) if place.cuda else ({},):
        model, expected = batched(place, asked, 12, **settings)
        before = ballonet.stats().copied.kv_d2h
        with kv_to_the_host(), ballonet.manage(model, interval=None):
            assert answers(model, asked, NEW, **settings) == expected, settings
        assert ballonet.stats().copied.kv_d2h > before
        del model


@scene(pages=256)
def test_requests_that_do_not_fit_wait(place: Place) -> None:
    """With room for activations and a few requests at once. A GPU's libraries take more of it than those of a CPU; with
    as much as on a CPU there may be too little for some requests, which fail."""
    asked = prompts(16, 60)
    model, expected = batched(place, asked)
    with tuning(serving={"lonely": 3}), ballonet.manage(model):
        for left in (96, 36) if place.cuda else (36,):
            filler = place.device.reserve(place.device.budget, "kv", place.device.group())
            filler.map(0, place.device.available - left)
            actual = answers(model, asked, NEW)
            filler.close()
            assert left == 36 or actual == expected
            for answer, right in zip(actual, expected, strict=True):
                assert answer == right or (place.cuda and "budget" in str(answer.error)), answer.error


@scene(only="cuda", pages=256)
def test_requests_are_answered_beside_a_library_that_has_a_workspace_for_one(place: Place) -> None:
    """For each further request in a step it takes as much as there is."""
    asked = prompts(16, 60)
    model, expected = batched(place, asked)

    def take(_: object, __: object, more: dict[str, Any]) -> None:
        requests = int(more["cu_seq_lens_q"].diff().count_nonzero())
        torch.empty((requests - 1) * place.device.budget + place.page, dtype=torch.uint8, device=place.kind)

    with tuning(serving={"lonely": 3}), ballonet.manage(model):
        filler = place.device.reserve(place.device.budget, "kv", place.device.group())
        filler.map(0, place.device.available - 96)
        hook = model.model.layers[-1].register_forward_pre_hook(take, with_kwargs=True)
        assert answers(model, asked, NEW) == expected
        hook.remove()
        filler.close()
        facts = batched_facts(model)
        assert facts is not None
        assert facts.latencies.lost >= 4, "sixteen requests were halved"


def alone(model: Any, place: Place, asked: list[list[int]]) -> list[list[int]]:
    """What `generate()` answers."""
    answers_alone = []
    for prompt in asked:
        ids = torch.tensor([prompt], device=place.kind)
        tokens = model.generate(ids, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0)
        answers_alone.append(tokens[0, len(prompt) :].tolist())
    return answers_alone


@scene(pages=256)
def test_beginnings_that_others_have_computed(place: Place) -> None:
    """Sequences of `generate()` are copied into blocks, and blocks into its cache."""
    asked = prompts(8, 60)
    for settings in ({}, {"use_cuda_graph": True}, {"use_async_batching": True}) if place.cuda else ({},):
        model, expected = batched(place, asked, auto_switch_to_flash=False, **settings)
        right = [reply.tokens for reply in expected]
        with tuning(prefixes={"block": BLOCK}), ballonet.manage(model, prefix_cache=True) as managed:
            assert alone(model, place, asked[:4]) == right[:4]
            for _ in range(2):
                assert answers(model, asked, NEW, auto_switch_to_flash=False, **settings) == expected, settings
            assert alone(model, place, asked) == right
            assert managed.prefixes.counts.copies > 0
            assert managed.prefixes.counts.hits > sum(map(len, asked))
        del model, managed


def flash_is_stocks(place: Place) -> None:
    asked = prompts(8, 60)
    model = build("llama", num_hidden_layers=4, hidden_size=128, intermediate_size=128).to(place.kind, torch.bfloat16)
    model.set_attn_implementation("flash_attention_2")
    sizes = {"page_size": 256}  # of a block: the least that its kernel with tables of blocks takes
    with in_order():
        expected = answers(model, asked, NEW, num_blocks=16 * len(asked), **sizes)
    with ballonet.manage(model):
        assert answers(model, asked, NEW, **sizes) == expected


@pytest.mark.gpu
def test_flash_is_stocks() -> None:
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        pytest.skip("flash_attn is not installed, or not for this device")
    play(flash_is_stocks, "cuda", pages=256)
