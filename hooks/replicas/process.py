"""The process of one replica: loads the model, measures what batches cost, joins, and runs until its supervisor ends.

Note [Measured as served]
    A forward of the whole model with one prompt says little about a batch, in which KV lies in blocks, chunks of
    several requests are computed together, and other requests decode. A cost fitted to such forwards was wrong by 56 %
    of the batches' times, one fitted to batches by 11 % (a loaded machine). So a group of one
    replica serves synthetic requests, which arrive one after the other, as its stages will.

    Disturbances only make a run longer, so the least time of several rounds counts. The batches have to be the same in
    each round; a scheduler that learns the costs of steps would choose others each time, so it does not learn here.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, cast

import torch

from ...allocator import devices
from ...allocator._native import Device
from ...allocator.config import Config
from ...allocator.errors import ManageError, RequestTooLarge
from ...allocator.install import install
from ...offload.policy.replicas.groups import alone
from ...offload.policy.replicas.pipeline import ChunkCost, Fit, Sample, fit
from ...offload.policy.replicas.tuning import DEFAULT, ReplicaTuning
from ...offload.policy.step_costs import Step, StepCosts
from ..batching.memory import memory_of
from ..manage import managed
from ..managed import Managed, residency_of, weights_of
from ..options import ManageOptions
from ..sampling.grammar import GrammarRefused, Grammars
from ..server.loading import loaded, source_of, suitable
from ..server.rendering import tokenizer_of
from ..server.served import ends_of
from ..splice.splice import Splice
from .channel import SupervisorChannel, ToSupervisor
from .errors import SupervisorLost
from .held_layers import HeldLayers
from .layer_moves import ReplicaSetup
from .link import Link
from .messages import Hello, Welcome, fingerprint_of
from .microbatch_plan import Request, split_by_cost
from .pair import GlooConnect, LinkGpu, NcclConnect, Store, gpu_name, stream_of
from .recording import Notes
from .replica import Replica
from .replica_model import (
    GroupSettings,
    Mark,
    Ran,
    ReplicaModel,
    RunsLayers,
    StageTimes,
    cache_of,
    marks_of,
)
from .stage import Stage

# Times that all is measured anew where times say nothing. Chosen: seen once, at a load of 20 on two cores.
_TRIES: Final = 3


def measure_cost(member: ReplicaModel, layers: int, mark: Callable[[], Mark], tuning: ReplicaTuning = DEFAULT) -> Fit:
    """Serves the same requests several times, and fits a cost to the least time of each batch. Repeats that where no
    cost can be fitted, as all rounds may have been disturbed. `layers`: of the model; `mark`: records marks on the
    device. ValueError where no cost can be fitted in the end; torch.OutOfMemoryError."""
    least: dict[tuple[tuple[int, int], ...], float] = {}
    for left in reversed(range(_TRIES)):
        for _ in range(tuning.rounds_measured):
            for ran in _batches(member, layers, mark, tuning):
                least[ran.sizes] = min(ran.end - ran.begin, least.get(ran.sizes, float("inf")))
        try:
            return fit([Sample(sizes, seconds) for sizes, seconds in least.items()])
        except ValueError:
            if not left:
                raise
    raise AssertionError("it is tried at least once")


def _batches(member: ReplicaModel, layers: int, mark: Callable[[], Mark], tuning: ReplicaTuning) -> Iterator[Ran]:
    """Yields the batches of one round, the same in each round."""
    ran: list[Ran] = []
    times = StageTimes(layers, None, lambda: 0.0, mark, ran.append)
    stage = Stage(replace(member, times=times), alone(0, layers), 0, 0, {}, lambda request, error: None)
    stage.cache.model = replace(stage.cache.model, costs=Unlearned())
    leader = stage.leader
    assert leader is not None
    for request in sample_requests(tuning, int(member.settings.batching.max_batch_tokens)):
        try:
            leader.requests.add(request)
        except RequestTooLarge:
            continue
        stage.step()
    while not leader.idle:
        stage.step()
    while not times.all_timed:
        times.poll()
    yield from ran


class Unlearned(StepCosts):
    """Costs of steps that learn nothing, so batches do not depend on earlier times, and that keep the layers resident,
    so their copies are not measured."""

    def observe(self, step: Step, seconds: float) -> None:
        """Learns nothing."""

    def faster(self, one: Step, other: Step) -> bool:
        """Prefers the step for which no layers are evicted."""
        return True


def sample_requests(tuning: ReplicaTuning, most: int) -> Iterator[Request]:
    """Yields synthetic requests: most prompts are short, the longest have some batches of `most` tokens. The last
    request outlives the others, so there are batches with one row."""
    random, longest, last = Random(0), tuning.answer_measured, tuning.requests_measured - 1
    for number in range(tuning.requests_measured):
        prompt = max(2, round(most * tuning.batches_measured * random.random() ** 4))
        new = random.randrange(longest) if number < last else longest + longest // 4
        yield Request(f"measured {number}", (0,) * prompt, 2 + new)


# (number, layers, channel) -> the same, changed, and what makes links: the one place where tests attach faults
Attach = Callable[[int, RunsLayers, SupervisorChannel], tuple[RunsLayers, SupervisorChannel, Callable[..., Link]]]


def to_stderr(line: str) -> None:
    """Prints a line for people."""
    print(f"ballonet: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """What each replica of a fleet is started with, in another process, so all of it can be pickled. `budget`,
    `page_size`, `host_budget`: as of `install()`, and `manage`: as of `manage()`; `batching`: arguments of
    ContinuousBatchingConfig, the same on all replicas; `environment`: variables, beside those of the process; `attach`:
    for tests, changes what a replica runs with; `say`: prints a line."""

    model: str
    budget: int | str | None = None
    page_size: int | str | None = None
    host_budget: int | str | None = None
    manage: Mapping[str, Any] = field(default_factory=dict)
    batching: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    attach: Callable[[Config], Attach | None] | None = None
    say: Callable[[str], object] = to_stderr
    tuning: ReplicaTuning = DEFAULT


def installed(options: ReplicaOptions) -> Device:
    """Puts the pool of a replica under torch, and returns its device. ConfigError, InstallError."""
    page_size = options.page_size or suitable([options.model], options.budget, options.say)
    install(budget=options.budget, page_size=page_size, host_budget=options.host_budget)
    return devices.require()


def run(options: ReplicaOptions, device: Device, rank: int, channel: ToSupervisor) -> None:
    """Serves as a replica until its supervisor ends. ManageError, SpliceError; JoinRefused; SupervisorLost before it
    serves; torch.OutOfMemoryError."""
    name, say, tuning = options.model, options.say, options.tuning
    tokenizer = tokenizer_of(source_of(name, own_templates=False))
    model = loaded(name, device, say)
    ends, vocabulary = ends_of(model.generation_config, tokenizer), model.config.get_text_config().vocab_size
    grammars = Grammars(tokenizer, ends, vocabulary)
    with suppress(GrammarRefused):  # each request with one is told
        grammars.matcher("start: //")  # the first takes a second
    handle = managed(model, ManageOptions.of(options.manage))
    try:
        with Splice(model) as splice:
            splice.prove()  # or the replica is refused, before it measures
            batching = dict(options.batching)
            settings = GroupSettings.of(model, batching.pop("max_batch_tokens", tuning.chunk), **batching)
            torch_device = torch.device("cuda", device.ordinal) if device.kind == "cuda" else torch.device("cpu")
            layers, marks = len(splice.layers), marks_of(torch_device)
            fingerprint = fingerprint_of(model, device)
            welcome = channel.join(fingerprint)  # before it measures, as it may be refused
            cost = welcome.cost
            if cost is None:
                cost = _measured(ReplicaModel(name, model, splice, settings), layers, marks, say, tuning)
            say(f"{name}: {handle!r}")
            notes = Notes(time.monotonic)
            times = StageTimes(layers, cost, time.monotonic, marks, lambda ran: _note(notes, ran))
            replica = ReplicaModel(name, model, splice, settings, times, grammars)
            hello = _hello(replica, handle, device, cost, rank)
            channel.serving.set()
            attach = None if options.attach is None else options.attach(Config.from_env())
            member = _Member(channel, replica, handle, torch_device, hello, notes, attach, tuning)
            try:
                while (requests := member.run(welcome)) is not None:
                    say(f"replica {welcome.member} joins anew")
                    welcome = channel.join(fingerprint, requests)
            except SupervisorLost:
                say(f"replica {welcome.member} ends: its supervisor has gone")
    finally:
        channel.close()
        handle.release()


@dataclass(frozen=True, slots=True)
class _Member:
    """What a replica runs with, whatever its number."""

    channel: ToSupervisor
    replica: ReplicaModel
    handle: Managed
    device: torch.device
    hello: Hello
    notes: Notes
    attach: Attach | None
    tuning: ReplicaTuning

    def run(self, welcome: Welcome) -> tuple[Request, ...] | None:
        """Runs as the member that was welcomed, until the supervisor ends it. Returns None; where it has to join anew,
        the requests to join with. SupervisorLost."""
        me, supervisor = welcome.member, cast(SupervisorChannel, self.channel)
        store = Store.connect(welcome.host, welcome.links, timeout=self.tuning.joining)
        replica, tuning = self.replica, self.tuning
        make: Callable[..., Link] = Link
        if self.attach is not None:
            runs, supervisor, make = self.attach(me, replica.runs, supervisor)
            replica = replace(replica, runs=runs)
        name = gpu_name(self.device)
        gpu = LinkGpu(name, self.device, stream_of(self.device), tuning.bulk) if name else None

        def connect(epoch: int, peer: int) -> Link:
            connects = GlooConnect(store, epoch, me, peer, tuning.forming)
            if gpu is not None:
                connects = NcclConnect(store, epoch, me, peer, tuning.forming, gpu)
            return make(connects, epoch, peer, self.channel.wakeup, device=self.device, tuning=tuning)

        supervisor.post(self.hello)
        split, held, layers = split_by_cost(self.hello.cost), HeldLayers(self.handle), len(self.hello.layers)
        setup = ReplicaSetup(me, replica, layers, held, supervisor, connect, time.monotonic, split, tuning, self.notes)
        loop = Replica(setup, self.channel.wakeup)
        try:
            return loop.run()
        finally:
            del loop, setup
            gc.collect()


def _measured(
    member: ReplicaModel, layers: int, marks: Any, say: Callable[[str], object], tuning: ReplicaTuning
) -> ChunkCost:
    """Measures the cost of chunks. ManageError where that fails."""
    try:
        measured = measure_cost(member, layers, marks, tuning)
    except ValueError as error:
        raise ManageError(f"what batches of {member.name} take cannot be measured: {error}") from error
    say(f"{member.name}: what a batch takes is predicted within {measured.error:.1%} on average")
    return measured.cost


def _note(notes: Notes, ran: Ran) -> None:
    """Adds a microbatch to the timeline."""
    tokens = sum(new for _, new in ran.sizes)
    notes.bar("microbatches", f"{len(ran.sizes)} requests, {tokens} tokens", ran.begin, ran.end)


def _hello(replica: ReplicaModel, handle: Managed, device: Device, cost: ChunkCost, rank: int) -> Hello:
    """Returns this replica's Hello."""
    layers = tuple(residency_of(handle).plan.pages)
    cache = cache_of(replica, range(len(layers)))
    token = round(cache.token_bytes)
    now = memory_of(cache.pages)
    cache.user = lambda: None
    own = sum(opened.backed for opened in weights_of(handle).ranges.get(None, ()))  # of weights outside of layers
    free = device.budget // device.page_size - own - now.reserve // device.page_size
    return Hello(os.getpid(), platform.node(), max(0, free), layers, token, device.page_size, cost, rank)
