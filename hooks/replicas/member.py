"""A replica's model as its stages use it, and the memory that there is for its KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...allocator.errors import ManageError
from ..batching.seams import batched
from ..sectors.memory import memory_of, most_of
from .settings import GroupSettings
from .span_cache import SpanCache
from .span_runner import RunsLayers, SpanRunner
from .stage_times import StageTimes


@dataclass(frozen=True, slots=True)
class Member:
    """A managed model, and what runs a part of it. `times`: takes in what microbatches take; None: nobody does."""

    name: str
    model: Any
    runs: RunsLayers
    settings: GroupSettings
    times: StageTimes | None = None


def cache_of(member: Member, layers: range) -> SpanCache:
    """A new cache for these layers. ManageError where the model is not managed; torch.OutOfMemoryError."""
    known = batched(member.model)
    if known is None:
        raise ManageError(f"the model of replica {member.name} is not managed: call ballonet.manage first")
    return SpanCache(member.model, known, layers, member.settings)


def room_of(cache: SpanCache) -> int:
    """Bytes that there are for KV beyond what the cache has."""
    return memory_of(cache.on, cache.pages.client, cache.pages.client.governor.tuning.serving).usable


def most_tokens(cache: SpanCache) -> int:
    """Tokens that the cache could have if no request ran."""
    most = most_of(cache.on, cache.pages.client, cache.pages.client.governor.tuning.serving)
    return int(most.usable / cache.token_bytes)


def runner_of(member: Member, cache: SpanCache) -> SpanRunner:
    """What computes microbatches of the layers of a cache."""
    return SpanRunner(member.model, member.runs, cache, member.settings, member.times)
