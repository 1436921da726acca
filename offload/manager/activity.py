"""Whether a model or a cache is in use, and how long its iterations take, by the progress of the device.

Iterations are timed from the beginning of one to that of the next. On a GPU the host begins one when it launches it,
many layers before the device gets there: the host's clock tells how fast the host launches. So each beginning is a mark
on the stream, and an interval is read once both of its marks have passed, which may be iterations later.

Note [The end mark]
    On a GPU a forward returns once it has been launched: a prefill of two seconds, or a decode step that takes longer
    than the pause after which a client counts as idle, still runs when the host has long gone on. So each forward ends
    with a mark on its stream, and its client is in use until that has passed, and for the pause after it. When a mark
    passed is seldom seen at that moment: it is worked out from the device's own time between two marks. `_offset` is
    what ties that to the host's clock: no mark passes before it is recorded, so each one recorded may raise it, and one
    recorded while the device had nothing to do makes it exact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class StreamMarks(Protocol):
    """Moments in the work of this thread's current stream."""

    def capturing(self) -> bool:
        """Is the current stream's work being captured?"""

    def mark(self) -> Any:
        """Records the moment at which all that was submitted so far is done."""

    def passed(self, marks: Iterable[Any]) -> bool:
        """Have all these marks passed?"""

    def seconds(self, first: Any, last: Any) -> float:
        """Seconds between two marks that have passed."""

    def release(self, marks: Iterable[Any]) -> None:
        """Frees the events under marks."""


@dataclass(slots=True, eq=False)
class StreamMark:
    """A mark, and when it was recorded, in seconds of the host's clock. `passed`: when it passed, None while it has
    not, as far as known; `since`: for the end of a forward, a mark that passed as it was recorded."""

    moment: Any
    recorded: float
    since: StreamMark | None = None
    passed: float | None = None


class Progress:
    """The progress of a device, on the host's clock. `marks`: None where an operator is complete when it returns.
    `end` may be called on any thread, at any moment; callers of the others hold the manager's lock."""

    def __init__(self, marks: StreamMarks | None, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self.ahead = marks is not None  # does the host go on while the device does what it was given?
        self._marks = marks
        self._clock = clock
        self._idle: StreamMark | None = None  # recorded when the device had nothing to do
        self._pending: list[StreamMark] = []

    def begin(self) -> None:
        """Notes that this thread is about to launch a forward."""
        marks = self._marks
        if marks is None or marks.capturing():
            return
        self.look()
        if not self._pending:
            before, self._idle = self._idle, StreamMark(marks.mark(), self._clock())
            if before is not None:
                marks.release((before.moment,))

    def end(self) -> StreamMark | None:
        """Marks the end of what this thread has launched; None where that is done already, or is being captured."""
        marks = self._marks
        if marks is None or self._idle is None or marks.capturing():
            return None
        mark = StreamMark(marks.mark(), self._clock(), self._idle)
        self._pending.append(mark)
        return mark

    def look(self) -> None:
        """Finds out which ends have passed."""
        marks = self._marks
        for end in tuple(self._pending):
            assert marks is not None
            assert end.since is not None
            if marks.passed((end.since.moment, end.moment)):
                at = end.since.recorded + marks.seconds(end.since.moment, end.moment)
                end.passed = max(end.recorded, min(at, self._clock()))
                self._pending.remove(end)
                marks.release((end.moment,))


class Activity:
    """When a client was in use last. `ended` may be called on any thread, at any moment; callers of the others hold the
    manager's lock."""

    def __init__(self, progress: Progress | None = None) -> None:
        """`progress`: of the device; None for a client that never runs."""
        self._progress = progress
        self.at = -math.inf  # by its iterations, as far as known; set where one begins
        self._ends: list[StreamMark] = []  # that have not passed, as far as known

    def ended(self, now: float, end: StreamMark | None) -> None:
        """Notes that an iteration has been launched, up to `end`."""
        self.at = max(self.at, now)
        if end is not None:
            self._ends.append(end)

    def last(self, now: float) -> float:
        """Returns when the client was in use last: now, while the device has not done all of it."""
        if self._ends and self._progress is not None:
            self._progress.look()
            for end in tuple(self._ends):
                self.at = max(self.at, now if end.passed is None else end.passed)
                if end.passed is not None:
                    self._ends.remove(end)
        return self.at


Tag = TypeVar("Tag")


class Intervals(Generic[Tag]):
    """The intervals of one thread's iterations, each with its caller's tag."""

    def __init__(self, marks: StreamMarks | None, clock: Callable[[], float], pending: int) -> None:
        """`marks`: None where an operator is complete when it returns; then `clock`, in seconds, tells. `pending`:
        beginnings that have not passed and are remembered."""
        self._marks = marks
        self._clock = clock
        self._pending = pending
        self._begun: deque[tuple[Any, Tag]] = deque()

    def begin(self, tag: Tag) -> list[tuple[Tag, float]]:
        """Notes that an iteration begins on this thread's current stream. Returns the tag and seconds of each that has
        ended since the last call, oldest first. An iteration that is captured does not count."""
        marks = self._marks
        if marks is None:
            self._begun.append((self._clock(), tag))
        elif marks.capturing():
            self.forget()
            return []
        else:
            self._begun.append((marks.mark(), tag))
        ended = []
        while len(self._begun) > 1 and (marks is None or marks.passed((self._begun[1][0],))):
            first, said = self._begun.popleft()
            last = self._begun[0][0]
            ended.append((said, float(last - first) if marks is None else marks.seconds(first, last)))
            if marks is not None:
                marks.release((first,))
        if len(self._begun) > self._pending:
            self._release(self._begun.popleft()[0])
        return ended

    def forget(self) -> None:
        """Drops the iterations that were not read yet."""
        while self._begun:
            self._release(self._begun.popleft()[0])

    def _release(self, mark: Any) -> None:
        if self._marks is not None:
            self._marks.release((mark,))
