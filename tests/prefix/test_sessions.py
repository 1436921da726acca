"""Conversations held by hand; what is pinned; what is left to transformers; what makes all void."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.utils import GenerationMixin

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator.errors import ManageError

from ..models import build
from ..pool import tiny_layers
from .conversations import sides, words

PAGE = 4096
FEW: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tiny_layers(monkeypatch, 2**24, PAGE):
        yield


class Tokenizer:
    """One letter, one token."""

    def __init__(self, template: bool) -> None:
        self.chat_template = "there is one" if template else None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        assert add_generation_prompt
        assert not return_dict
        ids = [1]
        for each in messages:
            ids += [2 if each["role"] == "user" else 3, *map(ord, each["content"])]
        return [*ids, 3]

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, ids.tolist()))


@pytest.mark.parametrize("template", [False, True])
def test_a_session(monkeypatch: pytest.MonkeyPatch, template: bool) -> None:
    with sides(monkeypatch) as both, ballonet.Session(both.model, Tokenizer(template)) as session:
        for turn in range(4):
            before = len(session.tokens)
            answer = session.send("hello there", **FEW)
            assert len(answer) == 4
            assert session.reused >= max(0, before - 1)
            assert session.reused > 0 or not turn
            other = session.fork()
            assert other.tokens == session.tokens
        more = other.generate(torch.tensor([[5, 6]]), **FEW)
        assert more.shape == (1, 4)
        assert other.reused == len(session.tokens) - 1
        assert len(other.tokens) == len(session.tokens) + 6
        for _ in range(3):
            while both.store._evict():
                pass
            both.check()
            assert session.generate([7], **FEW).shape == (1, 4)
            assert session.reused >= len(session.tokens) - 6, "it is pinned"
        del other
        session.close()
        session.close()
        gc.collect()
        assert both.store.get_num_new_matched_tokens([7]) == 0
        both.store.unpin(both.store.pin(ids := [1, 2]) and ids)
        with pytest.raises(ValueError, match="not pinned"):
            both.store.unpin(ids)
        while both.store._evict():
            pass
        assert both.store.pages == both.store.tokens == 0
        with pytest.raises(ManageError, match="closed"):
            session.generate([7])


def test_a_session_stays_whole_above_the_limit_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(monkeypatch) as both:
        both.store.limit = PAGE
        with ballonet.Session(both.model) as session:
            for turn in range(3):
                before = len(session.tokens)
                session.generate(words(torch.Generator().manual_seed(turn), 40), **FEW)
                assert session.reused == max(0, before - 1)
            assert both.store.nbytes > PAGE
        assert both.store.nbytes <= PAGE


def test_what_is_pinned_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that leaves a pinned sequence near its end copies; it would go on with one that is not."""
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch) as both:
        for pinned in (True, False):
            ids = both.ask(words(generator, 100))
            if pinned:
                both.store.pin(ids[0, :-1])
            both.ask(torch.cat([ids[:, :-4], words(generator, 3)], 1))
            assert (both.store.counts.copies, both.store.counts.moves) == ((1, 0) if pinned else (1, 1))
            assert both.store.get_num_new_matched_tokens(ids) == ids.shape[1] - (1 if pinned else 4)


def test_a_session_needs_a_store() -> None:
    model = build("llama")
    with pytest.raises(ManageError, match="prefix_cache=True"):
        ballonet.Session(model)
    with ballonet.manage(model) as managed:
        assert managed.prefixes is None
        with pytest.raises(ManageError, match="prefix_cache=True"):
            ballonet.Session(model)


