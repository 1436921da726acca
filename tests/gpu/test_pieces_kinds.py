"""Models of every kind decode by pieces of CUDA graphs to stock's tokens and logits, whatever happens meanwhile to
their KV, to their weights and in their calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import ballonet
from ballonet import testing
from ballonet.hooks.compat import cache_name
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.offload.manager.decision import StreamDecision
from ballonet.offload.manager.memory_manager import MemoryManager
from ballonet.offload.policy import plan
from ballonet.testing import chaos_of
from ballonet.testing.movable import MovableKV

from .. import architectures, models
from .decoding import KINDS, TOKENS, Kind, answer, apart, by_graphs, prompt, replays, seeing_caches
from .scene import Place, scene
from .stock import small_layers

GUESSED = 20  # tokens that are guessed at once: a check is of one more
CHECKS = 5
BACK = 3  # tokens that are cut off


class Scene(NamedTuple):
    """A model of a kind, what it is asked, and a model that guesses what it says."""

    place: Place
    kind: Kind
    model: Any
    given: Mapping[str, Any]
    guesser: Any


# -- What is asked


def cut_off(at: Scene) -> models.Output:
    """Answers twice, and the second time goes on before the end of the first answer."""
    settings = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    begun = at.model.generate(**at.given, **settings, return_dict_in_generate=True)
    begun.past_key_values.crop(-BACK)
    ids = begun.sequences[:, :-BACK]
    mask = torch.nn.functional.pad(at.given["attention_mask"], (0, TOKENS - BACK), value=1)
    more = {"input_ids": ids, "attention_mask": mask, cache_name(at.model): begun.past_key_values}
    return answer(at.model, more)


def half_right(model: Any) -> Any:
    """Returns a model that takes half of the tokens that `model` says for others."""
    copied = copy.deepcopy(model)
    head = copied.get_output_embeddings().weight
    with torch.no_grad():
        head.copy_(head[[token ^ 1 if token & 2 and token ^ 1 < len(head) else token for token in range(len(head))]])
    copied.generation_config.assistant_confidence_threshold = 0.0  # it guesses as many as it may
    return copied


def guessing(at: Scene, **more: Any) -> models.Output:
    """Asks something in which every token has been followed by others, until so many guesses were checked."""
    drawn = torch.randperm(architectures.TEXT - 2, generator=torch.Generator().manual_seed(4))[None] + 2
    given = {"input_ids": drawn.to(at.place.kind), "attention_mask": torch.ones_like(drawn).to(at.place.kind)}
    checks = count(1)
    end = [lambda ids, *_, **__: torch.full((1,), next(checks) >= CHECKS, device=ids.device)]
    return answer(at.model, given, CHECKS * (GUESSED + 1), stopping_criteria=end, **more)


def assisted(at: Scene) -> models.Output:
    """Has the other model guess."""
    return guessing(at, assistant_model=at.guesser)


# -- What happens meanwhile


Meanwhile = Callable[[Scene], AbstractContextManager[Any]]


@contextmanager
def nothing(at: Scene) -> Iterator[Any]:
    with ballonet.manage(at.model) as managed, by_graphs(managed):
        yield managed


@contextmanager
def checks_of_all_guesses(at: Scene) -> Iterator[Any]:
    with nothing(at) as managed:
        yield managed
        plans = managed._pieces._plans.items()
        checks = [plan for key, plan in plans if any((1, GUESSED + 1) in part for part in key if type(part) is tuple)]
        assert any(plan.replays(plan.call) for plan in checks), "no check of so many tokens is one by graphs"


@contextmanager
def streaming(every: int | None, at: Scene) -> Iterator[Any]:
    with small_layers(), ballonet.manage(at.model, interval=every) as managed:
        before = replays(managed)
        yield managed
        assert len(managed.report().streamed) == (at.model.config.num_hidden_layers // every if every else 0)
        assert (replays(managed) > before) == (at.kind.alone or every is None), managed.report().pieces


@contextmanager
def chaos(seed: int, at: Scene) -> Iterator[Any]:
    with small_layers(), testing.manage(at.model, interval=2 if at.kind.alone else None, chaos=seed) as managed:
        with by_graphs(managed):
            yield managed
        assert sum(chaos_of(managed).moved.values()) > 0


@contextmanager
def away_and_back(at: Scene) -> Iterator[Any]:
    """KV and the last layer leave and come back, between tokens and between calls."""
    last = at.model.config.num_hidden_layers - 1
    streamed: list[int] = []
    moved = 0

    def decided(manager: Any, client: Any, point: Any) -> StreamDecision:
        pages = client.plan.pages
        return StreamDecision(plan.streaming(pages, tuple(streamed), len(streamed)), "a test has decided")

    def move(step: int, cache: Any) -> None:
        nonlocal moved
        for layer in models.layers_of(cache):
            if isinstance(layer, ElasticLayer) and layer._range is not None:
                pages = MovableKV(layer._range.pages)
                go = pages.displace if step % 4 < 2 else pages.bring_back
                moved += sum(map(go, range(pages.pieces)))
        if at.kind.alone and step % TOKENS in (5, 9):
            streamed[:] = [] if streamed else [last]

    with (
        small_layers(),
        mock.patch.object(MemoryManager, "before", decided),
        mock.patch.object(MemoryManager, "restorable_pages", return_value=0),
        ballonet.manage(at.model) as managed,
        seeing_caches(at.model, move),
        by_graphs(managed),
    ):
        yield managed
        assert ballonet.stats().copied.weights_h2d or not at.kind.alone, "no layer was away"
        assert moved or not at.kind.pooled, "no KV was away"
        assert managed.report().pieces.captures == 1, "a layer that comes back keeps its graphs"


Ask = Callable[[Scene], models.Output]
Situation = tuple[Ask, tuple[Meanwhile, ...]]


def greedily(at: Scene) -> models.Output:
    return answer(at.model, at.given)


# What is about -> situation -> what is asked, and what happens meanwhile in two calls, case by case
SITUATIONS: Mapping[str, Mapping[str, Situation]] = {
    "calls": {
        "cuts": (cut_off, (nothing,)),
        "beams": (lambda at: answer(at.model, at.given, mode="beam"), (nothing,)),
        "several": (lambda at: answer(at.model, at.given, mode="sampling", num_return_sequences=2), (nothing,)),
        "guesses from the prompt": (partial(guessing, prompt_lookup_num_tokens=GUESSED), (checks_of_all_guesses,)),
        "guesses": (assisted, (checks_of_all_guesses,)),
    },
    "memory": {
        "pages leave and return": (greedily, (away_and_back,)),
        "layers stream": (greedily, tuple(partial(streaming, every) for every in (None, 2, 1))),
        "chaos": (greedily, tuple(partial(chaos, seed) for seed in range(3))),
    },
}


@scene(only="cuda", needs_host=True, pages=128, host_pages=64)
@pytest.mark.parametrize("about", SITUATIONS)
@pytest.mark.parametrize("what", KINDS)
def test_tokens_and_logits_of_a_kind_are_stocks_whatever_happens(place: Place, what: str, about: str) -> None:
    kind = KINDS[what]
    model = models.build(kind.name, **kind.changes).to(place.kind)
    at = Scene(place, kind, model, prompt(kind.name, place, padded=kind.padded), half_right(model))
    for situation, (ask, cases) in SITUATIONS[about].items():
        if not getattr(kind, situation.partition(" ")[0], True):
            continue
        expected = ask(at)
        for case in cases:
            with case(at):
                for call in range(2):
                    assert not apart(ask(at), expected), f"{situation}, call {call}"
