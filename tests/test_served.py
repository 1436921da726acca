"""Requests and batches of generation loops in a timeline: what is kept, what a loop tells, and how the trace has it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import ballonet
from ballonet.allocator.events import LoggedEvent
from ballonet.offload.timeline import file as recording_file
from ballonet.offload.timeline.file import RequestSeries, SeriesRecording
from ballonet.offload.timeline.recorder import Recorder, Served, recorders_of

from .models import build
from .pool import take_out
from .serving.batches import looping, prompts

PAGE = 65536


def test_the_life_of_a_request() -> None:
    all_ = Served(10, 100)
    all_.came("a", "r", 5, 7)
    all_.batch("a", 10, [("r", 0)], 7)
    all_.batch("a", 20, [("r", 1)], 1)
    all_.batch("a", 30, [("r", 2)], 1)
    all_.ended("a", "r", 35, 3, "finished")  # and begins anew
    all_.again("a", "r")
    all_.batch("a", 40, [("r", 3)], 9)
    all_.ended("a", "r", 50, 4, "failed")
    all_.rests("a", 50)
    all_.rests("a", 60)
    assert all_.requests == [RequestSeries("a", "r", 5, 7, 10, 20, 50, "failed", 4, 1)]
    assert all_.batches == {"a": [(10, 1, 7), (20, 1, 1), (30, 1, 1), (40, 1, 9), (50, 0, 0)]}
    all_.came("a", "r", 60, 2)  # another one of that name
    all_.came("b", "r", 61, 2)
    all_.ended("a", "r", 70, 0, "refused")
    assert [(request.loop, request.end, request.first) for request in all_.requests] == [
        ("a", "failed", 20),
        ("a", "refused", 0),
        ("b", "", 0),
    ]


def test_requests_and_batches_kept_are_bounded() -> None:
    all_ = Served(10, 100)
    for n in range(1000):
        all_.came("a", str(n), n, 1)
        all_.batch("a", n, [(str(n), 0)] * (99 if n == 700 else 1), 1)
    assert [request.name for request in all_.requests] == [str(n) for n in range(10)]
    assert all_.missing == 990
    assert len(all_.batches["a"]) <= 100
    assert max(all_.batches["a"], key=lambda batch: batch[1])[0] == 700


@pytest.fixture
def installed() -> Iterator[None]:
    ballonet.install(64 * PAGE, page_size=PAGE, host_budget=64 * PAGE, device="cpu")
    yield
    take_out()


@pytest.mark.usefixtures("installed")
def test_a_loop_tells_what_becomes_of_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = build("llama")
    model.config._name_or_path = "somebody/Tiny-1B"
    asked = prompts(3, 20)
    with ballonet.manage(model) as managed:
        recorders = recorders_of(ballonet.allocator.devices.of())
        with Recorder(recorders) as recorder, looping(model, 8) as manager:
            for name, prompt in zip("012", asked, strict=True):
                manager.add_request(prompt, request_id=name)
            manager.add_request(asked[0] * 5000, request_id="huge")
            for _ in range(4):
                assert manager.get_result(timeout=600) is not None
            manager.add_request(asked[0], request_id="cancelled", max_new_tokens=800)
            while (last := recorder.recording().requests[-1]).name == "huge" or not last.first:
                assert last.name == "huge" or last.end == ""
            manager.cancel_request("cancelled")
            while manager.batch_processor.scheduler.has_pending_requests():
                time.sleep(0.001)
            (thread,) = {manager._generation_thread.name}
        del manager
    caplog.clear()  # which holds a traceback
    assert (managed.report().released, thread) == (True, "batches of Tiny-1B")
    done = recorder.recording()
    told = {request.name: request for request in done.requests}
    assert [(told[name].end, told[name].tokens, told[name].prompt) for name in "012"] == [
        ("finished", 8, len(prompt)) for prompt in asked
    ]
    assert all(
        request.came <= request.began < request.first < request.ended for request in (told[name] for name in "012")
    )
    assert (told["huge"].end, told["huge"].began) == ("refused", 0)
    assert told["cancelled"].end == "cancelled"
    assert {request.loop for request in done.requests} == set(done.batches) == {"Tiny-1B"}
    batches = done.batches["Tiny-1B"]
    assert sum(batch[2] for batch in batches) >= sum(map(len, asked)) + 3 * 7, "whether they came together or not"
    assert max(batch[1] for batch in batches) <= 3


def recorded() -> SeriesRecording:
    requests = (
        RequestSeries("A", "one", 1_000_000, 5, 2_000_000, 3_000_000, 9_000_000, "finished", 4, 0),
        RequestSeries("A", "two", 2_000_000, 6, 0, 0, 4_000_000, "refused", 0, 0),
        RequestSeries("A", "<b>three", 5_000_000, 6, 6_000_000, 0, 0, "", 0, 2),
    )
    events = (
        LoggedEvent(5, "idle weights", "reclaim", 3, "B", "batches of A"),
        LoggedEvent(6, "idle weights", "reclaim", 2, "B", "batches of A"),
        LoggedEvent(7, "running KV", "reclaim", 9, "KV of requests of A", "batches of A"),
        LoggedEvent(8, "idle KV", "reclaim", 1, "KV of requests of B", "batches of A"),
    )
    rows, levels = ((0, 1, 2, 0, 3, 0),), ((0, 9 * PAGE, 0),)
    batches = {"A": ((2_000_000, 1, 5), (6_000_000, 2, 7))}
    return SeriesRecording(0, 10_000_000, 1.5e9, PAGE, rows, levels, events, {}, 0, requests, 1, batches)


def test_trace_has_requests_with_their_parts_and_steps_until_the_next() -> None:
    trace = json.loads(recording_file.as_trace(recorded()))["traceEvents"]
    bars = [(bar["name"], bar["ph"], bar["ts"]) for bar in trace if bar["ph"] in "be" and bar["id"] == "request 0"]
    assert bars == [
        ("one", "b", 1000),
        ("one", "e", 9000),
        ("waits", "b", 1000),
        ("waits", "e", 2000),
        ("prompt", "b", 2000),
        ("prompt", "e", 3000),
    ]
    refused = [(bar["name"], bar["ts"]) for bar in trace if bar["ph"] == "e" and bar["id"] == "request 1"]
    assert refused == [("two", 4000), ("waits", 4000)]
    steps = [(step["ts"], step["dur"], step["args"]["requests"]) for step in trace if step["ph"] == "X"]
    assert steps == [(2000, 4000, 1), (6000, 4000, 2)]
