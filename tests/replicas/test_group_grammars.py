"""Answers of groups of replicas that are held to a form, as a loop's are (tests/serving/test_grammars.py)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ballonet.hooks.replicas.frontend import FleetEngine
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.sampling.grammar import Grammars
from ballonet.hooks.sampling.settings import ChosenToken, Sampling

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
    model, tokenizer, asked = llama(3), letters(), asked_in_forms()[:8]
    first, free = asked.pop()[1], named(prompts(1, 30)[0], 12, Sampling(3, 1.2, frequency=0.5))
    matcher = Grammars(tokenizer, END, VOCABULARY).matcher(first.sampling.grammar or "")
    expected, plain = alone(model, replace(first, ends=END), matcher), alone(model, free)
    install()

    async def scene(engine: FleetEngine, _: InProcess) -> None:
        forms = answers_have_their_forms(engine, asked, tokenizer)
        held, other, _none = await asyncio.gather(answer(engine, first), answer(engine, free), forms)
        assert close_to(held[0], expected)
        assert close_to(other[0], plain)

    in_a_group(model, scene, stages, tokenizer, END)


def test_forms_of_requests_that_are_computed_again_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage finds no memory for them, when their answers have begun."""
    model, tokenizer, asked = llama(3), letters(), asked_in_forms()[:4]
    answers = list[list[list[ChosenToken]]]()
    install()

    async def whole(engine: FleetEngine, _: InProcess) -> None:
        got = await asyncio.gather(*(answer(engine, request) for _, request in asked))
        answers.append([tokens for tokens, _ in got])

    async def lacking(engine: FleetEngine, group: InProcess) -> None:
        lacks = Lacks(group.caches[2].store, 40, 3, False)
        monkeypatch.setattr(group.caches[2], "store", lacks)
        await whole(engine, group)
        assert lacks.failed == 3

    for scene in (whole, lacking):
        in_a_group(model, scene, 3, tokenizer, END)
    assert answers[0] == answers[1]


def test_forms_of_requests_that_are_handed_over_or_begin_again_go_on() -> None:
    model, grammars = llama(2), Grammars(letters(), END, VOCABULARY)
    asked = [
        Request(f"q{n}", tuple(ids), 24, Sampling(n, 1.5, grammar=FORMS["schema" if n % 2 else "regex"]), END)
        for n, ids in enumerate(prompts(6, 40))
    ]
    install()
    expected = answered(model, asked, 1, grammars=grammars)
    assert joined(asked, serve, grammars=grammars).answers(asked) == expected
    told = Told()
    with Replicas([model], grammars) as (member,):
        group = InProcess(1, [member] * 2, evenly(2, 2), told)
        for request, tokens in zip(asked, expected, strict=True):
            told.tokens[request.name] = delivered = chosen(*tokens[:5])
            group.add(Request(request.name, request.prompt, 24, request.sampling, END, delivered))
        group.run()
        del group
    assert told.answers(asked) == expected


@pytest.mark.parametrize("known", [True, False], ids=["tokenizer", "no end"])
def test_a_form_that_no_replica_can_use_is_refused(known: bool) -> None:
    async def scene(engine: FleetEngine, _: InProcess) -> None:
        denial = await denied(engine, named([3, 4], 8, Sampling(grammar="no grammar {{{")))
        assert denial is not None
        assert (denial.status, denial.code, denial.param) == (400, "invalid_value", "response_format")
        assert denial.message.startswith("the grammar cannot" if known else "the model has no token that ends")

    install()
    in_a_group(llama(2), scene, 1, letters(), END if known else ())
