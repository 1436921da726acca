"""Models whose layers keep windows or recurrent states go on from what is kept of them, with the tokens of stock."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import ballonet
from ballonet.allocator import runtime
from ballonet.hooks.compat import layer_classes, layer_count
from ballonet.hooks.device.pressure import give_up
from ballonet.hooks.prefix import snapshot_proof
from ballonet.hooks.prefix.snapshot import STATES

from ..architectures import ARCHITECTURES
from ..pool import bytes_that_exist, tiny_layers
from ..tuned import Tuned
from .conversations import evict_all
from .talks import talks

PAGE = 4096
# For each set of kinds of layers one architecture: code here looks at nothing else of a model.
KINDS = (
    *("gemma2", "mistral-window", "gemma3n_text", "falcon_h1", "zamba2", "qwen3_next", "lfm2", "nemotron_h"),
    "mamba2",
)
FORGETFUL = ("zamba", "mamba")  # stock does not go on from their states with several tokens
ONE_OF_EACH = ("gemma2", "qwen3_next", "mamba2")


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**25, PAGE):
        yield


def words(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(2, 190) for _ in range(count)]


def test_all_kinds_are_here() -> None:
    """Every architecture of the tests has the kinds of layers of one that is tried here, or of a stock cache."""

    def kinds(name: str) -> frozenset[Any]:
        each = ARCHITECTURES[name]
        config = AutoConfig.for_model(each.model_type or name, **each.config)
        return frozenset(kind for _, kind in layer_classes(config)) if layer_count(config) else frozenset()

    tried = {kinds(name) for name in KINDS}
    others = {name for name in ARCHITECTURES if (found := kinds(name)) & {*STATES} and found not in tried}
    assert others == {"recurrent_gemma"}, "which keeps its states outside of the cache, as a test below says"


@pytest.mark.parametrize("name", KINDS)
def test_turns_and_branches(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A conversation goes on where it ended, twice from the same turn, and after its last answer was changed."""
    draw = random.Random(4)
    with talks(monkeypatch, name, chaos=4) as both:
        first = both.ask(words(draw, 13))
        assert both.reused == 0
        turns = [first]
        for _ in range(2):
            turns.append(both.ask([*turns[-1], *words(draw, 5)]))
            assert both.reused == len(turns[-2]) - 1
        branch = both.ask([*first, *words(draw, 4)])
        assert both.reused == len(first) - 1
        both.ask([*branch, *words(draw, 3)])
        assert both.reused == len(branch) - 1
        both.ask([*turns[-1], *words(draw, 3)])
        assert both.reused == len(turns[-1]) - 1
        both.ask([*first[:13], *words(draw, 9)])
        assert both.reused == 13, "where the prompt ended"
        both.ask([*first[:12], *words(draw, 9)])
        assert both.reused == 0, "a state is of use for exactly its tokens"
        both.check()
        assert both.store.counts.hits == sum(len(each) - 1 for each in (first, turns[1], first, branch, turns[2])) + 13
        assert not both.store.counts.why_not


def test_a_window_that_was_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    with talks(monkeypatch, "mistral-window", chaos=4, sliding_window=40) as both:
        ids = both.ask(words(draw, 5))
        for _ in range(5):  # and then it is
            before = len(ids)
            ids = both.ask([*ids, *words(draw, 7)])
            assert both.reused == before - 1


