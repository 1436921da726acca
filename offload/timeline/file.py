"""A recording as a file: a trace for Perfetto and Chrome, or a picture; and the recording in a sentence."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, Final

from ...allocator.errors import ConfigError
from ...allocator.units import format_size, format_time
from . import picture
from .series import OWNERS, SeriesRecording

SUFFIXES: Final = (".json", ".png")
VIEWER: Final = "https://ui.perfetto.dev"

TraceEvent = dict[str, Any]


def summary(recording: SeriesRecording) -> str:
    """Returns a sentence: when memory was short first, what lay on the host, what moving took, who found no page."""
    counts = recording.counts
    taking = [event for event in recording.events if event.lever != "budget" and event.verb != "revert"]
    spilled = sum(count.pages for verb, count in counts.get("spill", {}).items() if verb == "pull")
    moving = sum(count.seconds for lever, verbs in counts.items() if lever != "budget" for count in verbs.values())
    refused = sum(count.events for verb, count in counts.get("refuse", {}).items() if verb == "pull")
    parts = []
    if taking:
        parts.append(f"memory was short from {(taking[0].when - recording.start) / 1e9:.3g} s on")
    if spilled:
        parts.append(f"{format_size(spilled * recording.page_size)} lay on pages of the host for want of others")
    if moving >= 1e-3:
        parts.append(f"{format_time(moving)} went into moving")
    if refused:
        parts.append(f"{refused} requests found no page at first (they waited, lay on the host, or failed)")
    text = "; ".join(parts) or "memory was never short"
    return f"{text[0].upper()}{text[1:]}."


def as_trace(recording: SeriesRecording) -> str:
    """Returns trace events: counters of bytes by owner, of the budget and of host pages; a slice for each step of a
    generation loop, each request, and each decision that took time; an instant for other decisions and for calls."""
    process = {"pid": os.getpid()}
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    events: list[TraceEvent] = [{"name": "process_name", "ph": "M", "tid": 0, "args": {"name": f"ballonet {program}"}}]
    events += _counters(recording)
    events += _steps(recording)
    events += _requests(recording)
    events += _decisions(recording)
    for when, name in recording.marks:
        events.append({"name": name, "cat": "call", "ph": "i", "s": "p", "tid": 0, "ts": _micro(recording, when)})
    about = {
        "summary": summary(recording),
        "began": recording.began,
        "page_size": recording.page_size,
        "events left out": recording.missing,
        "requests left out": recording.missing_requests,
    }
    trace = {"traceEvents": [process | event for event in events], "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(_finite(trace))


def check(path: str) -> None:
    """Raises ConfigError where a recording could not be written to `path`, before one begins."""
    if not path.lower().endswith(SUFFIXES):
        raise ConfigError(f"{path} has none of the suffixes of a timeline: {', '.join(SUFFIXES)}")
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(f"the timeline cannot be written to {path}: name a file in a folder that you may write to")
    if is_picture(path):
        picture.check(path)


def is_picture(path: str) -> bool:
    """Returns whether the suffix asks for a picture."""
    return path.lower().endswith(".png")


def write(recording: SeriesRecording, path: str) -> None:
    """Writes the recording as the suffix says. OSError, ConfigError."""
    if is_picture(path):
        picture.draw_recording(path, recording)
    else:
        put(as_trace(recording), path)


def put(text: str, path: str) -> None:
    """Writes a file all at once: a reader sees the old file or the new one. OSError."""
    part = f"{path}.{os.getpid()}.part"
    try:
        Path(part).write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


def _micro(recording: SeriesRecording, when: int) -> float:
    return max(0, when - recording.start) / 1e3


def _counters(recording: SeriesRecording) -> Iterator[TraceEvent]:
    """Yields one sample for each change of a value."""
    page = recording.page_size
    series: dict[str, Sequence[tuple[int, int]]] = {
        f"{owner}, bytes": [(row[0], row[column] * page) for row in recording.rows]
        for column, owner in enumerate(OWNERS, 1)
    }
    series["budget, bytes"] = [(when, budget) for when, budget, _ in recording.levels]
    series["on the host, bytes"] = [(when, pages * page) for when, _, pages in recording.levels]
    for name, values in series.items():
        last: int | None = None
        for when, value in values:
            if value != last:
                sample = {"name": name, "ph": "C", "tid": 0, "ts": _micro(recording, when)}
                yield {**sample, "args": {"value": value}}
            last = value


def _steps(recording: SeriesRecording) -> Iterator[TraceEvent]:
    """Yields a track for each generation loop. A step lasts until the next one, or until the loop rests."""
    for track, (loop, batches) in enumerate(recording.batches.items(), 1):
        yield {"name": "thread_name", "ph": "M", "tid": track, "args": {"name": f"steps of {loop}"}}
        ends = [*(batch[0] for batch in batches[1:]), recording.stop]
        for (when, requests, tokens), end in zip(batches, ends, strict=True):
            if requests:
                begins = _micro(recording, when)
                step = {"name": "step", "cat": loop, "ph": "X", "tid": track, "ts": begins}
                args = {"requests": requests, "new tokens": tokens}
                yield {**step, "dur": _micro(recording, end) - begins, "args": args}


def _requests(recording: SeriesRecording) -> Iterator[TraceEvent]:
    """Yields a slice for each request, with its wait and its prompt inside. They overlap, so they are asynchronous."""
    for number, request in enumerate(recording.requests):
        parts = (
            (request.name, request.came, request.ended or recording.stop),
            ("waits", request.came, request.began or request.ended or recording.stop),
            ("prompt", request.began, request.first or request.ended or recording.stop),
        )
        for name, begin, end in parts:
            if begin:
                yield from _slice(recording, name, request.loop, f"request {number}", begin, end, asdict(request))


def _decisions(recording: SeriesRecording) -> Iterator[TraceEvent]:
    """Yields what the log has of each decision. One that took time is a slice from when it was logged on."""
    for number, event in enumerate(recording.events):
        name, args = f"{event.lever}: {event.verb}", event.to_dict()
        if event.measured and isfinite(event.measured):
            end = event.when + round(event.measured * 1e9)
            yield from _slice(recording, name, event.lever, f"decision {number}", event.when, end, args)
        else:
            instant = {"name": name, "cat": event.lever, "ph": "i", "s": "p", "tid": 0}
            yield {**instant, "ts": _micro(recording, event.when), "args": args}


def _slice(
    recording: SeriesRecording, name: str, category: str, number: str, begin: int, end: int, args: dict[str, Any]
) -> Iterator[TraceEvent]:
    bar = {"name": name, "cat": category, "id": number, "tid": 0}
    yield {**bar, "ph": "b", "ts": _micro(recording, begin), "args": args}
    yield {**bar, "ph": "e", "ts": _micro(recording, end)}


def _finite(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value
