"""Chooses the next token of each request from the model's logits, with a row per request: for loops of batches
(loop.py) and for the last stage of replicas.

Note [Keyed draws]
    A generator's state depends on all earlier draws, also on those of other requests. Here each draw is a hash of the
    request's seed and the token's position, as a number u in [0, 1). The token is the first in the order of ids at
    which the cumulative probability passes u. So it depends neither on the batch nor on the number of stages, and a
    token that is computed again is the same, unless u lies so close to a boundary that the rounding of logits decides.

Note [Order of the settings]
    logprobs                   of the logits as the model gives them
    repetition                 transformers' formula, over prompt and answer
    bias, presence, frequency  are added: OpenAI's formula, over the answer
    masks                      a grammar's, then the ends while the answer is too short, unless nothing were left
    temperature, top_k, top_p, min_p   in this order, as transformers' processors

Note [Nobody waits for the device]
    What rows need is copied to the device before the forward, from pinned memory. No size and no branch depends on
    values of a tensor, so a batch can be prepared while the one before it is computed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

import torch

from .settings import ChosenToken, Sampling

_KEY: Final = struct.Struct("<qq")
_BITS: Final = struct.Struct("<Q")
WORD: Final = 32  # tokens of a word of a mask


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) for the token at a position of a request. `seed`: modulo 2**64."""
    signed = (seed + 2**63) % 2**64 - 2**63
    (bits,) = _BITS.unpack(hashlib.blake2b(_KEY.pack(signed, position), digest_size=8).digest())
    return float(bits >> 11) / float(2**53)


