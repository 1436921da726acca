"""A run, recorded: nothing lost, bounded, whoever else records, and written however it ends."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import ballonet
from ballonet.allocator import _native, devices
from ballonet.allocator.config import Config
from ballonet.allocator.errors import ConfigError, NotInstalled
from ballonet.allocator.events import Count, Events, LoggedEvent
from ballonet.offload.timeline.file import Row
from ballonet.offload.timeline.recorder import Recorder, Recorders, Timelines, mark, recorders_of

from .core import eventually

PAGE = 65536


class Fake:
    """A device whose rows are added by the test."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.numbers: dict[str, Any] = {
            "page_size": PAGE,
            "budget": 16 * PAGE,
            "host_pages": 0,
            "pages": {"free": 1, "weights": 2, "activations": 3, "kv": 4, "pending_free": 5},
        }

    def timeline(self) -> list[Row]:
        rows, self.rows = self.rows, []
        return rows

    def snapshot(self) -> dict[str, Any]:
        return self.numbers | {"pages": dict(self.numbers["pages"])}

    def now(self, kv: int) -> Row:
        row = (time.monotonic_ns(), 0, 0, 0, kv, 0)
        self.rows.append(row)
        return row


@pytest.fixture
def device() -> Iterator[_native.Device]:
    started = devices.start(Config(device="cpu", page_size=PAGE, budget=2**21, host_budget=2**20)).device
    yield started
    devices.stop()


def test_a_row_from_the_same_moment_as_the_beginning_is_not_before_it() -> None:
    """The core puts changes that are close together under the time of the first of them."""
    fake = Fake()
    recorder = Recorder(Recorders(fake), Timelines(interval=60))
    early = recorder.recording().start - 40_000
    fake.rows.append((early, 9, 9, 9, 9, 9))
    done = recorder.stop()
    assert done.rows[1] == (done.start, 9, 9, 9, 9, 9)


def test_recording_begins_with_the_owners_and_ends_with_the_last_row() -> None:
    fake = Fake()
    fake.now(99)  # before it began: nobody's
    recorder = Recorder(Recorders(fake), Timelines(interval=60))
    first = fake.now(7)
    second = fake.now(8)
    done = recorder.stop()
    assert [row[1:] for row in done.rows] == [(1, 2, 3, 4, 5), first[1:], second[1:]]
    assert done.rows[0][0] == done.start <= done.rows[1][0] <= done.stop
    assert done.page_size == PAGE
    assert done.levels == ((done.start, 16 * PAGE, 0),)
    assert recorder.stop() == done


def test_rows_are_collected_meanwhile_and_none_is_lost() -> None:
    fake = Fake()
    with Recorder(Recorders(fake), Timelines(interval=0.001)) as recorder:
        expected = []
        for kv in range(20):
            expected.append(fake.now(kv))
            eventually(lambda: not fake.rows)
        expected.append(fake.now(20))
    assert list(recorder.rows[1:]) == expected


def test_two_recorders_of_a_device_both_get_everything_from_their_beginning_on() -> None:
    fake = Fake()
    of_the_device = Recorders(fake)
    outer = Recorder(of_the_device, Timelines(interval=0.001))
    before = fake.now(1)
    with Recorder(of_the_device, Timelines(interval=0.001)) as inner:
        both = fake.now(2)
        eventually(lambda: len(inner.rows) == 2)
    after = fake.now(3)
    assert outer.stop().rows[1:] == (before, both, after)
    assert inner.rows[1:] == (both,)


@pytest.mark.usefixtures("device")
def test_recorders_of_two_devices_do_not_mix_them_up() -> None:
    second = devices.start(Config(device="cpu", page_size=PAGE, budget=2**21, host_budget=2**20), number=1)
    two = (devices.of(0), second)
    one, other = (Recorder(recorders_of(runtime), Timelines(interval=60)) for runtime in two)
    mark("begins", second.device)
    kv = second.device.reserve(4 * PAGE, "kv", second.device.group())
    kv.map(0, 3)
    begun, none = other.recording(), one.recording()
    assert ([name for _, name in begun.marks], none.marks) == (["begins"], ())
    assert len(begun.rows) > len(none.rows) == 1
    kv.close()
    for recorder in (one, other):
        recorder.stop()
    devices.stop(1)


def test_a_budget_that_changes_is_a_level_from_when_it_was_decided() -> None:
    fake, log = Fake(), Events()
    recorder = Recorder(Recorders(fake, log), Timelines(interval=60))
    fake.numbers["budget"] = 8 * PAGE
    log.decided("budget", "set", 8)
    log.decided("budget", "refuse", 1)
    recorder.recording()
    fake.numbers["host_pages"] = 3
    done = recorder.stop()
    assert [level[1:] for level in done.levels] == [(16 * PAGE, 0), (8 * PAGE, 0), (8 * PAGE, 3)]
    assert done.levels[1][0] == done.events[0].when < done.levels[2][0]


