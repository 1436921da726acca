"""Times of microbatches: busy and open seconds, errors of predictions, and marks in a GPU's stream."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ballonet.hooks.replicas.microbatch_plan import Chunk
from ballonet.hooks.replicas.replica_model import CudaTimeMarks, HostTimeMarks, Ran, StageTimes
from ballonet.offload.policy.replicas.pipeline import ChunkCost

from ..tuned import Clock
from .pipeline_time import evenly, pipeline_time

COST = ChunkCost(0.0, 1.0, 0.0)  # a second a token, in all layers
LAYERS = 4


def chunk(tokens: int, before: int = 0) -> Chunk:
    return Chunk("a", (0,) * tokens, before, False)


def times(clock: Clock, told: Callable[[Ran], object] = lambda ran: None) -> StageTimes:
    return StageTimes(LAYERS, COST, clock, HostTimeMarks(clock), told)


def run(of: StageTimes, clock: Clock, begin: float, seconds: float, tokens: int, layers: int) -> None:
    clock.now = begin
    began = of.begin()
    clock.now += seconds
    of.end(began, [chunk(tokens)], layers)


def test_the_bubble_is_that_of_the_timeline() -> None:
    """Two stages of three microbatches, as the timeline has them; the first stage counts how long they are open."""
    clock = Clock()
    stages = [times(clock) for _ in range(2)]
    planned = pipeline_time(evenly([4.0, 2.0, 6.0], 2))
    for number, (begins, ends) in enumerate(zip(planned.begin, planned.end, strict=True)):
        for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            clock.now = begin
            if (number, stage) == (0, 0):
                stages[0].set_open_stages(2)
            run(stages[stage], clock, begin, end - begin, 1, LAYERS // 2)
    clock.now = planned.seconds
    stages[0].set_open_stages(0)
    clock.now += 100.0  # nobody asks anything
    stages[0].set_open_stages(0)
    busy, opened = sum(times.busy for times in stages), sum(times.open for times in stages)
    assert (busy, opened) == (12.0, 2 * planned.seconds)
    assert 1 - busy / opened == pytest.approx(planned.bubble)


def test_a_replica_on_its_own_counts_nothing() -> None:
    clock = Clock()
    alone = times(clock)
    alone.set_open_stages(1)
    run(alone, clock, 0.0, 5.0, 5, LAYERS)
    alone.set_open_stages(0)
    assert (alone.busy, alone.open) == (0.0, 0.0)


def test_errors_are_relative_to_what_a_span_took() -> None:
    clock, ran = Clock(), list[Ran]()
    one = times(clock, ran.append)
    assert one.error is None
    run(one, clock, 0.0, 8.0, 8, LAYERS)  # as predicted
    assert one.error == 0.0
    run(one, clock, 10.0, 8.0, 8, LAYERS // 2)  # half of the layers: 4 s were predicted
    assert one.error == pytest.approx((0.0 + 0.5) / 2)
    assert ran[1] == Ran(10.0, 18.0, ((0, 8),), 2)


class Device:
    """The part of torch.cuda that marks use: a stream whose operations are over when the test says so."""

    def __init__(self) -> None:
        self.reached = 0.0  # seconds on the device's own clock, until which all is over
        self.submitted = 0.0

    def current_stream(self, device: torch.device) -> Device:
        return self

    def query(self) -> bool:
        return self.reached >= self.submitted

    def synchronize(self) -> None:
        self.reached = self.submitted

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self, stream: Device) -> None:
        self.at = stream.submitted

    def query(self) -> bool:
        assert self.at is not None
        return self.device.reached >= self.at

    def elapsed_time(self, other: Event) -> float:
        assert self.query(), "an event that is not over has no time"
        assert other.query(), "an event that is not over has no time"
        assert self.at is not None
        assert other.at is not None
        return (other.at - self.at) * 1e3


def test_moments_on_a_stream_are_those_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two microbatches are submitted at once, and the host knows their times once they are over."""
    device, clock, ran = Device(), Clock(), list[Ran]()
    fake = SimpleNamespace(current_stream=device.current_stream, Event=device.event)
    monkeypatch.setattr(torch, "cuda", fake)
    clock.now = 1000.0
    one = StageTimes(LAYERS, None, clock, CudaTimeMarks(torch.device("cuda"), clock), ran.append)
    for seconds in (3.0, 4.0):
        began = one.begin()
        device.submitted += seconds
        one.end(began, [chunk(1)], LAYERS)
    assert ran == []
    assert not one.all_timed
    device.reached, clock.now = 3.5, 1003.5
    one.poll()
    assert [moments[:2] for moments in ran] == [(1000.0, 1003.0)]
    device.reached, clock.now = 7.0, 1050.0  # the stream has nothing to do since
    one.poll()
    assert [moments[:2] for moments in ran] == [(1000.0, 1003.0), (1003.0, 1007.0)]
    began = one.begin()
    device.submitted, device.reached = 9.0, 9.0
    one.end(began, [chunk(1)], LAYERS)
    assert ran[-1][0] == 1050.0, "a stream without work begins when the host says so"
    assert one.all_timed


@pytest.mark.gpu
def test_a_gpu_s_moments_are_in_order() -> None:
    import time

    ran = list[Ran]()
    device = torch.device("cuda")
    one = StageTimes(LAYERS, None, time.monotonic, CudaTimeMarks(device, time.monotonic), ran.append)
    before, much = time.monotonic(), torch.randn(2048, 2048, device=device)
    for _ in range(4):
        began = one.begin()
        for _ in range(20):
            much = much @ much / 2048
        one.end(began, [chunk(1)], LAYERS)
    torch.cuda.synchronize()
    one.poll()
    assert one.all_timed
    moments = [at for moments in ran for at in moments[:2]]
    assert len(ran) == 4
    assert moments == sorted(moments)
    assert before <= moments[0] < moments[-1] <= time.monotonic() + 1e-3
