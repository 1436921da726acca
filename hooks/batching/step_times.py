"""How long the steps of a loop take by themselves: from their begin to their end on the device, whatever the host or
other loops do before the next one begins, and without the time in which the driver moved pages meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...offload.policy.step_costs import Step
from ..device.streams import Marks
from ..measure.pace import PENDING


class StepTimes:
    """The times of one loop's steps, on the thread that computes them."""

    def __init__(self, marks: Marks, driver: Callable[[], int]) -> None:
        """`driver`: returns the ns that the calling thread has spent in the driver so far."""
        self._marks = marks
        self._driver = driver
        self._begun: tuple[Step, Any, int] | None = None
        self._ended: deque[tuple[Step, Any, Any, float]] = deque()

    def begin(self, step: Step, stream: Any = None) -> None:
        """Begins a step whose work goes to `stream`, None for the current one; one that has not ended is forgotten."""
        self.forget()
        if not self._marks.capturing():
            with on(stream):
                self._begun = step, self._marks.mark(), self._driver()

    def end(self, stream: Any = None) -> None:
        """Ends the step that was begun, if any, once all of its work is submitted."""
        begun, self._begun = self._begun, None
        if begun is not None:
            step, first, driver = begun
            moved = 0.0 if self._marks.ahead else (self._driver() - driver) / 1e9  # a GPU computes meanwhile
            with on(stream):
                self._ended.append((step, first, self._marks.mark(), moved))
            if len(self._ended) > PENDING:
                _, *marks, _ = self._ended.popleft()
                self._marks.release(marks)

    def forget(self) -> None:
        """Does not time the step that was begun."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._marks.release((begun[1],))

    def drain(self) -> list[tuple[Step, float]]:
        """Returns (step, seconds) of those that are over on the device too, oldest first."""
        measured = []
        while self._ended and not self._marks.capturing():
            step, first, last, moved = self._ended[0]
            if (times := self._marks.read((first, last))) is None:
                break
            self._ended.popleft()
            measured.append((step, times[-1] - moved))
        return measured


def on(stream: Any) -> AbstractContextManager[Any]:
    """A `with` block in which `stream` is the current one, where it is one of a GPU."""
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else nullcontext()
