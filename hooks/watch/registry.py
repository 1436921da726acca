"""The one registry of this process for Prometheus: what a look says (allocator/looks.py), and what others add to it: a
server (hooks/server/server.py), a supervisor of replicas (hooks/replicas/replica_server.py). Each scrape is one look;
nothing is counted beside the work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...allocator.errors import NotInstalled
from ...allocator.looks import look
from .processes import Look, kv_tiers

PLACES: Final = ("device", "peer", "host", "disk")  # where tokens of prompts are found


class ProcessCollector(Collector):
    """Collects the facts of a look; none before `install()`."""

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus-client."""
        try:
            now = look()
        except NotInstalled:
            return
        yield from _memory(now)
        yield from _traffic(now)
        yield from _decisions(now)
        yield from _models(now)
        yield from _prompts(now)
        yield from _latencies(now)


REGISTRY: Final = CollectorRegistry()
REGISTRY.register(ProcessCollector())


class Addition(Collector):
    """Further metrics in the registry, from construction until `close()`; subclasses implement `collect`."""

    def __init__(self) -> None:
        REGISTRY.register(self)

    def close(self) -> None:
        """Takes the metrics out of the registry. Idempotent."""
        with suppress(KeyError):
            REGISTRY.unregister(self)


def text() -> bytes:
    """Returns all metrics, as the page at `/metrics`."""
    return generate_latest(REGISTRY)


def _memory(now: Look) -> Iterator[Metric]:
    page = now["page_size"]
    yield GaugeMetricFamily("ballonet_page_size_bytes", "Bytes of a page.", page)
    yield GaugeMetricFamily("ballonet_budget_bytes", "Device memory that ballonet may have.", now["budget"])
    yield GaugeMetricFamily("ballonet_created_bytes", "Device memory that exists.", now["created"] * page)
    yield _by("ballonet_device_bytes", "Device memory by owner.", "owner", _scaled(now["pages"], page))
    used = (now["host_pages"] - now["host_free"]) * page
    yield GaugeMetricFamily("ballonet_host_bytes", "Host memory that weights and KV have.", used)
    yield GaugeMetricFamily("ballonet_host_budget_bytes", "Host memory that ballonet may have.", now["host_budget"])
    spilled = now["spilled"] * page
    yield GaugeMetricFamily("ballonet_spilled_bytes", "Host memory of allocations that found no device pages.", spilled)
    if (share := now.get("shared")) is not None:
        text = "Device memory that processes share, and what this one has of it, uses, and has use for."
        sizes = {key: share[key] for key in ("total", "part", "used", "wanted", "floor")}
        yield _by("ballonet_shared_budget_bytes", text, "what", sizes)
    yield _by("ballonet_kv_bytes", "Where KV lies.", "tier", kv_tiers(now))


def _traffic(now: Look) -> Iterator[Metric]:
    copied = CounterMetricFamily("ballonet_copied_bytes", "Bytes copied, by owner and way.", labels=["way"])
    for way, nbytes in now["copied"].items():
        copied.add_metric([way], nbytes)
    yield copied
    reclaimed = now["reclaimed"] * now["page_size"]
    yield CounterMetricFamily("ballonet_reclaimed_bytes", "Device memory taken from who had it.", reclaimed)
    driver = CounterMetricFamily("ballonet_driver_seconds", "Time in calls that change page tables.", labels=["who"])
    for who, spent in now["driver_ns"].items():
        driver.add_metric([who], spent / 1e9)
    yield driver


def _decisions(now: Look) -> Iterator[Metric]:
    labels = ["source", "verb"]
    count = CounterMetricFamily("ballonet_decisions", "Decisions about pages.", labels=labels)
    moved = CounterMetricFamily("ballonet_decision_bytes", "Memory that decisions moved.", labels=labels)
    took = CounterMetricFamily("ballonet_decision_seconds", "Time that decisions took.", labels=labels)
    for source, verbs in now["counts"].items():
        for verb, decided in verbs.items():
            count.add_metric([source, verb], decided["events"])
            moved.add_metric([source, verb], decided["pages"] * now["page_size"])
            took.add_metric([source, verb], decided["seconds"])
    yield from (count, moved, took)


def _models(now: Look) -> Iterator[Metric]:
    page = now["page_size"]
    layers = GaugeMetricFamily("ballonet_layers", "Decoder layers, by model.", labels=["model"])
    streamed = GaugeMetricFamily("ballonet_streamed_layers", "Layers with no pages of their own.", labels=["model"])
    weights = GaugeMetricFamily("ballonet_weights_bytes", "Weights, by model and place.", labels=["model", "place"])
    for model in now.get("models", ()):
        layers.add_metric([model["path"]], model["layers"])
        streamed.add_metric([model["path"]], len(model["streamed"]))
        weights.add_metric([model["path"], "device"], model["pages"] * page)
        weights.add_metric([model["path"], "host"], model["host_pages"] * page)
    yield from (layers, streamed, weights)


def _prompts(now: Look) -> Iterator[Metric]:
    text = "Tokens of prompts, by model and where they were found; no: they were computed."
    prompts = CounterMetricFamily("ballonet_prompt_tokens", text, labels=["model", "found"])
    requests = CounterMetricFamily("ballonet_prefix_requests", "Prompts that asked what is kept.", labels=["model"])
    kept = GaugeMetricFamily("ballonet_prefix_bytes", "Pages under what is kept for prompts.", labels=["model"])
    for model in now.get("models", ()):
        if (store := model["prefixes"]) is not None:
            for place in PLACES:
                prompts.add_metric([model["path"], place], store["counts"][f"on_{place}"])
            prompts.add_metric([model["path"], "no"], store["counts"]["prompts"] - store["hits"])
            requests.add_metric([model["path"]], store["counts"]["requests"])
            kept.add_metric([model["path"]], store["nbytes"])
    yield from (prompts, requests, kept)


def _latencies(now: Look) -> Iterator[Metric]:
    forwards = HistogramMetricFamily("ballonet_forward_seconds", "Time of forwards.", labels=["model", "phase"])
    ttft = HistogramMetricFamily("ballonet_ttft_seconds", "From arrival to the first token.", labels=["model"])
    tpot = HistogramMetricFamily("ballonet_tpot_seconds", "Time per token after the first.", labels=["model"])
    lost = CounterMetricFamily("ballonet_steps_lost", "Batches that found no memory, by model.", labels=["model"])
    for model in now.get("models", ()):
        lost.add_metric([model["path"]], model["steps_lost"])
        for name, histogram in model["latencies"].items():
            family = {"ttft": ttft, "tpot": tpot}.get(name, forwards)
            labels = [model["path"]] if family is not forwards else [model["path"], name]
            ends = [*map(str, histogram["bounds"]), "+Inf"]
            family.add_metric(
                labels, list(zip(ends, accumulate(histogram["counts"]), strict=True)), histogram["seconds"]
            )
    yield from (forwards, ttft, tpot, lost)


def _by(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _scaled(pages: Mapping[str, int], page: int) -> dict[str, int]:
    return {owner: count * page for owner, count in pages.items()}
