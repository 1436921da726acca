"""How much KV on the host the steps of a loop may read, so that none of them takes longer than those of the recent past
did without: what stands for an SLO in Algorithm 2 of eLLM (§4.4.2) where requests have none. Pure: steps and their
seconds in, pages and names out.

Note [The own past]
    Each step is a gap between two tokens for everybody who shares the device. A prompt's chunk makes long ones now and
    then, which whoever asks takes; KV that is read on the host makes long ones for as long as it lies there. So a step
    that reads some may take as long as the longest of late that read none, a maximum that fades by each step. It is not
    known before there was one, and then nothing is bound by it.

Note [Whose turn it is to read]
    A prompt goes to the host while a step in which all decode, and it too, stays within that. What lies there already
    may be more, as others took pages, or the bound has faded: then its requests decode in turns, as many in each step
    as stay within it, those first who have waited for most steps; requests whose KV is on the device are in each step.
    One that is too long for any step goes once it has waited for `Serving.patience` of them, or where nobody else
    could: so each goes on, and at most every so many steps is longer than the bound, by what one request reads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .step_costs import Step
from .tuning import DEFAULT, Serving


class StepBound:
    """The longest that a step of one loop may take. Used by the thread that schedules."""

    def __init__(self, tuning: Serving = DEFAULT.serving) -> None:
        self._tuning = tuning
        self._longest = 0.0

    @property
    def seconds(self) -> float:
        """Seconds; infinity where no step has shown any."""
        return self._longest or math.inf

    def pass_over(self, steps: int) -> None:
        """Notes that there were so many steps that took no longer than others, and were not timed."""
        self._longest *= self._tuning.fading**steps

    def observe(self, step: Step, seconds: float) -> bool:
        """Notes what a step took. Did it take longer than it may, by more than is noise, as it read KV on the host?"""
        if step.away:
            return seconds > self.seconds * (1 + self._tuning.gain)
        self._longest = max(seconds, self._longest * self._tuning.fading)
        return False


class ReadingTurns:
    """Whose KV on the host is read in the next step. See Note [Whose turn it is to read]."""

    def __init__(self, tuning: Serving = DEFAULT.serving) -> None:
        self._tuning = tuning
        self._waited: dict[str, int] = {}  # steps that each has waited for its turn

    def choose(self, pages: Mapping[str, int], most: float, others: bool) -> set[str]:
        """Returns the requests that read in the next step. `pages`: of each that could, on the host; `most`: that the
        step may read; `others`: has it any requests that read none?"""
        chosen = set[str]()
        for name in sorted(pages, key=lambda name: -self._waited.get(name, 0)):
            overdue = not chosen and self._waited.get(name, 0) >= self._tuning.patience
            if pages[name] <= most or overdue:
                chosen.add(name)
                most -= pages[name]
        if pages and not chosen and not others:
            chosen = {max(pages, key=lambda name: self._waited.get(name, 0))}
        self._waited = {name: self._waited.get(name, 0) + 1 for name in pages if name not in chosen}
        return chosen
