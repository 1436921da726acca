"""A group that computes, in virtual time: its queue, its KV memory, and its microbatches on their way through stages.

Note [A group computes]
    A group of n stages has n places for microbatches under way. A decoding request belongs to one place: its next token
    needs its last one. When the first stage is free and a place has come back from the last one, a microbatch is formed
    for it: the tokens of its decoding requests, and a part of the prompts that wait. One replica alone is a group of
    one stage: its batch is filled up to `VirtualFleet.batch` tokens, as servers do. A pipeline looks ahead: the prompts
    that wait, up to a batch for each stage, are shared out so that all places take equally long (microbatches.py), what
    their decoding requests take included.

    A stage takes the part of the cost that its span is of all layers. States go to the next stage over the sender's
    link, urgently. Memory is counted in tokens of KV, in blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import chain
from typing import Protocol

from ....offload.policy.replicas.chunk_cost import ChunkCost
from ....offload.policy.replicas.microbatches import Chunk, fill
from ....offload.policy.tuning import DEFAULT
from .event_queue import EventQueue
from .fleet import VirtualFleet
from .jobs import Job
from .stages import Stages, VirtualMicrobatch
from .virtual_link import VirtualLink


class MemoryPolicy(Protocol):
    """What decides when a group's memory is short."""

    def admit(self, pipe: Pipeline) -> None:
        """Begins requests that wait, as far as there is room."""

    def make_room(self, pipe: Pipeline, job: Job) -> bool:
        """Returns whether there is room for the next token of `job` now."""

    def ended(self, pipe: Pipeline, job: Job) -> None:
        """The request has all its tokens."""

    def finish_leaving(self, pipe: Pipeline, job: Job) -> None:
        """A request that leaves (`Job.leaving`) is in no microbatch now."""


class Pipeline:
    """A group. `spans`: layers that each member has; `waiting`: requests without memory; `prompts`: those whose prompt
    is not all under way yet; `places`: those that decode, by microbatch; `stalled`: those whose KV is on the way.
    `capacity`, `used`: tokens of KV. `open`: seconds of all stages in which a microbatch was under way somewhere."""

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
        """`spans`, `links`: layers that each member has, and what it sends by; `silent`: members that compute nothing,
        which others keep."""
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
        self._free = deque(range(len(members)))  # places that are not under way
        self._opened = 0.0
        self._under_way: list[VirtualMicrobatch] = []
        self._paused: Callable[[], None] | None = None

    # --- memory

    def grow(self, job: Job, tokens: int) -> bool:
        """Has the request hold room for so many tokens, if there is room. Returns whether it does."""
        blocks = -(-tokens // self._fleet.block) * self._fleet.block
        more = (blocks if blocks <= self.capacity else tokens) - job.held
        if tokens > job.held:
            if self.used + more > self.capacity:
                return False
            self.used += more
            job.held += more
        return True

    def release(self, job: Job) -> None:
        """Takes all room from the request."""
        self.used -= job.held
        job.held = 0

    def jobs(self) -> Iterator[Job]:
        """Requests that have memory and are not stalled."""
        return chain(self.prompts, chain.from_iterable(self.places))

    def all_jobs(self) -> set[Job]:
        """All requests that are here: with memory, stalled, in a microbatch, or waiting."""
        in_flight = (job for each in self._under_way for job in (*each.decodes, *(job for job, _ in each.chunks)))
        return {*self.jobs(), *self.stalled, *in_flight, *self.waiting}

    # --- requests

    def add(self, job: Job) -> None:
        """Queues a request."""
        self.waiting.append(job)
        self.pump()

    def remove(self, job: Job) -> None:
        """Takes out a request that is in no microbatch; it keeps its memory."""
        assert not job.in_flight
        for each in (self.waiting, self.prompts, self.stalled, *self.places):
            if job in each:
                each.remove(job)
                return
        raise ValueError(f"request {job.number} is not in group {self.members}")

    @property
    def free(self) -> int:
        """Tokens of KV that are not used."""
        return self.capacity - self.used

    def resume(self, job: Job) -> None:
        """Has a request that has memory, and whose KV is here, go on."""
        job.stalled = False
        if job.kv < job.known - (job.made > 0):
            at = next((n for n, each in enumerate(self.prompts) if each.number > job.number), len(self.prompts))
            self.prompts.insert(at, job)
        else:
            min(self.places, key=len).append(job)

    def pause(self, then: Callable[[], None]) -> None:
        """Forms no microbatch any more, and calls `then` when none is under way."""
        self._paused = then
        if not self.in_flight:
            self._events.after(0.0, then)

    @property
    def in_flight(self) -> int:
        """Microbatches that are under way."""
        return len(self.members) - len(self._free)

    # --- microbatches

    def pump(self) -> None:
        """Forms microbatches as long as the first stage is free and there is something to do."""
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
            if not job.held or job.stalled or job.leaving:  # it made room for one before it, or goes
                continue
            if self.grow(job, job.kv + 1) or self._policy.make_room(self, job):
                job.in_flight += 1  # no more to be taken
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

    def _chunks(self, place: int, decodes: Sequence[tuple[int, int]]) -> list[tuple[Job, Chunk]]:
        """Parts of prompts for the microbatch of a place. See Note [A group computes]."""
        stages = len(self.members)
        room = self._fleet.batch * stages - (len(decodes) if stages == 1 else 0)
        ahead: list[tuple[Job, Chunk]] = []
        for job in self.prompts:
            if room <= 0:
                break
            if not job.leaving:
                ahead.append((job, Chunk(job.number, job.kv, min(room, job.known - job.kv))))
                room -= ahead[-1][1].new
        if stages == 1 or not ahead:
            return ahead
        cost = self._cost
        prompts = sum(cost.added(chunk.before, chunk.new) for _, chunk in ahead)
        others = sum(cost.added(job.kv, 1) for n, each in enumerate(self.places) if n != place for job in each)
        own = sum(cost.added(*each) for each in decodes)
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
        self._free.append(done.place)  # now: what those calls begin is in another place
        if not self.in_flight:
            self.open += (now - self._opened) * len(self.members)
            if self._paused is not None:
                self._paused()
                return
        self.pump()

    def _computed(self, job: Job, place: int, *, decodes: bool, token: bool) -> None:
        """The request was in a microbatch of a place. `token`: its next one follows from that."""
        job.in_flight -= 1
        if token:
            if not job.over:  # its client is there
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
