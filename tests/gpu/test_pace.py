"""Times of forwards by events that nobody waits for, and the speed of the link, on the device itself."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch

from ballonet.hooks.device.streams import marks_of
from ballonet.hooks.measure.pace import Pace
from ballonet.offload.manager.activity import Activity, Progress
from ballonet.offload.record import link
from ballonet.offload.record.record import Point

from .scene import Captured, Place, scene

HERE = Point("decode", 1, 100)


@scene()
def test_stalls_are_told_from_work(place: Place) -> None:
    """On a GPU the stream works for half a second, and then waits for one that works twice as long."""
    pace, lane = Pace(marks_of(place.device)), place.lane()
    for _ in range(3):
        lane.follow()
        with lane():
            place.sleep()
            place.sleep()
        pace.begin(HERE)
        place.sleep()
        with pace.waiting():
            lane.lead()
        pace.end()
        if place.cuda:
            assert pace.drain() == [], "it is not over, and nobody waits for it"
        place.synchronize()
        (step,) = pace.drain()
        assert step.point == HERE
        assert 0 <= step.stall <= step.total
        assert 0 < step.seconds <= step.total
        if place.cuda:
            assert 0.25 < step.stall / step.total < 0.75
            assert 0.25 < step.seconds / step.total < 0.75


@scene()
def test_captures_are_left_alone(place: Place) -> None:
    """What is captured is not timed, and whoever drains meanwhile, on any thread, breaks no capture."""
    pace = Pace(marks_of(place.device))
    numbers = torch.zeros(100, device=place.kind)
    drained = []

    def drain() -> None:
        drained.extend(pace.drain())

    def work() -> tuple[torch.Tensor, ...]:
        pace.begin(HERE)
        numbers.add_(1)
        pace.end()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(drain).result()
        return (numbers,)

    captured = Captured(place, work)
    place.synchronize()
    drain()
    assert len(drained) == (3 if place.cuda else 1), "those before the capture"
    (shown,) = captured.replay()
    assert shown.eq(1).all().item()


@scene(needs_host=True)
def test_the_link_has_a_speed(place: Place) -> None:
    """Nothing of what measured it stays."""
    before = place.device.snapshot()
    speed = link.measure(place.device)
    assert speed is not None
    assert speed > (1e9 if place.cuda and "SIMGPU_HOME" not in os.environ else 0)  # simulated: as fast as a core is
    after = place.device.snapshot()
    assert after["pages"]["weights"] == before["pages"]["weights"]
    assert after["copied"]["weights_d2h"] == before["copied"]["weights_d2h"]


@scene()
def test_in_use_until_the_device_is_done(place: Place) -> None:
    """A forward that was launched long ago, by the host's clock, runs still: its model is not idle."""
    now = 0.0
    marks = marks_of(place.device)
    progress = Progress(marks if marks.ahead else None, lambda: now)
    activity = Activity(progress)
    progress.begin()
    activity.at = now
    place.sleep()
    activity.ended(now, progress.end())
    now = 100.0
    assert activity.last(now) == (now if place.cuda else 0.0)
    place.synchronize()
    now = 200.0
    assert activity.last(now) < now
