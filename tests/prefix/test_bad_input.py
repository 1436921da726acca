"""Prompts, adapters, tokenizers and lengths that a store of prefixes must not be deceived by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig

import ballonet

from .. import models
from ..pool import tiny_layers
from ..tuned import Tuned
from . import conversations
from .conversations import Sides, sides, words

PAGE = 4096
FEW: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
CONTEXT = 48  # tokens that a model with learned positions knows


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**24, PAGE):
        yield


def test_prompts_that_differ_in_their_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with sides(monkeypatch) as both:
        ids = both.ask(words(torch.Generator().manual_seed(1), 60))
        other = ids.clone()
        other[0, 0] = 2 + (ids[0, 0] - 1) % (models.VOCABULARY - 2)
        both.ask(other)
        assert not both.reused
        both.ask(other)
        assert both.reused == other.shape[1] - 1


def test_a_prompt_of_one_token_and_the_same_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One token is always left to be computed."""
    with sides(monkeypatch) as both:
        for length in (1, 1, 2, 30, 30, 29):
            both.ask(torch.arange(5, 5 + length)[None])
            assert both.reused < length
        assert both.reused == 28


def test_adapters_that_are_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has computed is not another's, and is found again when it is back."""
    build = models.build

    def with_adapters(name: str) -> Any:
        model = build(name)
        for number in (1, 2):
            torch.manual_seed(number)
            model.add_adapter(LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False), f"adapter{number}")
        return model.eval()

    def switch(both: Sides, adapter: int) -> None:
        for model in (both.model, both.stock):
            if adapter:
                model.enable_adapters()
                model.set_adapter(f"adapter{adapter}")
                model.eval()
            else:
                model.disable_adapters()

    monkeypatch.setattr(conversations, "build", with_adapters)
    with sides(monkeypatch) as both:
        ids = words(torch.Generator().manual_seed(1), 60)
        answers = []
        for adapter in (0, 1, 2):
            switch(both, adapter)
            answers.append(both.ask(ids))
            assert not both.reused
        assert len({tuple(answer[0].tolist()) for answer in answers}) > 1, "the adapters do something"
        for adapter in (1, 0, 2):
            switch(both, adapter)
            assert torch.equal(both.ask(answers[adapter])[:, : ids.shape[1] + 6], answers[adapter])
            assert both.reused == ids.shape[1] + 5


class Letters:
    """A token for each letter, from `first` on."""

    chat_template = None

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [self.first + ord(letter) - ord("a") for letter in text]}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids.tolist()))


def test_a_tokenizer_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text is other tokens: what is reused is what begins with the same ones, whatever they once said."""
    text = "thequickbrownfoxjumpsoverthelazydog"
    with sides(monkeypatch) as both:
        for first, known in ((10, 0), (60, 1), (10, 1 + len(text) - 1), (60, 1 + len(text) - 1)):
            tokenizer = Letters(first)
            with ballonet.Session(both.model, tokenizer) as session:
                session.send(text, **FEW)
                assert session.reused == known
                ids = torch.tensor([[1, *tokenizer(text, False)["input_ids"]]])
                assert session.tokens == tuple(both.stock.generate(ids, **FEW)[0].tolist())
                tokenizer.first = 100 - first  # in the middle of a conversation
                before = session.tokens
                session.send("again", **FEW)
                ids = torch.tensor([[*before, *tokenizer("again", False)["input_ids"]]])
                assert session.tokens == tuple(both.stock.generate(ids, **FEW)[0].tolist())


def test_a_vocabulary_that_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its tokenizer, as new tokens are added: nothing that the model had computed before is used."""
    with sides(monkeypatch) as both:
        ids = both.ask(words(torch.Generator().manual_seed(1), 60))
        for model in (both.model, both.stock):
            torch.manual_seed(3)
            model.resize_token_embeddings(models.VOCABULARY + 30, mean_resizing=False)
        both.ask(torch.cat([ids, torch.tensor([[models.VOCABULARY + 20]])], 1))
        assert not both.reused


@pytest.mark.parametrize("stored", [20, CONTEXT])
def test_a_prefix_longer_than_the_context(monkeypatch: pytest.MonkeyPatch, stored: int) -> None:
    """Stock fails at positions that the model does not have; so it does behind a stored prefix, and then all is
    well."""
    build = models.build
    monkeypatch.setattr(conversations, "build", lambda name: build(name, n_positions=CONTEXT))
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch, "gpt2") as both:
        ids = both.ask(words(generator, stored - 6), max_new_tokens=7, min_new_tokens=7)
        kept = both.store.pages
        for more in (CONTEXT + 1 - ids.shape[1], CONTEXT):
            prompt = torch.cat([ids, words(generator, max(1, more))], 1)
            raised = []
            for model in (both.stock, both.model):
                with pytest.raises(Exception, match="index") as caught:
                    model.generate(prompt, **FEW)
                raised.append(caught.type)
            assert raised[0] is raised[1]
            both.check()
            assert not any(each.readers or each.in_use for each in both.store.contents.index.idle)
        assert both.store.pages <= kept
        both.ask(ids[:, :20])
        assert both.reused == 19


def test_a_prefix_longer_than_the_context_where_stock_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rotary positions nothing ends there."""
    build = models.build
    monkeypatch.setattr(conversations, "build", lambda name: build(name, max_position_embeddings=CONTEXT))
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch) as both:
        ids = words(generator, 40)
        for _ in range(4):
            before = ids.shape[1]
            ids = torch.cat([both.ask(ids), words(generator, 9)], 1)
        assert before > CONTEXT
        assert both.reused > CONTEXT
