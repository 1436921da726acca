"""What a watched process says, how two looks become rates, what is shown of them, and what keys do."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ballonet.allocator import control, devices, looks
from ballonet.allocator.config import Config
from ballonet.allocator.control import Control
from ballonet.allocator.errors import ControlRefused, NoSuchProcess, NotInstalled, NotPermitted, NotReachable
from ballonet.hooks.measure.timings import Histogram, Latencies, RequestTimes
from ballonet.hooks.watch import processes
from ballonet.hooks.watch.facts import with_names
from ballonet.hooks.watch.processes import SeenProcess, WatchedProcesses, copy_rates, kv_tiers, plain_look, program_of
from ballonet.hooks.watch.terminal import Budget, Dialog, keys_of, pressed
from ballonet.hooks.watch.view import as_text, bar, conclusion, format_age, lines_of, sections_of, title_of

from .programs import gone

PAGE = 65536
ME = os.getpid()


def event(number: int, **changes: Any) -> dict[str, Any]:
    """One decision, as a look has it."""
    plain = {"when": number * 10**9, "source": "kv", "verb": "reclaim", "pages": 2, "what": "KV cache of llama"}
    return {**plain, "by": "MainThread", "predicted": 0.002, "measured": 0.004, **changes}


def model(**changes: Any) -> dict[str, Any]:
    """One model, as a look has it."""
    counts = {"prompts": 200, "on_device": 50, "on_peer": 0, "on_host": 100, "on_disk": 0, "requests": 3}
    prefixes = {"counts": counts, "hits": 150, "hit_rate": 0.75, "tokens": 7, "nbytes": PAGE, "files": ["/a", 3 * PAGE]}
    plain = {"name": "llama", "path": "org/llama", "layers": 8, "streamed": [3, 7], "interval": 4, "slots": 1}
    rest = {"why": "memory is short", "pages": 60, "host_pages": 20, "copied": 5, "kv": [], "prefixes": prefixes}
    return {**plain, **rest, "seconds": {"decode": 0.02}, "slo": {"decode": 0.08, "prefill": None}, "latencies": {}} | {
        **changes
    }


def said(seconds: float = 10.0, **changes: Any) -> dict[str, Any]:
    """A look at that time."""
    pages = {"free": 4, "weights": 60, "activations": 6, "kv": 20, "pending_free": 0}
    plain = {"pid": 7, "when": int(seconds * 1e9), "page_size": PAGE}
    device = {"device": {"kind": "standin", "ordinal": 0, "number": 0}, "devices": [0]}
    memory = {"budget": 100 * PAGE, "created": 90, "pages": pages, "host_pages": 30, "host_free": 5, "spilled": 2}
    peer = {"host_budget": 50 * PAGE, "peer": "", "peer_budget": 0, "peer_pages": 8, "peer_free": 3}
    rest = {"copied": {"kv_d2h": 1000, "kv_h2d": 0}, "events": [], "cursor": 4, "kv": {"displaced": 12}, "models": []}
    return {**plain, **device, **memory, **peer, **rest, **changes}


# -- rates, tiers, histograms


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, said()), (said(10.0), said(10.0)), (said(10.0), said(12.0, copied={"kv_d2h": 999, "kv_h2d": 0}))],
    ids=["first", "same time", "counted anew"],
)
def test_there_is_no_rate_without_two_looks_at_one_life(before: dict[str, Any] | None, after: dict[str, Any]) -> None:
    assert copy_rates(before, after) == plain_look(after, before)["rates"] == {}


def test_kv_by_tier_counts_each_page_and_each_folder_once() -> None:
    look = said(models=[model(), model(), model(prefixes=None)])
    assert kv_tiers(look) == {"device": 20 * PAGE, "peer": 5 * PAGE, "host": 7 * PAGE, "disk": 3 * PAGE}
    assert kv_tiers(said(kv={"displaced": 2}))["host"] == 0


def test_durations_are_counted_by_bucket() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.11, 5.0):
        histogram.add(seconds)
    assert histogram.to_dict() == {"bounds": [0.1, 1.0], "counts": [2, 1, 1], "seconds": pytest.approx(5.26)}


def test_requests_are_measured_from_their_arrival_and_by_token() -> None:
    latencies = Latencies()
    times = RequestTimes(latencies)
    times.came("a", 1.0)
    times.came("b", 1.0)
    times.came("cancelled", 1.0)
    times.got("a", 1.5, 0)  # a batch of its prompt
    times.got("a", 2.0, 1)
    times.got("a", 3.0, 2)
    times.got("nobody", 3.0, 2)
    times.got("cancelled", 3.0, 2)
    times.ended("a", 6.0, 5, True)
    times.ended("b", 4.0, 1, True)  # its only token
    times.ended("cancelled", 9.0, 9, False)
    assert latencies.ttft.to_dict()["seconds"] == 1.0 + 3.0 + 2.0
    assert sum(latencies.ttft.to_dict()["counts"]) == 3
    assert latencies.tpot.to_dict()["seconds"] == 1.0
    assert sum(latencies.tpot.to_dict()["counts"]) == 1
    times.came("a", 10.0)  # the name again
    times.got("a", 10.5, 1)
    assert latencies.ttft.to_dict()["seconds"] == 6.5


def test_models_of_one_name_are_told_apart() -> None:
    rows = with_names([{"name": "a", "path": "x/a"}, {"name": "a", "path": "y/a"}, {"name": "a", "path": "x/a"}])
    assert [row["name"] for row in rows] == ["a", "a (2)", "a (3)"]
    assert [row["path"] for row in rows] == ["x/a", "y/a", "x/a (2)"]


# -- what is shown


def seen(*models: dict[str, Any], **changes: Any) -> SeenProcess:
    """A process that was looked at twice."""
    now = said(12.0, copied={"kv_d2h": 1000 + 2 * 2**20, "kv_h2d": 0}, models=[*models] or [model()], **changes)
    return SeenProcess(7, "serve.py", now, said(10.0), (event(9), event(11, by="", predicted=None)))


def shown(of: SeenProcess, title: str) -> dict[str, str]:
    """Texts of a section, by name."""
    return {row.name: row.text for section in sections_of(of) if section.title == title for row in section.rows}


def test_all_that_is_asked_for_is_shown() -> None:
    assert shown(seen(), "pages")["weights"] == "3.75MiB, 60 pages"
    assert shown(seen(), "pages")["not allocated"] == "640KiB, 10 pages"
    assert shown(seen(), "pages")["on the host"] == "1.56MiB of 3.12MiB, 128KiB of it spilled"
    assert shown(seen(), "copies") == {"KV to the host": "1MiB/s, 2MiB so far"}
    assert shown(seen(), "KV") == {
        "device": "1.25MiB", "peer": "320KiB", "host": "448KiB", "disk": "192KiB",
        "found again": "75% of 200 tokens of prompts of llama",
    }  # fmt: skip
    assert shown(seen(), "models")["llama"] == (
        "8 layers, 2 of them stream (interval 4); weights 3.75MiB; a token took 20 ms, SLO 80 ms; memory is short"
    )
    assert [*shown(seen(), "decisions").items()] == [
        ("1 s ago", "kv, reclaim: 2 pages (128KiB) of KV cache of llama, took 4 ms"),
        ("3 s ago", "kv, reclaim: 2 pages (128KiB) of KV cache of llama, for MainThread, took 4 ms, expected 2 ms"),
    ]


def test_bars_say_the_part() -> None:
    (pages,) = [section for section in sections_of(seen()) if section.title == "pages"]
    assert {row.name: row.part for row in pages.rows} == {
        "weights": 0.6, "KV": 0.2, "activations": 0.06, "pending free": 0, "free": 0.04, "not allocated": 0.1,
        "on the host": 0.5,
    }  # fmt: skip
    assert [bar(part, 4) for part in (0, 0.01, 0.5, 1, 2)] == ["░░░░", "█░░░", "██░░", "████", "████"]
    assert [format_age(seconds) for seconds in (-1, 59, 61, 7300)] == ["0 s", "59 s", "1 min", "2 h"]


def test_a_device_that_is_being_closed_has_no_budget() -> None:
    (pages,) = [section for section in sections_of(seen(budget=0)) if section.title == "pages"]
    assert {row.name for row in pages.rows} >= {"weights", "free"}


def test_a_look_at_a_process_ends_in_what_lies_outside_the_device() -> None:
    streams = "llama: 2 of 8 layers come from host memory for each token"
    assert (
        conclusion(seen()) == f"{streams}; 320KiB of KV on the peer; 448KiB of KV on the host; 896KiB of 6.25MiB free"
    )
    whole = said(models=[model(streamed=[])], kv={}, peer_pages=0, peer_free=0)
    assert conclusion(SeenProcess(7, "", whole)) == "llama: all 8 layers on the device; 896KiB of 6.25MiB free"
    assert conclusion(SeenProcess(7, "", said(kv={}, peer_free=8))).startswith("no model is managed; 896KiB")


def test_text_for_a_pipe_is_narrow_and_has_no_rows_of_nothing() -> None:
    brief, whole = as_text([seen()]), as_text([seen()], verbose=True)
    assert max(map(len, whole.splitlines())) <= 100
    assert "\x1b" not in whole
    assert [word for word in ("pending free", "ago", "d2h") if word in brief] == []
    assert [word for word in ("pending free", "1 s ago", "4 ms") if word not in whole] == []
    for text in (brief, whole):
        assert " ".join(text.split()).endswith(conclusion(seen()))
    text = as_text([seen(model(interval=None, streamed=[*range(2, 6)]))])
    assert "4 of them stream (2 to 5)" in text


def test_a_line_is_the_sentence_and_each_decision_once() -> None:
    first, second = SeenProcess(7, "", said(events=[event(1)]), decisions=(event(1),)), seen(events=[event(11)])
    assert [*lines_of(second)] == [f"process 7 · {conclusion(second)}"]
    _, line = lines_of(first, verbose=True)
    assert line.startswith("process 7 · 9 s ago · kv, reclaim: 2 pages (128KiB) of KV cache of llama, for MainThread, ")
    line, *decisions = lines_of(second, verbose=True)
    assert len(decisions) == 1
    (busy,) = lines_of(SeenProcess(7, "", said(events=[event(1)]), said(), (event(1),), "did not answer"), verbose=True)
    assert "did not answer" in busy


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3.11", "/home/me/chat.py", "--token", "secret"], "chat.py"),
        (["python", "-X", "dev", "-u", "chat.py"], "chat.py"),
        (["python", "-m", "ballonet", "serve", "--api-key", "secret"], "-m ballonet serve"),
        (["python", "-m", "ipykernel_launcher", "-f", "secret"], "-m ipykernel_launcher"),
        (["python", "-c", "secret"], "-c"),
        (["/opt/ballonet", "serve"], "ballonet"),
        (["python3"], "python3"),
        ([], ""),
    ],
)
def test_a_program_is_named_without_its_secrets(words: list[str], name: str) -> None:
    assert program_of(7, lambda path: b"".join(word.encode() + b"\0" for word in words)) == name


def test_a_program_that_is_gone_has_no_name() -> None:
    assert program_of(gone()) == ""


# -- keys


def after(*keys: str, dialog: Dialog | None = None, pid: int | None = 7) -> Dialog:
    now = Dialog() if dialog is None else dialog
    for key in keys:
        now = pressed(now, key, pid, 2**20)
    return now


def test_a_budget_is_typed_and_confirmed() -> None:
    typing = after("b", *"4MX", "back", *"iB")
    assert "budget of process 7, now 1MiB: 4MiB_" in typing.footer
    confirm = after("enter", dialog=typing)
    assert "change the budget of process 7 from 1MiB to 4MiB? " in confirm.footer
    assert confirm.act is None
    assert after("x", "enter", dialog=confirm) == confirm, "nothing but y"
    done = after("y", dialog=confirm)
    assert (done.act, done.stage) == (Budget(7, 2**22), "watch")
    assert after("j", dialog=done).act is None, "once"


@pytest.mark.parametrize("keys", [["escape"], ["enter", "n"], ["enter", "escape"], ["enter", "q"]])
def test_a_budget_that_is_not_confirmed_stays(keys: list[str]) -> None:
    left = after("b", *"4MiB", *keys)
    assert (left.act, left.stage, left.said, left.done) == (None, "watch", "the budget is as it was", False)


def test_a_size_that_is_none_is_typed_again() -> None:
    wrong = after("b", *"much", "enter")
    assert (wrong.stage, wrong.text) == ("type", "much")
    assert "write a positive number of bytes" in wrong.footer
    assert after("back", dialog=wrong).said == ""
    assert after("b", pid=None).said == "there is no process"


def test_other_keys() -> None:
    assert after("q").done
    assert not after("b", "q").done, "q is a letter here"
    assert [after(key).step for key in ("up", "k", "down", "j", "x")] == [-1, -1, 1, 1, 0]
    assert keys_of("b\x1b[Aq\r\x7f\x1b[B\x1b") == ["b", "up", "q", "enter", "back", "down", "escape"]


# -- processes


@pytest.fixture
def folder() -> Iterator[Path]:
    """One with a short name: the path of a socket may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="b-") as made:
        yield Path(made) / "s"


