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
from .bell import Bell
from .children import end_with_parent
from .costing import measured
from .errors import SupervisorLost
from .faults import Faults, FaultyLayers, FaultyLink, FaultySpeaks
from .fingerprint import fingerprint_of
from .forming import by_cost
from .held_layers import HeldLayers
from .link import Link
from .mail import ToSupervisor
from .mailbox import Mailbox
from .member import Member, cache_of
from .membership import join
from .messages import Hello, Started, decoded
from .nccl import NcclConnect, available, stream_of
from .notes import Notes
from .pair import GlooConnect
from .placement import Placement
from .rendezvous import open_store
from .replica import Replica
from .settings import GroupSettings
from .setup import Setup, Speaks
from .spliced import SplicedLayers
from .stage_times import Ran, StageTimes, marks_of
from .store import Store


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
    """Serves as a replica of the supervisor that `placement` says. `started`: what a supervisor has told who it started
    (messages.Started); `cost`: what chunks take, where that does not say it; None: it is measured; `batching`: what
    ContinuousBatchingConfig takes, the same for all. ManageError, SpliceError; JoinRefused, SupervisorLost where there
    is none; torch.OutOfMemoryError."""
    serves = end_with_parent(say)
    store = open_store(placement, tuning.joining)
    model = loaded(name, device, say)
    handle = managed(model, options)
    try:
        with Splice(model) as splice:
            runs = SplicedLayers(splice)
            settings = GroupSettings.of(model, max_batch_tokens or tuning.chunk, **batching)
            place = torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")
            layers, marks = len(splice.layers), marks_of(place)
            fingerprint = fingerprint_of(model, device)
            me = join(store, secret, fingerprint, tuning.joining)  # who is refused hears it before it measures
            told = None if started is None else decoded(started)
            assert told is None or isinstance(told, Started)
            cost = (None if told is None else told.cost) or cost
            cost = cost or _measured(Member(name, model, runs, settings), layers, marks, say, tuning)
            say(f"{name}: {handle!r}")
            notes = Notes(time.monotonic)
            times = StageTimes(layers, cost, time.monotonic, marks, lambda ran: _note(notes, ran), tuning)
            replica = Member(name, model, runs, settings, times)
            hello = _hello(replica, handle, device, cost, None if told is None else told.rank)
            serves()
            while _live(me, store, secret, replica, handle, place, hello, notes, say, tuning):
                say(f"replica {me} was taken for lost, and joins anew")
                me = join(store, secret, fingerprint, tuning.joining)
    finally:
        handle.release()


def _live(
    me: int,
    store: Store,
    secret: str | None,
    replica: Member,
    handle: Managed,
    place: torch.device,
    hello: Hello,
    notes: Notes,
    say: Callable[[str], object],
    tuning: Replicas,
) -> bool:
    """The life of a member, until the supervisor ends it or is gone. Is it to join anew?"""
    bell = Bell()
    box = Mailbox(store, me, secret or "", bell)
    supervisor: Speaks = ToSupervisor(box)
    make: Callable[..., Link] = Link
    path = Config.from_env().replica_faults
    if path is not None:
        faults = Faults(path, me)
        replica = dataclasses.replace(replica, runs=FaultyLayers(replica.runs, faults))
        supervisor, make = FaultySpeaks(supervisor, faults), partial(FaultyLink, faults)
    gpu = available(place)
    stream = stream_of(place) if gpu else None

    def connect(epoch: int, peer: int) -> Link:
        connects = GlooConnect(store, epoch, me, peer, tuning.forming)
        if stream is not None:
            ways: dict[str, Any] = {"gpu": gpu, "device": place, "stream": stream, "bulk": tuning.bulk}
            connects = NcclConnect(store, epoch, me, peer, tuning.forming, **ways)
        return make(connects, epoch, peer, bell, device=place, tuning=tuning)

    supervisor.post(hello)
    form, held = by_cost(hello.cost), HeldLayers(handle)
    setup = Setup(me, replica, len(hello.layers), held, supervisor, connect, time.monotonic, form, tuning, notes)
    loop = Replica(setup, bell)
    try:
        return loop.run()
    except SupervisorLost:
        say(f"replica {me} ends: its supervisor has gone")
    finally:
        del loop, setup
        gc.collect()
        box.close()
    return False


def _measured(member: Member, layers: int, marks: Any, say: Callable[[str], object], tuning: Replicas) -> ChunkCost:
    """What batches take here. ManageError."""
    try:
        found = measured(member, layers, marks, tuning)
    except ValueError as error:
        raise ManageError(f"what batches of {member.name} take cannot be measured: {error}") from error
    say(f"{member.name}: what a batch takes is predicted within {found.error:.1%} on average")
    return found.cost


def _note(notes: Notes, ran: Ran) -> None:
    """A microbatch, for the timeline."""
    tokens = sum(new for _, new in ran.sizes)
    notes.bar("microbatches", f"{len(ran.sizes)} requests, {tokens} tokens", ran.begin, ran.end)


def _hello(replica: Member, handle: Managed, device: Device, cost: ChunkCost, rank: int | None) -> Hello:
    """What this replica has to say of itself."""
    layers = tuple(residency_of(handle).plan.pages)
    cache = cache_of(replica, range(len(layers)))
    token = round(cache.token_bytes)
    now = memory_of(device, cache.pages.client, cache.pages.client.governor.tuning.serving)
    cache.user = lambda: None
    own = sum(each.backed for each in weights_of(handle).ranges.get(None, ()))  # of what is no layer
    free = device.budget // device.page_size - own - now.reserve // device.page_size
    return Hello(os.getpid(), platform.node(), max(0, free), layers, token, device.page_size, cost, rank)
