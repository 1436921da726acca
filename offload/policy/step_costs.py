"""The cost of a batch's step, learned from steps that ran, the batch with the most tokens per second, and whether the
SLOs of requests that are served together can be kept (Select-N §4.5). Pure: times of steps in, decisions out.

Note [A row without sequences]
    Attention that does not know the sequences of a packed row (sdpa and eager in transformers' continuous batching)
    compares each new token with each key that is read, whosever it is. So a step takes

        seconds = fixed + new * row + read * key + new * read * pair

    where `new` are its new tokens and `read` the tokens whose keys it reads. Kernels that know the sequences have
    pair = 0: then no batch is too large. Otherwise a batch of n requests with L tokens each is fastest, in tokens per
    second, at n = sqrt(fixed / (pair * L)); and prompts are faster in a step of their own as soon as the pairs that
    they make with other requests' keys take longer than `fixed`.

Note [What memory costs]
    More requests need more memory. Layers of the model may give it, which are then copied in each step, or the host, on
    which KV is then read. Each of those pages has a part of its own in what a step takes: copies that hide behind the
    computation cost nothing. So the two are compared by what they did, on this machine. What a page of layers costs
    before any was copied in a step is assumed: nothing where copies can hide, and where operators are complete when
    they return, so that nothing hides, what the link takes. One of KV on the host costs at least what the link takes,
    where kernels read over it. To learn it by trying is expensive: evicted weights are restored late, and admitted
    requests stay. What other models use and would lack costs as much as KV on the host: they wait for it, in each of
    their steps.

Note [What is remembered]
    The last steps of each size, by powers of two of `new` and `read`: a loop that has run batches of one size for an
    hour still knows what others took. Errors count relative to the time, so that long steps say no more than short
    ones. No part is negative: of all sets of parts whose least squares are positive the one that fits best counts.

Note [What is promised]
    `ttft`: seconds from a request's arrival to its first token, of which those that it has waited are gone. `tpot`:
    seconds of a step in which it decodes, with whatever else is in that step. What a step takes is measured from its
    own begin to its own end: until the next one begins other loops may have had the device. Whether an SLO was missed
    is judged by the time that passes for whoever waits, from begin to begin. Where nothing has been measured yet
    nothing is refused.

Note [Who may begin]
    A request begins where the step of all that decode, and of it, keeps the strictest tpot among them. It waits where
    it does not, and is refused where it would not even alone, or where its prompt cannot be done any more in the time
    that is left. A running request is never evicted for a new one.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from operator import mul
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .tuning import DEFAULT, Serving

REMEMBERED: Final = 4  # steps of each size. Chosen


@dataclass(frozen=True, slots=True)
class Step:
    """A step: `new` tokens, and tokens whose keys are `read`, the new ones among them; pages of layers that are copied
    to the device (`copied`), and of KV that is read on the host (`away`). `compared`: pairs of a new token and a read
    one; None: each new with each read, as in a packed row."""

    new: int
    read: int
    copied: int = 0
    away: int = 0
    compared: int | None = None

    @classmethod
    def of(cls, sequences: Iterable[tuple[int, int]]) -> Step:
        """The step of sequences that have so many new tokens each and hold so many before."""
        new = read = 0
        for count, held in sequences:  # in one call, as each step asks
            new += count
            read += count + held
        return cls(new, read)

    @classmethod
    def in_rows(cls, phase: str, batch: int, length: int) -> Step:
        """The step of `generate()`, in which each sequence has a row: prompts of `length` tokens in the phase
        "prefill", else a token each behind so many."""
        new, read = (length, length) if phase == "prefill" else (1, length + 1)
        return cls(batch * new, batch * read, compared=batch * new * read)

    def __add__(self, other: Step) -> Step:
        return Step(
            self.new + other.new, self.read + other.read, max(self.copied, other.copied), self.away + other.away
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds: of a step whatever is in it, of a new token, of a token that is read, of a pair of both; of a page of
    layers that is copied, and of a page of KV on the host."""

    fixed: float
    row: float
    key: float
    pair: float
    copied: float = 0.0
    away: float = 0.0

    def seconds(self, step: Step) -> float:
        """Seconds of the step."""
        return math.fsum(map(mul, astuple(self), _sizes(step)))

    def prefill(self, tokens: int, batch: int) -> float:
        """Seconds of the steps in which so many tokens of a prompt are computed alone, `batch` at a time."""
        return sum(
            self.seconds(Step(min(batch, tokens - at), min(tokens, at + batch))) for at in range(0, tokens, batch)
        )


