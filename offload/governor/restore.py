"""Which models and caches get spare pages back: numbers in, plans of models and pages of caches out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..policy.plan import Plan
from ..policy.reclaim_order import Absent, restore_order
from ..policy.remap import Model, revert
from .candidates import Held
from .situation import Situation


class Back(NamedTuple):
    """The outcome, by number of the state: plans with more resident layers, and pages of KV."""

    plans: Mapping[int, Plan]
    pages: Mapping[int, int]


def plan_restore(now: Situation, caches: Sequence[Held], spare: int, models: bool = True) -> Back:
    """Divides `spare` pages, in the order of reclaim_order.py, Note [What is restored first]. A model with an SLO gets
    none: its SLO decides. `models`: do models take part?"""
    states = {state.number: now.model(state) for state in now.states if models and state.auto and not state.has_slo}
    priorities = {state.number: state.model.priority for state in now.states}
    absent = [_of_model(number, model) for number, model in states.items() if model.freed or model.plan.streamed]
    for held in caches:
        if held.active and held.displaced:
            number, priority = held.state.number, priorities.get(held.state.model, 0)
            for count, seconds in ((held.displaced - held.near, now.page_seconds), (held.near, now.peer_seconds)):
                if count:
                    seconds = seconds or now.page_seconds or 0.0
                    absent.append(Absent(number, count, seconds, True, priority, held.used))
    plans: dict[int, Plan] = {}
    pages: dict[int, int] = {}
    for missing in restore_order(absent):
        if spare <= 0:
            break
        if missing.client in states:
            model = states[missing.client]
            plan = revert(model, spare)
            if plan is not None:
                plans[missing.client] = plan
                spare += model.plan.device_pages - plan.device_pages
        else:
            some = min(spare, missing.pages)
            pages[missing.client] = pages.get(missing.client, 0) + some
            spare -= some
    return Back(plans, pages)


def _of_model(number: int, model: Model) -> Absent:
    freed = model.freed
    seconds = model.stall / max(1, freed) if model.active else 0.0
    return Absent(number, freed, seconds, model.active, model.priority, model.used)


def restored_on_use(displaced: int, spare: int, offered: int) -> int:
    """Returns how many pages a cache restores when it is used again: it reads them in place in each step otherwise, so
    that they are worth taking from idle models and caches, which have `offered`."""
    return min(displaced, spare + offered)
