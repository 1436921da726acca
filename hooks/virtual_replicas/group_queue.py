"""The requests of a simulated group: which of them have memory, and what the next iteration computes.

Note [An iteration]
    Requests of which one token lacks KV decode, as far as there is room for it; then prompts are computed, in order,
    with what is left of the tokens of a batch. A request is in one microbatch at a time. Each answer has as many tokens
    as were recorded, which dispatcher and controller know in advance. Memory is counted in tokens of KV, in blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(eq=False, slots=True)
class Job:
    """A request. Tokens: of its `prompt`, `new` of its answer in all, `made` so far, `kv` with KV, `held` for which it
    has memory. `number`: by arrival; `in_flight`: it is in a microbatch; `copying`: its KV is copied, so it
    waits; `is_gone`: it was cancelled meanwhile."""

    name: str
    number: int
    prompt: int
    new: int
    made: int = 0
    kv: int = 0
    held: int = 0
    in_flight: bool = False
    copying: bool = False
    is_gone: bool = False

    @property
    def known(self) -> int:
        """Tokens of the prompt and the answer so far. All but the last one have KV once the request decodes."""
        return self.prompt + self.made

    @property
    def most(self) -> int:
        """Tokens of KV at the end of the request."""
        return self.prompt + self.new - 1

    @property
    def is_over(self) -> bool:
        """Whether all tokens are made."""
        return self.made >= self.new


Chunk = tuple[Job, int]  # and how many of its tokens are computed


class QueueMemory(Protocol):
    """Decides which requests of a queue have memory."""

    def admit(self, queue: GroupQueue) -> None:
        """Begins waiting requests, as far as there is room."""

    def make_room(self, queue: GroupQueue, job: Job) -> bool:
        """Tries to make room for the next token of `job`. Returns whether there is room now."""


class GroupQueue:
    """Requests. `waiting`: those without memory; `running`: those with memory on the device, in the order in which they
    began; `used`: tokens of KV. See Note [An iteration]."""

    def __init__(self, capacity: Callable[[], int], block: int, batch: int, memory: QueueMemory) -> None:
        """`capacity`: returns the tokens of KV for which there is memory in all; `block`: tokens of a block; `batch`:
        new tokens of an iteration."""
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        self.used = 0
        self.capacity = capacity()
        self._count = capacity
        self._block = block
        self._batch = batch
        self._memory = memory

    @property
    def free(self) -> int:
        """Tokens of KV that are not used."""
        return self.capacity - self.used

    def grow(self, job: Job, tokens: int) -> bool:
        """Reserves room for so many tokens of a request in all. Returns False, and reserves none, if there is none."""
        if tokens > job.held:
            blocks = -(-tokens // self._block) * self._block
            more = (blocks if blocks <= self.capacity else tokens) - job.held
            if self.used + more > self.capacity:
                return False
            self.used += more
            job.held += more
        return True

    def release(self, job: Job) -> None:
        """Frees all room of a request."""
        self.used -= job.held
        job.held = 0

    def remove(self, job: Job) -> None:
        """Removes a request that is in no microbatch, with its room."""
        if job in self.running:
            del self.running[job]
        elif job in self.waiting:
            self.waiting.remove(job)
        self.release(job)

    def preempt(self, job: Job) -> None:
        """Frees the KV of a request, and queues it before all others."""
        self.remove(job)
        job.kv = 0
        self.waiting.appendleft(job)

    def newest(self) -> Job:
        """Returns the request that came last, among those with memory that are in no microbatch."""
        return max((job for job in self.running if not job.in_flight), key=lambda job: job.number)

    def plan(self) -> list[Chunk]:
        """Returns the next iteration, of requests that are in no microbatch, and puts them in one."""
        self.capacity = self._count()
        chunks: list[Chunk] = []
        left = self._batch
        for job in [*self.running]:
            if job not in self.running:  # it was preempted in this loop
                continue
            if job.in_flight or job.copying or job.known - job.kv > 1 or not left:
                continue
            if self.grow(job, job.kv + 1) or self._memory.make_room(self, job):
                job.in_flight = True
                chunks.append((job, 1))
                left -= 1
        self._memory.admit(self)
        for job in self.running:
            if not left:
                break
            new = min(left, job.known - job.kv)
            if not (job.in_flight or job.copying) and job.kv + new <= job.held:
                job.in_flight = True
                chunks.append((job, new))
                left -= new
        return chunks

    def finish(self, chunks: Sequence[Chunk]) -> list[Job]:
        """Takes in that chunks are computed. Returns the requests that have got a token; those that have all of theirs,
        or are gone, are removed."""
        got = []
        for job, new in chunks:
            job.in_flight = False
            if job.is_gone:
                self.remove(job)
                continue
            job.kv += new
            if job.kv == job.known:
                job.made += 1
                got.append(job)
                if job.is_over:
                    self.remove(job)
        return got
