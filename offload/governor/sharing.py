"""Which intervals the models of a link get (Select-N §4.5): the ledger's answer for a situation.

Note [Together]
    On a link one model may have to give up device pages so that another can stream less. So what is best for all
    together is tried first, as if each could have any plan, and holds if those that grow find their pages in what is
    free and in what the others give up. Each comes by itself, before its own next iteration: who has to grow waits, as
    it is, until the others have made room. Where that would not fit, it is decided for one model at a time, with the
    others as they are: free pages can be promised once. Combinations that use less of the host and would fit are not
    looked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..policy.coordinator import LinkClient, Refusal, RunningShares, Shares, share, share_running
from ..record.record import Point
from .activity import Activity
from .client import ModelClient
from .client_state import FIRST, ModelState
from .situation import Situation


def settled(now: Situation, state: ModelState, point: Point) -> RunningShares:
    """Returns the shares of the models on the link. Called between iterations; `state` is about to have one like
    `point`. See Note [Together]."""
    assert now.bandwidth is not None
    points = {member.name: member.point or FIRST["prefill"] for member in now.states} | {state.name: point}
    clients = [now.client(member, points[member.name], _all(member)) for member in now.states]
    shares = _together(now, clients, now.room(state))
    if shares is not None:
        return RunningShares(shares, {})
    clients = [
        now.client(member, points[member.name], now.room(state) if member is state else 0) for member in now.states
    ]
    return share_running(clients, now.bandwidth, now.traffic)


def admit(now: Situation, model: ModelClient, available: int) -> Refusal | None:
    """Returns why a model cannot join those that are there, should they all decode; None where it can. See
    Governor.admit."""
    assert now.bandwidth is not None
    now.active = frozenset(state.number for state in now.states)
    taken = any(state.name == model.name for state in now.states)
    new = ModelState(-1, f"{model.name} (new)" if taken else model.name, Activity(), model, 0)
    only = model.interval if isinstance(model.interval, int) else None
    for phase, point in FIRST.items():
        costs, measured = now.costs(new, point)
        if new.slo(phase) == math.inf or not measured:
            continue
        slo, parts = new.slo(phase), new.tuning.link_parts
        client = LinkClient(new.name, costs, now.page_size, slo, available, only=only, parts=parts)
        wide = [now.client(state, state.last["decode"], _all(state)) for state in now.states]
        if _together(now, [*wide, client], available - now.mark) is not None:
            continue
        others = [now.client(state, state.last["decode"], 0) for state in now.states]
        verdict = share([*others, client], now.bandwidth, now.traffic)
        if isinstance(verdict, Refusal):
            return verdict
    return None


def _together(now: Situation, clients: Sequence[LinkClient], room: int) -> Shares | None:
    """Returns the best shares for all, if `room` beside the pages that they have allows them."""
    assert now.bandwidth is not None
    shares = share(clients, now.bandwidth, now.traffic)
    if isinstance(shares, Refusal):
        return None
    has: Mapping[str, int] = {state.name: now.standing(state).device_pages for state in now.states}
    plans = {client.name: client.plan(shares.options[client.name].interval) for client in clients if not client.idle}
    takes = sum(plan.device_pages - has.get(name, 0) for name, plan in plans.items())
    return shares if takes <= room else None


def _all(state: ModelState) -> int:
    return sum(state.model.plan.pages)
