"""The process of one replica: loads the model, joins the supervisor, and runs until that ends."""

from __future__ import annotations

import dataclasses
import gc
import os
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
from ..managed import Managed, elastic_of, managed
from ..options import ManageOptions
from ..sectors.room import memory_of
from ..server.loading import loaded
from ..splice.splice import Splice
from .bell import Bell
from .costing import measured
from .epoch import Fence
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
from .pair import GlooConnect
from .placement import Placement
from .rendezvous import open_store
from .replica import Replica
from .settings import GroupSettings
from .setup import Setup, Speaks
from .spliced import SplicedLayers
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
    tuning: Replicas = DEFAULT.replicas,
    **batching: Any,
) -> None:
    """Serves as a replica of the supervisor that `placement` says. `started`: what a supervisor has told who it started
    (messages.Started); `batching`: what ContinuousBatchingConfig takes, the same for all. ManageError, SpliceError;
    JoinRefused, SupervisorLost where there is none; torch.OutOfMemoryError."""
    store = open_store(placement, tuning.joining)
    model = loaded(name, device, say)
    handle = managed(model, options)
    try:
        told = None if started is None else decoded(started)
        assert told is None or isinstance(told, Started)
        cost = None if told is None else told.cost
        cost = cost or _measured(name, model, max_batch_tokens or tuning.chunk, say, tuning)
        say(f"{name}: {handle!r}")
        with Splice(model) as splice:
            runs = SplicedLayers(splice)
            replica = Member(name, model, runs, GroupSettings.of(model, max_batch_tokens or tuning.chunk, **batching))
            hello = _hello(replica, handle, device, cost, None if told is None else told.rank)
            me = join(store, secret, fingerprint_of(model, device), tuning.joining)
            _live(me, store, secret, replica, handle, device, hello, say, tuning)
    finally:
        handle.release()


def _live(
    me: int,
    store: Store,
    secret: str | None,
    replica: Member,
    handle: Managed,
    device: Device,
    hello: Hello,
    say: Callable[[str], object],
    tuning: Replicas,
) -> None:
    """The life of a member, until the supervisor ends it or is gone."""
    bell = Bell()
    box = Mailbox(store, me, secret or "", bell, Fence())
    supervisor: Speaks = ToSupervisor(box)
    make: Callable[..., Link] = Link
    path = Config.from_env().replica_faults
    if path is not None:
        faults = Faults(path, me)
        replica = dataclasses.replace(replica, runs=FaultyLayers(replica.runs, faults))
        supervisor, make = FaultySpeaks(supervisor, faults), partial(FaultyLink, faults)
    place = torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")

    def connect(epoch: int, peer: int) -> Link:
        connects = GlooConnect(store, epoch, me, peer, tuning.forming)
        return make(connects, epoch, peer, bell, device=place, tuning=tuning)

    supervisor.post(hello)
    form, held = by_cost(hello.cost), HeldLayers(handle)
    setup = Setup(me, replica, len(hello.layers), held, supervisor, connect, time.monotonic, form, tuning)
    loop = Replica(setup, bell)
    try:
        loop.run()
    except SupervisorLost:
        say(f"replica {me} ends: its supervisor has gone")
    finally:
        del loop, setup
        gc.collect()
        box.close()


def _measured(name: str, model: Any, most: int, say: Callable[[str], object], tuning: Replicas) -> ChunkCost:
    """What chunks take here. ManageError."""
    try:
        found = measured(model, most, tuning)
    except ValueError as error:
        raise ManageError(f"what chunks of {name} take cannot be measured: {error}") from error
    say(f"{name}: what a chunk takes is predicted to {found.error:.1%}")
    return found.cost


def _hello(replica: Member, handle: Managed, device: Device, cost: ChunkCost, rank: int | None) -> Hello:
    """What this replica has to say of itself."""
    layers = tuple(elastic_of(handle).plan.pages)
    cache = cache_of(replica, range(len(layers)))
    token = round(cache.token_bytes)
    now = memory_of(device, cache.pages.client, cache.pages.client.governor.tuning.serving)
    cache.user = lambda: None
    own = device.snapshot()["pages"]["weights"] - sum(layers)  # of what is no layer
    free = device.budget // device.page_size - own - now.reserve // device.page_size
    return Hello(os.getpid(), max(0, free), layers, token, device.page_size, cost, rank)
