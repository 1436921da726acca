"""A server of one model on several replicas: the supervisor, its replicas, and the endpoints of hooks/server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...allocator.errors import ManageError
from ...offload.policy.replicas.pipeline import ChunkCost
from ..server.anteroom import Anteroom
from ..server.application import Address, Application
from ..server.loading import config_of, described, generation_config_of, source_of
from ..server.render_pool import RenderPool
from ..server.rendering import tokenizer_of
from ..server.served import Models, ends_of, pooled, prepared_by
from ..watch.registry import Addition
from .channel import Wakeup
from .child_processes import ChildProcesses, ReplicaPipes
from .frontend import FleetEngine, RequestSink
from .microbatch_plan import Request
from .pair import Store
from .supervisor import Fleet, FleetState, FleetSupervisor, SupervisorPorts

LOCAL: Final = "127.0.0.1"


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


class ServedFleet(Protocol):
    """A fleet of replicas, as its server has it."""

    @property
    def cost(self) -> ChunkCost | None:
        """The cost of chunks on these replicas; None where it is not known."""

    @property
    def clients(self) -> RequestSink:
        """What takes clients' requests."""

    def start(self, front: FleetEngine) -> None:
        """Starts the replicas, and waits until one of them serves. `front`: is given answers. ManageError."""

    def state(self) -> FleetState:
        """Returns a snapshot of the replicas and their counts."""

    def close(self) -> None:
        """Ends requests and replicas, unless they are another's. Idempotent."""


class LocalFleet:
    """Replicas that are processes of this machine, with their supervisor in this process: a ServedFleet."""

    def __init__(self, fleet: Fleet, say: Callable[[str], None]) -> None:
        """`say`: prints a line. ManageError; ConfigError where a file cannot be written."""
        self._tuning = fleet.options.tuning
        self._say = say
        self._front: FleetEngine | None = None
        self._links = Store.host(LOCAL, timeout=self._tuning.store)  # ends with this object
        wakeup = Wakeup()
        pipes = ReplicaPipes(LOCAL, self._links.port, wakeup)
        self._children = ChildProcesses(fleet.options, fleet.devices, pipes)
        ports = SupervisorPorts(pipes, self._children, wakeup, self._told, say)
        self.supervisor = self.clients = FleetSupervisor(fleet, ports)
        self._count = fleet.replicas

    @property
    def cost(self) -> ChunkCost | None:
        """The cost of chunks on these replicas; None until one has joined."""
        return self.supervisor.cost

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the processes of replicas."""
        return self._children.processes

    def start(self, front: FleetEngine) -> None:
        """Starts the replicas, and waits until one of them serves. ManageError."""
        self._front = front
        self._say(f"{self._count} replicas start as processes of this machine")
        self.supervisor.start()
        self.supervisor.ready.wait()
        if (why := self.supervisor.failed) is not None:
            raise ManageError(why)

    def state(self) -> FleetState:
        """Returns a snapshot of the replicas and their counts."""
        return self.supervisor.state()

    def close(self) -> None:
        """Ends requests and replicas. Idempotent."""
        self.supervisor.end(lambda: self._children.close(self._tuning.joining))

    def _told(self, request: Request, error: str | None) -> None:
        if self._front is not None:
            self._front.deliver(request, error)


class ReplicaServer:
    """A server. Call `run`."""

    def __init__(self, name: str, fleet: ServedFleet, address: Address, say: Callable[[str], None]) -> None:
        """Starts the fleet, and waits until one of its replicas serves. `say`: prints a line. PortInUse, ManageError;
        ConfigError where a file cannot be written."""
        self.address = address
        self.fleet = fleet
        self._figures = FleetMetrics(fleet.state)
        source = source_of(name, own_templates=address.own_templates)
        self._pool = RenderPool(prepared_by([source]))
        try:
            config = config_of(source)
            ends = ends_of(generation_config_of(source, config), tokenizer_of(source))
            self.engine = FleetEngine(fleet.clients, config, address.waiting, ends)
            (shown,) = address.names or (name,)
            models = Models([described(shown, self.engine, source, pooled(self._pool))])
            self._application = Application(models, address, say)
            self.app = self._application.app
            fleet.start(self.engine)
            self._pool.wait()
        except BaseException:
            self.close()
            raise

    def run(self, anteroom: Anteroom) -> None:
        """Serves until SIGINT or SIGTERM. Running requests may end within a while, then fail; then replicas end."""
        self._application.run(self.close, anteroom)

    def close(self) -> None:
        """Ends all requests, the supervisor and the replicas. Idempotent."""
        self._figures.close()
        self._pool.close()
        self.fleet.close()
