"""A stage after the first: computes planned microbatches, with KV and block tables of its own; the last one samples.

Note [Keyed draws]
    A generator's state depends on all earlier draws, also on those of other requests in the batch. Here each draw is a
    hash of the request's seed and the token's position, as a number u in [0, 1). The token is the first in order of
    rising score at which the cumulative probability passes u. So it depends neither on the batch nor on the number of
    stages, and a token that is computed again after a fault is the same, unless u lies so close to a boundary that the
    rounding of logits decides.

Note [Left out]
    The first stage admits requests by the free memory that every stage reports. If a stage finds no memory anyway, it
    leaves the chunk out: the microbatch goes on without its rows, and the answer tells the first stage, which computes
    the request anew later, on all stages. Until a plan says that the request is gone, its later chunks are left out as
    well, as the KV of earlier tokens is missing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch
from msgspec.structs import replace
from transformers.generation.continuous_batching.requests import RequestState

from ...allocator.errors import DriverError
from ..splice.forms import States
from .microbatch_plan import Chunk, MicrobatchPlan, Passing, Sampling, StageLink, record_of, tensor_of
from .replica_model import StageParts, room_of

_KEY: Final = struct.Struct("<qq")
_BITS: Final = struct.Struct("<Q")


def uniform(seed: int, position: int) -> float:
    """Returns a number in [0, 1) for the token at a position of a request. `seed`: modulo 2**64."""
    signed = (seed + 2**63) % 2**64 - 2**63
    (bits,) = _BITS.unpack(hashlib.blake2b(_KEY.pack(signed, position), digest_size=8).digest())
    return float(bits >> 11) / float(2**53)


def sample(logits: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    """Returns a token for each row of `logits`, [rows, vocabulary]: temperature, then top_k, then top_p, as in
    transformers. `positions`: of the returned tokens."""
    logits = logits.float()
    likeliest = logits.argmax(-1)
    drawn = [row for row, sampling in enumerate(settings) if sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        chosen = _draw(logits[rows], [settings[row] for row in drawn], [positions[row] for row in drawn])
        likeliest[rows] = chosen
    tokens: list[int] = likeliest.tolist()
    return tokens


def _draw(logits: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    scores, order = (logits / column([sampling.temperature for sampling in settings], torch.float32)).sort(stable=True)
    vocabulary = scores.shape[-1]
    kept = column([min(sampling.top_k or vocabulary, vocabulary) for sampling in settings], torch.int64)
    scores = scores.masked_fill(scores < scores.gather(-1, vocabulary - kept), -torch.inf)
    unlikely = scores.softmax(-1).cumsum(-1) <= 1 - column([sampling.top_p for sampling in settings], torch.float32)
    unlikely[:, -1] = False
    mass = scores.masked_fill(unlikely, -torch.inf).double().softmax(-1).cumsum(-1)
    drawn = [uniform(sampling.seed, position) for sampling, position in zip(settings, positions, strict=True)]
    threshold = column(drawn, torch.float64) * mass[:, -1:]
    rank = torch.searchsorted(mass, threshold, right=True).clamp(max=vocabulary - 1)
    return order.gather(-1, rank)[:, 0]


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
        self._sampling: dict[str, Sampling] = {}
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
        self._sampling.pop(request, None)
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
        states = None if given is None else self._compute(stored, kept_rows(given, came, stored))
        if states is None:
            self._failed.update(chunk.request for chunk in stored)
            stored = []
        left_out = [(chunk.request, self.stage) for chunk in came if chunk not in stored]
        passing = replace(
            passing,
            left_out=(*passing.left_out, *dict.fromkeys(left_out)),
            rooms=(*passing.rooms, self.room),
            tensors=len(states) if states else 0,
        )
        self._send(passing, stored, states or ())
        return plan.number

    def _take_in(self, plan: MicrobatchPlan) -> None:
        for name in plan.gone:
            self.forget(name)
        for name in plan.aside:
            if name in self._states and self.cache.request_pages.to_host(name):
                self._aside.add(name)
        self._sampling.update(plan.begun)

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

    def _compute(self, chunks: Sequence[Chunk], given: States) -> States | None:
        """Runs this stage's layers. None where there was no memory."""
        if not chunks:
            return ()
        self.cache.begins(chunk.request for chunk in chunks)
        try:
            return self._runner.run(chunks, [self._states[chunk.request] for chunk in chunks], given)
        except (torch.OutOfMemoryError, DriverError):
            return None

    def _send(self, passing: Passing, chunks: Sequence[Chunk], states: States) -> None:
        if not self._runner.last:
            pass_on(self._after, passing, states)
            return
        tokens = sampled(chunks, self._sampling, states[0]) if states else ()
        self._after.send(tensor_of(replace(passing, tensors=0, tokens=tokens)), "answer", True)


def sampled(
    chunks: Sequence[Chunk], sampling: dict[str, Sampling], logits: torch.Tensor
) -> tuple[tuple[str, int], ...]:
    """Returns (request, token) for the chunks that sample one; `logits`: a row for each of these."""
    wanted = [chunk for chunk in chunks if chunk.samples]
    if not wanted:
        return ()
    tokens = sample(logits, [sampling[chunk.request] for chunk in wanted], [chunk.end for chunk in wanted])
    return tuple((chunk.request, token) for chunk, token in zip(wanted, tokens, strict=True))


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
