"""A group that computes, in virtual time: its queue, its KV memory, and its microbatches in flight.

Note [A group computes]
    A group of n stages has n places for microbatches in flight. A decoding request belongs to one place, as its next
    token needs its last one. When the first stage is free and the last one has finished a place's microbatch, the next
    one of that place is formed: the tokens of its decoding requests, and a part of the queued prompts. A lone replica
    is a group of one stage: its batch is filled up to `VirtualFleet.batch` tokens, as servers do. A pipeline looks
    ahead: the queued prompts, up to a batch for each stage, are dealt so that all places take equally long with their
    decoding requests (microbatches.py).

    The cost of a stage is proportional to its layers. States are sent to the next stage urgently, over the sender's
    link. Memory is counted in tokens of KV, in blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain
from typing import Protocol

from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.microbatches import ChunkSize, fill
from ...offload.policy.tuning import DEFAULT
from .event_queue import EventQueue
from .fleet import VirtualFleet
from .jobs import Job
from .stages import Stages, VirtualMicrobatch
from .virtual_link import VirtualLink


class MemoryPolicy(Protocol):
    """Decides which requests of a group have memory."""

    def admit(self, pipe: Pipeline) -> None:
        """Begins queued requests, as far as there is room."""

    def make_room(self, pipe: Pipeline, job: Job) -> bool:
        """Tries to make room for the next token of `job`. Returns whether there is room now."""

    def ended(self, pipe: Pipeline, job: Job) -> None:
        """Called when a request has all its tokens."""

    def finish_leaving(self, pipe: Pipeline, job: Job) -> None:
        """Called when a request with `Job.leaving` is in no microbatch any more."""


class Pipeline:
    """A group. `spans`: number of layers of each member; `waiting`: requests without memory; `prompts`: requests whose
    prompt is not all computed or in flight; `places`: decoding requests, by place; `stalled`: requests whose KV is on
    the way. `capacity`, `used`: tokens of KV. `open`: seconds of all stages with a microbatch in flight."""

    def __init__(
        self,
        events: EventQueue,
        fleet: VirtualFleet,
        cost: ChunkCost,
        policy: MemoryPolicy,
        members: tuple[int, ...],
        spans: Sequence[int],
        links: Sequence[VirtualLink],
        capacity: int,
        silent: Container[int] = (),
    ) -> None:
        """`spans`, `links`: number of layers and link of each member; `silent`: replicas that compute nothing, updated
        by the owner of the set."""
        self.members = members
        self.spans = tuple(spans)
        self.capacity = capacity
        self.used = 0
        self.waiting: deque[Job] = deque()
        self.prompts: deque[Job] = deque()
        self.places: list[list[Job]] = [[] for _ in members]
        self.stalled: list[Job] = []
        self.open = 0.0
        self._events = events
        self._fleet = fleet
        self._cost = cost
        self._policy = policy
        self.stages = Stages(events, fleet, members, spans, links, silent, self._finish, self.pump)
        self._least = DEFAULT.replicas.least
        self._free = deque(range(len(members)))  # places without a microbatch in flight
        self._opened = 0.0
        self._under_way: list[VirtualMicrobatch] = []
        self._paused: Callable[[], None] | None = None

    # --- memory

    def grow(self, job: Job, tokens: int) -> bool:
        """Reserves room for so many tokens of a request in all. Returns False, and reserves none, if there is none."""
        blocks = -(-tokens // self._fleet.block) * self._fleet.block
        more = (blocks if blocks <= self.capacity else tokens) - job.held
        if tokens > job.held:
            if self.used + more > self.capacity:
                return False
            self.used += more
            job.held += more
        return True

    def release(self, job: Job) -> None:
        """Frees all room of a request."""
        self.used -= job.held
        job.held = 0

    def jobs(self) -> Iterator[Job]:
        """Yields the requests that have memory and are not stalled."""
        return chain(self.prompts, chain.from_iterable(self.places))

    def all_jobs(self) -> set[Job]:
        """Returns all requests of the group: with memory, stalled, in a microbatch, or waiting."""
        in_flight = (
            job
            for microbatch in self._under_way
            for job in (*microbatch.decodes, *(job for job, _ in microbatch.chunks))
        )
        return {*self.jobs(), *self.stalled, *in_flight, *self.waiting}

    # --- requests

    def add(self, job: Job) -> None:
        """Queues a request."""
        self.waiting.append(job)
        self.pump()

    def remove(self, job: Job) -> None:
        """Removes a request that is in no microbatch; it keeps its memory. ValueError where it is not here."""
        assert not job.in_flight
        for jobs in (self.waiting, self.prompts, self.stalled, *self.places):
            if job in jobs:
                jobs.remove(job)
                return
        raise ValueError(f"request {job.number} is not in group {self.members}")

    @property
    def free(self) -> int:
        """Tokens of KV that are not used."""
        return self.capacity - self.used

    def resume(self, job: Job) -> None:
        """Resumes a request that has memory, and whose KV is here."""
        job.stalled = False
        if job.kv < job.known - (job.made > 0):
            at = next((n for n, prompt in enumerate(self.prompts) if prompt.number > job.number), len(self.prompts))
            self.prompts.insert(at, job)
        else:
            min(self.places, key=len).append(job)

    def pause(self, then: Callable[[], None]) -> None:
        """Stops forming microbatches, for good, and calls `then` when none is in flight."""
        self._paused = then
        if not self.in_flight:
            self._events.after(0.0, then)

    @property
    def in_flight(self) -> int:
        """Number of microbatches in flight."""
        return len(self.members) - len(self._free)

    # --- microbatches

    def pump(self) -> None:
        """Begins microbatches as long as the first stage is free and there is anything to compute."""
        for _ in range(len(self._free)):
            if self._paused is not None or not self.stages.takes:
                return
            place = self._free.popleft()
            made = self._form(place)
            if made is None:
                self._free.append(place)
                continue
            if self.in_flight == 1:
                self._opened = self._events.now
            self._under_way.append(made)
            self.stages.begin(made)

    def _form(self, place: int) -> VirtualMicrobatch | None:
        decodes: list[Job] = []
        for job in [*self.places[place]]:
            if not job.held or job.stalled or job.leaving:  # preempted in this loop, or leaving
                continue
            if self.grow(job, job.kv + 1) or self._policy.make_room(self, job):
                job.in_flight += 1  # so it is not preempted
                decodes.append(job)
        self._policy.admit(self)
        took = [(job.kv, 1) for job in decodes]
        chunks = self._chunks(place, took)
        if not decodes and not chunks:
            return None
        for job in decodes:
            job.kv += 1
        seconds = self._cost.batch([*took, *((chunk.before, chunk.new) for _, chunk in chunks)])
        parts = []
        for job, chunk in chunks:
            job.in_flight += 1
            job.kv += chunk.new
            parts.append((job, job.kv))
            if job.kv == job.known:
                self.prompts.remove(job)
        tokens = len(decodes) + sum(chunk.new for _, chunk in chunks)
        return VirtualMicrobatch(place, decodes, parts, seconds, tokens)

    def _chunks(self, place: int, decodes: Sequence[tuple[int, int]]) -> list[tuple[Job, ChunkSize]]:
        """Returns the parts of prompts for the microbatch of a place. See Note [A group computes]."""
        stages = len(self.members)
        room = self._fleet.batch * stages - (len(decodes) if stages == 1 else 0)
        ahead: list[tuple[Job, ChunkSize]] = []
        for job in self.prompts:
            if room <= 0:
                break
            if not job.leaving:
                ahead.append((job, ChunkSize(job.number, job.kv, min(room, job.known - job.kv))))
                room -= ahead[-1][1].new
        if stages == 1 or not ahead:
            return ahead
        cost = self._cost
        prompts = sum(cost.added(chunk.before, chunk.new) for _, chunk in ahead)
        others = sum(cost.added(job.kv, 1) for n, jobs in enumerate(self.places) if n != place for job in jobs)
        own = sum(cost.added(*decode) for decode in decodes)
        share = (prompts + others + own) / stages - own
        if share <= 0:
            return []
        first = ahead[0][1]
        share = max(share, cost.added(first.before, min(first.new, self._least)))
        made = fill([chunk for _, chunk in ahead], share, cost)
        return [(job, chunk) for (job, _), chunk in zip(ahead, made, strict=False)]

    def _finish(self, done: VirtualMicrobatch) -> None:
        now = self._events.now
        for job in done.decodes:
            self._computed(job, done.place, decodes=True, token=True)
        for job, after in done.chunks:
            self._computed(job, done.place, decodes=False, token=after == job.known)
        self._under_way.remove(done)
        self._free.append(done.place)  # after the calls, which may begin microbatches in other places
        if not self.in_flight:
            self.open += (now - self._opened) * len(self.members)
            if self._paused is not None:
                self._paused()
                return
        self.pump()

    def _computed(self, job: Job, place: int, *, decodes: bool, token: bool) -> None:
        """Takes in that a microbatch has computed a part of a request. `decodes`: it was decoding; `token`: the
        microbatch yields a token."""
        job.in_flight -= 1
        if token:
            if not job.over:  # its client has not gone away
                job.add_token(self._events.now)
            if job.ended:
                if decodes:
                    self.places[place].remove(job)
                self.release(job)
                self._policy.ended(self, job)
                return
            if not decodes:
                self.places[place].append(job)
        if job.leaving and not job.in_flight:
            self._policy.finish_leaving(self, job)
