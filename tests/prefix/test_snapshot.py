"""Models whose layers keep windows or recurrent states go on from what is kept of them, with the tokens of stock."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ballonet.allocator import devices
from ballonet.hooks.compat import layer_classes, layer_count
from ballonet.hooks.device.managers import give_up
from ballonet.hooks.prefix import sessions, snapshot
from ballonet.hooks.prefix.snapshot import STATES

from ..architectures import ARCHITECTURES
from ..pool import bytes_that_exist, tiny_layers
from ..tuned import Tuned
from .conversations import sides, words

pytestmark = pytest.mark.chaos


PAGE = 4096
# For each set of kinds of layers one architecture: code here looks at nothing else of a model.
KINDS = (
    *("gemma2", "mistral-window", "gemma3n_text", "falcon_h1", "zamba2", "qwen3_next", "lfm2", "nemotron_h"),
    "mamba2",
)
FORGETFUL = "the model does not go on from a state with several tokens"
SEVERAL = "several sequences, of which layers keep a window or a state"


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**25, PAGE):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def on(ids: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return torch.cat([ids, more], 1)


def test_all_kinds_are_here() -> None:
    """Every architecture of the tests has the kinds of layers of one that is tried here, or of a stock cache."""

    def kinds(name: str) -> frozenset[Any]:
        architecture = ARCHITECTURES[name]
        config = AutoConfig.for_model(architecture.model_type or name, **architecture.config)
        return frozenset(kind for _, kind in layer_classes(config)) if layer_count(config) else frozenset()

    tried = {kinds(name) for name in KINDS}
    others = {name for name in ARCHITECTURES if (states := kinds(name)) & {*STATES} and states not in tried}
    assert others == {"recurrent_gemma"}, "which keeps its states outside of the cache, as a test below says"


@pytest.mark.parametrize("name", KINDS)
def test_turns_and_branches(name: str, generator: torch.Generator) -> None:
    """A conversation goes on where it ended, twice from the same turn, and after its last answer was changed."""
    with sides(name, chaos=4) as both:
        first = both.ask(words(generator, 13))
        second = both.ask(on(first, words(generator, 5)))
        for before in (first, second, first):
            both.ask(on(before, words(generator, 4)))
            assert both.reused == before.shape[1] - 1
        both.ask(on(first[:, :13], words(generator, 9)))
        assert both.reused == 13, "where the prompt ended"
        both.ask(on(first[:, :12], words(generator, 9)))
        assert both.reused == 0, "a state is of use for exactly its tokens"
        both.check()
        assert both.store.counts.hits == 3 * 18 + 29 + 13
        assert not both.store.counts.why_not


def test_a_window_that_was_not_exceeded(generator: torch.Generator) -> None:
    with sides("mistral-window", chaos=4, changes={"sliding_window": 40}) as both:
        ids = both.ask(words(generator, 5))
        for _ in range(5):  # and then it is
            ids = both.ask(on(ids, words(generator, 7)))
            assert both.reused == ids.shape[1] - 14


@pytest.mark.parametrize(
    ("name", "turns", "why_not"),
    [
        ("zamba", 3, {FORGETFUL: 2}),  # stock does not go on from its states with several tokens
        ("mamba", 3, {FORGETFUL: 2}),
        ("recurrent_gemma", 1, {"a layer keeps its state outside of the cache": 1}),
    ],
)
def test_models_that_are_left_alone(name: str, turns: int, why_not: dict[str, int], generator: torch.Generator) -> None:
    with sides(name) as both:
        ids = words(generator, 13)
        for _ in range(turns):
            ids = both.ask(on(ids, words(generator, 5)))
            assert both.reused == 0
        assert both.store.states == 0
        assert both.store.counts.why_not == why_not


@pytest.mark.parametrize(("name", "times"), [("qwen3_next", 1), ("gemma2", 0)])
def test_the_proof_is_asked_for_once(
    monkeypatch: pytest.MonkeyPatch, name: str, times: int, generator: torch.Generator
) -> None:
    asked, proof = [], snapshot.state_affects_logits
    monkeypatch.setattr(sessions, "state_affects_logits", lambda *given: asked.append(1) or proof(*given))
    with sides(name) as both:
        ids = words(generator, 9)
        for _ in range(3):
            ids = both.ask(on(ids, words(generator, 5)))
    assert len(asked) == times


@pytest.mark.parametrize("seed", range(2))
def test_conversations_that_branch_under_a_limit(seed: int, generator: torch.Generator) -> None:
    """States and tokens go in the middle of conversations; what is left is right, and no more than may be."""
    draw = random.Random(seed)
    with sides(["gemma2", "qwen3_next"][seed], chaos=seed) as both:
        told, hits = [words(generator, 9)], 0
        for _ in range(26):
            new = draw.randint(1, 6)
            prompt = on(draw.choice(told[-6:]), words(generator, draw.randint(1, 9)))
            told.append(both.ask(prompt, max_new_tokens=new, min_new_tokens=new))
            hits += both.reused > 0
            if len(told) == 9:
                both.store.limit = both.store.nbytes // 2
            both.check()
            assert both.store.limit is None or both.store.nbytes <= both.store.limit
        assert hits > 5
        assert both.store.counts.evicted > 5
        while both.store.contents.give_up(1):
            both.check()
        assert both.store.pages == both.store.states == both.store.tokens == 0


@pytest.mark.parametrize(
    ("rows", "pads", "options", "reason"),
    [
        (2, 0, {}, SEVERAL),
        (1, 0, {"num_beams": 2}, SEVERAL),
        (1, 3, {}, "an attention mask, where layers keep a window or a state"),
    ],
)
def test_batch_with_windows_or_states_is_left_to_stock(
    rows: int, pads: int, options: dict[str, Any], reason: str, generator: torch.Generator
) -> None:
    with sides("gemma2") as both:
        mask = torch.ones(rows, 12, dtype=torch.int64)
        mask[0, :pads] = 0
        both.ask(words(generator, 12, rows), attention_mask=mask, **options)
        assert both.store.counts.why_not == {reason: 1}
        assert both.store.states == both.store.pages == 0


def test_states_are_in_the_pool_and_leave_it_when_others_need_room(generator: torch.Generator) -> None:
    device = devices.require()
    with sides("mistral-window", changes={"sliding_window": 64, "num_hidden_layers": 4}) as both:
        for _ in range(6):
            both.model.generate(words(generator, 80), max_new_tokens=3, do_sample=False)
        assert both.store.states == 12
        assert both.store.tokens == 0
        kept = both.store.nbytes
        assert kept >= 12 * 63 * 4 * 2 * 2 * 8 * 4
        gc.collect()
        device.trim()
        before = bytes_that_exist()
        assert give_up(device, 10) >= 10
        assert both.store.nbytes <= kept - 10 * PAGE
        gc.collect()
        device.trim()
        assert bytes_that_exist() <= before - 9 * PAGE
        both.check()
