"""A forward by pieces is broken off in the middle: it is computed on eagerly, with stock's tokens.

Layers before the break have the new token in their caches already, those behind it do not.
"""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch

import ballonet
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.pieces import program
from ballonet.hooks.pieces.runner import KEYS

from .. import models
from .decoding import SHORT, answer, apart, between, by_graphs, captures, prompt, replays
from .scene import Place, scene

KINDS = {"llama": False, "gemma3_text": False, "deepseek_v3": False, "falcon_h1": False, "llama-padded": True}


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("place_of_failure", [1, 2, 5])
def test_replay_that_fails_leaves_a_token_that_is_computed_on_eagerly(
    place: Place, name: str, place_of_failure: int
) -> None:
    model = models.build(name.removesuffix("-padded")).to(place.kind)
    given = prompt(name.removesuffix("-padded"), place, padded=KINDS[name])
    expected = answer(model, given)
    left = [-1]

    class Graph(torch._C._CUDAGraph):
        def replay(self) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("CUDA error: replay")
            super().replay()

    def begin(step: int) -> None:
        if step == 6:
            left[0] = place_of_failure

    with mock.patch.object(torch._C, "_CUDAGraph", Graph), ballonet.manage(model) as managed:
        for _ in range(2):
            assert not apart(answer(model, given), expected)
        assert replays(managed) > 0
        assert not apart(answer(model, given, **between(begin)), expected)
        assert left[0] < 1, "nothing has failed"
        assert "cannot be replayed" in managed.report().pieces.why
        for _ in range(2):
            assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("layer", [0, 1])
def test_token_that_finds_no_memory_is_computed_on_without_graphs(place: Place, layer: int) -> None:
    """The pages of graphs are free when it asks again."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    stock, asked, free = ElasticLayer.append_eagerly, [0], [0]

    def append(self: Any, *more: Any) -> Any:
        asked[0] -= 1
        if asked[0] == 0:
            free[0] = place.device.available
            raise torch.OutOfMemoryError("no room")
        return stock(self, *more)

    def begin(step: int) -> None:
        if step == 6:
            asked[0] = layer + 1

    with ballonet.manage(model) as managed:
        for _ in range(2):
            assert not apart(answer(model, given), expected)
        with mock.patch.object(ElasticLayer, "append_eagerly", append):
            assert not apart(answer(model, given, **between(begin)), expected)
        assert free[0] > 0, "every token has found memory"
        assert managed.report().pieces.why == ""
        assert captures(managed) == 2
        with by_graphs(managed):
            assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
def test_mask_of_another_shape_is_not_read_by_graphs_of_this_one(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place, padded=True)
    expected = answer(model, given)
    stock = program._EagerCall.put
    changed = [0]

    def put(self: Any, forward: Any, result: Any) -> None:
        if changed[0] and self.call.kind == "mask" and isinstance(result, torch.Tensor):
            changed[0] -= 1
            result = result.expand(*result.shape[:1], 3, *result.shape[2:])
        stock(self, forward, result)

    def begin(step: int) -> None:
        changed[0] = step == 6

    with mock.patch.object(program._EagerCall, "put", put), ballonet.manage(model) as managed:
        for _ in range(2):
            assert not apart(answer(model, given), expected)
        with by_graphs(managed):
            assert not apart(answer(model, given, **between(begin)), expected)


@scene(only="cuda", pages=128)
def test_idle_graphs_go_at_the_next_forward_of_another_model_while_pages_are_short(place: Place) -> None:
    idle, busy = (models.build("llama").to(place.kind) for _ in range(2))
    given = prompt("llama", place)
    expected = answer(busy, given)
    with ballonet.manage(idle) as first, ballonet.manage(busy) as second:
        for model in (idle, busy):
            for _ in range(2):
                answer(model, given)
        assert first.report().pieces.pages > 0 < second.report().pieces.pages
        second._pages.short = True
        looked = mock.patch.object(type(second._pages), "look", return_value=(place.device.available, 0))
        with looked, by_graphs(second):
            assert not apart(answer(busy, given), expected)
        assert first.report().pieces.pages == 0 < second.report().pieces.pages


@scene(only="cuda", pages=256)
def test_graphs_of_keys_that_are_forgotten_give_their_memory_back_at_once(place: Place) -> None:
    """No garbage is collected meanwhile."""
    model = models.build("llama").to(place.kind)
    most = KEYS
    with ballonet.manage(model) as managed:
        gc.disable()
        try:
            for rows in range(1, most + 6):
                given = prompt("llama", place, SHORT, rows=rows)
                for _ in range(2):
                    answer(model, given, 6)
            assert captures(managed) > most
            programs = [thing for thing in gc.get_objects() if type(thing) is program.Program]
            assert sum(bool(made._sequence) for made in programs) <= most
        finally:
            gc.enable()
