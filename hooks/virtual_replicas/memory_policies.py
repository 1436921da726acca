"""What is done when KV memory is full, by systems that drop no layers: wait, recompute, swap to the host, migrate.

Note [Peers]
    Simple models of other systems, whose replicas serve each for itself. All get requests from the dispatcher that the
    controller has, and begin them in order. `QueuePolicy` begins a request when all the KV fits that it will ever have.
    The others begin it when its prompt fits; when a token finds no room, the request that came last is preempted
    (vLLM): `RecomputePolicy` frees its KV and computes it anew; `Swap` copies the KV to the host, and back before any
    new request begins; `Migration` (Llumnix) moves requests from a replica whose queue is stuck to the one with most
    room: waiting requests at once, running ones while they go on decoding; where all replicas are full it recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ...offload.policy.replicas.pipeline import ChunkCost
from ...offload.policy.replicas.requests import Dispatcher
from ...offload.policy.replicas.tuning import DEFAULT
from .fleet import VirtualFleet
from .group_queue import Chunk, GroupQueue, Job
from .virtual_link import Wire
from .virtual_time import VirtualTime

# Part of the KV memory that stays free when a request begins, for those that decode: vLLM's watermark.
WATERMARK: Final = 0.01


class RecomputePolicy:
    """Preempts the newest request and computes it anew. Base of the others. See Note [Peers]."""

    def admit(self, queue: GroupQueue) -> None:
        """Begins requests in order, as long as there is room."""
        spare = int(WATERMARK * queue.capacity)
        while queue.waiting:
            wanted = self.wanted(queue.waiting[0])
            if (queue.used and wanted + spare > queue.free) or not queue.grow(queue.waiting[0], wanted):
                break
            queue.running[queue.waiting.popleft()] = None

    def wanted(self, job: Job) -> int:
        """Returns the tokens of room with which a request begins."""
        return job.known

    def make_room(self, queue: GroupQueue, job: Job) -> bool:
        """Preempts the newest requests until there is room for the next token of `job`. Returns False where `job`
        itself was preempted."""
        while not queue.grow(job, job.kv + 1):
            last = queue.newest()
            queue.preempt(last)
            if last is job:
                return False
        return True


class QueuePolicy(RecomputePolicy):
    """Begins a request only when all its KV fits. See Note [Peers]."""

    def wanted(self, job: Job) -> int:
        """Returns the tokens of KV at the end of the request."""
        return job.most


class Swap(RecomputePolicy):
    """Swaps the newest request of one queue to the host. `away`: requests whose KV is there; `copies`: those whose KV
    is being copied. See Note [Peers]."""

    def __init__(
        self, copy: Callable[[Job, bool, Callable[[], object]], object], nbytes: int, token: int, block: int
    ) -> None:
        """`copy`: called with a request, whether its KV comes back from the host, and what is to be called once that is
        done; `nbytes`: of host memory; `token`: bytes of a token's KV; `block`: tokens of a block."""
        self.away: dict[Job, None] = {}
        self.copies: set[Job] = set()
        self._copy = copy
        self._room = nbytes // token
        self._block = block

    def admit(self, queue: GroupQueue) -> None:
        """Swaps requests in, oldest first, as long as all running ones keep room for their next tokens (otherwise they
        would be swapped out at once); begins new requests where none is swapped out."""
        spare = len(queue.running) * self._block
        while self.away:
            job = min(self.away, key=lambda other: other.number)
            if (queue.used and job.known + spare > queue.free) or not queue.grow(job, job.known):
                return
            self.take_back(job)
            self._begin(job, True, lambda job=job: self._came_back(queue, job))  # type: ignore[misc]
        if not self.copies:
            super().admit(queue)

    def make_room(self, queue: GroupQueue, job: Job) -> bool:
        """Begins to swap out the newest request, unless one is being copied, and returns False: there is room once the
        copy has ended. Recomputes where the host is full."""
        if not self.copies:
            last = queue.newest()
            if last.kv > self._room:
                return super().make_room(queue, job)
            del queue.running[last]
            self._begin(last, False, lambda: self._went(queue, last))
        return False

    def put_away(self, job: Job) -> bool:
        """Takes a request whose KV is on the host. False where that has no room."""
        if job.kv > self._room:
            return False
        self.away[job] = None
        self._room -= job.kv
        return True

    def take_back(self, job: Job) -> None:
        """Gives up the host memory of a request. KeyError."""
        del self.away[job]
        self._room += job.kv

    def _begin(self, job: Job, back: bool, then: Callable[[], object]) -> None:
        job.copying = True
        self.copies.add(job)

        def copied() -> None:
            self.copies.discard(job)
            job.copying = False
            then()

        self._copy(job, back, copied)

    def _went(self, queue: GroupQueue, job: Job) -> None:
        queue.release(job)
        if not job.is_gone and not self.put_away(job):
            job.kv = 0
            queue.waiting.appendleft(job)

    def _came_back(self, queue: GroupQueue, job: Job) -> None:
        if job.is_gone:
            queue.release(job)
        else:
            queue.running[job] = None


@dataclass(frozen=True, slots=True)
class PeerSetup:
    """What replicas run with that drop no layers. `on_token`: called with each request that has got a token; `moved`:
    with bytes of KV that are copied, to or from the host or between replicas."""

    time: VirtualTime
    fleet: VirtualFleet
    cost: ChunkCost
    policy: str
    on_token: Callable[[Job], object]
    moved: Callable[[int], object]


