"""The records that stages of a group exchange for each microbatch: its plan, the chunks left out, and the answer.

Note [Shape header]
    The first stage schedules; the others follow. The plan of a microbatch goes through the pipeline before the hidden
    states, so each stage knows how many tokens of which request come. A plan has the ids of its tokens, 4 bytes each,
    little beside hidden states of kilobytes: so a follower keeps no copy of prompts and answers that could diverge, and
    models that read ids in every layer work. Per request, a follower keeps only how many tokens have KV, and how tokens
    are sampled.

Note [Order]
    Plans are numbered within an epoch, and every stage takes them in this order. A stage frees the requests in `gone`
    before it computes the plan's chunks; so KV is freed only after all microbatches that could read it, and a request
    that is in `gone` and begins in the same plan begins without KV.
"""

from __future__ import annotations

from msgspec import Struct


class Sampling(Struct, frozen=True):
    """How the tokens of a request are sampled. `temperature`: 0: the likeliest token; `top_k`: among so many likeliest,
    0: all; `top_p`: among the likeliest with this total probability. ValueError."""

    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"{self}: a temperature and top_k of 0 or more, and top_p above 0 and up to 1 are needed")


class Chunk(Struct, frozen=True):
    """New tokens of one request. `ids`: of the tokens; `before`: tokens of the request that have KV already;
    `samples`: whether the token after the last of these is sampled."""

    request: str
    ids: tuple[int, ...]
    before: int
    samples: bool

    @property
    def end(self) -> int:
        """Tokens of the request that have KV once this chunk is computed: the position of the token that it samples."""
        return self.before + len(self.ids)


class MicrobatchPlan(Struct, frozen=True):
    """The plan of a microbatch. `number`: within its epoch, from 0 on; `begun`: sampling of the requests whose first
    chunk this is; `gone`: requests whose KV is to be freed; `aside`: preempted requests, whose KV may go to the host. A
    plan without chunks only frees requests, and asks for the stages' free memory."""

    epoch: int
    number: int
    chunks: tuple[Chunk, ...] = ()
    begun: tuple[tuple[str, Sampling], ...] = ()
    gone: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


class Passing(Struct, frozen=True):
    """The record that a stage sends to the next one, before the hidden states of a microbatch. `left_out`: (request,
    stage that failed) of chunks that were not computed: the states have no rows of them. `rooms`: tokens for which
    stages 1, 2, ... have free memory. `tensors`: number of tensors that follow."""

    epoch: int
    number: int
    left_out: tuple[tuple[str, int], ...] = ()
    rooms: tuple[int, ...] = ()
    tensors: int = 0


class Answer(Struct, frozen=True):
    """The record that the last stage sends to the first. `tokens`: (request, id) of the sampled tokens; `left_out`,
    `rooms`: as in `Passing`, of all stages."""

    epoch: int
    number: int
    tokens: tuple[tuple[str, int], ...] = ()
    left_out: tuple[tuple[str, int], ...] = ()
    rooms: tuple[int, ...] = ()
