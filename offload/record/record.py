"""The performance record (Select-N §4.4): how long an iteration takes and how fast the link is, measured once and kept.

Iterations are measured with every layer resident, prefill and decode apart, at powers of two of batch and length. What
interval meets an SLO follows from that by arithmetic (plan.py), so one record serves every SLO and every budget;
the paper's table for one SLO is `intervals`.

Note [Never under]
    For a batch and length that were not measured the time of a listed point counts that is smaller in neither; of a
    point, the longest time of any that is larger in neither, should a measurement have been disturbed. So a looked-up
    time is never below what was measured for less work, and grows with batch and length.

Note [Learning from runs]
    A running model reports its times. One counts for the powers of two above its batch and length, and never for less
    than was measured there. Of the times that are remembered for a point the second longest counts: so a first
    iteration that loads kernels, or one that was disturbed, decides nothing by itself, and is forgotten. A time is
    forgotten for one of at least as much work, so that short prompts do not stand for long ones. What was learned is
    not written to the file: a machine that was busy for an hour is not slow for ever.

Note [As a rule]
    The times of Note [Never under] judge SLOs, and are too long for predictions. The time of an iteration as a rule is
    the median of those that did the most similar amount of work, of what is remembered of its point; of an even number
    the lower one of the middle, so that of the first two times it is not that of loading kernels.

Note [By pieces]
    A decode step by pieces of CUDA graphs takes a third of the time that it takes Python to launch it. So both have
    points of their own: "pieces" and "decode". Which of them counts says whoever asks (hooks/measure/timings.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, get_args

from ...allocator.errors import NotTrusted
from ...allocator.trusted import TrustedFolder, tell
from ..policy.plan import Costs, meeting

Phase = Literal["prefill", "decode", "pieces"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")  # of iterations; see Note [By pieces]
FORMAT: Final = 2  # of the file
WINDOW: Final = 16  # times that are remembered of what runs, for each point. Chosen
NEAREST: Final = 5  # of these, nearest in work, say what an iteration takes as a rule. Chosen: odd, for a median
GRID: Final = 0.002  # seconds: SLOs are listed at multiples of it (Select-N §4.4)


class Point(NamedTuple):
    """The size of an iteration: sequences, and tokens of each, held (decode, pieces) or new (prefill)."""

    phase: Phase
    batch: int
    length: int

    @property
    def corner(self) -> Point:
        """The listed point that the iteration counts for: powers of two that are no smaller (Select-N §4.4)."""
        return Point(self.phase, 1 << (self.batch - 1).bit_length(), 1 << (self.length - 1).bit_length())

    def counts_for(self, corner: Point) -> bool:
        """Is `corner` its corner? In one call, as this runs for each token."""
        return (
            self.phase == corner.phase
            and corner.batch < 2 * self.batch <= 2 * corner.batch
            and corner.length < 2 * self.length <= 2 * corner.length
        )


class Lesson(NamedTuple):
    """An observed time. `work`: sequences times tokens."""

    work: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Record:
    """A performance record. `key`: what it was measured for and on (model, device, driver, link, versions).
    `bandwidth`: bytes per second to the device. `seconds`: of one iteration, by point. `beside`: that `generate()`
    takes beside a decode step, and once beside the first forward, by phase, where measured. `copying`: seconds that
    computing loses to each second of copies, 0 where others copy. `entering`: seconds that the host takes for each
    layer that streams, 0 where not measured. `lessons`: times of runs since, which `time` remembers, by point, oldest
    first; `recent`: the last of them, newest first."""

    key: Mapping[str, str]
    bandwidth: float
    seconds: Mapping[Point, float] = field(default_factory=dict)
    beside: Mapping[Phase, float] = field(default_factory=dict, kw_only=True)
    copying: float = field(default=0.0, kw_only=True)
    entering: float = field(default=0.0, kw_only=True)
    lessons: Mapping[Point, Sequence[Lesson]] = field(default_factory=dict)
    recent: Mapping[Point, Sequence[Lesson]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = (self.bandwidth, *self.seconds.values())
        if not all(isinstance(time_, int | float) and 0 < time_ < math.inf for time_ in times):
            raise ValueError("a bandwidth or a time is not a positive number")
        beside = (*self.beside.values(), self.copying, self.entering)
        if not all(isinstance(time_, int | float) and 0 <= time_ < math.inf for time_ in beside):
            raise ValueError("what is beside an iteration is no number of seconds")
        if not all(point.phase in get_args(Phase) and min(point[1:]) >= 1 for point in self.seconds):
            raise ValueError("a point has no known phase, or no sequences or tokens")

    @property
    def points(self) -> frozenset[Point]:
        """The points that have a time."""
        return frozenset(self.seconds) | frozenset(self.lessons)

    @property
    def decoding(self) -> Phase:
        """The phase of the times that decode steps of `generate()` were measured to take."""
        return "pieces" if any(point.phase == "pieces" for point in self.seconds) else "decode"

    def knows(self, point: Point) -> bool:
        """Are there enough lessons for the same listed point that one more changes little?"""
        return len(self.lessons.get(point.corner, ())) >= NEAREST

    def time(self, phase: Phase, batch: int, length: int) -> float | None:
        """Returns the seconds that such an iteration takes at most; None where no point listed is as large. See Note
        [Never under]."""
        ceilings = (point for point in self.points if point.phase == phase and point[1] >= batch and point[2] >= length)
        return min(map(self._at_most, _corners(ceilings)), default=None)

    def typical(self, phase: Phase, batch: int, length: int) -> float | None:
        """Returns the seconds that such an iteration takes as a rule, where such ran, or else at most; None where not
        known. See Note [As a rule]."""
        recent, work = self.recent.get(Point(phase, batch, length).corner), batch * length
        if not recent:
            return self.time(phase, batch, length)
        nearest = sorted(recent, key=lambda lesson: abs(lesson.work - work))[:NEAREST]
        return statistics.median_low(lesson.seconds for lesson in nearest)

    def prefill_token(self, tokens: int) -> float | None:
        """Returns the seconds for each token of a prefill of so many, by those that ran with the nearest number; None
        where none did."""
        ran = [lesson for point, lessons in self.recent.items() if point.phase == "prefill" for lesson in lessons]
        near = sorted(ran, key=lambda lesson: max(lesson.work, tokens) / min(lesson.work, tokens))
        nearest = near[:NEAREST]
        return statistics.median_low(lesson.seconds / lesson.work for lesson in nearest) if nearest else None

    def learned(self, point: Point, seconds: float) -> Self:
        """Returns the record with the time of an iteration, all layers being resident. See Note [Learning from runs].
        ValueError."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"an iteration takes a positive time, not {seconds}")
        corner, lesson = point.corner, Lesson(point.batch * point.length, seconds)
        lessons = _remembered(self.lessons.get(corner, ()), lesson, WINDOW)
        recent = (lesson, *self.recent.get(corner, ()))[:WINDOW]
        return replace(self, lessons={**self.lessons, corner: lessons}, recent={**self.recent, corner: recent})

    def with_bandwidth(self, bandwidth: float) -> Self:
        """Returns the record with the bandwidth as measured last. ValueError."""
        return replace(self, bandwidth=bandwidth)

    def _at_most(self, point: Point) -> float:
        below = (
            known for known in self.points if known[0] == point[0] and known[1] <= point[1] and known[2] <= point[2]
        )
        return max(max(self.seconds.get(known, 0.0), _believed(self.lessons.get(known, ()))) for known in below)


