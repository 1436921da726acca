"""A cost of chunks, fitted to batches that ran (KunServe §4.3). Pure.

Note [What is fitted]
    The time of a batch is linear in the coefficients of its chunks' cost, so batches of any shape are samples. Batches
    in which all requests decode are fitted first; what they take is subtracted from the others, of which the rest is
    fitted. No coefficient is negative, and errors count relative to the time (nonnegative.py).

    Four forms are tried: Eq. 1, and it with `square`, with `prefix`, with both. More coefficients always fit better
    what they were fitted to. So every fourth sample is held out, the form is chosen by cross-validation among the
    others, and the error that is reported is that of the samples that neither chose nor fitted anything. At last the
    chosen form is fitted to all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import nonnegative
from ..tuning import DEFAULT, Replicas
from .chunk_cost import ChunkCost, is_decode


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch that ran: its chunks (before, new), and what it took in seconds."""

    chunks: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`cost`, and its mean relative error on batches that were held out: of all of them, of those with a part of a
    prompt, and of those that decode (None without any)."""

    cost: ChunkCost
    error: float
    prefill_error: float
    decode_error: float | None


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of the cost: which coefficients are apart."""

    square: bool
    prefix: bool

    def row(self, chunks: Sequence[tuple[int, int]]) -> list[float]:
        """What the batch has of each coefficient."""
        pairs = float(sum(before * new for before, new in chunks))
        own = sum(new * new + new for _, new in chunks) / 2
        optional = [own] * self.square + [float(sum(before for before, _ in chunks))] * self.prefix
        return [pairs if self.square else pairs + own, float(sum(new for _, new in chunks)), 1.0, *optional]

    def cost(self, found: Sequence[float]) -> ChunkCost:
        """The cost of these coefficients."""
        alpha, beta, gamma, *optional = found
        square = optional[0] if self.square else None
        return ChunkCost(alpha, beta, gamma, square, prefix=optional[-1] if self.prefix else 0.0)


_FORMS = tuple(_Form(square, prefix) for square in (False, True) for prefix in (False, True))


def fit(samples: Sequence[Sample], tuning: Replicas = DEFAULT.replicas) -> Fit:
    """Returns the cost and its held-out errors. ValueError where there are too few batches, or they do not say how
    long new tokens take. See Note [What is fitted]."""
    decoding = [each for each in samples if all(is_decode(*chunk) for chunk in each.chunks)]
    filling = [each for each in samples if not all(is_decode(*chunk) for chunk in each.chunks)]
    if len(filling) < tuning.samples:
        raise ValueError(f"{len(filling)} batches with prompts are too few to fit a cost: give {tuning.samples}")
    parts = [_held_out(each, tuning.folds) for each in (filling, decoding)]
    enough = len(decoding) >= tuning.samples
    made = [_both(filling, decoding if enough else (), tuning)]
    trial = _both(parts[0][0], parts[1][0] if enough else (), tuning)
    errors = [[_error(trial, each) for each in held] for _, held in parts]
    return Fit(
        made[0],
        statistics.fmean([*errors[0], *errors[1]]),
        statistics.fmean(errors[0]),
        statistics.fmean(errors[1]) if errors[1] else None,
    )


def _both(filling: Sequence[Sample], decoding: Sequence[Sample], tuning: Replicas) -> ChunkCost:
    decode = _chosen(decoding, tuning) if decoding else None
    rest = [each for each in (_without(each, decode) for each in filling) if each.seconds > 0]
    found = _chosen(rest, tuning)
    if not found.within + found.beta:
        raise ValueError("the batches do not say how long new tokens take: give prompts of several lengths")
    return replace(found, decode=decode)


def _without(sample: Sample, decode: ChunkCost | None) -> Sample:
    """The sample less what its decoding requests took."""
    if decode is None:
        return sample
    known = sum(decode.added(*chunk) for chunk in sample.chunks if is_decode(*chunk))
    return Sample(tuple(chunk for chunk in sample.chunks if not is_decode(*chunk)), sample.seconds - known)


def _chosen(samples: Sequence[Sample], tuning: Replicas) -> ChunkCost:
    """The simplest form that is about as good as the best one, fitted to all samples."""
    errors = {form: _validated(form, samples, tuning.folds) for form in _FORMS}
    least = min(errors.values())
    form = next(each for each in _FORMS if errors[each] <= least * (1 + tuning.simpler) + tuning.exact)
    return _fitted(form, samples)


def _validated(form: _Form, samples: Sequence[Sample], folds: int) -> float:
    """Mean relative error of the form on each fold, fitted to the others."""
    errors = []
    for number in range(folds):
        rest, held = _held_out(samples, folds, number)
        found = _fitted(form, rest)
        errors += [_error(found, each) for each in held]
    return statistics.fmean(errors)


def _fitted(form: _Form, samples: Sequence[Sample]) -> ChunkCost:
    rows = np.array([form.row(each.chunks) for each in samples])
    found = nonnegative.fitted(rows, np.array([each.seconds for each in samples]))
    assert found is not None  # a constant alone fits times above 0
    return form.cost(found)


def _held_out(samples: Sequence[Sample], folds: int, number: int = 0) -> tuple[list[Sample], list[Sample]]:
    """The others, and every `folds`-th sample from `number` on."""
    rest = [each for n, each in enumerate(samples) if n % folds != number]
    return rest, list(samples[number::folds])


def _error(cost: ChunkCost, sample: Sample) -> float:
    return abs(cost.batch(sample.chunks) / sample.seconds - 1)