@pytest.fixture
def installed() -> Iterator[devices.Runtime]:
    yield devices.start(Config(device="cpu", page_size=PAGE, budget=2**21))
    devices.stop()


@pytest.fixture
def listening(folder: Path, installed: devices.Runtime) -> Iterator[Control]:
    opened = Control(lambda nbytes, timeout, number: None, [folder])
    yield opened
    opened.close()


@pytest.mark.usefixtures("listening")
def test_a_look_has_numbers_and_the_decisions_since_the_last(installed: devices.Runtime, folder: Path) -> None:
    installed.events.decided("kv", "reclaim", 3, what="llama")
    first = control.look(ME, None, [folder])
    assert (first["pid"], first["budget"], first["page_size"]) == (ME, 2**21, PAGE)
    assert first["counts"]["kv"]["reclaim"]["events"] == 1
    assert [decision["pages"] for decision in first["events"]] == [3]
    assert control.look(ME, first["cursor"], [folder])["events"] == []
    for pages in range(100):
        installed.events.decided("kv", "reclaim", pages)
    later = control.look(ME, first["cursor"], [folder])
    assert [decision["pages"] for decision in later["events"]] == [*range(68, 100)], "the last ones"
    assert later["when"] > first["when"]


@pytest.mark.usefixtures("listening")
def test_others_publish_what_they_know(installed: devices.Runtime, folder: Path) -> None:
    looks.publish(installed, "weather", lambda on: {"rain": on.number})
    assert control.look(ME, None, [folder])["weather"] == {"rain": 0}
    looks.publish(installed, "weather", lambda on: 1 / 0)
    with pytest.raises(ControlRefused, match="division by zero"):
        control.look(ME, None, [folder])


