"""What a replica of a simulation has in place of a model: memory without pages, layers and KV without bytes, and stages
that compute nothing.

Note [What is simulated]
    A microbatch takes the seconds of a `ChunkCost`, on each stage in proportion to its layers; a lone replica that
    lacks layers reads them from its host in each microbatch, which takes as long as the copy. A token is a zero. An
    iteration begins with the memory that is free on all members of the group, which the real first stage knows a
    microbatch later. Where there is none the newest request goes to the host, as in `Swap`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet, ref

import torch

from ...allocator.errors import DropRefused, WeightsFileChanged
from ...offload.policy.replicas.demand import KVSize, prompt_pages
from ...offload.policy.replicas.groups import Group, Span
from ...offload.policy.replicas.pipeline import ChunkCost
from ...offload.policy.replicas.protocol import Reason
from ..replicas.leader import Notify
from ..replicas.microbatch_plan import FollowerSize, Request, tensor_of
from ..replicas.replica_model import Ran, StageTimes
from ..replicas.stage import Stage
from ..sampling.settings import ChosenToken
from .fleet import VirtualFleet
from .group_queue import Chunk, GroupQueue, Job
from .memory_policies import Swap
from .virtual_link import Sender, VirtualBytes, Wire
from .virtual_time import VirtualTime


class VirtualCache:
    """KV of a span of layers, in place of replica_model.SpanCache. `on_host`: requests whose KV is there; `tokens`: of
    the others."""

    def __init__(self, machine: VirtualMachine, layers: range) -> None:
        self.layers = layers
        self.on_host: set[str] = set()
        self.tokens = 0
        self.token_bytes = machine.fleet.shape.kv * len(layers) / len(machine.fleet.shape.layers)
        self._fleet = machine.fleet
        self._kv: dict[str, int] = {}  # tokens by request, in whole blocks

    def put(self, request: str, tokens: int) -> None:
        """Notes that so many tokens of a request have KV, on the device."""
        self.give(request)
        block = self._fleet.block
        self._kv[request] = whole = -(-tokens // block) * block
        self.tokens += whole

    def to_host(self, request: str) -> None:
        """Notes that the KV of a request is on the host."""
        if request in self._kv and request not in self.on_host:
            self.on_host.add(request)
            self.tokens -= self._kv[request]

    def give(self, request: str) -> None:
        """Frees the KV of a request. Idempotent."""
        tokens = self._kv.pop(request, 0)
        if request in self.on_host:
            self.on_host.discard(request)
        else:
            self.tokens -= tokens

    def store(self, state: Any, tokens: int) -> bool:
        """Allocates KV for a request that arrives: where the device has no room, on the host."""
        self.put(state.request_id, tokens)
        return True

    def count_blocks(self, request: str, layer: int) -> int:
        """Returns the number of blocks of a request's KV in a layer. KeyError."""
        return self._kv[request] // self._fleet.block

    def read_blocks(self, request: str, layer: int, first: int, count: int) -> VirtualBytes:
        """Returns the blocks [first, first + count) of a request's KV in a layer."""
        return VirtualBytes(int(count * self._fleet.block * self.token_bytes / len(self.layers)))

    def write_blocks(self, request: str, layer: int, first: int, count: int, tensor: VirtualBytes) -> None:
        """Does nothing: the bytes are nowhere."""

    @staticmethod
    def checksum(tensor: VirtualBytes) -> int:
        """Returns another number for bytes that are damaged."""
        return int(tensor.is_damaged)


