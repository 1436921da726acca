"""Requests with their answers so far, and microbatches of them: what stages exchange, and how an iteration is split.

Note [Shape header]
    The first stage schedules; the others follow. The plan of a microbatch goes through the pipeline before the hidden
    states, so each stage knows how many tokens of which request come. A plan has the ids of its tokens, 4 bytes each,
    little beside hidden states of kilobytes: so a follower keeps no copy of prompts and answers that could diverge, and
    models that read ids in every layer work. Per request, a follower keeps only how many tokens have KV, and the
    last one how tokens are chosen (`Begun`).

Note [Scored prompts]
    A prompt whose logprobs are wanted is its first token, and the others are an answer that is given: so its scores are
    tokens of an answer, on their way to clients, in the ledger, in a handover and after a kill. For transformers they
    are a prompt, the last of which the last stage tells in the place of a sampled token. The first stage makes its
    chunks small, as a loop does (hooks/sampling/loop.py), and the last one keeps only the logprobs.

Note [Order]
    Plans are numbered within an epoch, and every stage takes them in this order. A stage frees the requests in `gone`
    before it computes the plan's chunks; so KV is freed only after all microbatches that could read it, and a request
    that is in `gone` and begins in the same plan begins without KV.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import msgspec.structs
import torch
from msgspec import Struct
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from ...offload.policy.replicas.pipeline import ChunkCost, ChunkSize, equal_cost
from ...offload.policy.step_costs import NOTHING, RequestSLO
from ..sampling.carried import SAMPLING, SampledRequest
from ..sampling.sampler import TokenCounts
from ..sampling.settings import ChosenToken, Sampling

Record = TypeVar("Record")


class StageLink(Protocol):
    """One end of a link. Tensors of one tag arrive in order."""

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool) -> object:
        """Sends a tensor, which must not be written to afterwards. `urgent`: before queued messages that are not."""

    def recv(self, tag: str) -> torch.Tensor:
        """Waits for the next tensor of this tag, and returns it."""


def tensor_of(record: object) -> torch.Tensor:
    """Returns a record (a struct, a dataclass, or plain values) as uint8[bytes], to be sent."""
    return torch.frombuffer(bytearray(msgspec.msgpack.encode(record)), dtype=torch.uint8)


def record_of(tensor: torch.Tensor, kind: type[Record]) -> Record:
    """Returns the record of this type that `tensor_of` has encoded. msgspec.ValidationError where it is none."""
    return msgspec.msgpack.decode(tensor.cpu().numpy().data, type=kind)


class Chunk(Struct, frozen=True):
    """New tokens of one request. `ids`: of the tokens; `before`: tokens of the request that have KV already;
    `samples`: whether the token after the last of these is sampled; `scores`: whether logprobs of the tokens after
    these are wanted, which are the request's own."""

    request: str
    ids: tuple[int, ...]
    before: int
    samples: bool
    scores: bool = False

    @property
    def end(self) -> int:
        """Tokens of the request that have KV once this chunk is computed: the position of the token that it samples."""
        return self.before + len(self.ids)


def logit_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Returns which tokens of a microbatch the last stage needs logits of: the last one of each chunk that samples,
    then all of those that are scored."""
    starts = accumulate((len(chunk.ids) for chunk in chunks), initial=0)
    spans = [(chunk, range(start, start + len(chunk.ids))) for chunk, start in zip(chunks, starts, strict=False)]
    scored = [row for chunk, span in spans if chunk.scores for row in span]
    return [span[-1] for chunk, span in spans if chunk.samples] + scored


class Begun(Struct, frozen=True):
    """A request whose first chunk is in a plan, as the last stage needs it. `prompt`: number of its tokens, and of
    those that have been scored; `tokens`: all ids so far, where its choices or scores depend on them; else none."""

    request: str
    sampling: Sampling
    prompt: int
    ends: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, request: Request) -> Begun:
        """Tells of a request, which may have delivered tokens."""
        sampling = request.sampling
        needs = TokenCounts.needed(sampling) or sampling.grammar is not None or request.scored
        known = len(request.prompt) + (len(request.delivered) if request.scored else 0)
        return cls(request.name, sampling, known, request.ends, request.ids if needs else ())


class MicrobatchPlan(Struct, frozen=True):
    """The plan of a microbatch. `number`: within its epoch, from 0 on; `begun`: the requests whose first chunk this is;
    `gone`: requests whose KV is to be freed; `aside`: preempted requests, whose KV may go to the host. A
    plan without chunks only frees requests, and asks for the stages' free memory."""

    epoch: int
    number: int
    chunks: tuple[Chunk, ...] = ()
    begun: tuple[Begun, ...] = ()
    gone: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


