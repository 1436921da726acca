"""A recording of pages by owner over time, and of decisions; thinned to a limit, told in a sentence, and written to a
file: a trace for Perfetto and Chrome, or a picture.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from ...allocator.errors import ConfigError
from ...allocator.events import Counts, LoggedEvent
from ...allocator.units import format_size, format_time

# Seconds between tries to write to a full disk. Chosen: with 30 tries somebody has a minute to make room.
REST: Final = 2.0
OWNERS = ("free", "weights", "activations", "kv", "pending_free")
COLOURS: Final = {  # of owners, from the bottom up where they are stacked
    "weights": "#3b6fb6",
    "kv": "#e08a2c",
    "activations": "#58a55c",
    "pending_free": "#b65a9a",
    "free": "#d9d9d9",
}

Row = tuple[int, int, int, int, int, int]  # time in ns (CLOCK_MONOTONIC), then pages of each of OWNERS
Level = tuple[int, int, int]  # time in ns, bytes of the budget, host pages


End = Literal["", "finished", "failed", "cancelled", "refused"]


@dataclass(slots=True)
class RequestSeries:
    """One request. Times are 0 where there was none: `began`, when it was in a batch first; `first`, when its first
    token was known. `tokens`: generated; `again`: how often it began anew, or waited after it had begun."""

    loop: str
    name: str
    came: int
    prompt: int
    began: int = 0
    first: int = 0
    ended: int = 0
    end: End = ""
    tokens: int = 0
    again: int = 0


@dataclass(frozen=True, slots=True)
class Series:
    """Pages of each owner at evenly spaced times. `seconds[i]`, from the start, belongs to `pages[owner][i]`."""

    seconds: tuple[float, ...]
    pages: dict[str, tuple[int, ...]]

    def in_use(self) -> tuple[int, ...]:
        """Pages that were not free."""
        used = (self.pages[owner] for owner in OWNERS if owner != "free")
        return tuple(map(sum, zip(*used, strict=True)))


@dataclass(frozen=True, slots=True)
class SeriesRecording:
    """A recorded run. Times are ns of CLOCK_MONOTONIC."""

    start: int
    stop: int
    began: float  # seconds since the epoch, at `start`
    page_size: int  # bytes
    rows: tuple[Row, ...]  # in order of time, the first at `start`
    levels: tuple[Level, ...]  # one per change, the first at `start`
    events: tuple[LoggedEvent, ...]  # in order of time
    counts: Counts  # of all events, by source and verb, also of those that were not kept
    missing: int  # events that came and were not kept
    requests: tuple[RequestSeries, ...] = ()  # of generation loops, in the order in which they came
    missing_requests: int = 0  # those that came and were not kept
    batches: Mapping[str, tuple[Level, ...]] = field(default_factory=dict)  # by loop: time, requests, new tokens
    marks: tuple[tuple[int, str], ...] = ()  # time in ns and name of what began: "manage()", "generate()"


def resample(rows: Sequence[Row], start: int, stop: int, points: int) -> Series:
    """Resamples rows, in order of time, to `points` equal intervals of [start, stop) in ns; before the first row
    nothing existed.

    Each interval is shown by one row, so that its owners add up to what existed at one moment: of those in force
    during it, the one with the most pages in use, so that a peak is never lost between two points. ValueError where
    there is no interval.
    """
    if points < 1 or stop <= start:
        raise ValueError(f"{points} points between {start} and {stop} ns: the end must come after the start")
    chosen: list[Row] = []
    in_force: Row = (start, 0, 0, 0, 0, 0)
    position = 0
    for point in range(points):
        end = start + (stop - start) * (point + 1) // points
        begin = start + (stop - start) * point // points
        while position < len(rows) and rows[position][0] <= begin:
            in_force = rows[position]
            position += 1
        fullest = in_force
        while position < len(rows) and rows[position][0] < end:
            in_force = rows[position]
            fullest = max(fullest, in_force, key=_in_use)
            position += 1
        chosen.append(fullest)
    return Series(
        tuple((stop - start) * point / points / 1e9 for point in range(points)),
        {owner: tuple(row[index] for row in chosen) for index, owner in enumerate(OWNERS, start=1)},
    )


def _in_use(row: Row) -> int:
    return sum(row[2:])


R = TypeVar("R", Row, Level)


def thinned(rows: Sequence[R], limit: int) -> list[R]:
    """Returns no more than half of `limit` of the rows, which are in order of time; all where there are no more than
    `limit`.

    Of each of some equal intervals there remain the last row, the one with the most pages in use, and for each column
    the one with the most; and the first of all: so no peak is lost, and at the end of each interval all is as it was.
    ValueError where the limit is too small for a single interval.
    """
    if len(rows) <= limit:
        return list(rows)
    columns = range(1, len(rows[0]))
    intervals = limit // 2 // (len(columns) + 3)
    if not intervals:
        raise ValueError(f"{limit} rows are too few to thin to: at least {2 * (len(columns) + 3)}")
    start, length = rows[0][0], rows[-1][0] - rows[0][0] + 1
    kept = {0}
    for _, group in groupby(range(len(rows)), lambda index: (rows[index][0] - start) * intervals // length):
        within = list(group)
        kept |= {max(within, key=lambda index: rows[index][column]) for column in columns}
        kept |= {max(within, key=lambda index: sum(rows[index][2:])), within[-1]}
    return [rows[index] for index in sorted(kept)]


def fewer(events: Sequence[LoggedEvent], limit: int) -> list[LoggedEvent]:
    """Returns no more than half of `limit` of the events, in their order; all where there are no more than `limit`.

    Each source and verb keeps as many, or all that it has; of those that are too many the ones with the most pages.
    """
    if len(events) <= limit:
        return list(events)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, event in enumerate(events):
        groups.setdefault((event.source, event.verb), []).append(index)
    kept: list[int] = []
    room = limit // 2
    for left, group in zip(range(len(groups), 0, -1), sorted(groups.values(), key=len), strict=True):
        chosen = sorted(group, key=lambda index: events[index].pages, reverse=True)[: room // left]
        kept += chosen
        room -= len(chosen)
    return [events[index] for index in sorted(kept)]


_LINES: Final = 3  # of text, at most, with names of marks
_LINE: Final = 0.06  # of the height of a picture, for one of them
_LETTER: Final = 7.0  # points of its width, for a letter of them and its part of the margins
PICTURES: Final = (".svg", ".png")
_NAMES: Final = {"kv": "KV cache", "pending_free": "pending free (waits for what still uses it)", "free": "free, kept"}


def check_picture(path: str | Path) -> None:
    """Raises ConfigError where a picture could not be drawn to `path`, before any long work."""
    path = Path(path)
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"{path} has none of the suffixes of a picture: {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("drawing a picture needs matplotlib: pip install 'ballonet[demo]'")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no such folder")


@contextmanager
def picture(path: str | Path) -> Iterator[Any]:
    """Yields axes, and at the end writes what was drawn on them to `path`. ConfigError where that cannot be."""
    check_picture(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    try:
        yield axes
        axes.set_ylim(bottom=0)
        axes.set_title(textwrap.fill(axes.get_title(), 80), fontsize="medium")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)  # beside what is drawn, not on it
        figure.savefig(path, dpi=144)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def draw_curve(
    path: str | Path, points: Sequence[tuple[int, float]], title: str, asked: int, slo: float | None = None
) -> None:
    """Draws time per token against the budget to `path`. `points`: (bytes of budget, seconds per token); `asked`: the
    budget in question; `slo`: seconds. ConfigError."""
    with picture(path) as axes:
        name, unit = _unit(max(asked, *(size for size, _ in points)))
        axes.plot(
            [size / unit for size, _ in points],
            [1e3 * seconds for _, seconds in points],
            color="#3b6fb6",
            label="time per token",
        )
        axes.axvline(asked / unit, color="#e08a2c", label=f"the budget asked about, {format_size(asked)}")
        if slo is not None:
            axes.axhline(1e3 * slo, color="#404040", linestyle="--", label=f"the SLO, {format_time(slo)}")
        axes.set(xlabel=f"budget, {name}", ylabel="ms per token (lower is better)", title=title)


def draw_memory(path: str | Path, operations: int, live: Sequence[int], series: Mapping[str, Sequence[int]]) -> None:
    """Draws what allocators had of the driver over what was allocated to `path`. Bytes in equal parts of so many
    operations: `live`, allocated; `series`, by allocator. ConfigError."""
    with picture(path) as axes:
        unit_name, unit = _unit(max(map(max, (live, *series.values()))))
        for name, levels in (("allocated", live), *series.items()):
            places = [operations * part / len(levels) for part in range(len(levels) + 1)]
            sizes = [level / unit for level in levels]
            if name == "allocated":
                axes.stairs(sizes, places, fill=True, color="#d9d9d9", label=name)
            else:
                axes.stairs(sizes, places, baseline=None, linewidth=1.5, label=name)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel="operations", ylabel=f"{unit_name} (lower is better)", title="Memory taken from the driver")


def _unit(most: int) -> tuple[str, int]:
    """Returns the unit of an axis that goes to so many bytes, and its bytes."""
    return ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)


def draw_recording(path: str | Path, recording: SeriesRecording) -> None:
    """Draws pages by owner under the line of the budget to `path`. ConfigError."""
    with picture(path) as axes:
        span = recording.start, recording.stop
        lines = draw_pages(axes, recording.rows, recording.levels, recording.marks, span, recording.page_size)
        axes.set(xlabel="seconds", ylabel="MiB of device pages", title="Who owns the pages")
        axes.set_ylim(top=axes.get_ylim()[1] * (1 + _LINE * lines))  # the names of marks stand above


def draw_pages(
    axes: Any,
    rows: Sequence[Row],
    levels: Sequence[Level],
    marks: Sequence[tuple[int, str]],
    span: tuple[int, int],
    page_size: int,
) -> int:
    """Draws pages by owner in MiB on axes, the budget as a line above them and a line for each mark. `span`: first and
    last ns; the others: see SeriesRecording. Returns in how many lines of text names of marks stand; those for which
    there is no room have none."""
    start, stop = span

    def seconds(when: int) -> float:
        return (when - start) / 1e9

    series = resample(rows, start, stop, points=600)
    stacks = [[count * page_size / 2**20 for count in series.pages[owner]] for owner in COLOURS]
    labels = [_NAMES.get(owner, owner) for owner in COLOURS]
    axes.stackplot(series.seconds, stacks, labels=labels, colors=list(COLOURS.values()), step="post")
    times = [*(seconds(level[0]) for level in levels), seconds(stop)]
    budgets = [*(level[1] / 2**20 for level in levels), levels[-1][1] / 2**20]
    axes.step(times, budgets, where="post", color="black", linestyle="--", label="budget")
    axes.set_xlim(0, seconds(stop))
    per_letter = _LETTER / (72 * axes.figure.get_figwidth())  # of the width of the axes, and of the picture's margins
    ends = list[float]()  # where the last name of each line of text ends
    for when, name in marks:
        axes.axvline(seconds(when), color="#555555", linewidth=0.8)
        at, width = seconds(when) / seconds(stop), per_letter * (len(name) + 1)
        begin = at if at + width <= 1 else at - width
        line = next((line for line, end in enumerate(ends) if end <= begin), len(ends))
        if line == _LINES:
            continue
        ends[line : line + 1] = [begin + width]
        offset, side = (3, "left") if begin == at else (-3, "right")
        place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": (offset, -4 - 11 * line), "ha": side}
        place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0}  # over lines of other marks
        axes.annotate(name, (seconds(when), 1), va="top", fontsize="small", textcoords="offset points", **place)
    return len(ends)


SUFFIXES: Final = (".json", ".png")
VIEWER: Final = "https://ui.perfetto.dev"

TraceEvent = dict[str, Any]


def summary(recording: SeriesRecording) -> str:
    """Returns a sentence: when memory was short first, what lay on the host, what moving took, who found no page."""
    counts = recording.counts
    taking = [event for event in recording.events if event.source != "budget" and event.verb != "restore"]
    spilled = sum(count.pages for verb, count in counts.get("spill", {}).items() if verb == "reclaim")
    moving = sum(count.seconds for source, verbs in counts.items() if source != "budget" for count in verbs.values())
    refused = sum(count.events for verb, count in counts.get("refuse", {}).items() if verb == "reclaim")
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
        check_picture(path)


def is_picture(path: str) -> bool:
    """Returns whether the suffix asks for a picture."""
    return path.lower().endswith(".png")


def write(recording: SeriesRecording, path: str) -> None:
    """Writes the recording as the suffix says. OSError, ConfigError."""
    if is_picture(path):
        written(lambda: draw_recording(path, recording), path)
    else:
        written(lambda: put(as_trace(recording), path), path)


def written(act: Callable[[], object], path: str, tries: int = 30, rest: float = REST) -> None:
    """Writes a file by `act`; where the disk is full says so on stderr, and tries again for a while. OSError."""
    for left in range(tries, -1, -1):
        try:
            act()
            return
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not left:
                raise
            if left == tries:
                print(
                    f"ballonet: there is no room for {path}: it is tried again for {format_time(tries * rest)}",
                    file=sys.stderr,
                )
            time.sleep(rest)


def put(text: str, path: str) -> None:
    """Writes a file all at once: a reader sees the old file or the new one. OSError."""
    part = f"{path}.{os.getpid()}.part"
    Path(part).unlink(missing_ok=True)
    try:
        with open(part, "x", encoding="utf-8") as file:  # no link that another user has put there is followed
            file.write(text)
        os.replace(part, path)
    finally:
        Path(part).unlink(missing_ok=True)


def _micro(recording: SeriesRecording, when: int) -> float:
    return max(0, when - recording.start) / 1e3


def _counters(recording: SeriesRecording) -> Iterator[TraceEvent]:
    """Yields one sample for each change of a value."""
    page = recording.page_size
    series: dict[str, Sequence[tuple[int, int]]] = {
        f"{owner.replace('_', ' ')}, bytes": [(row[0], row[column] * page) for row in recording.rows]
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
        name, args = f"{event.source}: {event.verb}", event.to_dict()
        if event.measured and isfinite(event.measured):
            end = event.when + round(event.measured * 1e9)
            yield from _slice(recording, name, event.source, f"decision {number}", event.when, end, args)
        else:
            instant = {"name": name, "cat": event.source, "ph": "i", "s": "p", "tid": 0}
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