class LoneServer:
    """A replica that serves by itself. `queue`: its requests."""

    def __init__(self, setup: PeerSetup) -> None:
        time, fleet, policy, moved = setup.time, setup.fleet, setup.policy, setup.moved
        hosts = {back: Wire(time, fleet.link) for back in (False, True)}

        def copy(job: Job, back: bool, then: Callable[[], object]) -> None:
            moved(job.kv * fleet.shape.kv)

            def copied() -> None:
                then()
                self.pump()

            hosts[back].send(job.kv * fleet.shape.kv, copied)

        memory = QueuePolicy() if policy == "queue" else RecomputePolicy()
        if policy == "swap":
            memory = Swap(copy, fleet.host_budget, fleet.shape.kv, fleet.block)
        self.queue = GroupQueue(lambda: fleet.tokens, fleet.block, fleet.batch, memory)
        self.network = Wire(time, fleet.network)
        self._time = time
        self._cost = setup.cost
        self._on_token = setup.on_token
        self._is_busy = False

    def pump(self) -> None:
        """Begins an iteration, if none is computed and there is anything to compute."""
        if not self._is_busy and (chunks := self.queue.plan()):
            self._is_busy = True
            seconds = self._cost.batch([(job.kv, new) for job, new in chunks])
            self._time.after(seconds, lambda: self._computed(chunks))

    def _computed(self, chunks: Sequence[Chunk]) -> None:
        self._is_busy = False
        for job in self.queue.finish(chunks):
            self._on_token(job)
        self.pump()


class Peers:
    """Replicas that serve each for itself, with one of the policies. See Note [Peers]."""

    POLICIES: Final = ("queue", "recompute", "swap", "migrate")

    def __init__(self, setup: PeerSetup) -> None:
        self._dispatcher = Dispatcher()
        self._on_token = setup.on_token
        self._servers: list[LoneServer] = []
        self._server_of: dict[Job, LoneServer] = {}
        for member in range(setup.fleet.replicas):
            self._servers.append(LoneServer(replace(setup, on_token=self._got)))
            self._dispatcher.add((member,), setup.fleet.tokens)
        if setup.policy == "migrate":
            self._migration = Migration(setup, self._servers, self._move)

    def submit(self, job: Job) -> str | None:
        """Takes a request that arrives. Returns why it is refused; None: it is taken."""
        members = self._dispatcher.choose(job.most)
        if members is None:
            return "no replica can ever hold its KV"
        server = self._server_of[job] = self._servers[members[0]]
        self._dispatcher.promise(members, job.most)
        server.queue.waiting.append(job)
        server.pump()
        return None

    def _got(self, job: Job) -> None:
        if job.is_over:
            self._dispatcher.release((self._servers.index(self._server_of.pop(job)),), job.most)
        self._on_token(job)

    def _move(self, job: Job, to: LoneServer) -> None:
        """Moves what is promised to a request to another replica."""
        self._dispatcher.release((self._servers.index(self._server_of[job]),), job.most)
        self._dispatcher.promise((self._servers.index(to),), job.most)
        self._server_of[job] = to


class Migration:
    """Once a period moves a request of each stuck replica to one with room. See Note [Peers]."""

    def __init__(
        self, setup: PeerSetup, servers: Sequence[LoneServer], on_move: Callable[[Job, LoneServer], object]
    ) -> None:
        """`on_move`: called with each request and where it goes."""
        self._time = setup.time
        self._fleet = setup.fleet
        self._servers = servers
        self._on_move = on_move
        self._moved = setup.moved
        self._sources: set[LoneServer] = set()  # of requests that are on their way
        self._look()

    def _look(self) -> None:
        stuck = [server for server in self._servers if server.queue.waiting and self._is_stuck(server.queue)]
        others = [server for server in self._servers if not server.queue.waiting]
        for server in stuck:
            to = max(others, key=lambda other: other.queue.free, default=None)
            if to is None:
                break
            spare, first = int(WATERMARK * to.queue.capacity), server.queue.waiting[0]
            if first.known + spare <= to.queue.free:
                server.queue.waiting.popleft()
                self._on_move(first, to)
                to.queue.waiting.append(first)
                to.pump()
                others.remove(to)
            elif server not in self._sources:
                self._send(server, to, spare)
        self._time.after(DEFAULT.period, self._look)

    def _is_stuck(self, queue: GroupQueue) -> bool:
        return queue.waiting[0].known + int(WATERMARK * queue.capacity) > queue.free

    def _send(self, server: LoneServer, to: LoneServer, spare: int) -> None:
        """Begins to move the smallest request that makes room for the first waiting one, if it fits at the target."""
        short, block = server.queue.waiting[0].known - server.queue.free, self._fleet.block
        fits = [job for job in server.queue.running if short <= job.held <= to.queue.free - spare - block]
        job = min(fits, key=lambda fit: (fit.held, fit.number), default=None)
        if job is None:
            return
        room = job.held + block
        to.queue.used += room
        self._sources.add(server)
        self._moved(job.kv * self._fleet.shape.kv)
        sent = job.kv
        server.network.send(sent * self._fleet.shape.kv, lambda: self._came(job, sent, server, to, room))

    def _came(self, job: Job, sent: int, server: LoneServer, to: LoneServer, room: int) -> None:
        """Has a request go on at the target once it is in no microbatch; the KV of the few tokens since the copy began
        is neglected."""
        job.copying = job in server.queue.running and job.kv >= sent
        if job.in_flight and job.copying:
            self._time.after(DEFAULT.period / 10, lambda: self._came(job, sent, server, to, room))
            return
        self._sources.discard(server)
        to.queue.used -= room
        if not job.copying:  # it has ended, or was preempted
            return
        job.copying = False
        server.queue.remove(job)
        if to.queue.grow(job, max(job.known, room - self._fleet.block)):
            to.queue.running[job] = None
        else:
            job.kv = 0
            to.queue.waiting.appendleft(job)
        self._on_move(job, to)
        server.pump()
        to.pump()