def test_an_answer_of_another_version_is_not_taken_for_a_look(
    listening: Control, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {*looks.KEYS} <= looks.look().keys()
    answer = {key: value for key, value in looks.look().items() if key != "devices"}
    monkeypatch.setattr(listening, "_answer", lambda line: {"ok": True, **answer})
    with pytest.raises(NotReachable, match=f"process {ME} runs another version of ballonet: watch it with"):
        control.look(ME, None, [folder])


@pytest.mark.parametrize("line", [b'{"look": "x"}\n', b'{"look": []}\n', b'"look"\n', b'["look"]\n'])
def test_a_look_that_is_not_understood(listening: Control, line: bytes) -> None:
    assert listening._answer(line) == {"ok": False, "kind": "ValueError", "message": "the request is not understood"}


def test_without_a_device_there_is_nothing_to_see() -> None:
    with pytest.raises(NotInstalled):
        looks.look()


def test_the_sockets_of_this_user_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert control.listening([folder]) == []
    folder.mkdir()
    for name in (f"{gone()}.sock", f"{ME}.sock", f"{os.getppid()}.sock", "x.sock", "note.txt"):
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / name))
    assert control.listening([folder, folder]) == sorted([ME, os.getppid()])
    owner = control._owner
    monkeypatch.setattr(control, "_owner", lambda pid: os.geteuid() + 1 if pid == ME else owner(pid))
    assert control.listening([folder]) == [os.getppid()]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What processes answer, by pid; an error is raised."""
    by_pid = dict[int, Any]()

    def look(pid: int, since: int | None, *_: Any) -> dict[str, Any]:
        answer = by_pid[pid]
        if isinstance(answer, Exception):
            raise answer
        return {**answer, "since": since}

    monkeypatch.setattr(control, "look", look)
    monkeypatch.setattr(control, "listening", lambda folders: sorted(by_pid))
    return by_pid


def test_all_processes_are_looked_at_and_those_that_end_are_left_out(answers: dict[int, Any]) -> None:
    answers.update({7: said(events=[event(1)]), 8: said(), 9: NotReachable(9, "does not listen")})
    all_ = WatchedProcesses()
    all_.look()
    assert [process.pid for process in all_.seen] == [7, 8]
    answers.update({7: said(11.0, events=[event(2)], cursor=9), 8: NotReachable(8, "did not answer")})
    all_.look()
    first, second = all_.seen
    assert (first.now["when"], first.before and first.before["when"]) == (11 * 10**9, 10 * 10**9)
    assert [decision["when"] for decision in first.decisions] == [10**9, 2 * 10**9]
    assert first.now["since"] == 4, "what came after the look before"
    assert (second.trouble, second.now["when"]) == ("did not answer", 10 * 10**9)
    answers.update({8: said(12.0)})
    answers[7] = NoSuchProcess(7, "does not exist")
    all_.look()
    assert [(process.pid, process.trouble) for process in all_.seen] == [(8, "")]
    assert not all_.ended


@pytest.mark.parametrize("error", [NoSuchProcess(7, "x"), NotPermitted(7, "x"), NotReachable(7, "x")])
def test_one_process_that_cannot_be_looked_at_is_an_error(answers: dict[int, Any], error: Exception) -> None:
    answers[7] = error
    with pytest.raises(type(error)):
        WatchedProcesses(7).look()


def test_one_process_that_ends_has_ended(answers: dict[int, Any]) -> None:
    answers[7] = said()
    one = WatchedProcesses(7)
    one.look()
    answers[7] = NoSuchProcess(7, "does not exist")
    one.look()
    assert one.ended
    assert one.seen == ()


def test_all_devices_of_a_process_are_looked_at(installed: devices.Runtime, folder: Path) -> None:
    second = devices.start(Config(device="cpu", page_size=PAGE, budget=2**22), number=1)
    second.events.decided("kv", "reclaim", 3)
    here = WatchedProcesses(ME, folders=[folder])
    here.look()
    installed.events.decided("kv", "reclaim", 5)
    here.look()
    assert [(view.number, view.now["budget"]) for view in here.seen] == [(0, 2**21), (1, 2**22)]
    assert [[entry["pages"] for entry in one.decisions] for one in here.seen] == [[5], [3]]
    assert [title_of(view).split(" · ")[-2] for view in here.seen] == ["CPU (host stand-in 0)", "CPU (host stand-in 1)"]
    _, decision, _ = [line for view in here.seen for line in lines_of(view, verbose=True)]
    assert re.match(rf"device 0 of process {ME} · 0 s ago · kv, reclaim: 5 pages", decision)
    devices.stop(1)
    here.look()
    assert [view.number for view in here.seen] == [0]
    assert not here.seen[0].one_of_several


@pytest.mark.parametrize("pid", [7, ME], ids=["another", "this"])
def test_a_device_that_ends_between_two_answers_is_left_out(
    installed: devices.Runtime, monkeypatch: Any, pid: int
) -> None:
    asked = []

    def answer(device: int | None, error: Exception) -> dict[str, Any]:
        asked.append(device)
        if device == 2:
            raise error
        return said(devices=[0, 1, 2], device={"kind": "cuda", "ordinal": device or 0, "number": device or 0})

    def ask(pid: int, since: int | None, folders: Any, patience: float, device: int | None) -> dict[str, Any]:
        return answer(device, ControlRefused(pid, "no runtime", "NotInstalled"))

    monkeypatch.setattr(control, "look", ask)
    monkeypatch.setattr(processes, "look", lambda since, device: answer(device, NotInstalled("no runtime")))
    one = WatchedProcesses(pid)
    one.look()
    assert (asked, [view.key for view in one.seen]) == ([None, 1, 2], [(pid, 0), (pid, 1)])


@pytest.mark.usefixtures("installed")
def test_this_process_is_seen_first(answers: dict[int, Any]) -> None:
    answers.update({1: said(pid=1), ME: said(), 2**22 + 1: said(pid=2**22 + 1)})
    all_ = WatchedProcesses()
    all_.look()
    assert [process.pid for process in all_.seen] == [ME, 1, 2**22 + 1]


def test_this_process_without_ballonet_says_so() -> None:
    with pytest.raises(NotReachable, match=r"not installed in it: call ballonet\.install"):
        WatchedProcesses(ME).look()