def _corners(points: Iterable[Point]) -> list[Point]:
    """Returns the points of one phase than which no other is smaller in batch and length: the others cannot take
    less."""
    corners: list[Point] = []
    for point in sorted(points):
        if not corners or point.length < corners[-1].length:
            corners.append(point)
    return corners


def _remembered(lessons: Sequence[Lesson], new: Lesson, window: int) -> tuple[Lesson, ...]:
    if len(lessons) < window:
        return (*lessons, new)
    oldest = next((n for n, lesson in enumerate(lessons) if lesson.work <= new.work), None)
    return tuple(lessons) if oldest is None else (*lessons[:oldest], *lessons[oldest + 1 :], new)


def _believed(lessons: Sequence[Lesson]) -> float:
    """Returns the seconds that count; 0 where there is no lesson."""
    return max((0.0, *sorted(lesson.seconds for lesson in lessons)[: max(1, len(lessons) - 1)]))


def on_grid(slo: float, grid: float = GRID) -> float:
    """Returns the SLO that is listed for this one, in seconds: the next multiple of `grid` below it, which is never
    looser; 0 for one that is below all."""
    return math.floor(slo / grid * (1 + 1e-9)) * grid


def intervals(
    record: Record, phase: Phase, pages: Sequence[int], page_size: int, slo: float
) -> dict[tuple[int, int], int | None]:
    """Returns the paper's table 1: for each (batch, length) that is listed the smallest interval that meets the SLO
    (seconds), len(pages) + 1 where only the one that streams nothing does, None where none does."""
    table = {}
    for point in sorted(known for known in record.points if known.phase == phase):
        seconds = record.time(*point)
        assert seconds is not None
        costs = Costs(tuple(pages), seconds, page_size / record.bandwidth, record.entering)
        table[point.batch, point.length] = meeting(costs, on_grid(slo))
    return table