def test_generate_is_left_as_it_was() -> None:
    before, signature = GenerationMixin.generate, inspect.signature(GenerationMixin.generate)
    models = [build("llama"), build("gpt2")]
    managed = [ballonet.manage(model, prefix_cache=True) for model in models]
    assert GenerationMixin.generate is not before
    assert inspect.signature(GenerationMixin.generate) == signature
    assert GenerationMixin.generate.__doc__ == before.__doc__
    for each in managed:
        assert GenerationMixin.generate is not before
        each.release()
    assert GenerationMixin.generate is before
    models.append(build("llama"))
    ballonet.manage(models[-1], prefix_cache=True)
    models[-1].generate(words(torch.Generator(), 30), **FEW)
    del each, managed, models
    gc.collect()
    assert GenerationMixin.generate is before
    runtime.require().reap(wait=True)
    assert runtime.require().snapshot()["pages"]["kv"] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_cache": False}, "use_cache is off"),
        ({"past_key_values": "cache"}, "past_key_values was given"),
        ({"cache_implementation": "static"}, "the cache is not dynamic"),
        ({"inputs_embeds": "embeds"}, "no input_ids were given"),
        ({"prompt_lookup_num_tokens": 2}, "neither sampling, greedy nor beam search"),
        ({"attention_mask": "holes"}, "the attention mask is more than padding on the left"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states was given"),
        ({"position_ids": "positions"}, "position_ids was given"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_left_alone(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str) -> None:
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch) as both:
        known = both.ask(words(generator, 20))
        ids = torch.cat([known, words(generator, 3)], 1)
        length = ids.shape[1]
        made = {
            "cache": lambda: DynamicCache(config=both.stock.config),
            "embeds": lambda: both.stock.get_input_embeddings()(ids).detach(),
            "holes": lambda: torch.tensor([[1, 0] + [1] * (length - 2)]),
            "positions": lambda: torch.arange(length)[None] + 1,
        }

        def given() -> dict[str, Any]:
            return {name: made[value]() if value in made else value for name, value in options.items()} | FEW

        prompt = () if "inputs_embeds" in options else (ids,)
        got, want = both.model.generate(*prompt, **given()), both.stock.generate(*prompt, **given())
        got, want = (each if isinstance(each, torch.Tensor) else each.sequences for each in (got, want))
        assert torch.equal(got, want)
        assert both.store.counts.why_not == {reason: 1}
        assert both.store.counts.requests == 1
        both.check()


def test_a_prompt_that_stock_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(monkeypatch) as both:
        ids = both.ask(words(torch.Generator().manual_seed(1), 20))
        with pytest.raises(ValueError, match="max_length"):
            both.model.generate(ids, max_length=10)
        both.check()
        both.ask(ids)
        assert both.reused == ids.shape[1] - 1


def change_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)


def change_load(model: Any) -> None:
    model.load_state_dict(build("llama", initializer_range=0.3).state_dict())


def change_assign(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(model.model.layers[1].mlp.up_proj.weight * 2)


def change_resize(model: Any) -> None:
    torch.manual_seed(1)
    model.resize_token_embeddings(300, mean_resizing=False)


def change_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize("change", [change_in_place, change_load, change_assign, change_resize, change_hook])
def test_another_model_is_another_prefix(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    with sides(monkeypatch) as both:
        ids = both.ask(words(torch.Generator().manual_seed(1), 20))
        change(both.model)
        change(both.stock)
        both.known.clear()
        again = both.ask(ids)
        assert not both.reused
        again = both.ask(again)  # before the first forward memory of what is new was another
        both.ask(again)
        assert both.reused == again.shape[1] - 1


def test_whoever_holds_the_cache_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that keeps `past_key_values`: what is stored is a copy."""
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch) as both:
        held: list[Any] = []

        def hold(module: Any, args: Any, kwargs: Any) -> None:
            held.append(kwargs["past_key_values"])

        handle = both.model.register_forward_pre_hook(hold, with_kwargs=True)
        ids = both.ask(words(generator, 20))
        for _ in range(3):
            ids = both.ask(torch.cat([ids, words(generator, 3)], 1))
            assert both.reused
            both.check()
        kept = [[copy.deepcopy(layer.keys) for layer in cache.layers] for cache in held]
        handle.remove()
        ids = both.ask(torch.cat([ids, words(generator, 3)], 1))
        while both.store._evict():
            pass
        assert all(
            torch.equal(before, layer.keys)
            for cache, there in zip(held, kept, strict=True)
            for before, layer in zip(there, cache.layers, strict=True)
        )
        held.clear()
        del kept


def test_a_prefix_is_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch) as both:
        system = both.ask(words(generator, 330))[:, :330]
        alone = both.store.pages
        for branch in range(1, 6):
            both.ask(torch.cat([system, words(generator, 20)], 1))
            assert both.reused >= 329
            both.check()
            assert both.store.pages <= alone + branch * 2 * len(both.model.model.layers)
        gc.collect()
        device = runtime.require()
        device.reap(wait=True)
        assert device.snapshot()["pages"]["kv"] == both.store.pages
