"""The process of one replica: loads the model, joins the supervisor, and runs until that ends."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from ...allocator._native import Device
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
from .errors import SupervisorLost
from .fingerprint import fingerprint_of
from .forming import by_cost
from .held_layers import HeldLayers
from .link import Link
from .mail import ToSupervisor
from .mailbox import Mailbox
from .member import Member, cache_of
from .membership import join
from .messages import Hello
from .nccl import NcclConnect, available, stream_of
from .notes import Notes
from .pair import GlooConnect
from .placement import Placement
from .rendezvous import open_store
from .replica import Replica
from .settings import GroupSettings
from .setup import Setup
from .spliced import SplicedLayers
from .stage_times import Ran, StageTimes, marks_of


def run(
    name: str,
    device: Device,
    options: ManageOptions,
    placement: Placement,
    secret: str | None,
    say: Callable[[str], object],
    max_batch_tokens: int | None = None,
    tuning: Replicas = DEFAULT.replicas,
    **batching: Any,
) -> None:
    """Serves as a replica of the supervisor that `placement` says. `batching`: what ContinuousBatchingConfig takes, the
    same for all. ManageError, SpliceError; JoinRefused, SupervisorLost where there is none; torch.OutOfMemoryError."""
    store = open_store(placement, tuning.joining)
    model = loaded(name, device, say)
    handle = managed(model, options)
    try:
        with Splice(model) as splice:
            runs = SplicedLayers(splice)
            settings = GroupSettings.of(model, max_batch_tokens or tuning.chunk, **batching)
            place = torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")
            layers, marks = len(splice.layers), marks_of(place)
            try:
                cost = measured(Member(name, model, runs, settings), layers, marks, tuning)
            except ValueError as error:
                raise ManageError(f"what batches of {name} take cannot be measured: {error}") from error
            say(f"{name}: {handle!r}; what a batch takes is predicted within {cost.error:.1%} on average")
            notes = Notes(time.monotonic)
            times = StageTimes(layers, cost.cost, time.monotonic, marks, lambda ran: _note(notes, ran), tuning)
            replica = Member(name, model, runs, settings, times)
            hello = _hello(replica, handle, device, cost.cost)
            me = join(store, secret, fingerprint_of(model, device), tuning.joining)
            bell = Bell()
            box = Mailbox(store, me, secret or "", bell)
            supervisor = ToSupervisor(box)
            supervisor.post(hello)
            gpu = available(place)
            stream = stream_of(place) if gpu else None

            def connect(epoch: int, peer: int) -> Link:
                connects = GlooConnect(store, epoch, me, peer, tuning.forming)
                if stream is not None:
                    ways: dict[str, Any] = {"gpu": gpu, "device": place, "stream": stream, "bulk": tuning.bulk}
                    connects = NcclConnect(store, epoch, me, peer, tuning.forming, **ways)
                return Link(connects, epoch, peer, bell, device=place, tuning=tuning)

            form = by_cost(cost.cost)
            setup = Setup(
                me, replica, layers, HeldLayers(handle), supervisor, connect, time.monotonic, form, tuning, notes
            )
            loop = Replica(setup, bell)
            try:
                loop.run()
            except SupervisorLost:
                say(f"replica {me} ends: its supervisor has gone")
            finally:
                del loop
                gc.collect()
                box.close()
    finally:
        handle.release()


def _note(notes: Notes, ran: Ran) -> None:
    """A microbatch, for the timeline."""
    tokens = sum(new for _, new in ran.sizes)
    notes.bar("microbatches", f"{len(ran.sizes)} requests, {tokens} tokens", ran.begin, ran.end)


def _hello(replica: Member, handle: Managed, device: Device, cost: ChunkCost) -> Hello:
    """What this replica has to say of itself."""
    layers = tuple(elastic_of(handle).plan.pages)
    cache = cache_of(replica, range(len(layers)))
    token = round(cache.token_bytes)
    now = memory_of(device, cache.pages.client, cache.pages.client.governor.tuning.serving)
    cache.user = lambda: None
    own = device.snapshot()["pages"]["weights"] - sum(layers)  # of what is no layer
    free = device.budget // device.page_size - own - now.reserve // device.page_size
    return Hello(os.getpid(), max(0, free), layers, token, device.page_size, cost)
