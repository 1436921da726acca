"""A run of several processes on one clock as one file: a trace, or a picture.

A process has lanes; in a lane are bars, which may overlap in `REQUESTS` only. Times are seconds of one clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .file import is_picture, picture, put, written

REQUESTS: Final = "requests"


class Bar(NamedTuple):
    """One thing that a process did. `process`: -1 the server, else the replica of this number."""

    process: int
    lane: str
    name: str
    begin: float
    end: float


class FleetMark(NamedTuple):
    """An event of the server at a moment."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class FleetRecording:
    """A recorded run. `start`, `stop`: by the clock; `missing`: bars that were not kept."""

    start: float
    stop: float
    bars: tuple[Bar, ...]
    marks: tuple[FleetMark, ...]
    missing: int = 0

    def lanes(self) -> dict[int, dict[str, list[Bar]]]:
        """The bars by process and lane, those of a lane in order of time."""
        lanes: dict[int, dict[str, list[Bar]]] = {}
        for span in sorted(self.bars, key=lambda bar: (bar.process, bar.begin)):
            lanes.setdefault(span.process, {}).setdefault(span.lane, []).append(span)
        return lanes


def named(process: int) -> str:
    """Returns the name of a process, for people."""
    return "server" if process < 0 else f"replica {process}"


def as_trace(recording: FleetRecording) -> str:
    """Returns trace events, a process for each process and a thread for each lane; requests, which overlap, are
    asynchronous, and marks are global instants."""
    return json.dumps({"traceEvents": [*_events(recording)], "displayTimeUnit": "ms"})


def _events(recording: FleetRecording) -> Iterator[dict[str, Any]]:
    def micro(at: float) -> float:
        return (at - recording.start) * 1e6

    for process, lanes in recording.lanes().items():
        pid = process + 1
        yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": named(process)}}
        for tid, (lane, bars) in enumerate(lanes.items(), 1):
            where = {"pid": pid, "tid": tid}
            yield {"name": "thread_name", "ph": "M", **where, "args": {"name": lane}}
            for number, bar in enumerate(bars):
                told = {"name": bar.name, "cat": lane, **where, "ts": micro(bar.begin)}
                if lane == REQUESTS:
                    yield {**told, "ph": "b", "id": number}
                    yield {**told, "ph": "e", "id": number, "ts": micro(bar.end)}
                else:
                    yield {**told, "ph": "X", "dur": micro(bar.end) - micro(bar.begin)}
    for name, at in recording.marks:
        yield {"name": name, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": micro(at)}


def draw(path: str, recording: FleetRecording) -> None:
    """Draws a row for each lane of each process, and a line for each mark. ConfigError."""
    lanes = [(process, lane, bars) for process, lanes in recording.lanes().items() for lane, bars in lanes.items()]
    with picture(path) as axes:
        for row, (_, _, bars) in enumerate(lanes):
            spans = [(bar.begin - recording.start, bar.end - bar.begin) for bar in bars]
            axes.broken_barh(spans, (row, 0.8), edgecolor="white", linewidth=0.3)
        for mark in recording.marks:
            axes.axvline(mark.at - recording.start, color="#c0392b", linestyle=":")
            axes.annotate(mark.name, (mark.at - recording.start, len(lanes)), fontsize="small")
        axes.set_yticks([row + 0.4 for row in range(len(lanes))], [f"{named(who)}: {lane}" for who, lane, _ in lanes])
        axes.set_xlabel("seconds")


def write(recording: FleetRecording, path: str) -> None:
    """Writes the recording as the suffix says. ConfigError, OSError."""
    if is_picture(path):
        written(lambda: draw(path, recording), path)
    else:
        written(lambda: put(as_trace(recording), path), path)
