"""Prometheus metrics of a supervisor, added to those of its process (hooks/watch/registry.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..watch.registry import Addition
from .fleet_state import FleetState


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
