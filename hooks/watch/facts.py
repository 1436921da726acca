"""The facts of one managed model for `top` and metrics, as plain values that are known already."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torch import nn

from ...offload.manager.kv_read_plan import Streamed
from ..batching import patches
from ..measure.report import interval_of
from ..prefix.store import PrefixStore
from ..streaming.model_residency import ModelResidency
from ..weights.ranges import Weights


def model_facts(
    model: nn.Module, residency: ModelResidency, weights: Weights, prefixes: PrefixStore | None
) -> dict[str, Any]:
    """Keys: `name`; `path`, that it was loaded by, else its class; `layers`, `streamed` (those without device pages of
    their own), `interval`, `slots`, `why` (the reason of that decision); `pages`, `host_pages` of weights; `copied`:
    bytes of weights over the link; `seconds` of the last forwards and the `slo` of each, by phase; `kv` of its caches;
    `prefixes`; `latencies`: histograms in seconds; `steps_lost`: batches that found no memory."""
    batched, last = patches.batched(model), dict(residency.timings.last)
    histograms: dict[str, Any] = {
        phase: histogram.to_dict() for phase, histogram in residency.timings.histograms().items()
    }
    if batched is not None:
        latencies = batched.latencies
        histograms |= {"ttft": latencies.ttft.to_dict(), "tpot": latencies.tpot.to_dict()}
    return {
        "name": residency.name,
        "path": str(getattr(getattr(model, "config", None), "name_or_path", "")) or type(model).__name__,
        "layers": len(residency.plan.pages),
        "streamed": list(weights.away()),
        "interval": interval_of(residency.plan),
        "slots": len(residency.plan.slot_pages),
        "why": "" if residency.decision is None else residency.decision.why,
        "pages": weights.pages,
        "host_pages": weights.backings.host_pages,
        "copied": weights.ring.copied,
        "seconds": {phase: measured.total for phase, measured in last.items()},
        "slo": {"decode": residency.tpot_slo, "prefill": residency.ttft_slo},
        "kv": [cache_facts(cache) for cache in residency.caches()],
        "prefixes": None if prefixes is None else prefix_facts(prefixes),
        "latencies": histograms,
        "steps_lost": 0 if batched is None else batched.latencies.lost,
    }


def cache_facts(cache: Streamed) -> dict[str, Any]:
    """The facts of one KV cache: the `way` it is read, pages `away`, `slots`, bytes `copied`."""
    return {"way": str(cache.way), "away": cache.away, "slots": cache.slots, "copied": cache.copied}


def prefix_facts(store: PrefixStore) -> dict[str, Any]:
    """The facts of kept prefixes: `counts` of tokens, by where they were found; `hits`, `hit_rate`; kept `tokens` and
    `nbytes`; `files`: [folder, bytes], None where there are none."""
    counts = asdict(store.counts)
    del counts["why_not"]
    saver = store.contents.saver
    return {
        "counts": counts,
        "hits": store.counts.hits,
        "hit_rate": store.counts.hit_rate,
        "tokens": store.tokens,
        "nbytes": store.nbytes,
        "files": None if saver is None else saver.stored_bytes(),
    }


def with_names(models: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Makes names and paths of models unique: "llama", "llama (2)"."""
    named = list[dict[str, Any]]()
    for model in models:
        for key in ("name", "path"):
            first, number = model[key], 1
            while any(model[key] == other[key] for other in named):
                number += 1
                model[key] = f"{first} ({number})"
        named.append(model)
    return named
