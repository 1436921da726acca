"""A recording as a file: the trace, the picture, and the sentence about it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from ballonet.allocator.errors import ConfigError
from ballonet.allocator.events import Events, LoggedEvent
from ballonet.offload.timeline import file as recording_file
from ballonet.offload.timeline.file import SeriesRecording

PAGE = 4096
EVIL = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028&amp;\ud800"


def recorded(*events: LoggedEvent) -> SeriesRecording:
    log = Events()
    for event in events:
        log.add(event)
    rows = ((1000, 0, 0, 0, 0, 0), (2000, 1, 2, 0, 3, 0), (5000, 1, 2, 0, 4, 0))
    levels = ((1000, 9 * PAGE, 0), (3000, 7 * PAGE, 2))
    return SeriesRecording(1000, 10_001_000, 1.5e9, PAGE, rows, levels, events, log.counts(), 6)


MADE = LoggedEvent(3000, "idle weights", "reclaim", 3, "llama, layer 2", "MainThread", 0.25, inf)


def test_the_trace_has_a_counter_per_owner_and_an_instant_per_decision() -> None:
    trace = json.loads(recording_file.as_trace(recorded(MADE)))
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= set(event) for event in events)
    counters: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append((event["ts"], event["args"]["value"]))
    assert counters == {
        "free, bytes": [(0, 0), (1, PAGE)],
        "weights, bytes": [(0, 0), (1, 2 * PAGE)],
        "activations, bytes": [(0, 0)],
        "kv, bytes": [(0, 0), (1, 3 * PAGE), (4, 4 * PAGE)],
        "pending free, bytes": [(0, 0)],
        "budget, bytes": [(0, 9 * PAGE), (2, 7 * PAGE)],
        "on the host, bytes": [(0, 0), (2, 2 * PAGE)],
    }
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert (instant["name"], instant["ts"], instant["s"]) == ("idle weights: reclaim", 2, "p")
    assert instant["args"]["by"] == "MainThread"
    assert instant["args"]["pages"] == 3


def test_trace_holds_any_name_and_no_number_that_json_lacks() -> None:
    told = json.loads(recording_file.as_trace(recorded(replace(MADE, source=EVIL, by=EVIL, measured=nan))))
    (instant,) = [event for event in told["traceEvents"] if event["ph"] == "i"]
    assert (instant["cat"], instant["args"]["by"], instant["args"]["measured"]) == (EVIL, EVIL, None)
    assert (told["otherData"]["events left out"], told["otherData"]["began"]) == (6, 1.5e9)


def test_decision_that_took_time_is_a_slice() -> None:
    events = json.loads(recording_file.as_trace(recorded(replace(MADE, measured=0.002))))["traceEvents"]
    bars = [(event["name"], event["ph"], event["ts"]) for event in events if event["ph"] in "be"]
    assert bars == [("idle weights: reclaim", "b", 2), ("idle weights: reclaim", "e", 2002)]


def test_summary_says_when_memory_was_short_and_what_it_cost() -> None:
    assert recording_file.summary(recorded(replace(MADE, source="budget", verb="set"))) == "Memory was never short."
    spilled = LoggedEvent(5_041_000, "spill", "reclaim", 512, measured=3.4)
    refused = replace(MADE, when=6_000_000, source="refuse", measured=None)
    assert recording_file.summary(recorded(spilled, refused, refused)) == (
        "Memory was short from 0.00504 s on; 2MiB lay on pages of the host for want of others; 3400 ms went into "
        "moving; 2 requests found no page at first (they waited, lay on the host, or failed)."
    )


def test_suffix_decides_between_trace_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    for name, begins in (("a.JSON", b'{"traceEvents"'), ("a.trace.json", b'{"traceEvents"'), ("a.png", b"\x89PNG")):
        path = tmp_path / name
        recording_file.check(str(path))
        recording_file.write(recorded(MADE), str(path))
        assert path.read_bytes().startswith(begins)


def draw_marked(path: Path) -> None:
    """Marks that begin at the same moment, and one at the very end."""
    marks = tuple((5_000_000 + moment, "generate()") for moment in (0, 10, 20, 30, 40, 9_990_000))
    recording_file.draw_recording(path, replace(recorded(), stop=15_000_000, marks=marks))


PICTURES: dict[str, Callable[[Path], None]] = {
    "recording": draw_marked,
    "curve": lambda path: recording_file.draw_curve(
        path, [(2**27, 0.08), (2**28, 0.05)], f"/home/somebody/{'models/' * 12}: 1 x 4,096 tokens", 2**26, 0.078512
    ),
    "memory": lambda path: recording_file.draw_memory(
        path, 1_234_567, [2**30, 2**31], {"native": [2**32, 2**31], "expandable segments": [2**31, 2**31]}
    ),
}


@pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)
def test_texts_of_a_picture_are_readable_and_apart(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    original, pictures = recording_file.picture, list[Any]()

    @contextmanager
    def seen(path: Path) -> Iterator[Any]:
        with original(path) as axes:
            pictures.append(axes)
            yield axes

    monkeypatch.setattr(recording_file, "picture", seen)
    draw(tmp_path / "a.svg")
    (axes,) = pictures
    figure = axes.figure
    figure.canvas.draw()
    (legend,) = figure.legends
    ticks = [
        label
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
        if low <= place <= high
    ]
    texts: list[Any] = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *ticks, *legend.get_texts()]
    told = [text for text in texts if text.get_text()]
    boxes = [text.get_window_extent() for text in told]
    assert [text.get_text() for text in told if text.get_fontsize() < 8] == []
    placed = [*zip(told, boxes, strict=True), (legend, legend.get_window_extent())]
    assert [str(text) for text, box in placed if not -2 <= box.x0 < box.x1 <= figure.bbox.x1 + 2] == []  # pixels
    pairs = itertools.combinations(zip(told, boxes, strict=True), 2)
    assert [(a.get_text(), b.get_text()) for (a, box), (b, other) in pairs if box.overlaps(other)] == []
    assert not legend.get_window_extent().overlaps(axes.get_window_extent()), "what is drawn is to be seen"
    assert re.search("MiB|GiB", axes.get_xlabel() + axes.get_ylabel())


def test_a_failure_to_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(recording_file.os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        recording_file.write(recorded(MADE), str(path))
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("path", ["a", "a.json.gz", "a.html", ""])
def test_any_other_suffix_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"none of the suffixes of a timeline: \.json, \.png"):
        recording_file.check(path)


def test_a_full_disk_is_said_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, replace, naps = tmp_path / "a.json", os.replace, list[float]()

    def full(*given: Any) -> None:
        if len(naps) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*given)

    monkeypatch.setattr(recording_file.os, "replace", full)
    monkeypatch.setattr(recording_file.time, "sleep", naps.append)
    recording_file.write(recorded(MADE), str(path))
    assert json.loads(path.read_text())
    assert len(naps) == 3
    assert capsys.readouterr().err == f"ballonet: there is no room for {path}: it is tried again for 60 s\n"


def test_a_disk_that_stays_full_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = list[float]()
    monkeypatch.setattr(recording_file.time, "sleep", naps.append)

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        recording_file.written(fail, "a.json", tries=2)
    assert len(naps) == 2


def test_a_link_that_was_put_where_a_file_is_written_aside_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / f"a.json.{os.getpid()}.part").symlink_to(tmp_path / "mine")
    recording_file.write(recorded(MADE), str(tmp_path / "a.json"))
    assert (tmp_path / "mine").read_text() == "mine"
