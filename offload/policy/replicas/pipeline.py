"""The pipeline of a group: the seconds of a chunk and of a batch of chunks (KunServe Eq. 1-3), fitted to batches that
ran, and microbatches that take equally long (§4.3).

Note [The cost of a chunk]
    A chunk has `new` tokens of one request behind `before` others, those of a cached prefix included. Each new token
    attends to all before it, to the new ones before it and to itself, so

        seconds = alpha (before * new + (new^2 + new) / 2) + beta * new + gamma

    The paper prints new^2 + new: with the half the chunks of a prompt add up to the prompt, however it is cut, but for
    the gamma of each. gamma is what a batch takes whatever is in it (its weights are read once), so a batch of n chunks
    takes the sum less (n - 1) gamma (Eq. 3, where it is printed as lambda).

    Kernels differ from this in three ways. Attention to the prefix and within the chunk may run at different speeds:
    then `square` stands for alpha in the second term. Reading the keys of the prefix takes `prefix` seconds per token,
    however few new ones attend to them. And a decoding request (one new token) runs in other kernels than a prompt: it
    has a cost of its own (`decode`). `fit` says which of these help.

Note [One row]
    A batch with a single new token multiplies matrices by a vector: such kernels read the weights as they are, where
    those for several rows pack them first, and a transposed tensor of one row needs no copy. So it takes `lone` seconds
    less, whatever is read. Measured (CPU, float32, 8 layers of width 256): the matrices take 3.9 ms with one row, 5.3
    with two, and 6.0 to 6.6 with three to eight; a fit without `lone` was 9 % too high for one request, and for two to
    five 4 to 11 % too low.

Note [Pairs of different requests]
    Attention that does not know the sequences of a packed row (offload/policy/step_costs.py, Note [A row without
    sequences]) compares each new token of a batch with each key of the batch. Pairs of different chunks take `others`
    seconds each, so a batch takes longer than the sum of its chunks. What a chunk `added` to a batch, and what a `cut`
    takes, are without these: they depend on what else is in the batch.

Note [What is fitted]
    The time of a batch is linear in the coefficients of its chunks' cost, so batches of any shape are samples. No
    coefficient is negative, and errors count relative to the time (step_costs.py).

    Attention may know the sequences of a batch, or not (Note [Pairs of different requests]). Where it
    does not, four coefficients say what any batch takes. Where it does, batches in which all requests decode are fitted
    first; their cost is subtracted from the other batches, and the rest is fitted. Four forms are tried for each of
    the two: Eq. 1, and Eq. 1 with `square`, with `prefix`, with both. Where some batches had one new token and others
    more, another coefficient is fitted for that (Note [One row]).

    More coefficients always fit their own samples better. So every fourth sample is held out, the form is chosen by
    cross-validation among the others, and the reported error is that of the held-out samples. The returned cost is
    then chosen and fitted in the same way from all samples.

    Measured on a CPU (sdpa, which knows no sequences; 61 batches of prompts and decoding requests): 2 to 4 % held out
    with pairs of different requests, 17 to 21 % without.

Note [Look ahead]
    A stage that ends early waits for its neighbour, so batches should take equally long (KunServe §4.3). The batches
    are intervals of one row of chunks: `equal_cost` goes through it once and ends a batch where the running cost passes
    its share, in the middle of a chunk if need be (`ChunkCost.cut`). A request's tokens stay in order, and O(chunks)
    costs are computed. Where the costs of a prompt's chunks do not add up to the prompt's (`ChunkCost.square`,
    `prefix`), the last batch takes the difference.

    The paper halves recursively (Fig. 11), and stops where a batch has few tokens. So two batches with equally many
    tokens, one after a long prefix, are not split further, though one takes twice as long. Two errata: the test has to
    be made for every batch, not for B[0] alone; and all leaves are visited, which is O(batches), not O(log L).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple, Self

import numpy as np

from ..step_costs import Step, least_squares


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Seconds per pair of tokens (`alpha`), per new token (`beta`), per batch (`gamma`). See Note [The cost of a
    chunk]; `square`: None where it is alpha; `decode`: None where one new token behind others costs as any chunk;
    `others`: per pair of a new token and a token of another chunk, see Note [Pairs of different requests]; `lone`: that
    a batch with one new token takes less, see Note [One row]."""

    alpha: float
    beta: float
    gamma: float
    square: float | None = None
    prefix: float = 0.0
    decode: ChunkCost | None = None
    others: float = 0.0
    lone: float = 0.0

    @classmethod
    def packed(cls, fixed: float, row: float, key: float, pair: float, lone: float = 0.0) -> Self:
        """Returns the cost where attention does not know the sequences. Seconds: `fixed` per batch, `row` per new
        token, `key` per token read (new ones included), `pair` per pair of both, of any request; `lone`: see ChunkCost.
        """
        return cls(pair, max(0.0, row + key - pair), fixed, square=2 * pair, prefix=key, others=pair, lone=lone)

    def __post_init__(self) -> None:
        """Raises ValueError where a part is not a number of seconds."""
        parts = (self.alpha, self.beta, self.gamma, self.within, self.prefix, self.others, self.lone)
        if not all(math.isfinite(part) and part >= 0 for part in parts):
            raise ValueError(f"a cost has a part that is no number of seconds from 0 on: {self}")
        if self.lone > self.gamma:
            raise ValueError(f"a batch of one token takes less by more than it takes: {self}")

    @property
    def within(self) -> float:
        """Seconds per pair of new tokens."""
        return self.alpha if self.square is None else self.square

    def seconds(self, before: int, new: int) -> float:
        """Returns the seconds of a chunk alone in its batch."""
        part = self._of(before, new)
        return part._growing(before, new) + part.gamma - (part.lone if new == 1 else 0.0)

    def batch(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Returns the seconds of a batch of chunks (before, new); 0 for none. Where prompts and decoding requests have
        different gammas the larger one counts, once."""
        total = gamma = lone = 0.0
        row = read = own = 0
        for before, new in chunks:
            part = self._of(before, new)
            total += part._growing(before, new)
            gamma, lone = max(gamma, part.gamma), part.lone
            row, read, own = row + new, read + before + new, own + new * (before + new)
        return total + gamma - (lone if row == 1 else 0.0) + self.others * (row * read - own)

    def added(self, before: int, new: int) -> float:
        """Returns the seconds that a chunk adds to a batch of others, without `others` pairs."""
        return self._of(before, new)._growing(before, new)

    def cut(self, target: float, before: int) -> int:
        """Returns the most new tokens behind `before` that take no longer than `target` seconds, as part of a prompt;
        0 where one takes longer. Solves Eq. 1 for `new`: (a/2) new^2 + b new = target - gamma. ValueError where chunks
        of all sizes take the same."""
        a, b = self.within, self.alpha * before + self.within / 2 + self.beta
        rest = target - self.gamma - self.prefix * before
        if not b:
            raise ValueError(f"a larger chunk would take no longer: give beta or alpha above 0, not {self}")
        if rest <= 0:
            return 0
        new = int(2 * rest / (b + math.sqrt(b * b + 2 * a * rest)))  # a sum, so nothing cancels out
        spent = target - self.gamma
        if new and self._growing(before, new) > spent:  # it was rounded up
            return new - 1
        return new + (self._growing(before, new + 1) <= spent)

    def _of(self, before: int, new: int) -> ChunkCost:
        """Returns the cost that applies to such a chunk."""
        return self.decode if self.decode is not None and is_decode(before, new) else self

    def _growing(self, before: int, new: int) -> float:
        pairs = self.alpha * before * new + self.within * (new * new + new) / 2
        return pairs + self.prefix * before + self.beta * new


def is_decode(before: int, new: int) -> bool:
    """Returns whether the chunk is the next token of a request that has others."""
    return new == 1 and before > 0


# The fit


@dataclass(frozen=True, slots=True)
class Sample:
    """A batch that ran: its chunks, (tokens before, new tokens) each, and its seconds."""

    chunks: tuple[tuple[int, int], ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted `cost`, and its mean relative error on held-out batches."""

    cost: ChunkCost
    error: float


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

# Batches of a kind that a cost is fitted to at least, of which every `_FOLDS`-th is held out. Chosen: five coefficients
# need more than five samples when three quarters of three quarters are left.
_SAMPLES: Final = 16
_FOLDS: Final = 4
# A form with more coefficients has to be better by a part of the least error, and of the time if it is exact. Chosen.
_SIMPLER: Final = 0.02
_EXACT: Final = 1e-6

_FORMS = tuple(_Form(square, prefix) for square in (False, True) for prefix in (False, True))


def fit(samples: Sequence[Sample]) -> Fit:
    """Returns the cost and its held-out error. ValueError where there are too few batches, or new tokens take no time
    in them. See Note [What is fitted]."""
    decoding, filling = _kinds(samples)
    if len(filling) < _SAMPLES:
        raise ValueError(f"{len(filling)} batches with prompts are too few to fit a cost: give {_SAMPLES}")
    parts = [_held_out(batches) for batches in (filling, decoding)]
    rest = [other for others, _ in parts for other in others]
    apart = len(decoding) >= _SAMPLES
    made, trial = (_best(batches, apart) for batches in (samples, rest))
    return Fit(made, statistics.fmean(_error(trial, sample) for _, held in parts for sample in held))


def _kinds(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Returns the batches in which all requests decode, and the others."""
    kinds: tuple[list[Sample], list[Sample]] = [], []
    for sample in samples:
        kinds[not all(is_decode(*chunk) for chunk in sample.chunks)].append(sample)
    return kinds


def _best(samples: Sequence[Sample], apart: bool) -> ChunkCost:
    """Returns the cost with sequences or without, whichever predicts better. `apart`: decoding batches get a cost of
    their own. ValueError where new tokens take no time."""
    ways: tuple[Way, ...] = (partial(_by_sequence, apart=apart), _packed)
    cost = min(ways, key=lambda way: _validated(way, samples))(samples)
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


def _by_sequence(samples: Sequence[Sample], apart: bool) -> ChunkCost:
    """Returns the fitted cost of attention that knows the sequences."""
    decoding, filling = _kinds(samples)
    decode = _chosen(decoding) if apart else None
    rest = [sample for sample in (_without(sample, decode) for sample in filling) if sample.seconds > 0]
    return replace(_chosen(rest), decode=decode)


def _without(sample: Sample, decode: ChunkCost | None) -> Sample:
    """Returns the sample without its decoding requests and their seconds."""
    if decode is None:
        return sample
    known = sum(decode.added(*chunk) for chunk in sample.chunks if is_decode(*chunk))
    return Sample(tuple(chunk for chunk in sample.chunks if not is_decode(*chunk)), sample.seconds - known)


def _chosen(samples: Sequence[Sample]) -> ChunkCost:
    """Returns the cost of the simplest form whose error is close to the least, fitted to all samples."""
    forms = [replace(form, lone=lone) for lone in (False, True)[: 1 + _tells_of_one(samples)] for form in _FORMS]
    errors = {form: _validated(partial(_fitted, form), samples) for form in forms}
    least = min(errors.values())
    form = next(candidate for candidate in forms if errors[candidate] <= least * (1 + _SIMPLER) + _EXACT)
    return _fitted(form, samples)


def _validated(way: Way, samples: Sequence[Sample]) -> float:
    """Returns the mean relative error in cross-validation: `way` fits all folds but one, and is tested on that one."""
    errors = []
    for number in range(_FOLDS):
        rest, held = _held_out(samples, number)
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


def _held_out(samples: Sequence[Sample], number: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Returns (the other samples, every `_FOLDS`-th sample from `number` on)."""
    rest = [sample for n, sample in enumerate(samples) if n % _FOLDS != number]
    return rest, list(samples[number::_FOLDS])


def _error(cost: ChunkCost, sample: Sample) -> float:
    return abs(cost.batch(sample.chunks) / sample.seconds - 1)


# Microbatches


class ChunkSize(NamedTuple):
    """`new` tokens of a request, after `before` earlier ones."""

    request: int
    before: int
    new: int

    def cut(self, new: int) -> tuple[ChunkSize, ChunkSize]:
        """Returns the first `new` tokens, and the others."""
        return ChunkSize(self.request, self.before, new), ChunkSize(self.request, self.before + new, self.new - new)


Batch = list[ChunkSize]


def equal_cost(chunks: Sequence[ChunkSize], batches: int, cost: ChunkCost) -> list[Batch]:
    """Returns at most `batches` batches, none empty, that take as equally long as whole tokens allow. See Note
    [Look ahead]. ValueError where `batches` is below 1."""
    if batches < 1:
        raise ValueError(f"chunks cannot be put into {batches} batches")
    share = sum(cost.added(piece.before, piece.new) for piece in chunks) / batches
    made: list[Batch] = [[] for _ in range(batches)]
    number, room = 0, share
    for chunk in chunks:
        rest = chunk
        while rest.new:
            fits = rest.new if number == batches - 1 else _fitting(rest, room, cost)
            part, rest = rest.cut(fits)
            if fits:
                made[number].append(part)
                room -= cost.added(part.before, part.new)
            if rest.new:
                number, room = number + 1, room + share
    return [batch for batch in made if batch]


def _fitting(chunk: ChunkSize, room: float, cost: ChunkCost) -> int:
    """Returns how many tokens of the chunk bring a batch closest to its share, which is `room` seconds away."""
    if cost.added(chunk.before, chunk.new) <= room:
        return chunk.new
    fits = min(cost.cut(room + cost.gamma, chunk.before), chunk.new - 1)
    below = cost.added(chunk.before, fits) if fits else 0.0
    return fits + (cost.added(chunk.before, fits + 1) + below < 2 * room)
