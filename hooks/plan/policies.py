"""The policies of a simulation: ballonet, ballonet with parts switched off, and stock transformers to compare with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from ...allocator.errors import ManageError
from ...offload.policy.tuning import DEFAULT, Tuning
from ..options import ManageOptions
from .machine import Machine


@dataclass(frozen=True, slots=True)
class StockPolicy:
    """transformers' own cache and scheduler. `shared`: each model has an even part of the budget; else one model at a
    time is on the device, and has all of it."""

    what: str
    shared: bool


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """ballonet. `changes`: tuning values that differ from the defaults, by part."""

    what: str
    batches: Literal["full", "fast"] = "fast"
    interval: Literal["auto"] | None = "auto"
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def options(self) -> ManageOptions:
        """The options that models are managed with."""
        return ManageOptions(batches=self.batches, interval=self.interval)

    def tuning(self, machine: Machine) -> Tuning:
        """Returns the tuning. Values in bytes of a model's tensors are scaled like them. `exposed` is 0: on the
        simulated machine copies hide behind compute."""
        weights = replace(DEFAULT.weights, large=DEFAULT.weights.large // machine.scale)
        small = replace(DEFAULT, weights=weights, serving=replace(DEFAULT.serving, exposed=0.0))
        changed = {part: replace(getattr(small, part), **values) for part, values in self.changes.items()}
        return replace(small, **changed)


Policy = StockPolicy | ElasticPolicy
POLICIES: Final[Mapping[str, Policy]] = {
    "stock": StockPolicy("transformers' own cache and scheduler, of one model", shared=True),
    "split": StockPolicy("the same, and each model has an even part of the budget", shared=True),
    "swap": StockPolicy(
        "the same, with one model at a time on the device, whose weights are copied when it changes", False
    ),
    "full": ElasticPolicy("ballonet, with as many requests in a step as there is room for", batches="full"),
    "fast": ElasticPolicy("ballonet"),
    "lru": ElasticPolicy("of idle models that with the earliest use gives first", changes={"weights": {"mru": False}}),
    "uncapped": ElasticPolicy("models stream more than hides", changes={"weights": {"capped": False}}),
    "one-slot": ElasticPolicy("streamed layers share one slot: alpha + 1", changes={"weights": {"slots": (1,)}}),
    "two-slots": ElasticPolicy("streamed layers share two slots: alpha + 2", changes={"weights": {"slots": (2,)}}),
    "no-reversion": ElasticPolicy("layers that have left do not come back", changes={"pages": {"dwell": math.inf}}),
    "weights-fixed": ElasticPolicy("weights give no pages", interval=None),
    "no-inflation": ElasticPolicy(
        "nor do activations, and KV none to them", interval=None, changes={"serving": {"inflation": False}}
    ),
    "no-buffer": ElasticPolicy("no KV of prompts goes to the host", changes={"serving": {"most": 0.0}}),
    "fixed-buffer": ElasticPolicy(
        "the buffer on the host stays as large as it is (no Algorithm 2)",
        changes={"serving": {"violations": DEFAULT.serving.window + 1}},
    ),
}


def named(name: str, models: int) -> Policy:
    """Returns the policy of that name, for so many models. ManageError where there is none."""
    if name not in POLICIES:
        raise ManageError(f"no policy {name!r}: there are {', '.join(POLICIES)}")
    if name == "stock" and models > 1:
        raise ManageError(f"stock serves one model, and there are {models}: give split or swap")
    return POLICIES[name]


def default(models: int) -> tuple[str, ...]:
    """Returns the names of the policies that are compared by default."""
    return ("stock", "full", "fast") if models == 1 else ("split", "swap", "fast")
