"""Clients of a server with replicas, between its endpoints and the supervisor; and SLOs that requests come with, to the
replica that keeps them, less the time that has passed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from transformers import LlamaConfig

from ballonet.allocator.errors import SLOError
from ballonet.hooks.replicas.frontend import FleetEngine
from ballonet.hooks.replicas.messages import Start
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.stage import Stage
from ballonet.hooks.sampling.settings import ChosenToken, Sampling
from ballonet.hooks.server.engine import Denial, Generation, Listener, Update, tell
from ballonet.offload.policy.replicas.groups import alone
from ballonet.offload.policy.step_costs import NOTHING, Parts, RequestSLO

from ..models import build
from ..serving.batches import prompts
from ..serving.sampled import answer, denied
from .stages import Replicas, Told, install, requests
from .test_supervisor import Scene

CONFIG = LlamaConfig(vocab_size=60, max_position_embeddings=32)
SLOW = Parts(fixed=1.0, row=0.0, key=0.0, pair=0.0)  # a second a step


class Takes:
    """A supervisor that only remembers."""

    failed: str | None = None
    waiting = 0

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.cancelled: list[str] = []

    def submit(self, request: Request) -> str | None:
        self.asked.append(request)
        return self.failed

    def cancel(self, name: str) -> None:
        self.cancelled.append(name)

    def end_requests(self) -> None: ...


def asked_of(name: str = "a", *prompt: int, **more: Any) -> Generation:
    return Generation(name, prompt or (1, 2), **{"most": 3, "sampling": Sampling(), **more})


async def begun(engine: FleetEngine, asked: Generation) -> asyncio.Task[Any]:
    task = asyncio.ensure_future(answer(engine, asked))
    await asyncio.sleep(0)
    return task


def test_an_answer_comes_as_it_is_delivered() -> None:
    taking = Takes()
    engine = FleetEngine(taking, CONFIG, 8, (9,))
    tokens = ChosenToken(7, -0.5, ((7, -0.5),)), ChosenToken(8, -0.1), ChosenToken(9, -0.2)

    async def scene() -> None:
        for count, ended in ((3, "length"), (2, "stop")):
            task = await begun(engine, asked_of(sampling=Sampling(3, 0.5), ends=() if count == 3 else (8,)))
            request = taking.asked[-1]
            for token in tokens[:count]:
                request = request.with_token(token)
                await asyncio.to_thread(engine.deliver, request)
            assert await task == ([*tokens[:count]], ended)
        assert [(request.prompt, request.new, request.sampling.seed) for request in taking.asked] == [
            ((1, 2), 3, 3)
        ] * 2
        assert not taking.cancelled

    asyncio.run(scene())


def test_a_second_request_of_a_name_is_refused_until_the_first_has_ended() -> None:
    """Clients choose names: a proxy that sends a request again does so with the same one."""
    taking = Takes()
    engine = FleetEngine(taking, CONFIG, 8, (9,))

    async def scene() -> None:
        first = await begun(engine, asked_of())
        denial = await denied(engine, asked_of())
        assert denial is not None
        assert denial.status == 409
        first.cancel()
        await asyncio.wait([first])
        assert taking.cancelled == ["a"]
        again = await begun(engine, asked_of())
        assert not again.done()
        again.cancel()

    asyncio.run(scene())
    assert [request.name for request in taking.asked] == ["a", "a"]


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        (asked_of("a", 1, 60), 400, "invalid_value"),
        (Generation("a", (), 3, Sampling()), 400, "invalid_value"),
        (asked_of(sampling=Sampling(bias=((60, 1.0),))), 400, "invalid_value"),
        (asked_of("a", *range(30)), 400, "context_length_exceeded"),
    ],
)
def test_requests_that_cannot_be_computed_are_refused(asked: Generation, status: int, code: str) -> None:
    denial = asyncio.run(denied(FleetEngine(Takes(), CONFIG, 8, (9,)), asked))
    assert denial is not None
    assert (denial.status, denial.code) == (status, code)


def test_more_requests_than_may_wait_are_told_when_to_come_again() -> None:
    taking = Takes()
    taking.waiting = 8
    denial = asyncio.run(denied(FleetEngine(taking, CONFIG, 8, (9,)), asked_of()))
    assert denial is not None
    assert (denial.status, denial.retry_after) == (429, 1.0)


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        ("SLOError: request a: tpot of 1 s cannot be kept", 422, "the request: tpot of 1 s cannot be kept"),
        ("RequestTooLarge: a needs 3 GiB", 413, "the request needs 3 GiB"),
        ("GrammarRefused: the grammar cannot be used: no rule", 400, "the grammar cannot be used: no rule"),
        ("no replica is left", 503, "no replica is left"),
    ],
)
def test_an_error_of_replicas_ends_its_request(error: str, status: int, text: str) -> None:
    taking = Takes()
    engine = FleetEngine(taking, CONFIG, 8, (9,))

    async def scene() -> None:
        task = await begun(engine, asked_of())
        await asyncio.to_thread(engine.deliver, taking.asked[0], error)
        with pytest.raises(Denial, match=text) as caught:
            await task
        assert caught.value.status == status

    asyncio.run(scene())


def test_a_fleet_that_has_failed_answers_nothing() -> None:
    taking = Takes()
    engine = FleetEngine(taking, CONFIG, 8, (9,))
    assert engine.answers
    taking.failed = "replicas do not start"
    assert not engine.answers
    denial = asyncio.run(denied(engine, asked_of()))
    assert denial is not None
    assert (denial.status, denial.message) == (503, taking.failed)


def test_token_for_a_client_whose_event_loop_has_ended_is_no_error() -> None:
    async def listening() -> Listener:
        return Listener(asked_of())

    tell([(asyncio.run(listening()), Update((ChosenToken(7),)))])


# SLOs


@pytest.mark.parametrize("slo", [(None, None), (0.5, None), (None, 0.02)])
def test_the_slos_of_a_request_go_with_it(slo: tuple[float | None, float | None]) -> None:
    taking = Takes()

    async def scene() -> None:
        task = await begun(FleetEngine(taking, CONFIG, 8, (9,)), asked_of(ttft=slo[0], tpot=slo[1]))
        task.cancel()

    asyncio.run(scene())
    assert [(request.ttft, request.tpot) for request in taking.asked] == [slo]


def test_a_first_token_is_asked_for_until_it_is_there() -> None:
    request = Request("a", (1,), 5, ttft=2.0, tpot=0.1, waited=0.5)
    assert request.slo(10.0) == RequestSLO(2.0, 0.1, 9.5)
    assert request.with_token(ChosenToken(3)).slo(10.0) == RequestSLO(None, 0.1, 9.5)
    assert replace(request, tpot=None).with_token(ChosenToken(3)).slo(10.0) == NOTHING
    assert Request("a", (1,), 5).slo(10.0) == NOTHING


def test_the_time_that_a_request_has_waited_goes_with_it() -> None:
    """The first replica that has it is lost after a while."""
    scene = Scene()
    try:
        start = scene.begins()
        assert start.request.waited == 0.0
        scene.now = 0.25
        scene.replicas.ends(scene.member)
        _, (member, again) = scene.replicas.hears(Start, 2)
        assert member != scene.member
        assert (again.request.name, again.request.waited) == ("a", 0.25)
    finally:
        scene.supervisor.close()


@pytest.mark.usefixtures("nothing_is_left")
def test_a_replica_keeps_or_refuses_what_a_request_asks() -> None:
    install()
    told = Told()
    loose, late = (replace(request, tpot=5.0) for request in requests(prompts(2, 20), 4))
    with Replicas([build("llama", num_hidden_layers=2)]) as members:
        stage = Stage(members[0], alone(0, 2), 0, 1, {}, told)
        leader = stage.leader
        assert leader is not None
        scheduler = leader.requests.scheduler
        leader.requests.add(loose)
        leader.cache.model.costs.parts = SLOW
        with pytest.raises(SLOError, match=r"tpot of 0\.5 s cannot be kept; the nearest that can is 1 s"):
            leader.requests.add(replace(late, tpot=0.5))
        with pytest.raises(SLOError, match="ttft of 8 s"):
            leader.requests.add(replace(late, ttft=8.0, waited=7.5))
        assert late.name not in leader.requests.by_name
        assert scheduler.slos.asked(late.name) == NOTHING
        leader.requests.add(replace(late, ttft=8.0, waited=2.0))
        assert scheduler.slos.asked(late.name).ttft == 8.0
        given = leader.requests.release(late.name)
        assert given.waited >= 2.0
        assert scheduler.slos.asked(late.name) == NOTHING
        while not leader.idle:
            stage.step()
        assert not scheduler.slos.known
        del stage, leader, scheduler
    assert told.over == {loose.name}
