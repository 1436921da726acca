"""The timeline of several processes: what each notes, one clock for all, and the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ballonet.hooks.replicas.messages import Seen, decoded, encoded
from ballonet.hooks.replicas.recording import Notes, Recording, machine
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.timeline.fleet import REQUESTS, Bar, FleetMark, FleetRecording, as_trace, write

from ..tuned import Clock


def test_a_lane_has_what_goes_on_in_it() -> None:
    clock = Clock()
    notes = Notes(clock)
    notes.now("epoch", "nobody wants it")
    notes.bar("microbatches", "nobody wants it", 0.0, 1.0)
    notes.on = True
    for now, what in ((1.0, "one"), (2.0, "one"), (3.0, "two"), (4.0, None), (5.0, None), (6.0, "three")):
        clock.now = now
        notes.now("epoch", what)
    notes.bar("microbatches", "a", 1.0, 2.0)
    assert notes.take() == (("epoch", "one", 1.0, 3.0), ("epoch", "two", 3.0, 4.0), ("microbatches", "a", 1.0, 2.0))
    clock.now = 7.0
    notes.close()
    notes.close()
    assert notes.take() == (("epoch", "three", 6.0, 7.0),)


def test_what_another_machine_tells_is_moved_to_the_server_s_clock() -> None:
    """By the fastest of its messages. What comes from this machine is told by this clock."""
    clock = Clock(100.0)
    recording = Recording(clock)
    clock.now = 110.0
    recording.seen(0, Seen(machine(), 109.0, (("epoch", "here", 101.0, 102.0),)))
    recording.seen(1, Seen("another", 1009.0, (("epoch", "early", 1001.0, 1002.0),)))  # came after a second
    clock.now = 120.0
    recording.seen(1, Seen("another", 1019.5, (("epoch", "late", 1011.0, 1012.0),)))  # after half of one
    clock.now = 140.0
    recording.seen(1, Seen("another", 1035.0, ()))  # after five
    bars = {each.name: (each.process, each.begin, each.end) for each in recording.recording().bars}
    assert bars == {"here": (0, 101.0, 102.0), "early": (1, 101.5, 102.5), "late": (1, 111.5, 112.5)}


def test_requests_wait_and_answer_and_too_many_bars_are_counted() -> None:
    clock = Clock(10.0)
    recording = Recording(clock, replace(DEFAULT.timeline, bars=4))
    recording.request("a", 2.0, 5.0)
    recording.request("b", 3.0, None)
    recording.mark("epoch 2: drop")
    recording.seen(0, Seen(machine(), 0.0, (("epoch", "kept", 1.0, 2.0), ("epoch", "not kept", 2.0, 3.0))))
    found = recording.recording()
    assert [each[1:] for each in found.bars[:3]] == [
        (REQUESTS, "a waits", 2.0, 5.0),
        (REQUESTS, "a", 5.0, 10.0),
        (REQUESTS, "b waits", 3.0, 10.0),
    ]
    assert [each.name for each in found.bars[3:]] == ["kept"]
    assert (found.missing, found.marks) == (1, (FleetMark("epoch 2: drop", 10.0),))


def test_what_is_seen_goes_over_as_text() -> None:
    seen = Seen("machine", 1.5, (("epoch", "one", 1.0, 3.0),))
    assert decoded(encoded(seen)) == (seen,)


RECORDING = FleetRecording(
    start=10.0,
    stop=20.0,
    bars=(
        Bar(1, "epoch", "epoch 2: <stage 0>", 11.0, 13.0),
        Bar(-1, REQUESTS, "a", 11.0, 15.0),
        Bar(-1, REQUESTS, "b", 12.0, 14.0),
        Bar(-1, REQUESTS, "c", 14.0, 16.0),
    ),
    marks=(FleetMark("epoch 2: drop", 12.0),),
)


def test_a_trace_has_a_process_for_each_and_times_from_the_start() -> None:
    events = json.loads(as_trace(RECORDING))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "server", 2: "replica 1"}
    (bar,) = [event for event in events if event["ph"] == "X"]
    assert (bar["pid"], bar["ts"], bar["dur"]) == (2, 1e6, 2e6)
    begun = [event["id"] for event in events if event["ph"] == "b"]
    assert len(begun) == len({*begun}) == 3
    assert [event["ts"] for event in events if event["ph"] == "i"] == [2e6]


def test_suffix_decides_between_trace_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    for name, begins in (("timeline.json", b"{"), ("timeline.png", b"\x89PNG")):
        write(RECORDING, str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(begins)
