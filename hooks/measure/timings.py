"""The known times of one model's iterations: the record, and later measurements; and histograms of durations, as
Prometheus has them.

Note [By pieces or not]
    A model decodes by pieces of CUDA graphs within `generate()` and in generation loops, and eagerly in short calls and
    where pieces were refused. The next decode step is taken to be like the last one that was timed; before the first
    one, by pieces where the record has times of such. Where there is no time by pieces, of as many sequences and
    tokens, the longer eager one counts, so that no SLO is broken.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from ...offload.policy.plan import Plan
from ...offload.record.record import PHASES, Phase, Point, Record
from .pace import Measured

# Seconds: from a decode step of a tiny model to a prompt that waits for a minute, two or three to a decade. Chosen.
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)

# Iterations after which new times are told, and the part of the last that they differ by: each telling has all
# decisions made anew. Chosen.
_TELL: Final = 16
_NEWS: Final = 1 / 16


class Histogram:
    """Counts of durations by bucket. Any thread may add and read."""

    __slots__ = ("_bounds", "_counts", "_lock", "_total")

    def __init__(self, bounds: Sequence[float] = _BUCKETS) -> None:
        """`bounds`: the upper ends of the buckets, ascending, in seconds; one more bucket has all longer durations."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Counts one duration, in less than a microsecond, as it runs for each forward."""
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._total += seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: `bounds`, `counts` (of each bucket alone, one more than bounds), `seconds` (the
        sum)."""
        with self._lock:
            return {"bounds": list(self._bounds), "counts": list(self._counts), "seconds": self._total}


class Latencies:
    """How long the requests of one model took: from arrival to the first token (TTFT), and per token after that
    (TPOT). `lost`: steps of theirs that found no memory."""

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.tpot = Histogram()
        self.lost = 0


class RequestTimes:
    """Measures the requests of one generation loop for `latencies`."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._waiting: dict[str, float] = {}  # arrivals of requests without a token, in seconds
        self.lacks_token = self._waiting.__contains__  # does a request wait for its first token? In a call of C
        self._decoding: dict[str, float] = {}  # when requests had their first token

    def came(self, name: str, when: float) -> None:
        """Notes that a new request waits. `when`, here and below: seconds of one clock."""
        self._waiting[name] = when
        self._decoding.pop(name, None)

    def live(self, name: str) -> bool:
        """Has the request come, and not ended?"""
        return name in self._waiting or name in self._decoding

    def got(self, name: str, when: float, tokens: int) -> None:
        """Notes that the request has so many tokens now; does nothing for an unknown request."""
        if tokens and (came := self._waiting.pop(name, None)) is not None:
            self._latencies.ttft.add(max(0.0, when - came))
            self._decoding[name] = when

    def ended(self, name: str, when: float, tokens: int, finished: bool) -> None:
        """Notes the end of the request. Only requests that `finished` count for the latency per token."""
        if finished:
            self.got(name, when, tokens)
        self._waiting.pop(name, None)
        first = self._decoding.pop(name, None)
        if finished and first is not None and tokens > 1:
            self._latencies.tpot.add(max(0.0, when - first) / (tokens - 1))


class Timings:
    """The times of one model's iterations. Any thread may read them."""

    def __init__(self, bandwidth: Callable[[], float | None]) -> None:
        """`bandwidth`: returns the bytes per second of the link, None where it is not known."""
        self.record: Record | None = None
        self.last: dict[Phase, Measured] = {}  # by phase
        self._bandwidth = bandwidth
        self._lessons: deque[tuple[Point, float]] = deque()  # measurements to add to the record
        self._known: tuple[Record, Point] | None = None  # a listed point that this record knows
        self._pieces = True  # is the next decode step one by pieces? See Note [By pieces or not]
        self._histograms: dict[Phase, Histogram] = {phase: Histogram() for phase in PHASES}
        self._uncounted: deque[tuple[Phase, float]] = deque()  # seconds that no histogram has yet

    @property
    def entering(self) -> float:
        """Implements `IterationTimes.entering`."""
        return 0.0 if self.record is None else self.record.entering

    def seconds(self, point: Point) -> float | None:
        """Implements `IterationTimes.seconds`."""
        if not self._pieces:
            return None if self.record is None else self.record.time(*point)
        return self._look_up(Record.time, point)

    def typical(self, point: Point) -> float | None:
        """Implements `IterationTimes.typical`."""
        if not self._pieces:
            return None if self.record is None else self.record.typical(*point)
        return self._look_up(Record.typical, point)

    def _look_up(self, time: Callable[[Record, Phase, int, int], float | None], point: Point) -> float | None:
        record, (phase, batch, length) = self.record, point
        if record is None:
            return None
        seconds = time(record, "pieces", batch, length) if self._pieces and phase == "decode" else None
        return time(record, phase, batch, length) if seconds is None else seconds

    def note(self, measured: Measured, plan: Plan | None = None) -> bool:
        """Notes the times of a forward, under `plan`. Returns whether the record has changed."""
        point = measured.point
        if point is None or measured.seconds <= 0:
            return False
        if plan is not None and plan.streamed and self.record is not None and self.record.entering:
            resident = measured.seconds - len(plan.streamed) * self.record.entering
            measured = measured._replace(seconds=resident) if resident > 0 else measured
        self.last[point.phase] = measured
        self._uncounted.append((point.phase, measured.total))  # counted later, as this runs for each token
        decodes = point.phase == "decode"
        lesson = Point("pieces", *point[1:]) if decodes and measured.pieces else point
        self._lessons.append((lesson, measured.seconds))
        switched = decodes and measured.pieces is not self._pieces
        # Not each time: learning takes a hundred calls, and after a change all decisions are made anew.
        if not switched and len(self._lessons) < _TELL and (record := self.record) is not None:
            known = self._known
            if known is not None and record is known[0] and lesson.counts_for(known[1]):
                return False
            if record.knows(lesson):
                self._known = record, lesson.corner
                return False
        before = self.seconds(point)
        if switched:
            self._pieces = measured.pieces
        self.learn()
        now = self.seconds(point)
        return before is None or now is None or abs(now - before) > before * _NEWS

    def settled(self, point: Point) -> bool:
        """Is the time of such a decode step known, so that now and then one is timed?"""
        known = self._known
        return known is not None and known[0] is self.record and point.counts_for(known[1])

    def histograms(self) -> dict[Phase, Histogram]:
        """Returns the seconds that forwards took so far, stalls included, by phase."""
        with suppress(IndexError):  # there are no more
            while True:
                phase, seconds = self._uncounted.popleft()
                self._histograms[phase].add(seconds)
        return self._histograms

    def learn(self) -> None:
        """Adds the latest measurements to the record."""
        self.histograms()
        record = self.record or Record({}, self._bandwidth() or 1.0)
        with suppress(IndexError):  # there are no more, or another thread has taken the last one
            while True:
                record = record.learned(*self._lessons.popleft())
        self.record = record
