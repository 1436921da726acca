"""When each microbatch runs on each stage of a pipeline, and how long stages wait (KunServe Fig. 8). Pure.

Note [The timeline]
    Stage s begins microbatch k when it has ended k - 1, and stage s - 1 has ended k. Of n stages, n microbatches are
    under way at most: the first stage begins k when the last one has ended k - n, whose tokens it may need. The bubble
    is the part of the stages' time in which they wait. With m equal microbatches it is (n - 1) / (m + n - 1), which
    the start and the end of a pipeline cost: the floor that batches of unequal cost are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """The times, in seconds, at which each microbatch (first index) begins and ends on each stage (second index)."""

    begin: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last stage has ended the last microbatch; 0 without any."""
        return self.end[-1][-1] if self.end else 0.0

    @property
    def bubble(self) -> float:
        """Fraction of the time of all stages in which they wait, from the first microbatch's begin to the end."""
        if not self.seconds:
            return 0.0
        work = sum(sum(ends) - sum(begins) for begins, ends in zip(self.begin, self.end, strict=True))
        return 1 - work / (len(self.end[0]) * self.seconds)


def pipeline_time(seconds: Iterable[Sequence[float]]) -> PipelineTime:
    """Returns the timeline of microbatches that take `seconds[k][s]` on stage s. ValueError where they have different
    numbers of stages. See Note [The timeline]."""
    begin: list[tuple[float, ...]] = []
    end: list[tuple[float, ...]] = []
    for number, second in enumerate(seconds):
        stages = len(second)
        if not stages or (end and len(end[-1]) != stages):
            raise ValueError(f"microbatch {number} has {stages} stages, and all need the same number from 1 on")
        free = end[-1] if end else (0.0,) * stages
        arrived = end[number - stages][-1] if number >= stages else 0.0
        begins, ends = [], []
        for stage, took in enumerate(second):
            begins.append(max(free[stage], arrived))
            arrived = begins[-1] + took
            ends.append(arrived)
        begin.append(tuple(begins))
        end.append(tuple(ends))
    return PipelineTime(tuple(begin), tuple(end))


def evenly(costs: Iterable[float], stages: int) -> list[tuple[float, ...]]:
    """Returns the seconds of each microbatch on each of `stages` with equally many layers."""
    return [(cost / stages,) * stages for cost in costs]


def floor(microbatches: int, stages: int) -> float:
    """Returns the bubble of so many microbatches of equal cost."""
    return (stages - 1) / (microbatches + stages - 1)
