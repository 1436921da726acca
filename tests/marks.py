"""A stream that is behind its host, as a GPU's: for what goes by the moments at which it has done its work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .tuned import Clock

Mark = list[float]


class LateMarks:
    """Does one thing after the other; `launch` gives it work of so many seconds. A mark is the moment at which it is
    through with what it was given, by its own time, which is another one; what was given back is used again."""

    ahead = True

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = 0.0
        self.captures = False
        self.made = 0
        self._free: list[Mark] = []

    @property
    def in_use(self) -> int:
        return self.made - len(self._free)

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.clock.now) + seconds

    def capturing(self) -> bool:
        return self.captures

    def mark(self) -> Mark:
        assert not self.captures
        self.made += not self._free
        mark = self._free.pop() if self._free else []
        mark[:] = [max(self.free_at, self.clock.now) + 1000.0]
        return mark

    def passed(self, marks: Iterable[Mark]) -> bool:
        assert not self.captures
        return all(mark[0] - 1000.0 <= self.clock.now for mark in marks)

    def seconds(self, first: Mark, last: Mark) -> float:
        assert self.passed((first, last)), "the host would wait"
        return last[0] - first[0]

    def release(self, marks: Iterable[Mark]) -> None:
        self._free.extend(marks)

    def read(self, marks: Sequence[Mark]) -> list[float] | None:
        if not self.passed(marks):
            return None
        times = [self.seconds(marks[0], mark) for mark in marks]
        self.release(marks)
        return times
