"""A snapshot of a supervisor's replicas and their counts, for /metrics and tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ...offload.policy.replicas.controller import Controller
from .messages import Counted


@dataclass(frozen=True, slots=True)
class FleetState:
    """A snapshot. `spans`: (begin, end) of each replica's layers; `moved`: bytes of KV and of layers sent between
    replicas; `drops`, `restores`: committed so far; `declined`: number of declined drops by reason; `held`: requests
    that no group takes now; `replaced`: number of replacements for lost replicas; `layers`: resident ones of each
    replica; `busy`, `open`: seconds of the stages of pipelines; `errors`: of predictions, by replica (stage_times.py).
    """

    epoch: int
    spans: Mapping[int, tuple[int, int]]
    groups: tuple[tuple[int, ...], ...]
    drops: int
    restores: int
    discarded: int
    fenced: int
    moved: tuple[int, int]
    requests: int
    held: int
    recomputed: int
    replaced: int
    declined: Mapping[str, int]
    layers: Mapping[int, int]
    busy: float
    open: float
    errors: Mapping[int, float]

    @property
    def bubble(self) -> float:
        """Fraction of the pipeline stages' time in which they waited while there was work; 0 without pipelines."""
        return max(0.0, 1 - self.busy / self.open) if self.open else 0.0


def state_of(
    controller: Controller | None,
    requests: int,
    counts: Counter[str],
    declined: Mapping[str, int],
    told: Mapping[int, Counted],
    replaced: int,
) -> FleetState:
    """Returns the present state. `controller`: None before the first replica; `requests`: number of those that have not
    ended; `counts`: of actions, by ActionPerformer's names; `told`: the latest counts of each replica, also of lost
    ones; `replaced`: number of replacements."""
    groups = [] if controller is None else [each.group for each in tuple(controller.cluster.groups.values())]
    spans = {
        member: (span.begin, span.end)
        for group in groups
        for member, span in zip(group.members, group.spans, strict=True)
    }
    return FleetState(
        epoch=0 if controller is None else controller.epoch,
        spans=spans,
        groups=tuple(sorted(group.members for group in groups)),
        drops=counts["drop"],
        restores=counts["restore"],
        discarded=counts["discard"],
        fenced=counts["fence"],
        moved=(sum(each.kv_bytes for each in told.values()), sum(each.layer_bytes for each in told.values())),
        requests=requests,
        held=0 if controller is None else len(controller.book.held),
        recomputed=counts["recompute"],
        replaced=replaced,
        declined=dict(declined),
        layers={member: each.layers for member, each in told.items() if member in spans},
        busy=sum(each.busy for each in told.values()),
        open=sum(each.open for each in told.values()),
        errors={member: each.error for member, each in told.items() if member in spans and each.error is not None},
    )
