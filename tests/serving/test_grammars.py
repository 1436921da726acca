"""Answers of a server's loop that are held to a form. The model has a vocabulary of single letters."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="grammars need llguidance, which is not installed (.[structured])")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ballonet.hooks.sampling.grammar import grammar_of
from ballonet.hooks.sampling.settings import Sampling
from ballonet.hooks.server.engine import Engine, Generation
from ballonet.hooks.server.loops import Loop

from ..models import build
from . import asynchronous
from .batches import install, prompts
from .sampled import alone, answer, close_to, denied, in_a_loop, named

pytestmark = pytest.mark.usefixtures("nothing_is_left")

END = "<end>"
LETTERS = [END, *'{}[]":,-.0123456789abcdefghijklmnopqrstuvwxyz\\Ġ']
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["ab", "c"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
}
FORMS = {
    "schema": grammar_of("json_schema", json.dumps(SCHEMA)),
    "object": grammar_of("json_schema", '{"type": "object"}'),
    "regex": grammar_of("regex", "[0-9]{3}-[a-f]+z"),
    "choice": grammar_of("choice", '["ab", "cd"]'),
}


def letters() -> Any:
    """A tokenizer of letters, as many models have one of bytes."""
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def llama(layers: int = 2) -> Any:
    model = build("llama", num_hidden_layers=layers)
    model.generation_config.eos_token_id = 0
    return model


def fits(form: str, text: str) -> bool:
    """Is it one of that form?"""
    if form == "regex":
        return re.fullmatch("[0-9]{3}-[a-f]+z", text) is not None
    if form == "choice":
        return text in ("ab", "cd")
    read = json.loads(text)
    if form == "schema":
        return {*read} == {"n", "kind"} and isinstance(read["n"], int) and read["kind"] in ("ab", "c")
    return isinstance(read, dict)


def asked_in_forms() -> list[tuple[str, Generation]]:
    """Requests with their forms. A bias keeps numbers and spaces short."""
    long = [(n, -8.0) for n, letter in enumerate(LETTERS) if letter in "0123456789\\Ġ[{:"]
    short = (*long, (0, 8.0), (LETTERS.index("z"), 5.0))
    return [
        (form, named(prompt, 150, Sampling(n, temperature, bias=short, grammar=FORMS[form])))
        for n, (form, prompt) in enumerate(zip([*FORMS] * 2, prompts(8, 40), strict=True))
        for temperature in (0.0, 1.5)
    ]


async def answers_have_their_forms(engine: Engine, asked: Sequence[tuple[str, Generation]], tokenizer: Any) -> None:
    got = await asyncio.gather(*(answer(engine, request) for _, request in asked))
    ended = 0
    for (form, request), (tokens, why) in zip(asked, got, strict=True):
        text = tokenizer.decode([token.token for token in tokens if token.token])
        ended += why == "stop"
        assert why == "length" or (fits(form, text) and tokens[-1].token == 0), (form, text, request)
    assert ended > len(asked) / 2


@pytest.mark.parametrize("two", [False, True], ids=["one in flight", "two in flight"])
def test_answers_have_their_forms(two: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside each other and answers without a form, which stay what they are."""
    if two:
        asynchronous.allow(monkeypatch)
    free = named(prompts(1, 30)[0], 12, Sampling(3, 1.2, frequency=0.5))
    expected, tokenizer = alone(llama(), free), letters()
    install(256)

    async def scene(loop: Loop) -> None:
        forms = answers_have_their_forms(loop, asked_in_forms(), tokenizer)
        plain, _none = await asyncio.gather(answer(loop, free), forms)
        assert close_to(plain[0], expected)
        compiling = [thread for thread in threading.enumerate() if "grammars" in thread.name]
        assert len(compiling) == 1, "one grammar after the other"

    in_a_loop(llama(), scene, tokenizer=tokenizer, use_async_batching=two)


def test_a_form_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="regex"):
        grammar_of("regex", "[0-9")
    with pytest.raises(ValueError, match="json_schema"):
        grammar_of("json_schema", '{"type": "nothing"}')
    install(256)

    async def scene(loop: Loop) -> None:
        denial = await denied(loop, named([3, 4], 8, Sampling(grammar="no grammar {{{")))
        assert denial is not None
        assert (denial.status, denial.code) == (400, "invalid_value")

    in_a_loop(llama(), scene, tokenizer=letters())


def test_a_model_without_an_end_has_no_forms() -> None:
    install(256)
    model, tokenizer = llama(), letters()
    model.generation_config.eos_token_id = tokenizer.eos_token = None

    async def scene(loop: Loop) -> None:
        denial = await denied(loop, named([3, 4], 8, Sampling(grammar=FORMS["choice"])))
        assert denial is not None
        assert (denial.status, denial.message) == (400, "the model has no token that ends an answer")
        assert await denied(loop, named([3, 4], 2, Sampling())) is None

    in_a_loop(model, scene, tokenizer=tokenizer)