class VirtualMachine:
    """One replica's device and host. `dropped`: its layers that are not resident; `is_whole`: pages are reserved for
    all of them; `stages`: that are in use. Faults: `refusing`: why it cannot prepare the next epoch; `changed`: the
    file of its weights has changed."""

    def __init__(self, time: VirtualTime, fleet: VirtualFleet, sender: Sender) -> None:
        self.time = time
        self.fleet = fleet
        self.sender = sender
        self.dropped: set[int] = set()
        self.is_whole = True
        self.stages: WeakSet[VirtualStage] = WeakSet()
        self.refusing: Reason | None = None
        self.changed = False
        self.to_host = Wire(time, fleet.link)
        self.from_host = Wire(time, fleet.link)

    def free(self, cache: VirtualCache | None = None) -> int:
        """Returns the bytes that are free for KV; those of `cache` count as free."""
        pages = self.fleet.layer_pages
        resident = sum(pages) if self.is_whole else sum(pages) - sum(pages[layer] for layer in self.dropped)
        if self.dropped and not self.is_whole:
            resident += max(pages[layer] for layer in self.dropped)
        caches = [stage.cache for stage in self.stages if stage.cache is not cache]
        used = sum(other.tokens * other.token_bytes for other in caches)
        return int((self.fleet.pages - resident) * self.fleet.page - used)

    @property
    def missing(self) -> int:
        """Bytes of the layers that are not resident."""
        return sum(self.fleet.shape.layers[layer] for layer in self.dropped)

    @property
    def moved(self) -> int:
        """Bytes of KV and of layers that it has sent, to others and to and from its host."""
        return self.sender.bulk.moved + self.to_host.moved + self.from_host.moved


class VirtualLayers:
    """The layers of a replica, in place of held_layers.HeldLayers."""

    def __init__(self, machine: VirtualMachine, dropping: float) -> None:
        """`dropping`: seconds that a drop takes."""
        self._machine = machine
        self._dropping = dropping
        self._is_known = False  # that the file has changed

    @property
    def dropped(self) -> tuple[int, ...]:
        """The dropped layers, ascending."""
        return tuple(sorted(self._machine.dropped))

    def begin(self, wanted: Callable[[int], object], on_progress: Callable[[], object]) -> None:
        """Does nothing: no reclaim order lacks pages, and nothing is copied."""

    def end(self) -> None:
        """Does nothing: who has dropped layers, and is alone, restores them."""

    def prepare(self, layers: Iterable[int]) -> Iterator[object]:
        """Makes layers ready to be dropped, in no time. DropRefused, WeightsFileChanged, torch.OutOfMemoryError."""
        machine, why = self._machine, self._machine.refusing
        machine.refusing = None
        if machine.changed and not self._is_known:
            self._is_known = True
            raise WeightsFileChanged("weights", "it was written to")
        if why is not None:
            raise DropRefused(why.value) if why is Reason.HOST_MEMORY else torch.OutOfMemoryError(why.value)
        return iter(())

    def drop(self, span: Span) -> None:
        """Drops all layers outside of a span."""
        machine = self._machine
        machine.time.sleep(self._dropping)
        machine.dropped |= {*range(len(machine.fleet.shape.layers))} - {*span.layers}
        machine.is_whole = False

    def restore(
        self, order: Iterable[int], source: Callable[[int], Mapping[str, VirtualBytes] | None] | None = None
    ) -> Iterator[object]:
        """Restores dropped layers, one in each step, from a peer or from the host. torch.OutOfMemoryError,
        WeightsFileChanged, and what `source` raises."""
        machine = self._machine
        for layer in order:
            if layer not in machine.dropped:
                continue
            if source is None:
                if machine.changed:
                    raise WeightsFileChanged("weights", "it was written to")
                machine.time.sleep(machine.fleet.shape.layers[layer] / machine.fleet.link)
                machine.from_host.moved += machine.fleet.shape.layers[layer]
            else:
                source(layer)
            if not machine.is_whole and machine.free() < machine.fleet.layer_pages[layer] * machine.fleet.page:
                raise torch.OutOfMemoryError(f"no room for layer {layer}")
            machine.dropped.discard(layer)
            yield layer

    def tensors(self, layer: int) -> dict[str, VirtualBytes]:
        """Returns a layer, as one tensor."""
        return {"layer": VirtualBytes(self._machine.fleet.shape.layers[layer])}

    def keep_room(self) -> None:
        """Reserves pages for all layers."""
        self._machine.is_whole = True

    def release(self) -> None:
        """Does nothing: no manager decides about layers."""


