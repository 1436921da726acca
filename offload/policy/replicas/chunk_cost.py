"""Seconds of a chunk and of a batch of chunks (KunServe Eq. 1-3), and the chunk that takes a given time. Pure.

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
    has a cost of its own (`decode`). fit_cost.py says which of these help.

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self


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
