"""A replica's model as its stages use it, and the memory for its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...allocator.errors import ManageError
from ..batching.seams import batched
from ..sectors.memory import memory_of, most_of
from .group_settings import GroupSettings
from .span_cache import SpanCache
from .span_runner import RunsLayers, SpanRunner
from .stage_times import StageTimes


@dataclass(frozen=True, slots=True)
class ReplicaModel:
    """A managed model. `runs`: runs some of its layers; `times`: measures microbatches; None: they are not measured."""

    name: str
    model: Any
    runs: RunsLayers
    settings: GroupSettings
    times: StageTimes | None = None


def cache_of(member: ReplicaModel, layers: range) -> SpanCache:
    """Returns a new cache for these layers. ManageError where the model is not managed; torch.OutOfMemoryError."""
    known = batched(member.model)
    if known is None:
        raise ManageError(f"the model of replica {member.name} is not managed: call ballonet.manage first")
    return SpanCache(member.model, known, layers, member.settings)


def room_of(cache: SpanCache) -> int:
    """Returns the bytes that KV may take beyond the cache's present ones."""
    return memory_of(cache.on, cache.pages.client, cache.pages.client.governor.tuning.serving).usable


def most_tokens(cache: SpanCache) -> int:
    """Returns the tokens of KV for which there would be memory if no request ran."""
    most = most_of(cache.on, cache.pages.client, cache.pages.client.governor.tuning.serving)
    return int(most.usable / cache.token_bytes)


def runner_of(member: ReplicaModel, cache: SpanCache) -> SpanRunner:
    """Returns a runner for the layers of a cache."""
    return SpanRunner(member.model, member.runs, cache, member.settings, member.times)
