"""The process of one replica: loads the model, joins the supervisor, and runs until that ends."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from ...allocator._native import Device
from ...allocator.errors import ManageError
from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.tuning import DEFAULT, Replicas
from ..batching.memory import memory_of
from ..manage import managed
from ..managed import Managed, residency_of, weights_of
from ..options import ManageOptions
from ..server.loading import loaded
from ..splice.splice import Splice
from .channel import SupervisorChannel, Wakeup
from .child_processes import end_with_parent
from .connections import ToSupervisor
from .cost_measurement import measure_cost
from .errors import SupervisorLost
from .held_layers import HeldLayers
from .link import Link
from .messages import Hello, Started, fingerprint_of
from .microbatch_plan import split_by_cost
from .nccl import NcclConnect, gpu_name, stream_of
from .pair import GlooConnect, Store
from .recording import Notes
from .replica import Replica
from .replica_model import GroupSettings, ReplicaModel, RunsLayers, SplicedLayers, cache_of
from .replica_setup import ReplicaSetup
from .stage_times import Ran, StageTimes, marks_of

# (number, layers, channel) -> the same, changed, and what makes links: the one place where tests attach faults
Attach = Callable[[int, RunsLayers, SupervisorChannel], tuple[RunsLayers, SupervisorChannel, Callable[..., Link]]]


def run(
    name: str,
    device: Device,
    options: ManageOptions,
    host: str,
    port: int,
    secret: str | None,
    say: Callable[[str], object],
    max_batch_tokens: int | None = None,
    started: str | None = None,
    cost: ChunkCost | None = None,
    attach: Attach | None = None,
    tuning: Replicas = DEFAULT.replicas,
    **batching: Any,
) -> None:
    """Serves as a replica of the supervisor at `host` and `port`, until that ends. `say`: prints a line; `started`: a
    messages.Started as JSON, from a supervisor that has started this process; `cost`: of chunks, where `started` has
    none; None: it is measured; `attach`: for tests, changes what a replica runs with; `batching`: arguments of
    ContinuousBatchingConfig, the same on all replicas. ManageError, SpliceError; JoinRefused, SupervisorLost where
    there is no supervisor; torch.OutOfMemoryError."""
    keep_running = end_with_parent(say)
    wakeup = Wakeup()
    connection = ToSupervisor(host, port, secret, wakeup, tuning.joining)
    model = loaded(name, device, say)
    handle = managed(model, options)
    try:
        with Splice(model) as splice:
            runs = SplicedLayers(splice)
            settings = GroupSettings.of(model, max_batch_tokens or tuning.chunk, **batching)
            torch_device = torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")
            layers, marks = len(splice.layers), marks_of(torch_device)
            fingerprint = fingerprint_of(model, device)
            welcome = connection.join(fingerprint)  # before it measures, as it may be refused
            store = Store.connect(host, welcome.links, timeout=tuning.joining)
            told = None if started is None else msgspec.json.decode(started, type=Started)
            cost = (None if told is None else told.cost) or cost
            cost = cost or _measured(ReplicaModel(name, model, runs, settings), layers, marks, say, tuning)
            say(f"{name}: {handle!r}")
            notes = Notes(time.monotonic)
            times = StageTimes(layers, cost, time.monotonic, marks, lambda ran: _note(notes, ran), tuning)
            replica = ReplicaModel(name, model, runs, settings, times)
            hello = _hello(replica, handle, device, cost, None if told is None else told.rank)
            keep_running()
            member = _Member(connection, store, wakeup, replica, handle, torch_device, hello, notes, attach, tuning)
            me = welcome.member
            try:
                while member.run(me):
                    say(f"replica {me} was taken for lost, and joins anew")
                    me = connection.join(fingerprint).member
            except SupervisorLost:
                say(f"replica {me} ends: its supervisor has gone")
    finally:
        connection.close()
        handle.release()


@dataclass(frozen=True, slots=True)
class _Member:
    """What a replica runs with, whatever its number."""

    connection: ToSupervisor
    store: Store
    wakeup: Wakeup
    replica: ReplicaModel
    handle: Managed
    device: torch.device
    hello: Hello
    notes: Notes
    attach: Attach | None
    tuning: Replicas

    def run(self, me: int) -> bool:
        """Runs as member `me`, until the supervisor ends it. Returns whether it has to join anew. SupervisorLost."""
        supervisor: SupervisorChannel = self.connection
        replica, tuning = self.replica, self.tuning
        make: Callable[..., Link] = Link
        if self.attach is not None:
            runs, supervisor, make = self.attach(me, replica.runs, supervisor)
            replica = replace(replica, runs=runs)
        gpu = gpu_name(self.device)
        stream = stream_of(self.device) if gpu else None

        def connect(epoch: int, peer: int) -> Link:
            connects = GlooConnect(self.store, epoch, me, peer, tuning.forming)
            if stream is not None:
                ways: dict[str, Any] = {"gpu": gpu, "device": self.device, "stream": stream, "bulk": tuning.bulk}
                connects = NcclConnect(self.store, epoch, me, peer, tuning.forming, **ways)
            return make(connects, epoch, peer, self.wakeup, device=self.device, tuning=tuning)

        supervisor.post(self.hello)
        split, held, layers = split_by_cost(self.hello.cost), HeldLayers(self.handle), len(self.hello.layers)
        setup = ReplicaSetup(me, replica, layers, held, supervisor, connect, time.monotonic, split, tuning, self.notes)
        loop = Replica(setup, self.wakeup)
        try:
            return loop.run()
        finally:
            del loop, setup
            gc.collect()


def _measured(
    member: ReplicaModel, layers: int, marks: Any, say: Callable[[str], object], tuning: Replicas
) -> ChunkCost:
    """Measures the cost of chunks. ManageError where that fails."""
    try:
        found = measure_cost(member, layers, marks, tuning)
    except ValueError as error:
        raise ManageError(f"what batches of {member.name} take cannot be measured: {error}") from error
    say(f"{member.name}: what a batch takes is predicted within {found.error:.1%} on average")
    return found.cost


def _note(notes: Notes, ran: Ran) -> None:
    """Adds a microbatch to the timeline."""
    tokens = sum(new for _, new in ran.sizes)
    notes.bar("microbatches", f"{len(ran.sizes)} requests, {tokens} tokens", ran.begin, ran.end)


def _hello(replica: ReplicaModel, handle: Managed, device: Device, cost: ChunkCost, rank: int | None) -> Hello:
    """Returns this replica's Hello."""
    layers = tuple(residency_of(handle).plan.pages)
    cache = cache_of(replica, range(len(layers)))
    token = round(cache.token_bytes)
    now = memory_of(cache.pages)
    cache.user = lambda: None
    own = sum(each.backed for each in weights_of(handle).ranges.get(None, ()))  # of weights outside of layers
    free = device.budget // device.page_size - own - now.reserve // device.page_size
    return Hello(os.getpid(), platform.node(), max(0, free), layers, token, device.page_size, cost, rank)