class StepCosts:
    """The costs of one model's steps, as learned. Used by the thread that schedules."""

    def __init__(
        self, tuning: Serving = DEFAULT.serving, assumed: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    ) -> None:
        """`assumed`: seconds of a page of layers, as long as no step has copied any, and of one of KV on the host at
        least."""
        self._assumed = assumed
        self._copying = False  # has any step copied pages of layers?
        # the fitted parts; `fixed` includes the copies of layers that stream now; None: too few steps ran
        self.parts: Parts | None = None
        self._fitted: Parts | None = None
        self._tuning = tuning
        self._seen: dict[tuple[int, ...], deque[tuple[Step, float]]] = {}
        self._fresh = 0  # steps since `parts` was worked out

    def observe(self, step: Step, seconds: float) -> None:
        """Notes what a step took. See Note [What is remembered]."""
        if seconds <= 0 or step.new < 1:
            return
        self._copying = self._copying or step.copied > 0
        self._seen.setdefault(_size(step), deque(maxlen=REMEMBERED)).append((step, seconds))
        self._fresh += 1
        if self._fresh >= self._tuning.refit:
            self._fresh = 0
            self._fitted = fitted([sample for group in self._seen.values() for sample in group])
        if (parts := self._fitted) is not None:
            self.parts = replace(parts, fixed=parts.fixed + parts.copied * step.copied, copied=0.0)

    def settled(self, step: Step) -> bool:
        """Is it known what such a step takes, so that now and then one is timed?"""
        return self._fitted is not None and len(self._seen.get(_size(step), ())) == REMEMBERED

    @property
    def error(self) -> float | None:
        """The median relative error of `parts` over the steps that are remembered; None where there are no parts."""
        parts = self._fitted
        if parts is None:
            return None
        seen = [sample for group in self._seen.values() for sample in group]
        return statistics.median(abs(parts.seconds(step) / seconds - 1) for step, seconds in seen)

    @property
    def fixed(self) -> float:
        """Seconds of a step whatever is in it, infinity where that is not known."""
        return math.inf if self._fitted is None else self._fitted.fixed

    def largest(self, length: float) -> int | None:
        """Returns the largest batch of decoding requests that is fastest, where they hold so many tokens on average;
        None where no number is too large, or it is not known."""
        parts = self.parts
        if parts is None or not parts.pair or length <= 0:
            return None
        return max(1, round(math.sqrt(parts.fixed / (parts.pair * length))))

    def slower(self, requests: int, length: float) -> bool:
        """Are so many requests slower, by more than is worth the wait, than the largest batch?"""
        most, parts = self.largest(length), self.parts
        if most is None or parts is None or requests <= most:
            return False
        rates = [n / parts.seconds(Step(n, round(n * (length + 1)))) for n in (most, requests)]
        return rates[0] > rates[1] * (1 + self._tuning.gain)

    def apart(self, one: Step, other: Step) -> bool:
        """Do two steps, one after the other, take less than one with both?"""
        parts = self.parts
        return parts is not None and parts.seconds(one) + parts.seconds(other) < parts.seconds(one + other)

    def faster(self, one: Step, other: Step) -> bool:
        """Does a step in which as many requests decode as it has new tokens make more tokens per second than another?
        See Note [What memory costs]."""
        parts = self._assuming(self._fitted)
        return parts is not None and one.new * parts.seconds(other) > other.new * parts.seconds(one)

    def readable(self, step: Step, seconds: float) -> float:
        """Returns how many pages of KV on the host a step may read, whatever it reads by now, so that it takes no
        longer than so many seconds; infinity where it is not known what one costs."""
        parts = self._assuming(self.parts)
        if parts is None or not parts.away:
            return math.inf
        return max(0.0, (seconds - parts.seconds(replace(step, copied=0, away=0))) // parts.away)

    def _assuming(self, parts: Parts | None) -> Parts | None:
        """Returns parts, with what is assumed of copies as long as no step has shown any. A page on the host never
        costs less than is assumed: few steps read any, and most of those few compute prompts."""
        if parts is None:
            return None
        copied, away = self._assumed()
        return replace(parts, copied=parts.copied if self._copying else copied, away=max(parts.away, away))


def _size(step: Step) -> tuple[int, ...]:
    """Returns as which size the step is remembered. See Note [What is remembered]."""
    return step.new.bit_length(), step.read.bit_length(), step.copied.bit_length(), step.away.bit_length()


def _sizes(step: Step) -> tuple[int, ...]:
    """Returns how much a step has of each part."""
    pairs = step.new * step.read if step.compared is None else step.compared
    return 1, step.new, step.read, pairs, step.copied, step.away


def fitted(seen: list[tuple[Step, float]]) -> Parts | None:
    """Fits the parts to steps; None for fewer steps than there are parts of a step in memory."""
    if len(seen) < 4:
        return None
    rows = np.array([_sizes(step) for step, _ in seen], dtype=float)
    coefficients = least_squares(rows, np.array([seconds for _, seconds in seen]))
    return None if coefficients is None else Parts(*coefficients)


def least_squares(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, ...] | None:
    """Returns the coefficients (one for each column) whose products with `rows` (samples x columns) come closest to
    `seconds` (samples), errors relative to them: a long sample says no more than a short one. Of all sets of columns
    whose least squares are positive the one that fits best counts, so few columns only. None where no set has any."""
    relative = rows / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    known = np.flatnonzero(scale).tolist()
    scaled, ones = relative / np.where(scale, scale, 1), np.ones(len(seconds))
    best, least = None, math.inf
    for count in range(1, len(known) + 1):
        for chosen in combinations(known, count):
            coefficients = np.linalg.lstsq(scaled[:, chosen], ones, rcond=None)[0]
            error = float(np.sum((scaled[:, chosen] @ coefficients - ones) ** 2))
            if (coefficients > 0).all() and error < least * (1 - 1e-9):
                least, best = error, dict(zip(chosen, coefficients.tolist(), strict=True))
    if best is None:
        return None
    return tuple(best.get(n, 0.0) / (float(scale[n]) or 1.0) for n in range(len(scale)))


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
