"""SLOs of requests that are served together, and whether they can be kept (Select-N §4.5). Pure: times of steps in
(step_costs.py), decisions out.

Note [What is promised]
    `ttft`: seconds from a request's arrival to its first token, of which those that it has waited are gone. `tpot`:
    seconds of a step in which it decodes, with whatever else is in that step. What a step takes is measured from the
    beginning of one to that of the next, so that the time that Python takes is part of it: an SLO below that is refused
    rather than missed. Where nothing has been measured yet nothing is refused.

Note [Who may begin]
    A request begins where the step of all that decode, and of it, keeps the strictest tpot among them. It waits where
    it does not, and is refused where it would not even alone, or where its prompt cannot be done any more in the time
    that is left. A running request is never evicted for a new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .step_costs import Parts, Step


@dataclass(frozen=True, slots=True)
class RequestSLO:
    """The SLO of a request, in seconds; None where none is set. `arrived`: by the clock of the scheduler."""

    ttft: float | None = None
    tpot: float | None = None
    arrived: float = 0.0


@dataclass(frozen=True, slots=True)
class Nearest:
    """An SLO that cannot be kept, by its name, and the strictest that could be."""

    slo: str
    asked: float
    possible: float

    def __str__(self) -> str:
        return f"{self.slo} of {self.asked:.3g} s cannot be kept; the nearest that can is {self.possible:.3g} s"


NOTHING = RequestSLO()


def refused(parts: Parts | None, slo: RequestSLO, prompt: int, new: int, batch: int, now: float) -> Nearest | None:
    """Returns why a waiting request cannot have its SLO, even if it ran alone from now on; None where it can, or that
    is not known. `prompt`, `new`: its tokens; `batch`: the most tokens of one step."""
    if parts is None:
        return None
    if slo.tpot is not None and (least := parts.seconds(Step(1, prompt + new))) > slo.tpot:
        return Nearest("tpot", slo.tpot, least)
    if slo.ttft is not None:
        least = now - slo.arrived + parts.prefill(prompt, batch)
        if least > slo.ttft:
            return Nearest("ttft", slo.ttft, least)
    return None


def may_begin(parts: Parts | None, running: Iterable[tuple[int, RequestSLO]], tokens: int, slo: RequestSLO) -> bool:
    """May a request begin beside those that run, each with the tokens that it holds when it ends?"""
    together = [*running, (tokens, slo)]
    strictest = tightest(asked for _, asked in together).tpot
    if parts is None or strictest is None:
        return True
    step = Step.of((1, held) for held, _ in together)
    return len(together) == 1 or parts.seconds(step) <= strictest


def tightest(slos: Iterable[RequestSLO]) -> RequestSLO:
    """Returns the strictest of each kind of SLO."""
    known = list(slos)
    ttft = min((slo.ttft for slo in known if slo.ttft is not None), default=None)
    tpot = min((slo.tpot for slo in known if slo.tpot is not None), default=None)
    return RequestSLO(ttft, tpot)