@pytest.mark.parametrize("name", FORGETFUL)
def test_models_that_do_not_go_on_from_a_state_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Stock with a cache held by hand says something else than stock: nothing like that is said here."""
    draw = random.Random(4)
    with talks(monkeypatch, name) as both:
        ids = words(draw, 13)
        for _ in range(3):
            ids = both.ask([*ids, *words(draw, 5)])
            assert both.reused == 0
        assert both.store.states == 0
        assert both.store.counts.why_not == {"the model does not go on from a state with several tokens": 2}


def test_the_proof_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, asked = random.Random(4), []
    goes_on = snapshot_proof.goes_on
    monkeypatch.setattr("ballonet.hooks.prefix.sessions.goes_on", lambda *given: asked.append(1) or goes_on(*given))
    for name, times in (("qwen3_next", 1), ("lfm2", 1), ("gemma2", 0)):
        asked.clear()
        with talks(monkeypatch, name) as both:
            ids = words(draw, 9)
            for _ in range(3):
                ids = both.ask([*ids, *words(draw, 5)])
        assert len(asked) == times


def test_a_state_outside_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    with talks(monkeypatch, "recurrent_gemma") as both:
        both.ask(words(random.Random(4), 13))
        assert both.store.states == 0
        assert both.store.counts.why_not == {"a layer keeps its state outside of the cache": 1}


@pytest.mark.parametrize("seed", range(2))
def test_conversations_that_branch_under_a_limit(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """States and tokens go in the middle of conversations; what is left is right, and no more than may be."""
    draw = random.Random(seed)
    name = ["gemma2", "qwen3_next", "falcon_h1", "mistral-window", "mamba2", "lfm2"][seed]
    with talks(monkeypatch, name, chaos=seed) as both:
        told = [words(draw, 9)]
        hits = 0
        for _ in range(26):
            talk = draw.choice(told[-6:])
            talk = both.ask([*talk, *words(draw, draw.randint(1, 9))], draw.randint(1, 6))
            hits += both.reused > 0
            if len(talk) < 90:
                told.append(talk)
            if len(told) == 9:
                both.store.limit = both.store.nbytes // 2
            both.check()
            assert both.store.limit is None or both.store.nbytes <= both.store.limit
        assert hits > 5
        assert both.store.counts.evicted > 5
        while both.store.pressure.give_up(runtime.require(), 1):
            both.check()
        assert both.store.pages == both.store.states == both.store.tokens == 0


def test_another_model_is_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    with talks(monkeypatch, "qwen3_next") as both:
        ids = both.ask(words(draw, 13))
        for model in (both.model, both.stock):
            with torch.no_grad():
                next(model.parameters()).mul_(1.5)
        both.held.clear()
        ids = both.ask([*ids, 3])
        assert both.reused == 0
        both.ask([*ids, 3])
        assert both.reused == len(ids) - 1


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        (2, {}, "several sequences, of which layers keep a window or a state"),
        (1, {"num_beams": 2}, "several sequences, of which layers keep a window or a state"),
        (1, {"pads": 3}, "an attention mask, where layers keep a window or a state"),
    ],
)
def test_what_is_left_to_stock(
    monkeypatch: pytest.MonkeyPatch, rows: int, options: dict[str, Any], reason: str
) -> None:
    draw = random.Random(4)
    with talks(monkeypatch, "gemma2") as both:
        ids = torch.tensor([words(draw, 12) for _ in range(rows)])
        mask = torch.ones_like(ids)
        mask[0, : options.pop("pads", 0)] = 0
        given = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5, **options}
        assert torch.equal(both.model.generate(ids, **given), both.stock.generate(ids, **given))
        assert both.store.counts.why_not == {reason: 1}
        assert both.store.states == both.store.pages == 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_whoever_holds_the_cache_keeps_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    draw = random.Random(4)
    with talks(monkeypatch, name) as both:
        ids, held = words(draw, 9), []
        cache = "cache_params" if name == "mamba2" else "past_key_values"

        def hold(module: Any, args: Any, kwargs: Any) -> None:
            if not held or held[-1] is not kwargs[cache]:
                held.append(kwargs[cache])

        handle = both.model.register_forward_pre_hook(hold, with_kwargs=True)
        both.hooks += 1
        for _ in range(3):
            ids = both.ask([*ids, *words(draw, 5)])
            both.check()
        assert both.reused > 0
        handle.remove()
        both.hooks -= 1
        assert len(held) >= 3
        kept = [tensor.clone() for layer in held[-1].layers for tensor in _shown(layer)]
        both.ask([*ids, 4])
        both.ask([*ids, 5])
        evict_all(both.store)
        assert all(map(torch.equal, kept, (tensor for layer in held[-1].layers for tensor in _shown(layer))))
        del handle, kept
        held.clear()


def _shown(layer: Any) -> Iterator[torch.Tensor]:
    found = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    found += [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    yield from (each for each in found if each is not None)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_request_that_is_broken_off(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    draw = random.Random(4)
    with talks(monkeypatch, name) as both:
        ids = both.ask(words(draw, 13))
        for step in (0, 2):
            left = iter(range(step))

            def fail(*_: Any, left: Iterator[int] = left) -> None:
                if next(left, None) is None:
                    raise KeyboardInterrupt

            handle = both.model.get_output_embeddings().register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                both.model.generate(torch.tensor([[*ids, 5, 6]]), max_new_tokens=5, do_sample=False)
            handle.remove()
            both.check()
            both.ask([*ids, *words(draw, 3)])
            assert both.reused == len(ids) - 1


def test_requests_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts its own forwards, and they branch from one turn."""
    draw = random.Random(4)
    with talks(monkeypatch, "mamba2") as both:
        ids = both.ask(words(draw, 30))
        said = [[*ids, *words(draw, 4 + n)] for n in range(3)]
        ready = threading.Barrier(3)

        def run(number: int) -> list[int]:
            prompt = torch.tensor([said[number]])
            ready.wait()
            given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
            tokens: list[int] = both.model.generate(prompt, **given)[0].tolist()
            return tokens

        with ThreadPoolExecutor(3) as threads:
            found = list(threads.map(run, range(3)))
        both.check()
        assert both.store.counts.hits >= len(ids) - 1
        for tokens, prompt in zip(found, said, strict=True):
            assert tokens == both.stock.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()


def test_states_are_in_the_pool_and_leave_it_when_others_need_room(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    device = runtime.require()
    with talks(monkeypatch, "mistral-window", sliding_window=64, num_hidden_layers=4) as both:
        for _ in range(6):
            both.model.generate(torch.tensor([words(draw, 80)]), max_new_tokens=3, do_sample=False)
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


def test_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(4)
    for name in ONE_OF_EACH:
        with talks(monkeypatch, name) as both, ballonet.Session(both.model) as session:
            for turn in range(3):
                before = len(session.tokens)
                session.generate(words(draw, 6), max_new_tokens=4, do_sample=False)
                assert session.reused == (before - 1 if turn else 0)
            other = session.fork()
            other.generate([7], max_new_tokens=4, do_sample=False)
            assert other.reused == len(session.tokens) - 1
            evict_all(both.store)
            assert both.store.states == 2, "the ends of both conversations are pinned"
            session.generate([7, 8], max_new_tokens=4, do_sample=False)
            assert session.reused == len(session.tokens) - 7
            del other
            session.close()
            gc.collect()
            both.ask(words(draw, 3))
            evict_all(both.store)
            assert both.store.states == both.store.pages == 0