def test_decisions_are_those_since_it_began_in_order_of_time() -> None:
    fake, log = Fake(), Events()
    log.add(LoggedEvent(1, "budget", "set", 1))
    recorder = Recorder(Recorders(fake, log), Timelines(interval=60))
    late, early = (
        LoggedEvent(20, "idle activations", "reclaim", 2),
        LoggedEvent(10, "spill", "reclaim", 3, measured=0.5),
    )
    log.add(late)
    log.add(early)
    done = recorder.stop()
    assert done.events == (early, late)
    assert done.counts == {"idle activations": {"reclaim": Count(1, 2, 0.0)}, "spill": {"reclaim": Count(1, 3, 0.5)}}
    assert done.missing == 0
    log.add(late)
    assert recorder.stop() == done


def test_recording_of_a_long_run_is_bounded_and_counts_what_is_missing() -> None:
    fake, log = Fake(), Events(limit=30)
    recorder = Recorder(Recorders(fake, log), Timelines(interval=60, rows=80, events=20))
    for number in range(50):
        for _ in range(10):
            fake.now(1000 if number == 7 else number)
        for host_pages in (2000 if number == 8 else 2, 1):
            fake.numbers["host_pages"] = host_pages
            recorder.recording()
        log.add(LoggedEvent(number, "idle activations", "reclaim", number))
        if number % 10 == 0:
            assert len(recorder.recording().rows) <= 80
    log.add(LoggedEvent(50, "budget", "set", 1))
    for number in range(40):  # more than the log keeps
        log.add(LoggedEvent(100 + number, "idle activations", "reclaim", 0))
    done = recorder.stop()
    assert max(len(done.rows), len(done.levels)) <= 80
    assert done.levels[0] == (done.start, 16 * PAGE, 0)
    assert max(level[2] for level in done.levels) == 2000
    assert max(row[4] for row in done.rows) == 1000
    assert len(done.events) <= 20
    assert done.missing == 91 - len(done.events)
    assert done.counts["idle activations"]["reclaim"].events == 90


def test_an_error_of_the_device_is_raised_by_stop_and_others_go_on() -> None:
    class Broken(Fake):
        def timeline(self) -> list[Row]:
            if self.rows:
                raise RuntimeError("gone")
            return []

    broken, fake = Broken(), Fake()
    recorder, other = (
        Recorder(Recorders(broken), Timelines(interval=0.001)),
        Recorder(Recorders(fake), Timelines(interval=0.001)),
    )
    broken.now(1)
    with pytest.raises(RuntimeError, match="gone"):
        recorder.stop()
    row = fake.now(1)
    assert other.stop().rows[1:] == (row,)


def test_a_device_is_recorded_beyond_its_end(device: _native.Device) -> None:
    recorder = Recorder(recorders_of(devices.of()), Timelines(interval=60))
    group = device.group()
    kv = device.reserve(4 * PAGE, "kv", group)
    kv.map(0, 4)
    kv.close()
    devices.stop()
    done = recorder.stop()
    assert max(row[4] + row[5] for row in done.rows) == 4, "the cache, or what was left of it"
    assert sum(done.rows[-1][1:]) == 0
    assert done.levels[0][1] == 2**21


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, SystemExit])
def test_a_timeline_is_written_however_it_ends(
    tmp_path: Path, device: _native.Device, error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path is where it was when it was given."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.json"
    group = device.group()
    kv = device.reserve(4 * PAGE, "kv", group)
    with nullcontext() if error is None else pytest.raises(error), ballonet.timeline("run.json") as recorder:
        os.chdir("/")
        kv.map(0, 3)
        devices.of().events.decided("idle activations", "reclaim", 3)
        assert recorder.recording().events[-1].pages == 3
        assert not path.exists()
        if error is not None:
            raise error
    kv.close()
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["value"] for event in events if event["name"] == "kv, bytes"][-1] == 3 * PAGE
    assert [event["name"] for event in events if event["ph"] == "i"][-1] == "idle activations: reclaim"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


def test_unwritable_path_is_refused_before_recording(tmp_path: Path, device: _native.Device) -> None:
    (tmp_path / "folder.json").mkdir()
    for name, says in (
        ("run.txt", "none of the suffixes"),
        ("none/run.json", "a folder that you may write to"),
        ("folder.json", "name a file"),
    ):
        with pytest.raises(ConfigError, match=says), ballonet.timeline(tmp_path / name):
            raise AssertionError("it was opened")
    devices.stop()
    with pytest.raises(NotInstalled), ballonet.timeline(tmp_path / "run.json"):
        raise AssertionError("it was opened")
    assert not any(thread.name == "ballonet-timeline" for thread in threading.enumerate())


@pytest.mark.usefixtures("device")
def test_calls_are_marked_while_somebody_records() -> None:
    mark("nobody hears this")
    recorder = Recorder(recorders_of(devices.of()), Timelines(interval=60))
    mark("generate()")
    recording = recorder.stop()
    mark("too late")
    ((when, name),) = recording.marks
    assert name == "generate()"
    assert recording.start <= when <= recording.stop
