"""The known times of one model's iterations: the record, and later measurements."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ...offload.policy.tuning import WeightPlans
from ...offload.record.record import Phase, Point, Record
from .histogram import Histogram
from .pace import Measured


class Timings:
    """The times of one model's iterations. Any thread may read them."""

    def __init__(self, bandwidth: Callable[[], float | None], tuning: WeightPlans) -> None:
        """`bandwidth`: returns the bytes per second of the link, None where it is not known."""
        self.record: Record | None = None
        self.last: dict[Phase, Measured] = {}  # by phase
        self._bandwidth = bandwidth
        self._tuning = tuning
        self._lessons: deque[tuple[Point, float]] = deque()  # measurements to add to the record
        self._known: tuple[Record, Point] | None = None  # a listed point that this record knows
        self._histograms: dict[Phase, Histogram] = {"prefill": Histogram(), "decode": Histogram()}
        self._uncounted: deque[tuple[Phase, float]] = deque()  # seconds that no histogram has yet

    def seconds(self, point: Point) -> float | None:
        """Implements `IterationTimes.seconds`."""
        return None if self.record is None else self.record.time(*point)

    def typical(self, point: Point) -> float | None:
        """Implements `IterationTimes.typical`."""
        return None if self.record is None else self.record.typical(*point)

    def note(self, measured: Measured) -> bool:
        """Notes the times of a forward. Returns whether the record has changed."""
        point = measured.point
        if point is None or measured.seconds <= 0:
            return False
        self.last[point.phase] = measured
        self._uncounted.append((point.phase, measured.total))  # counted later, as this runs for each token
        self._lessons.append((point, measured.seconds))
        # Not each time: learning takes a hundred calls, and after a change all decisions are made anew.
        if len(self._lessons) < self._tuning.tell and (record := self.record) is not None:
            known = self._known
            if known is not None and record is known[0] and point.counts_for(known[1]):
                return False
            if record.knows(point):
                self._known = record, point.corner
                return False
        before = self.seconds(point)
        self.learn()
        now = self.seconds(point)
        return before is None or now is None or abs(now - before) > before * self._tuning.news

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
