"""What requests can be simulated with: ballonet, ballonet with parts switched off, and what it is compared with."""

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
    """transformers' own cache and scheduler. `shared`: of the budget each model has an even part, else all of it while
    it is the one that is there."""

    what: str
    shared: bool


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """ballonet. `changes`: values of tuning that are other ones, by part."""

    what: str
    batches: Literal["full", "fast"] = "fast"
    interval: Literal["auto"] | None = "auto"
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def options(self) -> ManageOptions:
        """What models are managed with."""
        return ManageOptions(batches=self.batches, interval=self.interval)

    def tuning(self, machine: Machine) -> Tuning:
        """The values to decide by. What is in bytes of a model's tensors is scaled as they are. On the machine that is
        simulated copies hide behind the computation."""
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
    """The policy of that name, for so many models. ManageError."""
    if name not in POLICIES:
        raise ManageError(f"no policy {name!r}: there are {', '.join(POLICIES)}")
    if name == "stock" and models > 1:
        raise ManageError(f"stock serves one model, and there are {models}: give split or swap")
    return POLICIES[name]


def default(models: int) -> tuple[str, ...]:
    """The policies that are compared where nobody says which."""
    return ("stock", "full", "fast") if models == 1 else ("split", "swap", "fast")