class Unusable(Exception):
    """Raised for a file without a usable record, with the reason: it is measured anew."""


class RecordMissing(Unusable):
    """Raised where there is no file."""


class RecordDamaged(Unusable):
    """Raised where the file is not what was written."""


def path_of(folder: Path, key: Mapping[str, str]) -> Path:
    """Returns the path of a record: one file for a model and device, whatever else of the key changes."""
    owner = json.dumps([key.get(name) for name in ("model", "device")])
    return folder / f"record-{hashlib.sha256(owner.encode()).hexdigest()[:16]}.json"


def save(record: Record, path: Path) -> None:
    """Writes the file, as a whole or not at all: measurements, not lessons. OSError."""
    content = {
        "key": dict(record.key),
        "bandwidth": record.bandwidth,
        "points": [[*point, seconds] for point, seconds in sorted(record.seconds.items())],
        **({"beside": dict(record.beside)} if record.beside else {}),
        **({"copying": record.copying} if record.copying else {}),
        **({"entering": record.entering} if record.entering else {}),
    }
    text = json.dumps({"format": FORMAT, "checksum": _checksum(content), **content}, indent=1)
    TrustedFolder(path.parent).write(path.name, f"{text}\n".encode())


def load(path: Path, key: Mapping[str, str]) -> Record:
    """Reads the record. RecordMissing; RecordDamaged; Unusable where it is of another version, for another key, or not
    trusted."""
    try:
        document = json.loads(TrustedFolder(path.parent, make=False).read(path.name))
    except (FileNotFoundError, NotADirectoryError):
        raise RecordMissing(f"there is none yet in {path}") from None
    except NotTrusted as error:
        tell(str(error))
        raise Unusable(f"{path} is not trusted") from None
    except (OSError, ValueError) as error:
        raise RecordDamaged(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise RecordDamaged(f"{path} is damaged: it holds no object of JSON")
    if document.get("format") != FORMAT:
        raise Unusable(f"{path} was written by another version of ballonet")
    content: dict[str, Any] = {name: document.get(name) for name in ("key", "bandwidth", "points")}
    content |= {name: document[name] for name in ("beside", "copying", "entering") if name in document}
    if document.get("checksum") != _checksum(content):
        raise RecordDamaged(f"{path} is damaged: its checksum is wrong")
    if content["key"] != dict(key):
        differ = sorted(name for name in {*key, *content["key"]} if content["key"].get(name) != key.get(name))
        raise Unusable(f"{path} was measured for another {', '.join(differ)}")
    try:
        points = {Point(phase, batch, length): seconds for phase, batch, length, seconds in content["points"]}
        optional = {name: content[name] for name in ("beside", "copying", "entering") if name in content}
        return Record(content["key"], content["bandwidth"], points, **optional)
    except (TypeError, ValueError) as error:
        raise RecordDamaged(f"{path} is damaged: {error}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
