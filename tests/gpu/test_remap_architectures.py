"""Every kind of architecture gives stock's tokens on the device, whichever source is reclaimed while it answers.

Some of the architectures of the CPU's proof (tests/test_generate_equivalence.py); several in a scene, each under one
source after the other, since a process of its own takes longer to start than a tiny model to answer.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet import testing
from ballonet.allocator.errors import PoolExhausted
from ballonet.testing import chaos_of

from .. import models
from ..architectures import ARCHITECTURES
from ..architectures.encoder_decoders import ENCODER_DECODERS
from ..architectures.multimodal import MULTIMODAL
from .scene import Place, everywhere, play
from .stock import differences, small_layers

OTHERS = ENCODER_DECODERS | MULTIMODAL  # of which no prefix is kept: what an encoder gave is not among the tokens
NAMES = (*[name for name in ARCHITECTURES if name not in OTHERS][::3], *list(OTHERS)[::5])
AT_ONCE = 8  # architectures of a scene
FEW = ("llama", "mixtral", "qwen3_next")  # on the stand-in, where others have the proof for all
TOKENS = 8

ReclaimSource = Callable[[Place, Any], contextlib.AbstractContextManager[Callable[[], bool]]]


@contextlib.contextmanager
def streaming(place: Place, model: Any) -> Iterator[Callable[[], bool]]:
    """Every layer that can comes through slots; no weight goes back to the host."""
    with small_layers(), ballonet.manage(model, interval=1) as managed:
        before = ballonet.stats().copied.weights_d2h
        yield lambda: managed.report().link_bytes > 0
        assert ballonet.stats().copied.weights_d2h == before


@contextlib.contextmanager
def streaming_and_chaos(place: Place, model: Any) -> Iterator[Callable[[], bool]]:
    """Some layers come through slots while pages of the others, and KV, move."""
    with small_layers(), testing.manage(model, interval=2, chaos=7) as managed:
        yield lambda: chaos_of(managed) is not None and sum(chaos_of(managed).moved.values()) > 0


@contextlib.contextmanager
def spill(place: Place, model: Any) -> Iterator[Callable[[], bool]]:
    """Whatever page of the device is free is taken at once: activations, and KV that grows, lie on the host."""
    filler = place.device.reserve(place.device.budget, "kv", place.device.group())
    taken, spilled = 0, False

    def take(*_: object) -> None:
        nonlocal taken, spilled
        with contextlib.suppress(PoolExhausted):
            while True:
                filler.map(taken, 1)
                taken += 1
        now = place.device.snapshot()
        spilled = spilled or now["host_pages"] > now["host_free"]

    with ballonet.manage(model, interval=None):
        hooks = [module.register_forward_hook(take) for module in model.modules()]
        try:
            yield lambda: spilled
        finally:
            for hook in hooks:
                hook.remove()
            filler.close()


@contextlib.contextmanager
def prefix(place: Place, model: Any) -> Iterator[Callable[[], bool]]:
    """What a prompt begins with is copied from what an earlier one left behind."""
    with ballonet.manage(model, prefix_cache=True) as managed:
        yield lambda: managed.prefixes is not None and managed.prefixes.counts.hits > 0


SOURCES: dict[str, ReclaimSource] = {
    "streaming": streaming,
    "streaming and chaos": streaming_and_chaos,
    "spill": spill,
    "prefix": prefix,
}


def ways(name: str, source: str) -> tuple[str, ...]:
    if source == "prefix":
        return () if name in OTHERS else ("in turns",)
    return tuple(way for way in ("padded", "beam") if way not in ARCHITECTURES[name].refuses)


def answers(model: Any, name: str, way: str, place: Place) -> models.Output:
    mode, rows = {"padded": ("greedy", 3), "in turns": ("greedy", 1)}.get(way, (way, 2))
    asked = models.questions(name, rows, 16, padded=way == "padded")
    inputs = {key: value.to(place.kind) for key, value in asked.items()}
    answer = models.generate(model, mode, inputs, TOKENS)
    if way != "in turns":
        return answer
    more = torch.cat([answer.tokens, inputs["input_ids"][:, -5:]], dim=1)
    return models.generate(model, mode, {"input_ids": more, "attention_mask": torch.ones_like(more)}, TOKENS)


def tokens_are_stocks(place: Place, names: tuple[str, ...]) -> None:
    wrong: list[str] = []
    reclaimed: dict[str, list[bool]] = {source: [] for source in SOURCES}
    for name in names:
        model = models.build(name).to(place.kind)
        expected = {
            way: answers(model, name, way, place) for way in {way for source in SOURCES for way in ways(name, source)}
        }
        for source, reclaim in SOURCES.items():
            if wanted := ways(name, source):
                with reclaim(place, model) as moved:
                    for way in wanted:
                        if said := differences(answers(model, name, way, place), expected[way]):
                            wrong.append(f"{name}, {way}, {source}: {said}")
                    reclaimed[source].append(moved())
        del model, expected
        gc.collect()
        place.synchronize()
    assert not wrong, "\n".join(wrong)
    assert all(any(moved) for moved in reclaimed.values() if moved), f"a source that moved nothing: {reclaimed}"


@everywhere
@pytest.mark.parametrize("first", range(0, len(NAMES), AT_ONCE))
def test_tokens_are_stocks(kind: str, first: int) -> None:
    if kind == "cpu" and first:
        pytest.skip("tests/test_generate_equivalence.py has all of them for a CPU")
    names = NAMES[first : first + AT_ONCE] if kind == "cuda" else FEW
    play(tokens_are_stocks, kind, pages=256, host_pages=256, spill=True, names=names)
