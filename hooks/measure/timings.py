"""What iterations of one model took, as far as it is known: the record, and what was measured since."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ...offload.policy.tuning import WeightPlans
from ...offload.record.record import Phase, Point, Record
from .histogram import Histogram
from .pace import Measured


class Timings:
    """Grows by what is measured. Any thread may ask it."""

    def __init__(self, bandwidth: Callable[[], float | None], tuning: WeightPlans) -> None:
        """`bandwidth`: bytes per second of the link, where somebody knows."""
        self.record: Record | None = None
        self.last: dict[Phase, Measured] = {}  # by phase
        self._bandwidth = bandwidth
        self._tuning = tuning
        self._lessons: deque[tuple[Point, float]] = deque()  # that the record does not have yet
        self._known: tuple[Record, Point] | None = None  # a listed point that this record knows
        self._histograms: dict[Phase, Histogram] = {"prefill": Histogram(), "decode": Histogram()}
        self._uncounted: deque[tuple[Phase, float]] = deque()  # seconds that no histogram has yet

    def seconds(self, point: Point) -> float | None:
        """See IterationTimes.seconds."""
        return None if self.record is None else self.record.time(*point)

    def typical(self, point: Point) -> float | None:
        """See IterationTimes.typical."""
        return None if self.record is None else self.record.typical(*point)

    def note(self, measured: Measured) -> bool:
        """Notes what a forward took. Does the record say something else than before by now?"""
        point = measured.point
        if point is None or measured.seconds <= 0:
            return False
        self.last[point.phase] = measured
        self._uncounted.append((point.phase, measured.total))  # and counted later: this is called for each token
        self._lessons.append((point, measured.seconds))
        # Not each time: a lesson is a hundred calls, and after news all decisions are made anew.
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
        """Adds what was measured since to the record."""
        self.histograms()
        record = self.record or Record({}, self._bandwidth() or 1.0)
        with suppress(IndexError):  # there are no more, or another thread has taken the last one
            while True:
                record = record.learned(*self._lessons.popleft())
        self.record = record
