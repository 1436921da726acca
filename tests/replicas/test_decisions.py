"""The log of a controller: what is read is what was written, and a controller told the same events answers the same."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from ballonet.__main__ import main
from ballonet.allocator.errors import ManageError
from ballonet.hooks.replicas.microbatch_plan import Request
from ballonet.hooks.replicas.recording import DecisionFile, read_decisions
from ballonet.hooks.replicas.supervisor import Supervisor, SupervisorPorts
from ballonet.hooks.virtual_replicas.run import run
from ballonet.offload.policy.replicas.actions import Commit, Decline, Dispatch, Fence, Prepare, StartRestore
from ballonet.offload.policy.replicas.chunk_cost import ChunkCost
from ballonet.offload.policy.replicas.decisions import Continued, Decision, Entry, Setup, from_line, replayed, to_line
from ballonet.offload.policy.replicas.demand import KVSize
from ballonet.offload.policy.replicas.drop_gate import Verdict
from ballonet.offload.policy.replicas.events import Arrived, Damaged, Joined, Load, PrepareFailed, Reason, Tick
from ballonet.offload.policy.replicas.groups import Group, Span
from ballonet.offload.policy.replicas.restore_plan import Pull
from ballonet.offload.policy.tuning import DEFAULT

from .test_supervisor import Played, hello, wait
from .virtual import SLOW, burst, fleet

PAIR = Group((0, 1), (Span(0, 3), Span(3, 8)))
ENTRIES: list[Entry] = [
    Setup(
        (3, 4), KVSize(128, 1024), ChunkCost(1e-9, 0.1, 1e-3, decode=ChunkCost(0.0, 1e-5, 0.1)), DEFAULT.replicas, 0.1
    ),
    Decision(3, Tick(0.1 + 0.2), (Prepare(3, (PAIR,), (Pull(0, 1, None), Pull(1, 7, 0))), Decline(Reason.NO_PLAN))),
    Decision(3, Load(1.0, 0, 3, 5, 6, 7, 8), (Decline(Reason.NO_GAIN, Verdict(math.inf, 1 / 3, helps=False)),)),
    Decision(4, PrepareFailed(2.0, 4, 1, Reason.FILE_CHANGED), (Commit(4, (("a", 0), ("b", 1))), StartRestore(4, ()))),
    Decision(9, Damaged(1e9, 4, 1, "a \u2028 line"), (Dispatch("a", 9, (0, 1)), Fence(1, Reason.HUNG))),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_what_is_read_is_what_was_written(entry: Entry) -> None:
    line = to_line(entry)
    assert "\n" not in line
    assert from_line(line) == entry


def test_a_line_has_epoch_event_and_actions() -> None:
    found = json.loads(to_line(ENTRIES[4]))
    assert {*found} == {"epoch", "event", "actions"}
    assert (found["epoch"], found["event"]["type"], found["event"]["member"]) == (9, "Damaged", 1)
    assert [each["type"] for each in found["actions"]] == ["Dispatch", "Fence"]


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
def test_what_is_no_line_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(to_line(ENTRIES[0]) + "\n" + text + "\n")
    with pytest.raises(ManageError, match="log, line 2: "):
        read_decisions(tmp_path / "log")


def test_a_log_that_cannot_be_written_is_refused_and_one_that_breaks_ends_nothing(tmp_path: Path) -> None:
    with pytest.raises(ManageError, match="no log of decisions can be written"):
        DecisionFile(tmp_path / "none" / "log", print)
    said: list[str] = []
    file = DecisionFile(Path("/dev/full"), said.append)
    for each in ENTRIES:
        file(each)
    file.close()
    file.close()
    assert len(said) == 1
    assert "No space left" in said[0]


def test_a_long_log_is_cut_and_its_latest_part_is_kept(tmp_path: Path) -> None:
    """As long as nothing is given up it is read, and answered again, as one; later that is refused."""
    path, most = tmp_path / "log", 20_000
    (tmp_path / "log.1").write_text("of another log")
    everything: list[Entry] = []
    run(fleet(2, 1600), SLOW, burst(60, 0.1, 60, 20), "drop", log=everything.append)
    file = DecisionFile(path, print, most)
    assert [each.name for each in tmp_path.iterdir()] == ["log"]
    refused = 0
    for count, entry in enumerate(everything[:500], 1):
        file(entry)
        if count % 20 and count < 500:
            continue
        found = read_decisions(path)
        if isinstance(found[0], Setup):
            assert found == everything[:count]
            continue
        lost = count - len(found) + 1
        assert found == [Continued(lost), everything[0], *everything[lost + 1 : count]]
        with pytest.raises(ValueError, match=f"behind {lost} decisions that are not here"):
            [*replayed(found)]
        refused += 1
    file.close()
    assert 1 < refused < 20, "of all looks"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log", "log.1"]
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
    assert sum(bool(each.actions) for each, _ in again) > 200
    assert all(one == other for one, other in again)
    setup = log[0]
    assert isinstance(setup, Setup)
    other = replace(setup, tuning=dataclasses.replace(setup.tuning, gain=1.0))
    assert any(one != other for one, other in replayed([other, *log[1:]])), "no drop is worth that"


def test_a_log_begins_with_a_setup_and_is_of_one_controller() -> None:
    with pytest.raises(ValueError, match="begins with"):
        [*replayed([ENTRIES[1]])]
    with pytest.raises(ValueError, match="begins with"):
        [*replayed([])]
    with pytest.raises(ValueError, match="one controller"):
        [*replayed([ENTRIES[0], ENTRIES[0]])]


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
        wait(lambda: any(isinstance(each, Decision) and each.event == Arrived(7.0, "a", 2, 3) for each in tuple(log)))
    finally:
        supervisor.close()
    assert isinstance(log[1], Decision)
    assert log[1].event == Joined(7.0, 0, 100)
    given = [each for each in log[1:] if isinstance(each, Decision) and Dispatch("a", 1, (0,)) in each.actions]
    assert len(given) == 1
    assert all(one == other for one, other in replayed(log))


def test_what_a_controller_is_told_needs_replicas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("--log", str(tmp_path / "log")), ("--silent", "2s")):
        assert main(["serve", "model", name, value]) != 0
        assert f"{name} is of the server that has --replicas" in capsys.readouterr().err
    assert not (tmp_path / "log").exists()
