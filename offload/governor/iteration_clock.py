"""Times iterations, from the beginning of one to that of the next, in the device's time.

On a GPU the host begins an iteration when it launches it, many layers before the device gets there: the host's clock
tells how fast the host launches. So each beginning is a mark on the stream, and an interval is read once both of its
marks have passed, which may be iterations later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .activity import StreamMarks

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
