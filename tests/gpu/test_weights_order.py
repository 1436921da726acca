"""Layers that stream among others that do something else: other models, broken forwards, graphs, much to compute."""

from __future__ import annotations

import sys

import pytest
import torch

import ballonet

from .. import models
from .scene import ROOT, Place, everywhere, play
from .stock import TOKENS, differences, questions
from .test_weights_streaming import LAYERS, small_layers, streams_here, tiny, to_host


def models_in_turns(place: Place, rounds: int) -> None:
    """Two models with slots of their own, a few tokens of each in turn; one is broken off in the middle of a layer."""
    both = [tiny("llama", place), tiny("llama", place, layers=LAYERS - 2)]
    inputs = questions("llama", place.kind)
    expected = [models.generate(model, "greedy", inputs, TOKENS) for model in both]
    broken = both[0].model.layers[3].mlp

    def fail(*_: object) -> None:
        raise ValueError("as it should")

    with small_layers(), ballonet.manage(both[0], interval=2), ballonet.manage(both[1], interval=1):
        for step in range(rounds):
            if step % 2:
                handle = broken.register_forward_pre_hook(fail)
                with pytest.raises(ValueError, match="as it should"):
                    both[0](**inputs)
                handle.remove()
            for model, right in zip(both, expected, strict=True):
                assert not differences(models.generate(model, "greedy", inputs, TOKENS), right)


@everywhere
def test_models_in_turns_and_a_forward_that_breaks_off(kind: str) -> None:
    streams_here(kind)
    play(models_in_turns, kind, pages=256, host_pages=128, rounds=6 if kind == "cuda" else 2)


def graphs_of_resident_layers(place: Place, steps: int) -> None:
    """Layers between two that stream are captured and replayed; the tokens are those of the same model uncaptured."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from graphed import GraphedDecode

    sys.path.remove(str(ROOT / "benchmarks"))
    model = tiny("llama", place)

    def decode(streamed: tuple[int, ...]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        with GraphedDecode(model, streamed, 2, 16, steps + 1) as decoding:
            found = [decoding.step() for _ in range(steps)]
            assert all(run.captured == place.cuda for run in decoding.runs)
            return [each.cpu() for each in found]

    every_layer = tuple(range(LAYERS))
    expected = decode(every_layer)
    assert len(torch.cat(expected).unique()) > 1
    with small_layers():
        for interval in (3, 2):
            with ballonet.manage(model, interval=interval) as managed:
                with torch.no_grad():
                    model(expected[0].to(place.kind))  # it flies before the first capture
                before = to_host()
                for found, right in zip(decode(managed.streamed), expected, strict=True):
                    assert torch.equal(found, right), f"interval {interval}"
                assert managed.flying, "a graph has looked at a layer that streams"
                assert to_host() == before


@everywhere
def test_graphs_of_resident_layers(kind: str) -> None:
    streams_here(kind)
    play(graphs_of_resident_layers, kind, pages=256, host_pages=128, steps=12)


def much_to_compute(place: Place, length: int, rounds: int) -> None:
    """A long prompt: each layer computes for longer than the next takes to come, so copies wait for slots."""
    model = tiny("llama", place)
    prompt = torch.randint(2, models.VOCABULARY, (4, length), generator=torch.Generator().manual_seed(2)).to(place.kind)

    def answer() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(prompt, use_cache=False).logits
        return logits.sum(-1).cpu()

    right = answer()
    with small_layers(), ballonet.manage(model, interval=1) as managed:
        for _ in range(rounds):
            assert torch.equal(answer(), right)
        assert managed.flying


@everywhere
def test_much_to_compute(kind: str) -> None:
    streams_here(kind)
    cuda = kind == "cuda"
    play(much_to_compute, kind, pages=1024 if cuda else 256, host_pages=128, length=4096 if cuda else 64, rounds=5)
