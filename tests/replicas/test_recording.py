"""What a supervisor records: the log of its controller, which another one told the same events repeats, and the
timeline of all processes on one clock.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ballonet.__main__ import main
from ballonet.allocator.errors import ManageError
from ballonet.hooks.replicas.messages import Seen, decoded, encoded
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.recording import DecisionFile, Notes, Recording, machine, read_decisions
from ballonet.hooks.replicas.supervisor import Supervisor, SupervisorPorts
from ballonet.hooks.virtual_replicas.run import run
from ballonet.offload.policy.replicas.demand import KVSize
from ballonet.offload.policy.replicas.drops import Pull, Verdict
from ballonet.offload.policy.replicas.groups import Group, Span
from ballonet.offload.policy.replicas.pipeline import ChunkCost
from ballonet.offload.policy.replicas.protocol import (
    Arrived,
    Commit,
    Continued,
    Damaged,
    Decision,
    Decline,
    Dispatch,
    Entry,
    Fence,
    Joined,
    Load,
    Prepare,
    PrepareFailed,
    Reason,
    Setup,
    StartRestore,
    Tick,
    from_line,
    to_line,
)
from ballonet.offload.policy.replicas.tuning import ReplicaTuning
from ballonet.offload.timeline.file import REST
from ballonet.offload.timeline.fleet import REQUESTS, Bar, FleetMark, FleetRecording, as_trace, write

from ..tuned import Clock
from .test_supervisor import Played, hello, wait
from .virtual import SLOW, burst, fleet, replayed

PAIR = Group((0, 1), (Span(0, 3), Span(3, 8)))
ENTRIES: list[Entry] = [
    Setup(
        (3, 4), KVSize(128, 1024), ChunkCost(1e-9, 0.1, 1e-3, decode=ChunkCost(0.0, 1e-5, 0.1)), ReplicaTuning(), 0.1
    ),
    Decision(3, Tick(0.1 + 0.2), (Prepare(3, (PAIR,), (Pull(0, 1, None), Pull(1, 7, 0))), Decline(Reason.NO_PLAN))),
    Decision(3, Load(1.0, 0, 3, 5, 6, 7, 8), (Decline(Reason.NO_GAIN, Verdict(math.inf, 1 / 3, helps=False)),)),
    Decision(4, PrepareFailed(2.0, 4, 1, Reason.FILE_CHANGED), (Commit(4, (("a", 0), ("b", 1))), StartRestore(4, ()))),
    Decision(9, Damaged(1e9, 4, 1, "a \u2028 line"), (Dispatch("a", 9, (0, 1)), Fence(1, Reason.HUNG))),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_entries_of_a_log_are_read_as_they_were_written(entry: Entry) -> None:
    line = to_line(entry)
    assert "\n" not in line
    assert from_line(line) == entry


def test_a_line_has_epoch_event_and_actions() -> None:
    line = json.loads(to_line(ENTRIES[4]))
    assert {*line} == {"epoch", "event", "actions"}
    assert (line["epoch"], line["event"]["type"], line["event"]["member"]) == (9, "Damaged", 1)
    assert [action["type"] for action in line["actions"]] == ["Dispatch", "Fence"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"epoch": 1}',
        '{"epoch": 1, "event": {"type": "Unheard"}, "actions": []}',
        '{"epoch": 1, "event": {"type": "Tick", "at": 1, "more": 2}, "actions": []}',
        '{"epoch": 1, "event": {"at": 1}, "actions": []}',
    ],
)
def test_line_that_is_no_entry_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(to_line(ENTRIES[0]) + "\n" + text + "\n")
    with pytest.raises(ManageError, match="log, line 2: "):
        read_decisions(tmp_path / "log")


def test_a_log_that_cannot_be_written_is_refused_and_one_that_breaks_ends_nothing(tmp_path: Path) -> None:
    with pytest.raises(ManageError, match="no log of decisions can be written"):
        DecisionFile(tmp_path / "none" / "log", print)
    said: list[str] = []
    file = DecisionFile(Path("/dev/full"), said.append)
    for entry in ENTRIES:
        file(entry)
    file.close()
    file.close()
    assert len(said) == 1
    assert "No space left" in said[0]


class SmallDisk:
    """Files for whose lines there is so much `room`, in bytes; a line that does not fit is written in part."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 10**9
        disk, real = self, Path.open

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                if not disk.room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                part = data[: disk.room]
                disk.room -= len(part)
                return super().write(part)

        def opened(path: Path, mode: str = "r", *given: Any, **more: Any) -> Any:
            return File(path, mode) if mode == "wb" else real(path, mode, *given, **more)

        monkeypatch.setattr(Path, "open", opened)


