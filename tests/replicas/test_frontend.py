"""Clients of a server with replicas, between their handlers and the supervisor; and SLOs that requests come with, from
the HTTP header to the replica that keeps them, less the time that has passed.
"""

from __future__ import annotations

import asyncio
import contextvars
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from msgspec.structs import replace
from transformers import GenerationConfig, LlamaConfig

from ballonet.allocator.errors import SLOError
from ballonet.hooks.replicas.http_frontend import FrontendLoop, FrontendManager
from ballonet.hooks.replicas.messages import Start
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.stage import Stage
from ballonet.hooks.server.tenants import asked_slo
from ballonet.offload.policy.replicas.groups import alone
from ballonet.offload.policy.step_costs import NOTHING, Parts, RequestSLO

from ..models import build
from ..serving.batches import prompts
from .stages import Replicas, Told, install, requests
from .test_supervisor import Scene

MODEL: Any = SimpleNamespace(config=LlamaConfig())
READER: Any = SimpleNamespace(decode=lambda ids, **_: f"{ids}")
OPTIONS = GenerationConfig(max_new_tokens=1, do_sample=False)


def test_a_second_request_of_a_name_is_refused_until_the_first_has_ended() -> None:
    """Clients choose names: a proxy that sends a request again does so with the same one."""
    taking = Takes()
    front = FrontendManager(taking)
    loop = FrontendLoop(front, taking, 8)
    loop.init_cb(MODEL, OPTIONS)

    async def scene() -> None:
        def asked(name: str = "a") -> Any:
            return loop.generate_non_streaming(MODEL, READER, {"input_ids": [1, 2]}, OPTIONS, name)

        first = asyncio.ensure_future(asked())
        await asyncio.sleep(0)
        second = asyncio.ensure_future(asked())
        await asyncio.sleep(0)
        assert second.done()
        with pytest.raises(HTTPException, match="has not ended") as caught:
            second.result()
        assert caught.value.status_code == 409
        other = asyncio.ensure_future(asked("b"))
        await asyncio.sleep(0)
        for number, request in enumerate(taking.asked):
            front.deliver(request.with_token(7 + number))
        assert [(await task)[0] for task in (first, other)] == ["[7]", "[8]"]
        again = asyncio.ensure_future(asked())
        await asyncio.sleep(0)
        front.deliver(taking.asked[-1].with_token(9))
        assert (await again)[0] == "[9]"

    asyncio.run(scene())
    assert [request.name for request in taking.asked] == ["a", "b", "a"]


def test_token_for_a_client_whose_event_loop_has_ended_is_no_error() -> None:
    """The loop ends just when it is asked whether it has."""
    front, loop = FrontendManager(Takes()), asyncio.new_event_loop()
    loop.close()
    ending: Any = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=loop.call_soon_threadsafe)
    front._handlers["a"] = print, ending
    front.deliver(replace(Request("a", (1,), 1), delivered=(7,)))
    assert not front.has("a")


# SLOs


SLOW = Parts(fixed=1.0, row=0.0, key=0.0, pair=0.0)  # a second a step


class Takes:
    """A supervisor that only remembers."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    waiting = 0

    def submit(self, request: Request) -> str | None:
        self.asked.append(request)
        return None

    def cancel(self, name: str) -> None: ...

    def end_requests(self) -> None: ...


@pytest.mark.parametrize("slo", [None, (0.5, None), (None, 0.02)])
def test_the_headers_of_a_request_go_with_it(slo: tuple[float | None, float | None] | None) -> None:
    taking = Takes()
    front = FrontendManager(taking)

    def handled() -> None:
        asked_slo.set(slo)
        FrontendLoop(front, taking, 8).init_cb(None, GenerationConfig(do_sample=False))
        front.add_request([1, 2], "a", 3)

    contextvars.copy_context().run(handled)
    assert [(request.ttft, request.tpot) for request in taking.asked] == [slo or (None, None)]


def test_a_first_token_is_asked_for_until_it_is_there() -> None:
    request = Request("a", (1,), 5, ttft=2.0, tpot=0.1, waited=0.5)
    assert request.slo(10.0) == RequestSLO(2.0, 0.1, 9.5)
    assert request.with_token(3).slo(10.0) == RequestSLO(None, 0.1, 9.5)
    assert replace(request, tpot=None).with_token(3).slo(10.0) == NOTHING
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
        assert len(scheduler.slos) == 0
        del stage, leader, scheduler
    assert told.over == {loose.name}
