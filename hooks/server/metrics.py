"""What a server says of itself at `/metrics`, in Prometheus' format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ...allocator._native import Device
from ..prefix.store import PrefixStore
from .tenants import Tenants


class Collector:
    """Reads the device and the loops when it is asked: nothing is counted beside the work."""

    def __init__(
        self, device: Device, tenants: Tenants, prefixes: Callable[[], Mapping[str, PrefixStore | None]]
    ) -> None:
        """`prefixes`: what is kept for prompts, by model."""
        self._prefixes = prefixes
        self._device = device
        self._tenants = tenants
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """All figures, as the page at `/metrics`."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        now = self._device.snapshot()
        page = now["page_size"]
        yield GaugeMetricFamily("ballonet_budget_bytes", "Device memory that ballonet may have.", now["budget"])
        yield GaugeMetricFamily("ballonet_created_bytes", "Device memory that exists.", now["created"] * page)
        owners = GaugeMetricFamily("ballonet_device_bytes", "Device memory by owner.", labels=["owner"])
        for owner, pages in now["pages"].items():
            owners.add_metric([owner], pages * page)
        yield owners
        used = (now["host_pages"] - now["host_free"]) * page
        yield GaugeMetricFamily("ballonet_host_bytes", "Host memory that weights and KV have.", used)
        copied = CounterMetricFamily("ballonet_copied_bytes", "Bytes copied, by owner and way.", labels=["way"])
        for way, nbytes in now["copied"].items():
            copied.add_metric([way], nbytes)
        yield copied
        text = "Tokens of prompts, by model and where they were found; no: they were computed."
        prompts = CounterMetricFamily("ballonet_prompt_tokens", text, labels=["model", "found"])
        for name, store in self._prefixes().items():
            if store is not None:
                counts = store.counts
                for place in ("device", "peer", "host", "disk"):
                    prompts.add_metric([name, place], getattr(counts, f"on_{place}"))
                prompts.add_metric([name, "no"], counts.prompts - counts.hits)
        yield prompts
        requests = GaugeMetricFamily("ballonet_requests", "Requests, by model and state.", labels=["model", "state"])
        steps = CounterMetricFamily("ballonet_batches", "Batches computed, by model.", labels=["model"])
        buffers = GaugeMetricFamily(
            "ballonet_host_buffer_bytes", "Host memory that KV of prompts may have, by model.", labels=["model"]
        )
        for name, loop in tuple(self._tenants.loops.items()):
            running, waiting = loop.queued
            requests.add_metric([name, "running"], running)
            requests.add_metric([name, "waiting"], waiting)
            steps.add_metric([name], loop.steps)
            buffers.add_metric([name], loop.buffer)
        yield requests
        yield buffers
        yield steps
