"""A recording as a file: a page to look at, the numbers as JSON, or a trace in the format of Chrome and Perfetto.

Note [Untrusted names]
    Names of threads, models and programs are untrusted. The page has them only inside one JSON text, where
    `<`, `>` and `&` are written as escapes so that it cannot be left, and puts them on the screen as text, never as
    HTML. Its content security policy allows its own script and style, and no network at all.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, Final

from ...allocator.errors import ConfigError
from .series import OWNERS, SeriesRecording

_TIMES: Final = ("came", "began", "first", "ended")  # of a request
PAGE: Final = Path(__file__).with_name("page.html")


def facts(recording: SeriesRecording) -> dict[str, Any]:
    """Returns the recording in plain dicts and numbers. Times are seconds from its start; `rows` hold the time, then
    pages of each of `owners`; `levels` the time, bytes of the budget, host pages; `batches` of each loop the time,
    requests, new tokens."""

    def seconds(when: int) -> float:
        return max(0, when - recording.start) / 1e9

    return {
        "began": recording.began,
        "seconds": seconds(recording.stop),
        "program": os.path.basename(sys.argv[0]) if sys.argv else "",
        "pid": os.getpid(),
        "page_size": recording.page_size,
        "owners": OWNERS,
        "rows": [[seconds(row[0]), *row[1:]] for row in recording.rows],
        "levels": [[seconds(level[0]), *level[1:]] for level in recording.levels],
        "events": [{**event.to_dict(), "when": seconds(event.when)} for event in recording.events],
        "counts": {
            lever: {verb: count._asdict() for verb, count in verbs.items()} for lever, verbs in recording.counts.items()
        },
        "missing": recording.missing,
        "requests": [
            {name: (seconds(value) if value else None) if name in _TIMES else value for name, value in each.items()}
            for each in map(asdict, recording.requests)
        ],
        "missing_requests": recording.missing_requests,
        "batches": {
            loop: [[seconds(batch[0]), *batch[1:]] for batch in batches] for loop, batches in recording.batches.items()
        },
        "marks": [{"when": seconds(when), "name": name} for when, name in recording.marks],
    }


def as_json(recording: SeriesRecording) -> str:
    """Returns one JSON object, see `facts`."""
    return json.dumps(_finite(facts(recording)))


def as_trace(recording: SeriesRecording) -> str:
    """Returns trace events: counters of bytes by owner, of the budget, of host pages, of batches; an instant for each
    decision; a bar for each request, of which its first token is a part."""
    told = facts(recording)
    page, process = recording.page_size, {"pid": told["pid"], "tid": 0}
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", **process, "args": {"name": f"ballonet {told['program']}"}}
    ]
    for owner, number in zip(OWNERS, range(1, len(OWNERS) + 1), strict=True):
        events += _counter(f"{owner}, bytes", [(row[0], row[number] * page) for row in told["rows"]], process)
    events += _counter("budget, bytes", [(level[0], level[1]) for level in told["levels"]], process)
    events += _counter("on the host, bytes", [(level[0], level[2] * page) for level in told["levels"]], process)
    for loop, batches in told["batches"].items():
        events += _counter(f"{loop}, requests in a batch", [(batch[0], batch[1]) for batch in batches], process)
    for number, each in enumerate(told["requests"]):
        parts = [("waits", each["came"], each["began"]), ("prompt", each["began"], each["first"])]
        for name, begins, ends in ((each["name"], each["came"], each["ended"]), *parts):
            if begins is not None:
                bar = {"name": name, "cat": each["loop"], "id": number, **process}
                ends = told["seconds"] if ends is None else ends
                events.append({**bar, "ph": "b", "ts": begins * 1e6, "args": each})
                events.append({**bar, "ph": "e", "ts": ends * 1e6})
    events += [
        {
            "name": f"{event['lever']}: {event['verb']}",
            "cat": event["lever"],
            "ph": "i",
            "s": "p",
            "ts": event["when"] * 1e6,
            **process,
            "args": {key: value for key, value in event.items() if key != "when"},
        }
        for event in told["events"]
    ]
    return json.dumps(_finite({"traceEvents": events, "displayTimeUnit": "ms"}))


def as_page(recording: SeriesRecording) -> str:
    """Returns an HTML page that needs nothing else. See Note [Untrusted names]."""
    data = as_json(recording)
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    before, after = PAGE.read_text(encoding="utf-8").split("{{recording}}")
    return before + data + after


FORMATS: Final[dict[str, Callable[[SeriesRecording], str]]] = {  # by suffix, the longer of two that fit first
    ".trace.json": as_trace,
    ".perfetto": as_trace,
    ".json": as_json,
    ".html": as_page,
}


def check(path: str) -> None:
    """Raises ConfigError where a recording could not be written to `path`, before one begins."""
    _format(path)
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(f"the timeline cannot be written to {path}: name a file in a folder that you may write to")


def write(recording: SeriesRecording, path: str) -> None:
    """Writes the recording in the format of the suffix, all at once: a reader sees the old file or the new one.
    OSError."""
    put(_format(path)(recording), path)


def put(text: str, path: str) -> None:
    """Writes a file all at once. OSError."""
    part = f"{path}.{os.getpid()}.part"
    try:
        Path(part).write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


def _format(path: str) -> Callable[[SeriesRecording], str]:
    for suffix, form in FORMATS.items():
        if path.lower().endswith(suffix):
            return form
    raise ConfigError(f"{path} has none of the suffixes of a timeline: {', '.join(FORMATS)}")


def _counter(name: str, values: list[tuple[float, int]], process: dict[str, int]) -> list[dict[str, Any]]:
    """Returns one sample for each change of the value."""
    samples: list[dict[str, Any]] = []
    last: int | None = None
    for seconds, value in values:
        if value != last:
            samples.append({"name": name, "ph": "C", "ts": seconds * 1e6, **process, "args": {"value": value}})
        last = value
    return samples


def _finite(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
