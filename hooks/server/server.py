"""A server of several models on one pool, and what it adds to the metrics of its process (hooks/watch/registry.py): its
requests, by model.

transformers   loading of models, chat templates, the parser of answers, the loop
ballonet       the endpoints and their streams (endpoints.py), an engine for each model (loops.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from transformers import ContinuousBatchingConfig

from ...allocator._native import Device
from ..device import managers
from ..manage import managed
from ..managed import Managed
from ..options import ManageOptions
from ..profile import Grid
from ..watch.registry import Addition
from .anteroom import Anteroom
from .application import Address, Application
from .loading import described, load, source_of
from .loops import Loop
from .render_pool import RenderPool
from .rendering import tokenizer_of
from .served import Models, ServedModel, pooled, prepared_by


class RequestCollector(Addition):
    """Collects the requests of all loops at each scrape, until `close()`."""

    def __init__(self, loops: Mapping[str, Loop]) -> None:
        self._loops = loops
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        requests = GaugeMetricFamily("ballonet_requests", "Requests, by model and state.", labels=["model", "state"])
        steps = CounterMetricFamily("ballonet_batches", "Batches computed, by model.", labels=["model"])
        buffers = GaugeMetricFamily(
            "ballonet_host_buffer_bytes", "Host memory that KV of prompts may have, by model.", labels=["model"]
        )
        for model, loop in tuple(self._loops.items()):
            running, waiting = loop.queued
            requests.add_metric([model, "running"], running)
            requests.add_metric([model, "waiting"], waiting)
            steps.add_metric([model], loop.steps)
            buffers.add_metric([model], loop.buffer)
        yield from (requests, buffers, steps)


class Server:
    """Models that are loaded and managed, and the application that serves them. `loops`: by model."""

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
        self.loops: dict[str, Loop] = {}
        self._handles: list[Managed] = []
        sources = [source_of(name, own_templates=address.own_templates) for name in names]
        tuning = managers.composed_with(device).tuning
        self._pool = RenderPool(prepared_by(sources))
        grid = Grid(*tuning.serving.measured) if len(names) > 1 else None
        settings, served = ContinuousBatchingConfig(**batching), list[ServedModel]()
        try:
            for name, shown, source in zip(names, address.names or names, sources, strict=True):
                say(f"loading {name}")
                model = load(name, device)
                # measured first, so that its iteration times are known while other models run
                self._handles.append(managed(model, options, grid=grid))
                loop = self.loops[name] = Loop(model, tokenizer_of(source), settings, address.waiting)
                served.append(described(shown, loop, source, pooled(self._pool), model))
                say(f"{name}: {self._handles[-1]!r}")
            self._pool.wait()
        except BaseException:
            self._pool.close()
            raise
        self._models = Models(served)
        self._application = Application(self._models, address, say)
        self._figures = RequestCollector(self.loops)
        self.app = self._application.app

    def run(self, anteroom: Anteroom) -> None:
        """Serves as `Application.run` does, and releases the models at the end."""
        self._application.run(self.close, anteroom)

    def close(self) -> None:
        """Ends the loops, and frees the models' memory."""
        self._figures.close()
        self._pool.close()
        self._models.close()
        self.loops.clear()
        while self._handles:
            self._handles.pop().release()
