"""A run of several processes on one clock as one file: a picture, numbers, or a trace.

A process has lanes; in a lane are bars, which may overlap in `REQUESTS` only. Times are seconds of one clock.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ...allocator.errors import ConfigError
from .file import FORMATS, put

REQUESTS: Final = "requests"
_WIDTH: Final = 1400  # pixels of the picture
_ROW: Final = 16  # and of a row of it
_COLOURS: Final = ("#3b6fb6", "#dd8526", "#4f9d55", "#b0569a", "#7f8a99", "#2f8f86")  # of lanes, in turns


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
        found: dict[int, dict[str, list[Bar]]] = {}
        for each in sorted(self.bars, key=lambda bar: (bar.process, bar.begin)):
            found.setdefault(each.process, {}).setdefault(each.lane, []).append(each)
        return found


def named(process: int) -> str:
    """Returns the name of a process, for people."""
    return "server" if process < 0 else f"replica {process}"


def as_json(recording: FleetRecording) -> str:
    """Returns one JSON object: `seconds`, `bars` as [process, lane, name, begin, end], `marks` as [name, at],
    `missing`; times from the start."""
    start = recording.start
    bars = [[named(each.process), *each[1:3], each.begin - start, each.end - start] for each in recording.bars]
    marks = [[name, at - start] for name, at in recording.marks]
    seconds = recording.stop - start
    return json.dumps({"seconds": seconds, "bars": bars, "marks": marks, "missing": recording.missing})


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
            for number, each in enumerate(bars):
                told = {"name": each.name, "cat": lane, **where, "ts": micro(each.begin)}
                if lane == REQUESTS:
                    yield {**told, "ph": "b", "id": number}
                    yield {**told, "ph": "e", "id": number, "ts": micro(each.end)}
                else:
                    yield {**told, "ph": "X", "dur": micro(each.end) - micro(each.begin)}
    for name, at in recording.marks:
        yield {"name": name, "ph": "i", "s": "g", "pid": 0, "tid": 0, "ts": micro(at)}


def as_page(recording: FleetRecording) -> str:
    """Returns an HTML page that needs nothing else and runs no script: a row for each lane, names where the mouse
    is."""
    scale = _WIDTH / max(recording.stop - recording.start, 1e-9)
    drawn: list[str] = []
    y = 2 * _ROW

    def place(at: float) -> float:
        return round((at - recording.start) * scale, 2)

    for process, lanes in recording.lanes().items():
        drawn.append(f'<text x="0" y="{y + 12}" class="process">{named(process)}</text>')
        y += _ROW
        for number, (lane, bars) in enumerate(lanes.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            rows = list(packed(bars))
            drawn.append(f'<text x="-6" y="{y + 12}" text-anchor="end">{html.escape(lane)}</text>')
            for row, each in rows:
                width = max(0.5, place(each.end) - place(each.begin))
                said = f"{html.escape(each.name)}: {each.end - each.begin:.3f} s"
                drawn.append(
                    f'<rect x="{place(each.begin)}" y="{y + row * _ROW + 2}" width="{width:.2f}" height="{_ROW - 3}" '
                    f'fill="{colour}"><title>{said}</title></rect>'
                )
            y += _ROW * (1 + max((row for row, _ in rows), default=0))
    for name, at in recording.marks:
        x = place(at)
        drawn.append(f'<line x1="{x}" x2="{x}" y1="{_ROW}" y2="{y}"><title>{html.escape(name)}</title></line>')
        drawn.append(f'<text x="{x + 2}" y="{_ROW - 4}">{html.escape(name)}</text>')
    about = f"{recording.stop - recording.start:.1f} s, {len(recording.bars)} bars"
    if recording.missing:
        about += f", {recording.missing} more are left out"
    return _PAGE.format(about=about, width=_WIDTH + 220, height=y + _ROW, drawn="\n".join(drawn))


_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>ballonet replicas</title>
<style>body {{ font: 14px system-ui, sans-serif; }} text {{ font-size: 11px; }} .process {{ font-weight: 600; }}
line {{ stroke: #c0392b; stroke-dasharray: 3 3; }} rect {{ stroke: #fff; stroke-width: .3; }}</style></head>
<body><h1>ballonet replicas</h1><p>{about}</p>
<svg width="{width}" height="{height}" viewBox="-180 0 {width} {height}" role="img" aria-label="What each process did">
{drawn}
</svg></body></html>
"""


def packed(bars: Iterable[Bar]) -> Iterator[tuple[int, Bar]]:
    """Iterates over (row, bar) in order of time; the row is the first in which no other bar is at that time."""
    ends: list[float] = []
    for each in bars:
        row = next((row for row, end in enumerate(ends) if end <= each.begin), len(ends))
        ends[row:] = [each.end, *ends[row + 1 :]]
        yield row, each


_FORMS: Final[dict[str, Callable[[FleetRecording], str]]] = {
    ".trace.json": as_trace,
    ".perfetto": as_trace,
    ".json": as_json,
    ".html": as_page,
}
assert _FORMS.keys() == FORMATS.keys(), "file.check() says what suffixes there are"


def write(recording: FleetRecording, path: str) -> None:
    """Writes the recording in the format of the suffix. ConfigError, OSError."""
    for suffix, form in _FORMS.items():
        if path.lower().endswith(suffix):
            put(form(recording), path)
            return
    raise ConfigError(f"{path} has none of the suffixes of a timeline: {', '.join(_FORMS)}")
