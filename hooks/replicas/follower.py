"""A stage after the first: computes planned microbatches, with KV and block tables of its own; the last one samples.

Note [Left out]
    The first stage admits requests by the free memory that every stage reports. If a stage finds no memory anyway, it
    leaves the chunk out: the microbatch goes on without its rows, and the answer tells the first stage, which computes
    the request anew later, on all stages. Until a plan says that the request is gone, its later chunks are left out as
    well, as the KV of earlier tokens is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat

import torch
from msgspec.structs import replace
from transformers.generation.continuous_batching.requests import RequestState

from ...allocator.errors import DriverError
from ..sampling.grammar import Grammars, Matcher
from ..sampling.sampler import Logprobs, SampledRow, TokenCounts, draw, put
from ..sampling.settings import ChosenToken
from ..splice.forms import States
from .microbatch_plan import Begun, Chunk, MicrobatchPlan, Passing, StageLink, record_of, tensor_of
from .replica_model import SpanCache, StageParts, room_of

ChosenTokens = tuple[tuple[str, ChosenToken], ...]  # by request


class StageSampler:
    """Chooses tokens on the last stage of a group, from the rows that `cache` has memory for. Used by one thread."""

    def __init__(self, cache: SpanCache, grammars: Grammars) -> None:
        self._cache = cache
        self._grammars = grammars
        self._begun: dict[str, Begun] = {}
        self._counts: dict[str, TokenCounts] = {}
        self._matched: dict[str, tuple[Matcher, list[int]]] = {}  # of requests with grammars, with their answers

    def begin(self, begun: Iterable[Begun]) -> None:
        """Notes requests."""
        self._begun.update((told.request, told) for told in begun)

    def forget(self, request: str) -> None:
        """Forgets a request, if it is known."""
        self._begun.pop(request, None)
        self._counts.pop(request, None)
        self._matched.pop(request, None)

    def choose(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> ChosenTokens:
        """Returns a token for each chunk that samples one, with the name of its request, and those of prompts that are
        scored. `logits`: [`logit_rows` of the chunks, vocabulary]."""
        wanted = [chunk for chunk in chunks if chunk.samples]
        scored = tuple(self._score([chunk for chunk in chunks if chunk.scores], logits[len(wanted) :]))
        if not wanted:
            return scored
        logits = logits[: len(wanted)]
        drawn = draw(logits, [self._row(chunk, logits) for chunk in wanted], self._cache.logit_rows)
        for n, chunk in enumerate(wanted):
            if (counts := self._counts.get(chunk.request)) is not None:
                counts.add(drawn.tokens[n : n + 1])
        chosen = [*zip((chunk.request for chunk in wanted), drawn.told(drawn.tokens.tolist()), strict=True)]
        for name, token in chosen:
            if name in self._matched:
                self._matched[name][1].append(token.token)
        return (*chosen, *scored)

    def _score(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> Iterator[tuple[str, ChosenToken]]:
        """Yields the logprobs of prompts' own tokens, but for those that are known."""
        for chunk, rows in zip(chunks, logits.split([len(chunk.ids) for chunk in chunks]), strict=True):
            begun, first = self._begun[chunk.request], chunk.before + 1
            targets, most = begun.tokens[first : chunk.end + 1], begun.sampling.logprobs or 0
            logprobs = Logprobs.of(rows.float().log_softmax(-1), put(targets, torch.int64, logits.device), most)
            for token in [*logprobs.told(targets, repeat(most, len(targets)))][max(0, begun.prompt - first) :]:
                yield chunk.request, token

    def _row(self, chunk: Chunk, logits: torch.Tensor) -> SampledRow:
        name, begun = chunk.request, self._begun[chunk.request]
        sampling, prompt = begun.sampling, begun.prompt
        allowed: Callable[[], torch.Tensor] | None = None
        if TokenCounts.needed(sampling) and name not in self._counts:
            made = TokenCounts(begun.tokens[:prompt], begun.tokens[prompt:], logits.shape[-1], logits.device)
            self._counts[name] = made
        if sampling.grammar is not None and name not in self._matched:
            self._matched[name] = self._grammars.matcher(sampling.grammar), [*begun.tokens[prompt:]]
        if name in self._matched:
            matcher, tokens = self._matched[name]
            allowed = functools.partial(matcher.allowed, tokens)
        return SampledRow(sampling, chunk.end, chunk.end - prompt, begun.ends, self._counts.get(name), allowed)


class OutOfStep(RuntimeError):
    """A stage got a record of another epoch or microbatch than the expected one: its group is out of step."""


