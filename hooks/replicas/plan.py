"""The records that stages of a group exchange for each microbatch: what is computed, what was left out, what came out.

Note [Shape header]
    The first stage schedules; the others follow. Its plan of a microbatch goes through the pipeline before the states
    do, so each stage knows how many tokens of which request come. A plan has the ids of its tokens, 4 bytes each beside
    hidden states of kilobytes: so a follower keeps no copy of prompts and answers that could get out of step, and a
    model that looks at ids in every layer works. A follower holds of a request how many tokens it has KV of, and how
    its tokens are sampled.

Note [Order]
    Plans are numbered within an epoch and every stage takes them in this order. What a plan says of requests that are
    gone is done before its chunks are computed; so KV is freed only after all microbatches that could read it, and a
    request that is gone and begins in the same plan begins with nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens of a request are chosen. `seed`: of its random numbers; `temperature`: 0 chooses the likeliest token;
    `top_k`: among so many likeliest, 0: all; `top_p`: among the likeliest with so much probability in all."""

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"{self}: a temperature and top_k of 0 or more, and top_p above 0 and up to 1 are needed")


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one request. `ids`: of the tokens; `before`: tokens of the request that have KV already;
    `samples`: is the token after the last of these wanted?"""

    request: str
    ids: tuple[int, ...]
    before: int
    samples: bool

    @property
    def end(self) -> int:
        """Tokens of the request that have KV once it is computed: the position of the token that it samples."""
        return self.before + len(self.ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """One microbatch. `number`: within its epoch, from 0 on; `begun`: how requests are sampled of which no chunk came
    before; `gone`: requests whose KV nobody needs any more; `aside`: requests that wait, whose KV may leave the
    device. Without chunks it tells what is gone, and asks for what stages have room for."""

    epoch: int
    number: int
    chunks: tuple[Chunk, ...] = ()
    begun: tuple[tuple[str, Sampling], ...] = ()
    gone: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Text for another process."""
        chunks = [[each.request, each.ids, each.before, each.samples] for each in self.chunks]
        begun = [[name, each.seed, each.temperature, each.top_k, each.top_p] for name, each in self.begun]
        return json.dumps([self.epoch, self.number, chunks, begun, self.gone, self.aside])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan that `to_json` was called on."""
        epoch, number, chunks, begun, gone, aside = json.loads(text)
        return cls(
            epoch,
            number,
            tuple(Chunk(name, tuple(ids), before, samples) for name, ids, before, samples in chunks),
            tuple((name, Sampling(*settings)) for name, *settings in begun),
            tuple(gone),
            tuple(aside),
        )


@dataclass(frozen=True, slots=True)
class Passing:
    """What a stage tells the next one with the states of a microbatch. `left_out`: (request, stage) of chunks that it
    or one before it could not compute: the states have no rows of them. `rooms`: tokens that stage 1, 2, ... have
    memory for beyond what they hold. `tensors`: how many follow that the next layer is called with."""

    epoch: int
    number: int
    left_out: tuple[tuple[str, int], ...] = ()
    rooms: tuple[int, ...] = ()
    tensors: int = 0

    def to_json(self) -> str:
        """Text for another process."""
        return json.dumps([self.epoch, self.number, self.left_out, self.rooms, self.tensors])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` was called on."""
        epoch, number, left_out, rooms, tensors = json.loads(text)
        return cls(epoch, number, _pairs(left_out), tuple(rooms), tensors)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the last stage tells the first one. `tokens`: (request, id) of those that were sampled; the rest as in
    `Passing`, of all stages."""

    epoch: int
    number: int
    tokens: tuple[tuple[str, int], ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()
    rooms: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Text for another process."""
        return json.dumps([self.epoch, self.number, self.tokens, self.left_out, self.rooms])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` was called on."""
        epoch, number, tokens, left_out, rooms = json.loads(text)
        return cls(epoch, number, _pairs(tokens), _pairs(left_out), tuple(rooms))


def _pairs(found: list[list[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, number) for name, number in found)
