"""A cost of chunks, fitted to batches that ran (KunServe §4.3). Pure.

Note [What is fitted]
    The time of a batch is linear in the coefficients of its chunks' cost, so batches of any shape are samples. No
    coefficient is negative, and errors count relative to the time (step_costs.py).

    Attention may know the sequences of a batch, or not (chunk_cost.py, Note [Pairs of different requests]). Where it
    does not, four coefficients say what any batch takes. Where it does, batches in which all requests decode are fitted
    first; their cost is subtracted from the other batches, and the rest is fitted. Four forms are tried for each of
    the two: Eq. 1, and Eq. 1 with `square`, with `prefix`, with both. Where some batches had one new token and others
    more, another coefficient is fitted for that (chunk_cost.py, Note [One row]).

    More coefficients always fit their own samples better. So every fourth sample is held out, the form is chosen by
    cross-validation among the others, and the reported error is that of the held-out samples. The returned cost is
    then chosen and fitted in the same way from all samples.

    Measured on a CPU (sdpa, which knows no sequences; 61 batches of prompts and decoding requests): 2 to 4 % held out
    with pairs of different requests, 17 to 21 % without.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..step_costs import Step, least_squares
from ..tuning import DEFAULT, Replicas
from .chunk_cost import ChunkCost, is_decode


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch that ran: its chunks, (tokens before, new tokens) each, and its seconds."""

    chunks: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted `cost`, and its mean relative error on held-out batches: on all, on those with parts of prompts, and on
    those that only decode (None without any)."""

    cost: ChunkCost
    error: float
    prefill_error: float
    decode_error: float | None


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of the cost: which optional coefficients it has. `lone`: one for batches with more than one row."""

    square: bool
    prefix: bool
    lone: bool = False

    def row(self, chunks: Sequence[tuple[int, int]]) -> list[float]:
        """Returns the factors of the coefficients for a batch."""
        pairs = float(sum(before * new for before, new in chunks))
        own = sum(new * new + new for _, new in chunks) / 2
        optional = [own] * self.square + [float(sum(before for before, _ in chunks))] * self.prefix
        optional += [_more(chunks)] * self.lone
        return [pairs if self.square else pairs + own, float(sum(new for _, new in chunks)), 1.0, *optional]

    def cost(self, coefficients: Sequence[float]) -> ChunkCost:
        """Returns the cost with these coefficients."""
        alpha, beta, gamma, *optional = coefficients
        lone = optional.pop() if self.lone else 0.0
        square = optional[0] if self.square else None
        prefix = optional[-1] if self.prefix else 0.0
        return ChunkCost(alpha, beta, gamma + lone, square, prefix, lone=lone)


Way = Callable[[Sequence[Sample]], ChunkCost]  # fits a cost to batches

_FORMS = tuple(_Form(square, prefix) for square in (False, True) for prefix in (False, True))


def fit(samples: Sequence[Sample], tuning: Replicas = DEFAULT.replicas) -> Fit:
    """Returns the cost and its held-out errors. ValueError where there are too few batches, or new tokens take no time
    in them. See Note [What is fitted]."""
    decoding, filling = _kinds(samples)
    if len(filling) < tuning.samples:
        raise ValueError(f"{len(filling)} batches with prompts are too few to fit a cost: give {tuning.samples}")
    parts = [_held_out(batches, tuning.folds) for batches in (filling, decoding)]
    rest = [other for others, _ in parts for other in others]
    apart = len(decoding) >= tuning.samples
    made, trial = (_best(batches, apart, tuning) for batches in (samples, rest))
    errors = [[_error(trial, sample) for sample in held] for _, held in parts]
    return Fit(
        made,
        statistics.fmean([*errors[0], *errors[1]]),
        statistics.fmean(errors[0]),
        statistics.fmean(errors[1]) if errors[1] else None,
    )