class Follower:
    """A stage after the first. Used by one thread. `stage`: its number, from 1 on."""

    def __init__(self, stage: int, parts: StageParts) -> None:
        assert parts.before is not None
        assert parts.after is not None
        self.epoch = parts.epoch
        self.stage = stage
        self.cache = parts.cache
        self._runner = parts.runner
        self._before = parts.before
        self._after = parts.after
        self._number = 0
        self._states: dict[str, RequestState] = {}
        self._sampler = StageSampler(parts.cache, parts.grammars)
        self._failed: set[str] = set()
        self._aside: set[str] = set()

    @property
    def held(self) -> dict[str, int]:
        """Number of tokens that have KV on this stage, by request."""
        return {name: state.position_offset for name, state in self._states.items()}

    @property
    def room(self) -> int:
        """Tokens for which there is free memory."""
        self.cache.pool.try_to_free_sectors()
        return int(room_of(self.cache) / self.cache.token_bytes)

    def adopt(self, state: RequestState) -> None:
        """Takes a request whose KV is already in the cache."""
        self._states[state.request_id] = state

    def forget(self, request: str) -> None:
        """Frees a request's KV and state."""
        self.cache.free_blocks(request)
        self._states.pop(request, None)
        self._sampler.forget(request)
        self._failed.discard(request)
        self._aside.discard(request)

    def run(self) -> int:
        """Waits for the next microbatch, computes it, and sends the result on. Returns its number. OutOfStep."""
        plan = record_of(text := self._before.recv("plan"), MicrobatchPlan)
        if not self._runner.last:
            self._after.send(text, "plan", True)
        passing = record_of(self._before.recv("passing"), Passing)
        if {(plan.epoch, plan.number), (passing.epoch, passing.number)} != {(self.epoch, self._number)}:
            raise OutOfStep(f"stage {self.stage} expects microbatch {self._number} of epoch {self.epoch}")
        self._number += 1
        self._take_in(plan)
        absent = {name for name, _ in passing.left_out}
        came = [chunk for chunk in plan.chunks if chunk.request not in absent]
        given = self._given(passing.tensors)
        stored = [chunk for chunk in came if self._store(chunk)]
        states, tokens = (None, ()) if given is None else self._compute(stored, kept_rows(given, came, stored))
        if states is None:
            self._failed.update(chunk.request for chunk in stored)
            stored = []
        left_out = [(chunk.request, self.stage) for chunk in came if chunk not in stored]
        passing = replace(
            passing,
            left_out=(*passing.left_out, *dict.fromkeys(left_out)),
            rooms=(*passing.rooms, self.room),
            tensors=0 if self._runner.last else len(states or ()),
            tokens=tokens,
        )
        if self._runner.last:
            self._after.send(tensor_of(passing), "answer", True)
        else:
            pass_on(self._after, passing, states or ())
        return plan.number

    def _take_in(self, plan: MicrobatchPlan) -> None:
        for name in plan.gone:
            self.forget(name)
        for name in plan.aside:
            if name in self._states and self.cache.request_pages.to_host(name):
                self._aside.add(name)
        self._sampler.begin(plan.begun)

    def _store(self, chunk: Chunk) -> bool:
        """Allocates the blocks of a chunk, on the host where the device has no page. False where it cannot be
        computed."""
        name = chunk.request
        state = self._states.get(name)
        if state is None and name not in self._failed:
            state = self._states[name] = RequestState(name, [])
        if state is None or name in self._failed or state.position_offset != chunk.before:
            self._failed.add(name)
            return False
        if name in self._aside:
            self._aside.discard(name)
            self.cache.request_pages.to_device(name)
        if self.cache.store(state, len(chunk.ids)):
            return True
        self._failed.add(name)
        return False

    def _given(self, count: int) -> States | None:
        """Receives all states from the stage before; None where there was no memory for one of them."""
        states: list[torch.Tensor] = []
        for _ in range(count):
            with suppress(torch.OutOfMemoryError, DriverError):
                states.append(self._before.recv("states"))
        return tuple(states) if len(states) == count else None

    def _compute(self, chunks: Sequence[Chunk], given: States) -> tuple[States | None, ChosenTokens]:
        """Runs this stage's layers, and chooses tokens where it is the last one. None where there was no memory."""
        if not chunks:
            return (), ()
        self.cache.begins(chunk.request for chunk in chunks)
        try:
            states = self._runner.run(chunks, [self._states[chunk.request] for chunk in chunks], given)
            return states, self._sampler.choose(chunks, states[0]) if self._runner.last else ()
        except (torch.OutOfMemoryError, DriverError):
            return None, ()


def pass_on(link: StageLink, passing: Passing, states: States) -> None:
    """Sends the record and the states of a microbatch to the next stage."""
    link.send(tensor_of(passing), "passing", True)
    for tensor in states:
        link.send(tensor, "states", True)


def kept_rows(given: States, came: Sequence[Chunk], kept: Sequence[Chunk]) -> States:
    """Returns the states of the chunks in `kept`: tensors with a row for each token, in their second dimension, are
    cut; others apply to all chunks."""
    if len(came) == len(kept):
        return given
    sizes = [len(chunk.ids) for chunk in came]
    return tuple(
        torch.cat([part for chunk, part in zip(came, tensor.split(sizes, 1), strict=True) if chunk in kept], 1)
        if kept and tensor.dim() > 1 and tensor.shape[1] == sum(sizes)
        else tensor
        for tensor in given
    )