class Passing(Struct, frozen=True):
    """The record that a stage sends to the next one, before the hidden states of a microbatch, and the last stage to
    the first. `left_out`: (request, stage that failed) of chunks that were not computed: the states have no rows of
    them. `rooms`: tokens for which stages 1, 2, ... have free memory. `tensors`: number of tensors that follow.
    `tokens`: those that the last stage has chosen, by request."""

    epoch: int
    number: int
    left_out: tuple[tuple[str, int], ...] = ()
    rooms: tuple[int, ...] = ()
    tensors: int = 0
    tokens: tuple[tuple[str, ChosenToken], ...] = ()


Size = tuple[int, int]  # of a chunk: tokens of its request before it, new tokens
Piece = tuple[int, int]  # index of a chunk, and how many of its new tokens, after those of its earlier pieces
SplitPolicy = Callable[[Sequence[Size], int], list[list[Piece]]]
# (chunks, places) -> at most `places` microbatches, in the order in which they are computed; none is empty, every token
# is in one of them, and pieces of a chunk are in different ones


def split_by_tokens(chunks: Sequence[Size], places: int) -> list[list[Piece]]:
    """Returns microbatches of equally many new tokens, give or take one; the order of chunks is kept."""
    total = sum(new for _, new in chunks)
    ends = [round(total * (n + 1) / places) for n in range(places)]
    batches: list[list[Piece]] = []
    done = 0
    pieces: list[Piece] = []
    for index, (_, new) in enumerate(chunks):
        left = new
        while left:
            end = next(stop for stop in ends if stop > done)
            taken = min(left, end - done)
            pieces.append((index, taken))
            left, done = left - taken, done + taken
            if done == end:
                batches.append(pieces)
                pieces = []
    return batches


def split_by_cost(cost: ChunkCost) -> SplitPolicy:
    """Returns a policy that makes microbatches of equal cost (KunServe §4.3; policy/replicas/pipeline.py)."""

    def split(chunks: Sequence[Size], places: int) -> list[list[Piece]]:
        batches = equal_cost([ChunkSize(number, *size) for number, size in enumerate(chunks)], places, cost)
        return [[(piece.request, piece.new) for piece in batch] for batch in batches]

    return split


@dataclass(slots=True)
class Microbatch:
    """A microbatch. `states`: of the requests of its chunks; `tokens`: of the blocks that it takes on every stage;
    `answer`: set where the first stage is also the last."""

    chunks: Sequence[Chunk]
    states: Sequence[RequestState]
    number: int = -1
    tokens: int = 0
    answer: Passing | None = None

    def without(self, gone: Sequence[bool]) -> Microbatch:
        """Returns the microbatch without the chunks for which `gone` is true."""
        kept = [n for n, is_gone in enumerate(gone) if not is_gone]
        return Microbatch([self.chunks[n] for n in kept], [self.states[n] for n in kept])


def split_iteration(
    chunks: Sequence[Chunk], states: Sequence[RequestState], split: SplitPolicy, places: int
) -> list[Microbatch]:
    """Returns the microbatches of an iteration, at most `places`, in order."""
    done = [0] * len(chunks)
    batches = []
    for pieces in split([(chunk.before, len(chunk.ids)) for chunk in chunks], places):
        cut = []
        for index, new in pieces:
            chunk, first = chunks[index], done[index]
            done[index] += new
            ends = done[index] == len(chunk.ids)
            ids = chunk.ids[first : first + new]
            cut.append(Chunk(chunk.request, ids, chunk.before + first, chunk.samples and ends, chunk.scores))
        batches.append(Microbatch(cut, [states[index] for index, _ in pieces]))
    assert done == [len(chunk.ids) for chunk in chunks], "a token is in no microbatch"
    return batches