def put(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copies numbers to a device, without waiting for it."""
    return move(torch.tensor(values, dtype=dtype), device)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor of the host to a device, without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class TokenCounts:
    """The tokens of a request, on its device: how often its answer has each, and which its prompt has."""

    def __init__(self, prompt: Sequence[int], answer: Sequence[int], vocabulary: int, device: torch.device) -> None:
        self.answer = torch.zeros(vocabulary, device=device)
        self.answer.index_add_(0, put(answer, torch.int64, device), self.answer.new_ones(len(answer)))
        self.prompt = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self.prompt[put(prompt, torch.int64, device)] = True

    @staticmethod
    def needed(sampling: Sampling) -> bool:
        """Do these settings depend on earlier tokens?"""
        return bool(sampling.presence or sampling.frequency or sampling.repetition != 1)

    def add(self, token: torch.Tensor) -> None:
        """TokenCounts one more token of the answer, [1]."""
        self.answer.index_add_(0, token, self.answer.new_ones(1))


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What the next token of a request depends on, beside the logits. `position`: of the token in its sequence;
    `answered`: tokens of its answer so far; `ends`: tokens that `Sampling.least` puts off; `counts`: see
    `TokenCounts.needed`; `allowed`: returns the tokens that a grammar allows, a bit each: int32[vocabulary / 32], on
    the host. It is called once the forward has been launched."""

    sampling: Sampling
    position: int
    answered: int = 0
    ends: tuple[int, ...] = ()
    counts: TokenCounts | None = None
    allowed: Callable[[], torch.Tensor] | None = None

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Rows of one kind are chosen together."""
        sampling = self.sampling
        return sampling.temperature > 0, sampling.temperature > 0 and sampling.top_p < 1, sampling.logprobs is not None

    @property
    def is_plain(self) -> bool:
        """Is its token the likeliest, and nothing else asked?"""
        sampling = self.sampling
        changes = sampling.bias or self._puts_ends_off or self.allowed or TokenCounts.needed(sampling)
        return not (changes or sampling.temperature or sampling.logprobs is not None)

    @property
    def _puts_ends_off(self) -> bool:
        return bool(self.ends) and self.answered < self.sampling.least

    @property
    def late(self) -> tuple[int, ...]:
        """Tokens that may not come yet."""
        return self.ends if self._puts_ends_off else ()


class Logprobs(NamedTuple):
    """Logprobs of the rows' tokens, [rows], and of the likeliest ones with their ids, [rows, most]."""

    own: torch.Tensor
    likeliest: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def of(cls, logprobs: torch.Tensor, tokens: torch.Tensor, most: int) -> Logprobs:
        """Picks them. `logprobs`: [rows, vocabulary]."""
        values, ids = logprobs.topk(min(most, logprobs.shape[-1]))
        return cls(logprobs.gather(-1, tokens[:, None])[:, 0], values, ids)

    def told(self, tokens: Iterable[int], most: Iterable[int]) -> Iterator[ChosenToken]:
        """Yields the rows, each with so many likeliest tokens. Waits for the device."""
        columns = self.own.tolist(), self.ids.tolist(), self.likeliest.tolist()
        for token, count, own, ids, values in zip(tokens, most, *columns, strict=True):
            yield ChosenToken(token, own, tuple(zip(ids[:count], values[:count], strict=True)))


class Drawn(NamedTuple):
    """Chosen tokens. `tokens`: of each row of the logits, int64; `logprobs`: of some of these: their numbers, how many
    likeliest tokens each one wants, and the values."""

    tokens: torch.Tensor
    logprobs: Sequence[tuple[Sequence[int], Sequence[int], Logprobs]]

    def told(self, tokens: Sequence[int]) -> list[ChosenToken]:
        """Returns the rows' `tokens`, which are on the host by now. Waits for the device."""
        chosen = [ChosenToken(token) for token in tokens]
        for rows, most, logprobs in self.logprobs:
            for row, token in zip(rows, logprobs.told([chosen[row].token for row in rows], most), strict=True):
                chosen[row] = token
        return chosen


class Draws:
    """How the tokens of rows are chosen, once the logits are there. See Note [Nobody waits for the device]."""

    def __init__(self, rows: Sequence[SampledRow], device: torch.device, most: int) -> None:
        """`rows`: of the first rows of the logits; `most`: rows that are chosen at once, which bounds the memory."""
        special = sorted((n for n, row in enumerate(rows) if not row.is_plain), key=lambda n: rows[n].kind)
        self._parts = [
            _Part(numbers[first : first + most], rows, device)
            for numbers in (list(group) for _, group in groupby(special, key=lambda n: rows[n].kind))
            for first in range(0, len(numbers), most)
        ]

    def __call__(self, logits: torch.Tensor) -> Drawn:
        """Chooses a token for each row of `logits`, float32[rows, vocabulary]: for further ones the likeliest."""
        tokens, told = logits.argmax(-1), []
        for part in self._parts:
            tokens[part.index], logprobs = part.choose(logits[part.index])
            if logprobs is not None:
                told.append((part.numbers, [row.sampling.logprobs or 0 for row in part.rows], logprobs))
        return Drawn(tokens, told)


def draw(logits: torch.Tensor, rows: Sequence[SampledRow], most: int) -> Drawn:
    """Chooses a token for each row of `logits`, [rows, vocabulary]. `most`: see Draws."""
    return Draws(rows, logits.device, most)(logits.float())


class _Part:
    """Rows of one kind. `numbers`, `index`: theirs among all rows."""

    def __init__(self, numbers: Sequence[int], rows: Sequence[SampledRow], device: torch.device) -> None:
        self.numbers = numbers
        self.rows = [rows[number] for number in numbers]
        self.index = put(numbers, torch.int64, device)
        self._device = device
        settings = [row.sampling for row in self.rows]
        self._counts = [row.counts for row in self.rows if row.counts is not None]
        if self._counts:
            counted = [n for n, row in enumerate(self.rows) if row.counts is not None]
            self._counted = put(counted, torch.int64, device)
            self._repetition = self._column([settings[n].repetition for n in counted])
            self._presence = self._column([settings[n].presence for n in counted])
            self._frequency = self._column([settings[n].frequency for n in counted])
        biases = [(n, token, by) for n, sampling in enumerate(settings) for token, by in sampling.bias]
        self._bias = self._points([(n, token) for n, token, _ in biases])
        self._by = put([by for *_, by in biases], torch.float32, device)
        self._late = self._points([(n, token) for n, row in enumerate(self.rows) for token in row.late])
        self._masked = [(n, row.allowed) for n, row in enumerate(self.rows) if row.allowed is not None]
        self._most = max(sampling.logprobs or 0 for sampling in settings)
        self._told = settings[0].logprobs is not None
        self._drawn = settings[0].temperature > 0
        self._top_k = [sampling.top_k for sampling in settings]
        self._min_p = any(sampling.min_p for sampling in settings)
        self._cuts = settings[0].top_p < 1
        if self._drawn:
            self._temperature = self._column([sampling.temperature for sampling in settings])
            self._less = self._column([1 - sampling.top_p for sampling in settings])
            self._share = self._column([sampling.min_p for sampling in settings])
            self._kth = self._column([max(top_k - 1, 0) for top_k in self._top_k], torch.int64)
            self._all = self._column([top_k == 0 for top_k in self._top_k], torch.bool)
            draws = [uniform(row.sampling.seed, row.position) for row in self.rows]
            self._uniform = self._column(draws, torch.float64)

    def _column(self, values: Sequence[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return put(values, dtype, self._device)[:, None]

    def _points(self, points: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """Puts (row, token) pairs on the device, as rows and tokens; () where there are none."""
        return tuple(put(numbers, torch.int64, self._device) for numbers in zip(*points, strict=True))

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, Logprobs | None]:
        """Chooses from the rows' logits, [rows, vocabulary], which it overwrites."""
        own = scores.log_softmax(-1) if self._told else None
        self._change(scores)
        tokens = self._draw(scores) if self._drawn else scores.argmax(-1)
        return tokens, None if own is None else Logprobs.of(own, tokens, self._most)

    def _change(self, scores: torch.Tensor) -> None:
        if self._counts:
            count, ours = torch.stack([counts.answer for counts in self._counts]), scores[self._counted]
            there = torch.stack([counts.prompt for counts in self._counts]) | (count > 0)
            repeated = torch.where(ours < 0, ours * self._repetition, ours / self._repetition)
            ours = torch.where(there, repeated, ours) - self._frequency * count - self._presence * (count > 0)
            scores[self._counted] = ours
        if self._bias:
            scores.index_put_(self._bias, self._by, accumulate=True)
        if self._masked:
            words = torch.stack([allowed() for _, allowed in self._masked])
            masked = put([n for n, _ in self._masked], torch.int64, self._device)
            bits = torch.arange(WORD, dtype=torch.int32, device=self._device)
            forbidden = (move(words, self._device)[:, :, None] >> bits & 1 == 0).flatten(1)
            scores[masked] = scores[masked].masked_fill(forbidden[:, : scores.shape[-1]], -torch.inf)
        if self._late:
            short = scores.index_put(self._late, scores.new_full((), -torch.inf))
            scores.copy_(torch.where(short.amax(-1, keepdim=True) == -torch.inf, scores, short))

    def _draw(self, scores: torch.Tensor) -> torch.Tensor:
        scores = (scores - scores.amax(-1, keepdim=True)) / self._temperature  # however small that is
        if most := max(self._top_k):
            kept = scores.topk(min(most, scores.shape[-1])).values
            least = kept.gather(-1, self._kth.clamp(max=kept.shape[-1] - 1))
            scores = scores.masked_fill((scores < least) & ~self._all, -torch.inf)
        if self._cuts:
            rising, order = scores.sort(stable=True)
            unlikely = rising.softmax(-1).cumsum(-1) <= self._less
            unlikely[:, -1] = False
            scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), -torch.inf)
        chances = scores.softmax(-1)
        if self._min_p:
            chances = chances.masked_fill(chances < self._share * chances.amax(-1, keepdim=True), 0)
        mass = chances.cumsum(-1, dtype=torch.float64)
        whole = mass[:, -1:]
        drawn = torch.minimum(self._uniform * whole, torch.nextafter(whole, torch.zeros_like(whole)))
        return torch.searchsorted(mass, drawn, right=True)[:, 0].clamp(
            max=scores.shape[-1] - 1
        )  # behind it: not numbers
