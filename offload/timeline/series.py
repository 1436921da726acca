"""Pages by owner over time, and decisions: rows and events, resampled or thinned to a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal, TypeVar

from ...allocator.events import Counts, LoggedEvent

OWNERS = ("free", "weights", "activations", "kv", "retiring")
COLOURS: Final = {  # of owners, from the bottom up where they are stacked
    "weights": "#3b6fb6",
    "kv": "#e08a2c",
    "activations": "#58a55c",
    "retiring": "#b65a9a",
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
    counts: Counts  # of all events, by lever and verb, also of those that were not kept
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

    Each lever and verb keeps as many, or all that it has; of those that are too many the ones with the most pages.
    """
    if len(events) <= limit:
        return list(events)
    groups: dict[tuple[str, str], list[int]] = {}
    for index, event in enumerate(events):
        groups.setdefault((event.lever, event.verb), []).append(index)
    kept: list[int] = []
    room = limit // 2
    for left, group in zip(range(len(groups), 0, -1), sorted(groups.values(), key=len), strict=True):
        chosen = sorted(group, key=lambda index: events[index].pages, reverse=True)[: room // left]
        kept += chosen
        room -= len(chosen)
    return [events[index] for index in sorted(kept)]