class FollowerSize(NamedTuple):
    """Tokens of a follower whose stage has begun. `room`: for which it has memory; `most`: the same if no request ran;
    `reads`: that it can read in a microbatch."""

    room: int
    most: int
    reads: int


class UnderWay:
    """The microbatches of a group: those that are `planned`, and those that are `begun` and not answered yet. `rooms`:
    tokens for which each follower had memory at the last answer."""

    def __init__(self, rooms: Sequence[int]) -> None:
        self.planned: deque[Microbatch] = deque()
        self.begun: deque[Microbatch] = deque()
        self.rooms = tuple(rooms)

    @property
    def requests(self) -> set[str]:
        """The requests that are in a microbatch."""
        return {chunk.request for batch in (*self.planned, *self.begun) for chunk in batch.chunks}

    @property
    def room(self) -> float:
        """Tokens for which every follower has memory beyond those of microbatches; infinity without followers."""
        return min(self.rooms, default=math.inf) - sum(batch.tokens for batch in self.begun)


class Request(Struct, frozen=True):
    """A request. `prompt`: token ids; `new`: tokens of the answer at most; `ends`: ids that end it; `delivered`: tokens
    of the answer so far. `ttft`, `tpot`: SLOs in seconds, for the first token and for a decoding step; None: no SLO.
    `waited`: seconds since it arrived, at the time of sending; `assignment`: counts how often it was given to a group
    (client_requests.py). `scored`: the whole answer, where only its logprobs are wanted: a prompt's further tokens."""

    name: str
    prompt: tuple[int, ...]
    new: int
    sampling: Sampling = Sampling()
    ends: tuple[int, ...] = ()
    delivered: tuple[ChosenToken, ...] = ()
    ttft: float | None = None
    tpot: float | None = None
    waited: float = 0.0
    assignment: int = 0
    scored: tuple[int, ...] = ()

    @property
    def given(self) -> tuple[int, ...]:
        """The ids of all tokens that are not to be chosen."""
        return self.prompt + self.scored

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of all tokens so far."""
        return self.given if self.scored else self.prompt + tuple(chosen.token for chosen in self.delivered)

    @property
    def over(self) -> bool:
        """Whether the answer is complete."""
        return len(self.delivered) >= self.new or (bool(self.delivered) and self.delivered[-1].token in self.ends)

    def slo(self, now: float) -> RequestSLO:
        """Returns the SLO of the request, with its arrival on a clock that is at `now`; without a TTFT once the first
        token is there."""
        if self.tpot is None and (self.ttft is None or self.delivered):
            return NOTHING
        return RequestSLO(None if self.delivered else self.ttft, self.tpot, now - self.waited)

    def with_token(self, token: ChosenToken) -> Self:
        """Returns the request with one more token of its answer."""
        return msgspec.structs.replace(self, delivered=(*self.delivered, token))


def state_of(request: Request, held: int = 0) -> RequestState:
    """Returns transformers' state of a request, of which the first `held` tokens have KV, fewer than all. Delivered
    tokens count as prompt, as after a preemption: a decoding request has a prompt of one token left. So do scored ones;
    what comes after the last one is not asked for."""
    scored = bool(request.scored)
    state: Any = RequestState(
        request.name,
        list(request.ids[:-1] if scored else request.ids),
        streaming=True,
        max_new_tokens=1 if scored else request.new - len(request.delivered),
        eos_token_id=list(request.ends) or None,
        logit_processor_kwargs={SAMPLING: SampledRequest(request.sampling, scored={})} if scored else {},
    )
    if request.delivered and not scored:
        state._true_initial_tokens = len(request.prompt)
    if held:
        state.status = RequestStatus.PREFILLING
        state.position_offset = held
        state.remaining_prefill_tokens = state.initial_tokens[held:]
    made: RequestState = state
    return made