@dataclass(frozen=True, slots=True)
class VirtualReplicaModel:
    """In place of replica_model.ReplicaModel. `machines`: of all replicas, by member."""

    machine: VirtualMachine
    machines: Mapping[int, VirtualMachine]
    cost: ChunkCost
    times: StageTimes


@dataclass(frozen=True, slots=True)
class VirtualMicrobatch:
    """What a stage sends to the next one. `sizes`: (tokens before, new tokens) of chunks; `ends`: of each request its
    tokens with KV then; `gone`: requests whose KV is to be freed; `nbytes`: of hidden states."""

    sizes: tuple[tuple[int, int], ...]
    ends: tuple[tuple[str, int], ...]
    gone: tuple[str, ...]
    nbytes: int


class VirtualLeader:
    """The first stage of a group, in place of leader.Leader and its requests. `by_name`: those that have not ended;
    `plans`: see Leader."""

    def __init__(self, stage: VirtualStage, notify: Notify) -> None:
        self.by_name: dict[str, Request] = {}
        self.plans = True
        self._stage_of = ref(stage)  # no cycle: its KV is freed with the stage, at once
        self._notify = notify
        self._jobs: dict[str, Job] = {}
        fleet = stage.machine.fleet
        nbytes = fleet.host_budget * stage.group.size
        self._swap = Swap(self._copy, nbytes, fleet.shape.kv, fleet.block)
        self.queue = GroupQueue(self._capacity, fleet.block, fleet.batch, self._swap)
        self._planned: deque[Sequence[Chunk]] = deque()
        self._flying: deque[Sequence[Chunk]] = deque()
        self._gone: list[str] = []
        self._is_stuck = False  # nothing could be planned, and nothing has changed since

    @property
    def requests(self) -> VirtualLeader:
        """The requests of the group, which are here, too."""
        return self

    @property
    def _stage(self) -> VirtualStage:
        stage = self._stage_of()
        assert stage is not None
        return stage

    # -- requests

    def add(self, request: Request) -> None:
        """Queues a request without KV."""
        self.queue.waiting.append(self._job(request))

    def adopt(self, request: Request, held: int) -> None:
        """Takes a request `held` tokens of which have KV on all stages; on the host, where the device has no room."""
        job = self._job(request)
        job.kv = held
        self.queue.capacity = self._stage.capacity()
        if self.queue.grow(job, job.known):
            self.queue.running[job] = None
        elif self._swap.put_away(job):
            self._mark_on_host(job)
        else:
            job.kv = 0
            self.forget(request.name)
            self.queue.waiting.append(job)

    def forget(self, request: str) -> None:
        """Has all stages free the KV of a request."""
        self._stage.cache.give(request)
        self._gone.append(request)

    def cancel(self, request: str) -> None:
        """Ends a request."""
        if self.by_name.pop(request, None) is not None:
            self._drop(self._jobs.pop(request))
            self.forget(request)

    def release(self, request: str) -> Request:
        """Removes a request, and returns it for another group; its KV stays in the caches."""
        self._drop(self._jobs.pop(request))
        return self.by_name.pop(request)

    def held(self, request: str) -> int:
        """Returns the number of a request's tokens that have KV."""
        return self._jobs[request].kv

    @property
    def waiting(self) -> list[int]:
        """Tokens of each request that has no memory on the device."""
        return [job.known for job in (*self.queue.waiting, *self._swap.away)]

    def _capacity(self) -> int:
        """Returns the tokens of KV for which there is memory, without those of requests that are still on their way."""
        used = self.queue.used if self._jobs else 0
        stored: int = self._stage.cache.tokens
        return self._stage.capacity() - max(0, stored - used)

    def _job(self, request: Request) -> Job:
        job = Job(request.name, int(request.name), len(request.prompt), request.new, len(request.delivered))
        self.by_name[request.name], self._jobs[request.name] = request, job
        self._is_stuck = False
        return job

    def _drop(self, job: Job) -> None:
        self._is_stuck = False
        if job in self._swap.away:
            self._swap.take_back(job)
        elif job.in_flight or job.copying:
            job.is_gone = True
        else:
            self.queue.remove(job)

    # -- microbatches

    @property
    def in_flight(self) -> int:
        """Number of microbatches that were begun and not answered."""
        return len(self._flying)

    @property
    def queued(self) -> int:
        """Number of microbatches that are planned and not begun, and of copies under way."""
        return len(self._planned) + len(self._swap.copies)

    @property
    def idle(self) -> bool:
        """Whether no microbatch can be planned, as far as known."""
        wanted = not self._is_stuck and self.plans and bool(self.queue.waiting or self.queue.running or self._swap.away)
        return not (wanted or self._planned or (self._gone and self._stage.group.size > 1))

    def launch(self) -> bool:
        """Begins a microbatch, if a place is free and there is anything to compute. Returns whether it did."""
        size = self._stage.group.size
        if self.in_flight >= size:
            return False
        if not self._planned and self.plans:
            self._plan(size - self.in_flight)
        while self._planned:
            planned = self._planned.popleft()
            chunks = [chunk for chunk in planned if not chunk[0].is_gone]
            self.queue.finish([chunk for chunk in planned if chunk[0].is_gone])
            if chunks:
                self._begin(chunks)
                return True
        if self._gone and size > 1:
            self._begin(())
            return True
        return False

    def collect(self) -> bool:
        """Takes in the answer to the oldest microbatch, and returns True."""
        self._stage.take_answer()
        self._finish(self._flying.popleft())
        return True

    def _plan(self, places: int) -> None:
        chunks = self.queue.plan()
        self._is_stuck = not chunks
        if places == 1 or not chunks:
            self._planned.extend([chunks] if chunks else [])
            return
        for pieces in self._stage.split([(job.kv, new) for job, new in chunks], places):
            self._planned.append([(chunks[index][0], new) for index, new in pieces])
        self._keep_order()

    def _keep_order(self) -> None:
        """Puts a chunk that was cut off into one microbatch: a request is in one at a time."""
        seen: set[Job] = set()
        for number, chunks in enumerate(self._planned):
            self._planned[number] = kept = [chunk for chunk in chunks if chunk[0] not in seen]
            seen |= {job for job, _ in kept}

    def _begin(self, chunks: Sequence[Chunk]) -> None:
        gone, self._gone = tuple(self._gone), []
        sizes = tuple((job.kv, new) for job, new in chunks)
        ends = tuple((job.name, job.kv + new) for job, new in chunks)
        tokens = sum(new for _, new in sizes)
        nbytes = tokens * self._stage.machine.fleet.shape.hidden
        self._flying.append(chunks)
        self._stage.compute(VirtualMicrobatch(sizes, ends, gone, nbytes))
        if self._stage.group.size == 1:
            self.collect()

    def _finish(self, chunks: Sequence[Chunk]) -> None:
        self._is_stuck = False
        for job in self.queue.finish(chunks):
            request = self.by_name[job.name] = self.by_name[job.name].with_token(ChosenToken(0))
            if job.is_over:
                del self.by_name[job.name], self._jobs[job.name]
                self.forget(job.name)
            self._notify(request, None)

    # -- KV on the host

    def _copy(self, job: Job, back: bool, then: Callable[[], object]) -> None:
        """Has each member copy its part of a request's KV."""
        stage, left = self._stage, self._stage.group.size
        wakeup = stage.machine.sender.wakeup

        def copied() -> None:
            nonlocal left
            left -= 1
            if left or self._stage_of() is None:
                return
            self._is_stuck = False
            then()
            if not back and job in self._swap.away:
                self._mark_on_host(job)
            wakeup.notify()

        for member, span in zip(stage.group.members, stage.group.spans, strict=True):
            machine = stage.model.machines[member]
            wire = machine.from_host if back else machine.to_host
            wire.send(job.kv * machine.fleet.shape.kv * len(span) // stage.group.layers, copied)

    def _mark_on_host(self, job: Job) -> None:
        for member in self._stage.group.members:
            for cache in self._stage.caches_of(member):
                cache.to_host(job.name)


class VirtualFollower:
    """A stage after the first, in place of follower.Follower."""

    def __init__(self, stage: VirtualStage) -> None:
        self._stage_of = ref(stage)  # no cycle, see VirtualLeader

    def adopt(self, state: object) -> None:
        """Takes a request whose KV is already in the cache."""

    def run(self) -> None:
        """Computes the next microbatch of the stage before."""
        stage = self._stage_of()
        assert stage is not None
        stage.compute_next()


class VirtualStage(Stage):
    """A Stage that computes nothing. See Note [What is simulated]."""

    cache: Any  # a VirtualCache

    def __init__(self, model: Any, group: Group, me: int, *others: Any) -> None:
        """The arguments are those of Stage; `model`: a VirtualReplicaModel."""
        self.model: VirtualReplicaModel = model
        self.machine = self.model.machine
        self.machine.stages.add(self)
        self._is_last = me == group.members[-1]
        super().__init__(model, group, me, *others)

    def _new_cache(self, replica: Any, layers: range) -> Any:
        return VirtualCache(self.machine, layers)

    def _new_follower(self, number: int) -> Any:
        return VirtualFollower(self)

    def _follower_size(self) -> FollowerSize:
        return FollowerSize(0, 0, 0)  # the leader knows all machines

    def _new_leader(self, followers: Sequence[FollowerSize]) -> Any:
        return VirtualLeader(self, self._notify)

    def capacity(self) -> int:
        """Returns the tokens of KV for which all members of the group have memory."""
        token, tokens = self.machine.fleet.shape.kv, []
        for member, span in zip(self.group.members, self.group.spans, strict=True):
            own = next(iter(self.caches_of(member)), None)
            tokens.append(self.model.machines[member].free(own) * self.group.layers // (token * len(span)))
        return int(max(0, min(tokens)))

    def caches_of(self, member: int) -> list[VirtualCache]:
        """Returns the cache of a member in this epoch; none before its stage has begun."""
        return [stage.cache for stage in self.model.machines[member].stages if stage.epoch == self.epoch]

    def count_pages(self, layers: int) -> tuple[int, int, int]:
        """Returns pages: (of KV on the device, free, pending), see Stage; the first stage has the pending ones of
        all."""
        fleet, cache = self.machine.fleet, self.cache
        used = int(cache.tokens * cache.token_bytes) // fleet.page
        waiting = () if self.leader is None else self.leader.requests.waiting
        pending = prompt_pages(waiting, KVSize(fleet.shape.kv, fleet.page))
        return used, max(0, self.machine.free()) // fleet.page, pending

    def compute_next(self) -> None:
        """Computes the next microbatch of the stage before."""
        assert self._before is not None
        batch: Any = self._before.link.take("plan")
        self.compute(batch)

    def take_answer(self) -> None:
        """Takes in the answer of the last stage, unless that is this one."""
        if self._before is not None:
            self._before.link.take("answer")

    def compute(self, batch: VirtualMicrobatch) -> None:
        """Computes this stage's layers of a microbatch, and passes it on."""
        machine, time = self.machine, self.machine.time
        began, span = time.now(), len(self.cache.layers)
        if batch.sizes:
            seconds = self.model.cost.batch(batch.sizes) * span / self.group.layers
            time.sleep(max(seconds, machine.missing / machine.fleet.link if self.group.size == 1 else 0.0))
            self.model.times.add(Ran(began, time.now(), (), span))
        for request in batch.gone:
            self.cache.give(request)
        for request, tokens in batch.ends:
            self.cache.put(request, tokens)
        if self._is_last and self._after is not None:
            self._after.send(tensor_of(()), "answer", True)
        elif self._after is not None:
            self._after.send(batch, "plan", True)  # type: ignore[arg-type]  # what has `nbytes`
