"""A server's additions to the metrics of its process (hooks/watch/registry.py): its requests, by model."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..watch.registry import Addition
from .tenants import Tenants


class RequestCollector(Addition):
    """Collects the requests of all loops at each scrape, until `close()`."""

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        requests = GaugeMetricFamily("ballonet_requests", "Requests, by model and state.", labels=["model", "state"])
        steps = CounterMetricFamily("ballonet_batches", "Batches computed, by model.", labels=["model"])
        buffers = GaugeMetricFamily(
            "ballonet_host_buffer_bytes", "Host memory that KV of prompts may have, by model.", labels=["model"]
        )
        for name, loop in tuple(self._tenants.loops.items()):
            model = name.removesuffix("@main")  # as everywhere else in the registry
            running, waiting = loop.queued
            requests.add_metric([model, "running"], running)
            requests.add_metric([model, "waiting"], waiting)
            steps.add_metric([model], loop.steps)
            buffers.add_metric([model], loop.buffer)
        yield from (requests, buffers, steps)
