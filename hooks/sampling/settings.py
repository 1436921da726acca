"""A request's settings for choosing tokens, and a chosen token. They travel between processes."""

from __future__ import annotations

import math

from msgspec import Struct


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How the tokens of a request are chosen. ValueError.

    seed                with a token's position in its sequence, all that a draw depends on
    temperature         0: the likeliest token
    top_k               draws among so many likeliest tokens; 0: among all
    top_p, min_p        draws among the likeliest of this total probability; of this share of the likeliest's
    presence, frequency OpenAI's penalties, over the answer's tokens
    repetition          transformers' penalty, over prompt and answer; 1: none
    bias                (token, what is added to its logit)
    least               tokens of the answer before one of its ends may come
    logprobs            so many likeliest tokens are told with each one; 0: only its own logprob; None: none
    grammar             a grammar of llguidance, as its text; None: any token may come
    """

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    least: int = 0
    logprobs: int | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        numbers = (self.temperature, self.presence, self.frequency, self.repetition, *(by for _, by in self.bias))
        if not all(map(math.isfinite, numbers)) or self.temperature < 0 or self.top_k < 0 or self.repetition <= 0:
            raise ValueError(f"{self}: finite numbers are needed, a temperature and top_k from 0, repetition above 0")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"{self}: top_p above 0 and up to 1, and min_p from 0 to 1 are needed")


class ChosenToken(Struct, frozen=True, array_like=True):
    """A token of an answer or of a scored prompt. `logprob`: the model's own, before temperature, penalties and masks;
    None where none was asked for, or for a prompt's first token. `likeliest`: (token, logprob), best first."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()