def _kinds(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Returns the batches in which all requests decode, and the others."""
    kinds: tuple[list[Sample], list[Sample]] = [], []
    for sample in samples:
        kinds[not all(is_decode(*chunk) for chunk in sample.chunks)].append(sample)
    return kinds


def _best(samples: Sequence[Sample], apart: bool, tuning: Replicas) -> ChunkCost:
    """Returns the cost with sequences or without, whichever predicts better. `apart`: decoding batches get a cost of
    their own. ValueError where new tokens take no time."""
    ways: tuple[Way, ...] = (partial(_by_sequence, apart=apart, tuning=tuning), _packed)
    cost = min(ways, key=lambda way: _validated(way, samples, tuning.folds))(samples)
    if not cost.within + cost.beta:
        raise ValueError("the batches do not say how long new tokens take: give prompts of several lengths")
    return cost


def _packed(samples: Sequence[Sample]) -> ChunkCost:
    """Returns the fitted cost of attention that does not know the sequences."""
    sizes = [Step.of((new, before) for before, new in sample.chunks) for sample in samples]
    lone = _tells_of_one(samples)
    rows = [[1.0, float(size.new), float(size.read), float(size.new * size.read)] for size in sizes]
    fixed, row, key, pair, *more = _solved(
        [[*values, *[_more(sample.chunks)] * lone] for values, sample in zip(rows, samples, strict=True)], samples
    )
    saved = sum(more, 0.0)
    return ChunkCost.packed(fixed + saved, row, key, pair, saved)


def _by_sequence(samples: Sequence[Sample], apart: bool, tuning: Replicas) -> ChunkCost:
    """Returns the fitted cost of attention that knows the sequences."""
    decoding, filling = _kinds(samples)
    decode = _chosen(decoding, tuning) if apart else None
    rest = [sample for sample in (_without(sample, decode) for sample in filling) if sample.seconds > 0]
    return replace(_chosen(rest, tuning), decode=decode)


def _without(sample: Sample, decode: ChunkCost | None) -> Sample:
    """Returns the sample without its decoding requests and their seconds."""
    if decode is None:
        return sample
    known = sum(decode.added(*chunk) for chunk in sample.chunks if is_decode(*chunk))
    return Sample(tuple(chunk for chunk in sample.chunks if not is_decode(*chunk)), sample.seconds - known)


def _chosen(samples: Sequence[Sample], tuning: Replicas) -> ChunkCost:
    """Returns the cost of the simplest form whose error is close to the least, fitted to all samples."""
    forms = [replace(form, lone=lone) for lone in (False, True)[: 1 + _tells_of_one(samples)] for form in _FORMS]
    errors = {form: _validated(partial(_fitted, form), samples, tuning.folds) for form in forms}
    least = min(errors.values())
    form = next(candidate for candidate in forms if errors[candidate] <= least * (1 + tuning.simpler) + tuning.exact)
    return _fitted(form, samples)


def _validated(way: Way, samples: Sequence[Sample], folds: int) -> float:
    """Returns the mean relative error in cross-validation: `way` fits all folds but one, and is tested on that one."""
    errors = []
    for number in range(folds):
        rest, held = _held_out(samples, folds, number)
        cost = way(rest)
        errors += [_error(cost, sample) for sample in held]
    return statistics.fmean(errors)


def _fitted(form: _Form, samples: Sequence[Sample]) -> ChunkCost:
    return form.cost(_solved([form.row(sample.chunks) for sample in samples], samples))


def _solved(rows: Sequence[Sequence[float]], samples: Sequence[Sample]) -> tuple[float, ...]:
    coefficients = least_squares(np.array(rows), np.array([sample.seconds for sample in samples]))
    assert coefficients is not None  # a constant alone fits times above 0
    return coefficients


def _more(chunks: Sequence[tuple[int, int]]) -> float:
    """Returns 1 where a batch has more than one new token, else 0."""
    return float(sum(new for _, new in chunks) > 1)


def _tells_of_one(samples: Sequence[Sample]) -> bool:
    """Returns whether some samples have one new token and others more."""
    return len({_more(sample.chunks) for sample in samples}) == 2


def _held_out(samples: Sequence[Sample], folds: int, number: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Returns (the other samples, every `folds`-th sample from `number` on)."""
    rest = [sample for n, sample in enumerate(samples) if n % folds != number]
    return rest, list(samples[number::folds])


def _error(cost: ChunkCost, sample: Sample) -> float:
    return abs(cost.batch(sample.chunks) / sample.seconds - 1)
