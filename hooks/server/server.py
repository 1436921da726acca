"""A server of several models on one pool: transformers' own application, with additions, also to the metrics of its
process (hooks/watch/registry.py): its requests, by model.

transformers   the endpoints, chat templates, streams of tokens, loading of models
ballonet       one loop per model (tenants.py), `/metrics`, refusals with numbers, keys, a shutdown that finishes
               running requests (application.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from transformers import ContinuousBatchingConfig

from ...allocator._native import Device
from ..device import governors
from ..manage import managed
from ..managed import Managed
from ..options import ManageOptions
from ..profile import Grid
from ..watch.registry import Addition
from .application import Address, Application
from .loading import load, models_on
from .tenants import Loop, Tenants


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
        for name, loop in tuple(self._tenants.items()):
            model = name.removesuffix("@main")  # as everywhere else in the registry
            running, waiting = loop.queued
            requests.add_metric([model, "running"], running)
            requests.add_metric([model, "waiting"], waiting)
            steps.add_metric([model], loop.steps)
            buffers.add_metric([model], loop.buffer)
        yield from (requests, buffers, steps)


class Server:
    """Models that are loaded and managed, and the application that serves them."""

    def __init__(
        self,
        names: Sequence[str],
        device: Device,
        options: ManageOptions,
        address: Address,
        say: Callable[[str], None],
        **batching: Any,
    ) -> None:
        """Loads the models. `say`: is called with each line for people. `batching`: arguments of
        ContinuousBatchingConfig. ManageError where a model cannot be found or loaded, torch.OutOfMemoryError."""
        self._say = say
        self.tenants = Tenants()
        self._waiting = address.waiting
        self._settings = ContinuousBatchingConfig(**batching)
        self._models = models_on(device, names)
        self._handles: dict[str, Managed] = {}
        grid = Grid(*governors.composed_with(device).tuning.serving.measured) if len(names) > 1 else None
        for name in names:
            self._load(name, options, grid)
        self._application = Application(self._models, cast(Any, self.tenants), address, say)
        self._figures = RequestCollector(self.tenants)
        self.app = self._application.app

    def run(self) -> None:
        """Serves as `Application.run` does, and releases the models at the end."""
        self._application.run(self.close)

    def close(self) -> None:
        """Ends the loops, and frees the models' memory."""
        self._figures.close()
        self.tenants.close()
        while self._handles:
            self._handles.popitem()[1].release()
        self._models.shutdown()

    def _load(self, name: str, options: ManageOptions, grid: Grid | None) -> None:
        """Loads and manages a model. `grid`: the points to measure first, so that its iteration times are known while
        other models run."""
        self._say(f"loading {name}")
        model = load(self._models, name)
        _, tokenizer = self._models.load_model_and_processor(self._models.process_model_name(name))
        self._handles[name] = managed(model, options, grid=grid)
        self.tenants[name] = Loop(model, tokenizer, self._settings, self._waiting)
        self._say(f"{name}: {self._handles[name]!r}")
