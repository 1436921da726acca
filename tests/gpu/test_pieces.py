"""Tokens and logits of models that decode by pieces of CUDA graphs: stock's to the bit, and graphs are replayed."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch

import ballonet
from ballonet.hooks.managed import residency_of
from ballonet.offload.policy import plan

from .. import models
from .decoding import KINDS, LONG, SHORT, TOKENS, answer, apart, between, by_graphs, captures, decoding, prompt, replays
from .scene import Place, scene
from .stock import small_layers


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("what", KINDS)
def test_tokens_and_logits_of_all_calls_are_stocks(place: Place, what: str) -> None:
    """The first calls, later ones, and one whose cache has another length."""
    kind = KINDS[what]
    model = models.build(kind.name, **kind.changes).to(place.kind)
    asked = [prompt(kind.name, place, longest, padded=kind.padded) for longest in (LONG, SHORT)]
    expected = [answer(model, given) for given in asked]
    with ballonet.manage(model) as managed:
        counts = []
        for which in (0, 0, 1, 0):
            assert not apart(answer(model, asked[which]), expected[which]), f"call {len(counts)}"
            counts.append(replays(managed))
        assert 0 < counts[0] < counts[1] < counts[2] < counts[3], managed.report().pieces
        assert managed.report().pieces.way == ("coarse" if kind.coarse else "fine")
        assert captures(managed) == 1, "calls of other lengths take the same graphs"
    assert not apart(answer(model, asked[0]), expected[0])
    assert not apart(answer(model, asked[1]), expected[1])


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_in_half_precision_are_stocks(place: Place, dtype: str) -> None:
    model = models.build("llama").to(place.kind, getattr(torch, dtype))
    given = prompt("llama", place)
    expected = answer(model, given)
    with decoding(model):
        for _ in range(2):
            assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
def test_calls_that_stop_at_one_length_prove_nothing_of_others(place: Place) -> None:
    """Three that end after their second token, and a fourth that goes on: where the length is in what is computed."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place, rows=1)
    mlp = model.model.layers[1].mlp

    class Scaling(torch.nn.Module):
        """Multiplies by how many tokens there are, by a number that a graph would keep."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mlp(x) * (1 + tokens[0])

    def answered(stop: int = 0) -> models.Output:
        tokens[0] = 0
        criteria = [lambda ids, scores, **_: torch.full((1,), tokens[0] == stop, device=ids.device)]
        counting = between(lambda step: tokens.__setitem__(0, step))
        return answer(model, given, stopping_criteria=criteria, **counting)

    tokens = [0]
    model.model.layers[1].mlp = Scaling()
    expected = answered()
    with ballonet.manage(model):
        for _ in range(4):
            answered(stop=2)
        assert not apart(answered(), expected)
        assert not apart(answered(), expected)


@scene(only="cuda", pages=128)
def test_returned_hidden_states_and_logits_are_nobody_elses(place: Place) -> None:
    """What a step has returned is the same once later steps have run, and may be written to."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    update = model._update_model_kwargs_for_generation

    def keep(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        kept.append((outputs.logits, outputs.logits.clone()))
        kept.extend((state, state.clone()) for state in outputs.get("hidden_states") or ())
        return update(outputs, *args, **kwargs)

    def spoil(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        for logits in last:
            logits.fill_(float("nan"))
        last[:] = [outputs.logits]
        return update(outputs, *args, **kwargs)

    last: list[torch.Tensor] = []

    expected = answer(model, given)
    with decoding(model):
        answer(model, given)
        model._update_model_kwargs_for_generation = keep
        for states in (False, True, True):
            answer(model, given, output_hidden_states=states)
        assert len(kept) > 2 * TOKENS
        assert all(torch.equal(now, then) for now, then in kept)
        storages = {now.untyped_storage().data_ptr() for now, _ in kept}
        assert len(storages) == len(kept), "two of them share memory"
        model._update_model_kwargs_for_generation = spoil
        assert not apart(answer(model, given), expected)
        del model._update_model_kwargs_for_generation
        kept.clear()
        last.clear()


@scene(only="cuda", pages=128)
def test_two_caches_in_turn_are_each_their_own(place: Place) -> None:
    """A call within a call of the same model: the inner one's cache is another one, of another length."""
    model = models.build("llama").to(place.kind)
    asked = [prompt("llama", place, longest) for longest in (LONG, SHORT)]
    expected = [answer(model, given) for given in asked]
    inner: list[models.Output] = []
    with decoding(model):
        answer(model, asked[0])
        actual = answer(model, asked[0], **between(lambda step: inner.append(answer(model, asked[1])), at=6))
        assert not apart(actual, expected[0])
        assert [apart(one, expected[1]) for one in inner] == [""]


@scene(only="cuda", pages=128)
def test_graphs_of_one_batch_do_not_serve_another(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    asked = [prompt("llama", place, rows=rows) for rows in (1, 2, 3)]
    expected = [answer(model, given) for given in asked]
    with ballonet.manage(model) as managed:
        for which in (0, 1, 2, 1, 0, 2):
            with by_graphs(managed):
                assert not apart(answer(model, asked[which]), expected[which])
        assert captures(managed) == 3


@scene(only="cuda", needs_host=True, spill=True, pages=256, host_pages=256)
def test_tokens_are_stocks_after_eviction_and_return(place: Place) -> None:
    """The budget shrinks within a call until layers and KV have gone to the host, and grows again."""
    model = models.build("llama", hidden_size=512, num_hidden_layers=4, max_position_embeddings=2048).to(place.kind)
    given = {name: tensor.to(place.kind) for name, tensor in models.prompts(8, 512).items()}
    expected = answer(model, given, 24)

    def budget(pages: int) -> None:
        try:
            ballonet.set_budget(pages * place.page)
        except ballonet.BudgetInUse as error:
            if error.smallest is not None:
                ballonet.set_budget(error.smallest)

    with small_layers(), ballonet.manage(model) as managed:
        with by_graphs(managed):
            assert not apart(answer(model, given, 24), expected)
        gc.collect()
        place.empty_cache()
        place.device.reset_peaks()
        answer(model, given, 24)
        most = place.device.snapshot()["physical_peak"] // place.page
        steps = {4: most // 2, 8: most // 4, 12: 256, 16: most // 3, 20: 256}
        for _ in range(2):
            actual = answer(model, given, 24, **between(lambda step: budget(steps[step]) if step in steps else None))
            assert not apart(actual, expected)
            del actual
        copied = ballonet.stats().copied
        assert copied.weights_h2d + copied.kv_h2d + copied.weights_d2h + copied.kv_d2h > 0, "no page has moved"
        budget(256)
        gc.collect()
        with by_graphs(managed):
            assert not apart(answer(model, given, 24), expected)
        del given


@scene(only="cuda", needs_host=True, pages=128, host_pages=64)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_layer_that_was_away_at_the_capture_is_captured_once_it_is_back(place: Place, name: str) -> None:
    model = models.build(name).to(place.kind)
    given = prompt(name, place)
    expected = answer(model, given)
    layers = model.config.num_hidden_layers
    streamed = [layers - 1]
    graphs = []

    def chosen(pages: Any, _: Any) -> Any:
        return plan.streaming(pages, tuple(streamed), 1) if streamed else plan.Plan(tuple(pages))

    with small_layers(), mock.patch.object(plan, "at_interval", chosen), ballonet.manage(model, interval=1) as managed:
        for now in ([layers - 1], [], [0]):
            streamed[:] = now
            residency = residency_of(managed)
            residency._change(chosen(residency.plan.pages, 1))
            residency._make_resident(residency.arrangement.returned(False))
            for _ in range(3):
                with by_graphs(managed):
                    assert not apart(answer(model, given), expected), f"{now} away"
            assert list(managed.report().streamed) == now
            graphs.append(managed.report().pieces.graphs)
        assert graphs[0] < graphs[1], "a layer that has come back has no graphs"


@scene(only="cuda", needs_host=True, pages=128, host_pages=64)
def test_layers_that_cannot_run_alone_decode_by_graphs_once_none_streams(place: Place) -> None:
    model = models.build("gemma3n_text").to(place.kind)
    given = prompt("gemma3n_text", place)
    expected = answer(model, given)
    with small_layers(), ballonet.manage(model, interval=2) as managed:
        for _ in range(2):
            assert not apart(answer(model, given), expected)
        assert "streaming: layer 1 is away" in managed.report().pieces.why
        assert replays(managed) == 0
        residency = residency_of(managed)
        residency._change(plan.Plan(residency.plan.pages))
        residency._make_resident(residency.arrangement.returned(False))
        with by_graphs(managed):
            for _ in range(2):
                assert not apart(answer(model, given), expected)
