"""The process of one replica: loads the model, joins the supervisor, and runs until that ends."""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...allocator._native import Device
from ...allocator.config import Config
from ...allocator.errors import ManageError
from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.tuning import DEFAULT, Replicas
from ..manage import managed
from ..managed import Managed, residency_of, weights_of
from ..options import ManageOptions
from ..sectors.memory import memory_of
from ..server.loading import loaded
from ..splice.splice import Splice
from .child_processes import end_with_parent
from .cost_measurement import measure_cost
from .errors import SupervisorLost
from .fault_injection import Faults, FaultyChannel, FaultyLayers, FaultyLink
from .fingerprint import fingerprint_of
from .group_settings import GroupSettings
from .held_layers import HeldLayers
from .link import Link
from .mailbox import Mailbox
from .membership import join
from .messages import Hello, Started, decoded
from .microbatch_split import split_by_cost
from .nccl import NcclConnect, gpu_name, stream_of
from .notes import Notes
from .pair import GlooConnect
from .placement import Placement
from .rendezvous import open_store
from .replica import Replica
from .replica_model import ReplicaModel, cache_of
from .replica_setup import ReplicaSetup, SupervisorChannel
from .spliced_layers import SplicedLayers
from .stage_times import Ran, StageTimes, marks_of
from .store import Store
from .typed_mailbox import ToSupervisor
from .wakeup import Wakeup


def run(
    name: str,
    device: Device,
    options: ManageOptions,
    placement: Placement,
    secret: str | None,
    say: Callable[[str], object],
    max_batch_tokens: int | None = None,
    started: str | None = None,
    cost: ChunkCost | None = None,
    tuning: Replicas = DEFAULT.replicas,
    **batching: Any,
) -> None:
    """Serves as a replica of the supervisor at `placement`, until that ends. `say`: prints a line; `started`: a
    messages.Started, from a supervisor that has started this process; `cost`: of chunks, where `started` has none;
    None: it is measured; `batching`: arguments of ContinuousBatchingConfig, the same on all replicas. ManageError,
    SpliceError; JoinRefused, SupervisorLost where there is no supervisor; torch.OutOfMemoryError."""
    keep_running = end_with_parent(say)
    store = open_store(placement, tuning.joining)
    model = loaded(name, device, say)
    handle = managed(model, options)
    try:
        with Splice(model) as splice:
            runs = SplicedLayers(splice)
            settings = GroupSettings.of(model, max_batch_tokens or tuning.chunk, **batching)
            torch_device = torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")
            layers, marks = len(splice.layers), marks_of(torch_device)
            fingerprint = fingerprint_of(model, device)
            me = join(store, secret, fingerprint, tuning.joining)  # before it measures, as it may be refused
            told = None if started is None else decoded(started)
            assert told is None or isinstance(told, Started)
            cost = (None if told is None else told.cost) or cost
            cost = cost or _measured(ReplicaModel(name, model, runs, settings), layers, marks, say, tuning)
            say(f"{name}: {handle!r}")
            notes = Notes(time.monotonic)
            times = StageTimes(layers, cost, time.monotonic, marks, lambda ran: _note(notes, ran), tuning)
            replica = ReplicaModel(name, model, runs, settings, times)
            hello = _hello(replica, handle, device, cost, None if told is None else told.rank)
            keep_running()
            while _run_member(me, store, secret, replica, handle, torch_device, hello, notes, say, tuning):
                say(f"replica {me} was taken for lost, and joins anew")
                me = join(store, secret, fingerprint, tuning.joining)
    finally:
        handle.release()


def _run_member(
    me: int,
    store: Store,
    secret: str | None,
    replica: ReplicaModel,
    handle: Managed,
    torch_device: torch.device,
    hello: Hello,
    notes: Notes,
    say: Callable[[str], object],
    tuning: Replicas,
) -> bool:
    """Runs as member `me`, until the supervisor ends it or is lost. Returns whether it has to join anew."""
    wakeup = Wakeup()
    box = Mailbox(store, me, secret or "", wakeup)
    supervisor: SupervisorChannel = ToSupervisor(box)
    make: Callable[..., Link] = Link
    path = Config.from_env().replica_faults
    if path is not None:
        faults = Faults(path, me)
        replica = dataclasses.replace(replica, runs=FaultyLayers(replica.runs, faults))
        supervisor, make = FaultyChannel(supervisor, faults), partial(FaultyLink, faults)
    gpu = gpu_name(torch_device)
    stream = stream_of(torch_device) if gpu else None

    def connect(epoch: int, peer: int) -> Link:
        connects = GlooConnect(store, epoch, me, peer, tuning.forming)
        if stream is not None:
            ways: dict[str, Any] = {"gpu": gpu, "device": torch_device, "stream": stream, "bulk": tuning.bulk}
            connects = NcclConnect(store, epoch, me, peer, tuning.forming, **ways)
        return make(connects, epoch, peer, wakeup, device=torch_device, tuning=tuning)

    supervisor.post(hello)
    split, held = split_by_cost(hello.cost), HeldLayers(handle)
    setup = ReplicaSetup(
        me, replica, len(hello.layers), held, supervisor, connect, time.monotonic, split, tuning, notes
    )
    loop = Replica(setup, wakeup)
    try:
        return loop.run()
    except SupervisorLost:
        say(f"replica {me} ends: its supervisor has gone")
    finally:
        del loop, setup
        gc.collect()
        box.close()
    return False


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
    now = memory_of(device, cache.pages.client, cache.pages.client.governor.tuning.serving)
    cache.user = lambda: None
    own = sum(each.backed for each in weights_of(handle).ranges.get(None, ()))  # of weights outside of layers
    free = device.budget // device.page_size - own - now.reserve // device.page_size
    return Hello(os.getpid(), platform.node(), max(0, free), layers, token, device.page_size, cost, rank)
