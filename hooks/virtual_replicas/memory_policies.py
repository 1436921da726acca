"""Policies for full KV memory that drop no layers: wait, recompute, swap to the host, migrate.

Note [Peers]
    All policies get requests from the same dispatcher, and begin them in order. `QueuePolicy` begins a request when all
    the KV fits that it will ever have. The others begin it when its prompt fits; when a token finds no room, the
    request that came last is preempted (vLLM): `RecomputePolicy` frees its KV and computes it anew; `SwapPolicy` copies
    the KV to the host, and back before any new request begins; `MigratePolicy` (Llumnix) moves requests from a replica
    whose queue is stuck to the one with most room: waiting requests at once, running ones while they go on decoding;
    where all replicas are full it recomputes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...offload.policy.replicas.dispatch import Dispatcher
from ...offload.policy.replicas.link_order import shares
from ...offload.policy.tuning import DEFAULT
from .jobs import Job
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .fleet_run import FleetRun


class RecomputePolicy:
    """Preempts the newest request and computes it anew. Base of the other policies. See Note [Peers]."""

    def __init__(self, run: FleetRun) -> None:
        self.run = run
        self._dispatcher = Dispatcher()
        self._open()

    def _open(self) -> None:
        """Begins a group of one for each replica."""
        for member in range(self.run.fleet.replicas):
            pipe = self.run.open((member,), (1,), self.run.fleet.tokens, self)
            self._dispatcher.add(pipe.members, pipe.capacity)

    def arrive(self, job: Job) -> None:
        """Assigns a request that arrives to a replica, or refuses it where none can ever hold it."""
        members = self._dispatcher.choose(job.most)
        if members is None:
            self.run.finish(job, "no replica can ever hold its KV")
            return
        self._dispatcher.promise(members, job.most)
        self.run.pipes[members].add(job)

    def admit(self, pipe: Pipeline) -> None:
        """Begins requests in order, as long as there is room."""
        spare = int(DEFAULT.replicas.watermark * pipe.capacity)
        while pipe.waiting:
            wanted = self.wanted(pipe.waiting[0])
            if (pipe.used and wanted + spare > pipe.free) or not pipe.grow(pipe.waiting[0], wanted):
                break
            pipe.prompts.append(pipe.waiting.popleft())

    def wanted(self, job: Job) -> int:
        """Returns the tokens of room with which a request begins."""
        return job.known

    def make_room(self, pipe: Pipeline, job: Job) -> bool:
        """Preempts the newest requests until there is room for the next token of `job`. Returns False where `job`
        itself was preempted."""
        while not pipe.grow(job, job.kv + 1):
            last = max((other for other in pipe.jobs() if not other.in_flight and not other.leaving), key=_number)
            self.preempt(pipe, last)
            if last is job:
                return False
        return True

    def preempt(self, pipe: Pipeline, job: Job) -> None:
        """Frees the KV of a request, and queues it before all others."""
        pipe.remove(job)
        pipe.release(job)
        job.drop_kv()
        pipe.waiting.appendleft(job)

    def ended(self, pipe: Pipeline, job: Job) -> None:
        """Ends a request that has all its tokens."""
        self._dispatcher.release(pipe.members, job.most)
        self.run.finish(job)

    def moved(self, job: Job, pipe: Pipeline, to: Pipeline) -> None:
        """Moves what is promised to a request to another replica."""
        self._dispatcher.release(pipe.members, job.most)
        self._dispatcher.promise(to.members, job.most)

    def finish_leaving(self, pipe: Pipeline, job: Job) -> None:
        """Raises AssertionError: no request leaves under this policy."""
        raise AssertionError(f"request {job.number} leaves group {pipe.members}, and goes nowhere")


class QueuePolicy(RecomputePolicy):
    """Begins a request only when all its KV fits. See Note [Peers]."""

    def wanted(self, job: Job) -> int:
        """Returns the tokens of KV at the end of the request."""
        return job.most


@dataclass(slots=True)
class _Host:
    """Host memory of a group. `room`: free bytes; `away`: requests swapped out; `copies`: requests being copied."""

    room: int
    away: list[Job] = field(default_factory=list)
    copies: list[Job] = field(default_factory=list)


class SwapPolicy(RecomputePolicy):
    """Swaps the newest request to the host: each member of a group copies the KV of its layers. See Note [Peers]."""

    def __init__(self, run: FleetRun) -> None:
        self._hosts: dict[Pipeline, _Host] = {}
        self._settling: dict[Pipeline, Callable[[], None]] = {}
        super().__init__(run)

    def admit(self, pipe: Pipeline) -> None:
        """Swaps requests in, oldest first, as long as all decoding ones keep room for their next tokens (otherwise they
        would be swapped out at once); begins new requests where none is swapped out."""
        host = self.host(pipe)
        spare = sum(map(len, pipe.places)) * self.run.fleet.block
        while host.away:
            job = min(host.away, key=_number)
            if (pipe.used and job.kv + 1 + spare > pipe.free) or not pipe.grow(job, job.kv + 1):
                return
            host.away.remove(job)
            self._copy(pipe, job, lambda job=job: self._swapped_in(pipe, job), back=True)  # type: ignore[misc]
        if not host.copies:
            super().admit(pipe)

    def make_room(self, pipe: Pipeline, job: Job) -> bool:
        """Begins to swap out the newest request, unless one is being copied, and returns False: there is room once the
        copy has ended. Recomputes where the host is full."""
        host = self.host(pipe)
        if not host.copies:
            last = max((other for other in pipe.jobs() if not other.in_flight), key=_number)
            if self.nbytes(last) > host.room:
                return super().make_room(pipe, job)
            pipe.remove(last)
            last.stalled = True
            host.room -= self.nbytes(last)
            self._copy(pipe, last, lambda: self._swapped_out(pipe, last), back=False)
        return False

    def host(self, pipe: Pipeline) -> _Host:
        """Returns the host memory of a group."""
        return self._hosts.setdefault(pipe, _Host(len(pipe.members) * self.run.fleet.host_budget))

    def call_when_settled(self, pipe: Pipeline, then: Callable[[], None]) -> None:
        """Calls `then` once no copy of the group is under way."""
        self._settling[pipe] = then
        self._settle(pipe)

    def _settle(self, pipe: Pipeline) -> None:
        if pipe in self._settling and not self.host(pipe).copies:
            self._settling.pop(pipe)()

    def close(self, pipe: Pipeline) -> _Host:
        """Removes a group, and returns its host memory."""
        self._settling.pop(pipe, None)
        return self._hosts.pop(pipe)

    def nbytes(self, job: Job) -> int:
        """Returns the bytes of a request's KV."""
        return job.kv * self.run.fleet.shape.kv

    def _copy(self, pipe: Pipeline, job: Job, then: Callable[[], None], *, back: bool) -> None:
        """Has each member copy its part of a request's KV to the host, or `back`; then calls `then`."""
        host, left = self.host(pipe), len(pipe.members)
        host.copies.append(job)

        def copied() -> None:
            nonlocal left
            left -= 1
            if not left:
                host.copies.remove(job)
                then()
                self._settle(pipe)

        for nbytes, member in zip(shares(self.nbytes(job), pipe.spans, None), pipe.members, strict=True):
            self.run.host_link(member, back=back).send(nbytes, copied, owner=pipe)

    def _swapped_out(self, pipe: Pipeline, job: Job) -> None:
        pipe.release(job)
        self.host(pipe).away.append(job)
        pipe.pump()

    def _swapped_in(self, pipe: Pipeline, job: Job) -> None:
        self.host(pipe).room += self.nbytes(job)
        pipe.resume(job)
        pipe.pump()