@pytest.mark.parametrize("room", [0, 7, 10**9])
def test_a_log_on_a_full_disk_goes_on_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """No line is cut, and the part after the gap says how many decisions came before it."""
    disk, clock, said, path = SmallDisk(monkeypatch), Clock(), list[str](), tmp_path / "log"
    file = DecisionFile(path, said.append, clock=clock)
    for entry in ENTRIES[:2]:
        file(entry)
    disk.room = 7
    file(ENTRIES[2])
    disk.room = 10**9
    file(ENTRIES[3])
    assert read_decisions(path) == ENTRIES[:2], "not at once"
    clock.now += REST
    if room < 10**9:
        disk.room = room
        file(ENTRIES[3])
        assert read_decisions(path) == []
        disk.room = 10**9
        clock.now += REST
    file(ENTRIES[4])
    file.close()
    assert read_decisions(path) == [Continued(3 if room == 10**9 else 4), ENTRIES[0], ENTRIES[4]]
    assert read_decisions(tmp_path / "log.1") == ENTRIES[:2]
    assert len(said) == 1


def test_a_long_log_is_cut_and_its_latest_part_is_kept(tmp_path: Path) -> None:
    """As long as nothing is given up it is read, and answered again, as one; later that is refused."""
    path, most = tmp_path / "log", 20_000
    (tmp_path / "log.1").write_text("of another log")
    everything: list[Entry] = []
    run(fleet(2, 1600), SLOW, burst(60, 0.1, 60, 20), "drop", log=everything.append)
    file = DecisionFile(path, print, most)
    assert [file.name for file in tmp_path.iterdir()] == ["log"]
    refused = 0
    for count, entry in enumerate(everything[:500], 1):
        file(entry)
        if count % 20 and count < 500:
            continue
        read = read_decisions(path)
        if isinstance(read[0], Setup):
            assert read == everything[:count]
            continue
        lost = count - len(read) + 1
        assert read == [Continued(lost), everything[0], *everything[lost + 1 : count]]
        refused += 1
    file.close()
    assert 1 < refused < 20, "of all looks"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]
    assert path.stat().st_size < (tmp_path / "log.1").stat().st_size < most + 10_000
    (tmp_path / "log.1").unlink()
    assert isinstance(read_decisions(path)[0], Continued)


def test_a_controller_that_is_told_the_same_answers_the_same(tmp_path: Path) -> None:
    file = DecisionFile(tmp_path / "log", print)
    arrivals = burst(240, 0.1, 60, 150) + burst(8, 6.0, 20, 20, begin=60.0)
    run(fleet(2, 1600), SLOW, arrivals, "drop", log=file)
    file.close()
    log = read_decisions(tmp_path / "log")
    again = [*replayed(log)]
    assert sum(bool(decision.actions) for decision, _ in again) > 200
    assert all(one == other for one, other in again)
    setup = log[0]
    assert isinstance(setup, Setup)
    other = replace(setup, tuning=dataclasses.replace(setup.tuning, gain=1.0))
    assert any(one != other for one, other in replayed([other, *log[1:]])), "no drop is worth that"


def test_the_supervisor_notes_what_its_controller_is_told_and_answers() -> None:
    log: list[Entry] = []
    replicas = Played()
    ports = SupervisorPorts(
        replicas, replicas, replicas.wakeup, lambda request, error: None, lambda line: None, lambda: 7.0
    )
    supervisor = Supervisor(ports, 1, note=log.append)
    supervisor.start()
    try:
        replicas.says(0, hello(0))
        supervisor.ready.wait()
        assert supervisor.submit(Request("a", (1, 2), 3)) is None
        wait(
            lambda: any(isinstance(entry, Decision) and entry.event == Arrived(7.0, "a", 2, 3) for entry in tuple(log))
        )
    finally:
        supervisor.close()
    assert isinstance(log[1], Decision)
    assert log[1].event == Joined(7.0, 0, 100)
    given = [entry for entry in log[1:] if isinstance(entry, Decision) and Dispatch("a", 1, (0,)) in entry.actions]
    assert len(given) == 1
    assert all(one == other for one, other in replayed(log))


def test_log_of_decisions_without_replicas_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("--log", str(tmp_path / "log")), ("--silent", "2s")):
        assert main(["serve", "model", name, value]) != 0
        assert f"{name} is of the server that has --replicas" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()


# The timeline


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


def test_bars_of_another_machine_are_moved_to_the_server_s_clock() -> None:
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
    bars = {bar.name: (bar.process, bar.begin, bar.end) for bar in recording.recording().bars}
    assert bars == {"here": (0, 101.0, 102.0), "early": (1, 101.5, 102.5), "late": (1, 111.5, 112.5)}


def test_requests_wait_and_answer_and_too_many_bars_are_counted() -> None:
    clock = Clock(10.0)
    recording = Recording(clock, 4)
    recording.request("a", 2.0, 5.0)
    recording.request("b", 3.0, None)
    recording.mark("epoch 2: drop")
    recording.seen(0, Seen(machine(), 0.0, (("epoch", "kept", 1.0, 2.0), ("epoch", "not kept", 2.0, 3.0))))
    recorded = recording.recording()
    assert [bar[1:] for bar in recorded.bars[:3]] == [
        (REQUESTS, "a waits", 2.0, 5.0),
        (REQUESTS, "a", 5.0, 10.0),
        (REQUESTS, "b waits", 3.0, 10.0),
    ]
    assert [bar.name for bar in recorded.bars[3:]] == ["kept"]
    assert (recorded.missing, recorded.marks) == (1, (FleetMark("epoch 2: drop", 10.0),))


def test_bars_are_decoded_as_they_were_sent() -> None:
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
