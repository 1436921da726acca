"""A server of one model on several replicas: the supervisor, its replicas, and transformers' HTTP application."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...allocator.errors import ManageError
from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.controller import Controller
from ...offload.policy.replicas.decisions import Entry, Setup
from ...offload.policy.replicas.demand import KVSize
from ...offload.policy.tuning import DEFAULT, Replicas
from ...offload.timeline.file import check
from ...offload.timeline.fleet import write
from ..server.application import Address, Application
from ..watch.registry import Addition
from .channel import Wakeup
from .child_processes import SECRET, STARTED, ChildProcesses, placed
from .connections import LOCAL, FromReplicas
from .http_frontend import FrontendLoop, FrontendManager, FrontendState, ShapeOnly
from .messages import Hello, Started
from .pair import Store
from .recording import DecisionFile, Recording
from .requests import Request
from .supervisor import FleetState, Supervisor


class FleetMetrics(Addition):
    """Metrics of replicas, groups and epochs, read from the supervisor at each scrape, until `close()`."""

    def __init__(self, state: Callable[[], FleetState]) -> None:
        self._state = state
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics. Called by prometheus-client."""
        now = self._state()
        yield GaugeMetricFamily("ballonet_replicas_epoch", "The last epoch that was given out.", now.epoch)
        yield GaugeMetricFamily("ballonet_replicas", "Replicas that serve.", len(now.spans))
        yield GaugeMetricFamily("ballonet_replica_groups", "Groups of replicas.", len(now.groups))
        spans = GaugeMetricFamily("ballonet_replica_layers", "Layers that a replica holds.", labels=["replica", "edge"])
        for member, (begin, end) in sorted(now.spans.items()):
            spans.add_metric([str(member), "begin"], begin)
            spans.add_metric([str(member), "end"], end)
        yield spans
        layers = GaugeMetricFamily(
            "ballonet_replica_resident_layers", "Layers that a replica has on its device.", labels=["replica"]
        )
        for member, count in sorted(now.layers.items()):
            layers.add_metric([str(member)], count)
        yield layers
        errors = GaugeMetricFamily(
            "ballonet_replica_cost_error",
            "Mean relative error of what a replica's latest microbatches were predicted to take.",
            labels=["replica"],
        )
        for member, error in sorted(now.errors.items()):
            errors.add_metric([str(member)], error)
        yield errors
        yield GaugeMetricFamily(
            "ballonet_pipeline_bubble", "Part of the time of pipelines' stages that is idle with work.", now.bubble
        )
        seconds = CounterMetricFamily(
            "ballonet_pipeline_stage_seconds",
            "Seconds of pipelines' stages: busy, and open, while their group has work.",
            labels=["state"],
        )
        seconds.add_metric(["busy"], now.busy)
        seconds.add_metric(["open"], now.open)
        yield seconds
        changes = CounterMetricFamily("ballonet_replica_epochs", "Epochs, by what became of them.", labels=["kind"])
        for kind, count in (("drop", now.drops), ("restore", now.restores), ("discarded", now.discarded)):
            changes.add_metric([kind], count)
        yield changes
        declined = CounterMetricFamily(
            "ballonet_replica_declined", "Drops that were not made, and why.", labels=["why"]
        )
        for why, count in now.declined.items():
            declined.add_metric([why], count)
        yield declined
        moved = CounterMetricFamily("ballonet_replica_moved_bytes", "Bytes between replicas.", labels=["what"])
        for what, count in zip(("kv", "layers"), now.moved, strict=True):
            moved.add_metric([what], count)
        yield moved
        yield CounterMetricFamily("ballonet_replicas_ended", "Replicas that were ended as they hung.", now.fenced)
        yield CounterMetricFamily(
            "ballonet_replicas_replaced", "Replicas that were started instead of lost ones.", now.replaced
        )
        yield CounterMetricFamily("ballonet_requests_recomputed", "Requests that began anew.", now.recomputed)
        requests = GaugeMetricFamily("ballonet_replica_requests", "Requests, by state.", labels=["state"])
        requests.add_metric(["computed"], now.requests - now.held)
        requests.add_metric(["held"], now.held)
        yield requests


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas of a server. `here`: number that this machine starts, with these `arguments` of `ballonet serve`
    each and `devices` GPUs in all; `host`, `port`: where they and others join, 0: any free port; `secret`: None: a
    random one; `cost`: of chunks; None: the first replicas measure it."""

    here: int
    arguments: Sequence[str]
    host: str = LOCAL
    port: int = 0
    devices: int = 0
    secret: str | None = None
    cost: ChunkCost | None = None


class ReplicaServer:
    """A server. Call `run`."""

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        address: Address,
        say: Callable[[str], None],
        tuning: Replicas = DEFAULT.replicas,
        log: Path | None = None,
        timeline: str | None = None,
    ) -> None:
        """Starts the replicas, and waits until one of them serves. `say`: prints a line; `log`: file of the
        controller's decisions; `timeline`: file of the timeline of all processes, written at the end. PortInUse,
        ManageError; ConfigError where that file cannot be written."""
        if timeline is not None:
            check(timeline)
        self._timeline = timeline
        self._recording = None if timeline is None else Recording(time.monotonic)
        self._say = say
        self.address = address
        self.cost = fleet.cost  # later that of the first replica
        self._tuning = tuning
        self._log = None if log is None else DecisionFile(log, say, tuning.log_bytes)
        self._wakeup = Wakeup()
        secret = fleet.secret or secrets.token_hex()
        self._links = Store.host(fleet.host, timeout=tuning.store)  # ends with this object
        self._replicas = FromReplicas(fleet.host, fleet.port, secret, self._links.port, self._wakeup, tuning.joining)
        self.port = self._replicas.port
        where = f"{fleet.host}:{self.port}"

        def recipe(rank: int, cost: ChunkCost | None) -> tuple[Sequence[str], Mapping[str, str]]:
            told = {SECRET: secret, STARTED: msgspec.json.encode(Started(rank, cost)).decode()}
            return [name, "--join", where, *fleet.arguments], placed(rank, fleet.devices) | told

        self._children = ChildProcesses(recipe, forks=not fleet.devices)
        self.supervisor = Supervisor(
            self._controller,
            self._replicas,
            self._children,
            self._wakeup,
            time.monotonic,
            self._told,
            say,
            fleet.here,
            fleet.cost,
            tuning,
            self._note,
            self._recording,
        )
        self._figures = FleetMetrics(self.supervisor.state)
        self._front = FrontendManager(self.supervisor)
        loop = FrontendLoop(self._front, self.supervisor, address.waiting)
        state = FrontendState(loop, self._front)
        try:
            models = ShapeOnly([name], "cpu")
            models.load_model_and_processor(models.process_model_name(name))
            self._application = Application(models, state, address, say)
            self.app = self._application.app
            say(f"{fleet.here} replicas start; others join at {where}")
            self.supervisor.start()
            self.supervisor.ready.wait()
            if (why := self.supervisor.failed) is not None:
                raise ManageError(why)
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the processes of replicas on this machine."""
        return self._children.processes

    def run(self) -> None:
        """Serves until SIGINT or SIGTERM. Running requests may end within a while, then fail; then replicas end."""
        self._application.run(self.close)

    def close(self) -> None:
        """Ends all requests, the supervisor and the replicas. Idempotent."""
        self._figures.close()
        self.supervisor.close()
        self._children.close(self._tuning.joining)
        self._write()
        self._replicas.close()
        if self._log is not None:
            self._log.close()

    def _write(self) -> None:
        """Writes the timeline, once."""
        path, self._timeline = self._timeline, None
        if path is None or self._recording is None:
            return
        self.supervisor.collect()
        write(self._recording.recording(), path)
        self._say(f"the timeline is in {path}")

    def _controller(self, hello: Hello) -> Controller:
        self.cost = hello.cost
        kv = KVSize(hello.token, hello.page)
        setup = Setup(hello.layers, kv, hello.cost, self._tuning, hello.page / self._tuning.link)
        self._note(setup)
        return setup.controller()

    def _note(self, entry: Entry) -> None:
        if self._log is not None:
            self._log(entry)

    def _told(self, request: Request, error: str | None) -> None:
        self._front.deliver(request, error)
