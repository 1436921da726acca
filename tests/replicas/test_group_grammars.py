"""Answers of groups of replicas that are held to a form, as a loop's are (tests/serving/test_grammars.py)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ballonet.hooks.replicas.frontend import FleetEngine
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.sampling.grammar import Grammars
from ballonet.hooks.sampling.settings import Sampling

from ..models import VOCABULARY
from ..serving.batches import prompts
from ..serving.sampled import alone, answer, close_to, denied, named
from ..serving.test_grammars import FORMS, answers_have_their_forms, asked_in_forms, letters, llama
from .stages import InProcess, Replicas, Told, answered, chosen, evenly, in_a_group, install
from .test_kv_exchange import joined, serve
from .test_pipeline import Lacks

pytestmark = pytest.mark.usefixtures("nothing_is_left")
END = (0,)


@pytest.mark.parametrize("stages", [1, 3])
def test_answers_of_a_group_have_their_forms_and_are_those_of_a_whole_model(stages: int) -> None:
    """Beside an answer without a form, which stays what it is."""
    model, tokenizer, asked = llama(3), letters(), asked_in_forms()
    _, first = asked[0]
    free = named(prompts(1, 30)[0], 12, Sampling(3, 1.2, frequency=0.5))
    matcher = Grammars(tokenizer, END, VOCABULARY).matcher(first.sampling.grammar or "")
    expected, plain = alone(model, first, matcher), alone(model, free)
    install()

    async def scene(engine: FleetEngine, _: InProcess) -> None:
        forms = answers_have_their_forms(engine, asked[1:], tokenizer)
        (held, _why), (other, _), _ = await asyncio.gather(answer(engine, first), answer(engine, free), forms)
        assert [token.token for token in held][: len(expected)] == [token.token for token in expected][: len(held)]
        assert close_to(other, plain)

    in_a_group(model, scene, stages, tokenizer, END)


def test_forms_of_requests_that_are_computed_again_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage finds no memory for them, when their answers have begun."""
    model, tokenizer, asked = llama(3), letters(), asked_in_forms()[:6]
    install()

    async def whole(engine: FleetEngine, _: InProcess) -> None:
        answers.append([tokens for tokens, _ in await asyncio.gather(*(answer(engine, one) for _, one in asked))])

    async def lacking(engine: FleetEngine, group: InProcess) -> None:
        lacks = Lacks(group.caches[2].store, 40, 8, False)
        monkeypatch.setattr(group.caches[2], "store", lacks)
        await whole(engine, group)
        assert lacks.failed == 8

    answers: list[list[Any]] = []
    in_a_group(model, whole, 3, tokenizer, END)
    in_a_group(model, lacking, 3, tokenizer, END)
    assert answers[0] == answers[1]


def test_forms_of_requests_that_are_handed_over_go_on() -> None:
    model, grammars = llama(2), Grammars(letters(), END, VOCABULARY)
    asked = [
        Request(one.name, one.prompt, 24, one.sampling, END)
        for _, one in asked_in_forms()
        if one.sampling.grammar != FORMS["choice"]
    ][:6]
    install()
    expected = answered(model, asked, 1, grammars=grammars)
    assert joined(asked, serve, grammars=grammars).answers(asked) == expected
    begun = [
        Request(one.name, one.prompt, 24, one.sampling, END, chosen(*tokens[:9]))
        for one, tokens in zip(asked, expected, strict=True)
        if len(tokens) > 9
    ]
    told = Told()
    told.tokens.update((one.name, one.delivered) for one in begun)
    with Replicas([model], grammars) as (member,):
        group = InProcess(1, [member] * 2, evenly(2, 2), told)
        for one in begun:
            group.add(one)
        group.run()
        del group
    assert told.answers(begun) == [tokens for tokens in expected if len(tokens) > 9]
    assert len(begun) > 2


def test_a_form_that_no_replica_can_use_is_refused() -> None:
    async def scene(engine: FleetEngine, _: InProcess) -> None:
        for grammar in ("no grammar {{{", FORMS["choice"]):
            denial = await denied(engine, named([3, 4], 8, Sampling(grammar=grammar)))
            if grammar == FORMS["choice"] and tokenizer is not None:
                assert denial is None
                continue
            assert denial is not None
            assert (denial.status, denial.code, denial.param) == (400, "invalid_value", "response_format")
            assert denial.message.startswith("the grammar cannot" if tokenizer else "the model has no token that ends")

    install()
    for tokenizer in (letters(), None):
        in_a_group(llama(3), scene, 1, tokenizer, END if tokenizer else ())
