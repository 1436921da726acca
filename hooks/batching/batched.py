"""What the generation loops of a model know of it, for as long as it is managed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...allocator._native import Device
from ...offload.policy.step_costs import StepCosts
from .living import Living

Require = Callable[[float | None, float | None], None]


@dataclass(frozen=True, slots=True)
class Batched:
    """A model whose continuous batching is elastic, on `device`. `costs`: what its steps take; `fast`: are batches
    chosen by that? `require`: is told what the requests of the next batch ask of a step that decodes, and of one with
    prompts, in seconds, before it is computed. `living`: the cache that outlives the
    loops; None: each has its own."""

    device: Device
    costs: StepCosts
    fast: bool
    require: Require
    living: Living | None = None