class MigratePolicy(RecomputePolicy):
    """Moves requests to the replica with most room. See Note [Peers]."""

    def __init__(self, run: FleetRun) -> None:
        super().__init__(run)
        self._moves: dict[Job, tuple[Pipeline, Pipeline, int]] = {}  # from, to, tokens of room there
        self._sources: set[Pipeline] = set()
        run.every(DEFAULT.replicas.period, self._look)

    def preempt(self, pipe: Pipeline, job: Job) -> None:
        """Cancels the move of a request, frees its KV and queues it before all others."""
        self._cancel(job)
        super().preempt(pipe, job)

    def ended(self, pipe: Pipeline, job: Job) -> None:
        """Cancels the move of a request, if any, and ends it."""
        self._cancel(job)
        super().ended(pipe, job)

    def finish_leaving(self, pipe: Pipeline, job: Job) -> None:
        """Has a request go on at the target, which has all its KV."""
        _, to, room = self._moves.pop(job)
        self._sources.discard(pipe)
        pipe.remove(job)
        pipe.release(job)
        job.held, job.leaving = room, False
        self.moved(job, pipe, to)
        to.resume(job)
        pipe.pump()
        to.pump()

    def _look(self) -> None:
        """Once a period: moves a request of each stuck replica to one with room."""
        stuck = [pipe for pipe in self.run.pipes.values() if pipe.waiting and self._is_stuck(pipe)]
        if not stuck:
            return
        others = [pipe for pipe in self.run.pipes.values() if not pipe.waiting]
        for pipe in stuck:
            to = max(others, key=lambda other: other.free, default=None)
            if to is None:
                return
            spare, first = int(DEFAULT.replicas.watermark * to.capacity), pipe.waiting[0]
            if first.known + spare <= to.free:
                pipe.waiting.popleft()
                self.moved(first, pipe, to)
                to.add(first)
                others.remove(to)
            elif pipe not in self._sources:
                self._leave(pipe, to, spare)

    def _is_stuck(self, pipe: Pipeline) -> bool:
        spare = int(DEFAULT.replicas.watermark * pipe.capacity)
        return pipe.waiting[0].known + spare > pipe.free

    def _leave(self, pipe: Pipeline, to: Pipeline, spare: int) -> None:
        """Begins to move the smallest request that makes room for the first queued one, if it fits at the target."""
        short = pipe.waiting[0].known - pipe.free
        block = self.run.fleet.block
        fits = [fit for place in pipe.places for fit in place if short <= fit.held <= to.free - spare - block]
        job = min(fits, key=lambda fit: (fit.held, fit.number), default=None)
        if job is None:
            return
        room = job.held + block
        to.used += room
        self._moves[job] = pipe, to, room
        self._sources.add(pipe)
        link = self.run.link_of(pipe.members[0])
        link.send(job.kv * self.run.fleet.shape.kv, lambda: self._sent(job, to))

    def _sent(self, job: Job, to: Pipeline) -> None:
        """Notes that the KV has arrived; that of the few tokens since the copy began is neglected."""
        move = self._moves.get(job)
        if move is None or move[1] is not to:
            return
        job.leaving = True
        if not job.in_flight:
            self.finish_leaving(move[0], job)

    def _cancel(self, job: Job) -> None:
        if job in self._moves:
            source, to, room = self._moves.pop(job)
            self._sources.discard(source)
            to.used -= room
            job.leaving = False


def _number(job: Job) -> int:
    return job.number
