"""Decode steps like the last one on their thread, which are begun and ended in one call each: nothing is decided for
them, and none is timed.

Note [Steps like the last]
    That is a step of as many sequences, with the same cache, after which nothing has happened: the manager's version,
    the time until which its decision holds, and the core's numbers are those of the step before
    (offload/manager/memory_manager.py, Note [Events]). In a generation loop the cache says whether the requests are
    those of the step before, too (`ElasticPagedCache.batch`, hooks/batching/repeated.py). Of such steps two in a row
    are looked at and timed of each `sampled`: two, as the time per token is that between them. While a time is being
    learned, or somebody listens, all are. No step is taken for one like the last whose tokens may be more than those
    that the last decision was made for; nor any where layers stream.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Final

import torch

from ...allocator._native import Device
from ...offload.manager.client import ModelClient
from ...offload.manager.decision import StreamDecision
from ...offload.manager.memory_manager import MemoryManager, ModelState
from ...offload.record.record import Point
from ..device import graphs
from ..measure.pace import PACKED, Pace
from ..measure.timings import Timings

# arguments whose sizes `_Steps.shape` does not tell
_OTHERS: Final = frozenset(("inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds"))


class StepsAlike:
    """The steps of one model that are like the last on their thread."""

    def __init__(self, device: Device, manager: MemoryManager, pace: Pace, timings: Timings) -> None:
        """`pace`, `timings`: of the model."""
        self.decision: StreamDecision | None = None  # that is in force; any change makes a new one
        self._device = device
        self._manager = manager
        self._pace = pace
        self._timings = timings
        self._here = _Here()

    def continues(self, args: Sequence[Any], kwargs: Mapping[str, Any], cache: object) -> bool:
        """Begins a step like the last, with these arguments; in one call, as it runs for each token. False, and nothing
        was done, where it has to be looked at."""
        here, manager, device = self._here, self._manager, self._device
        if (
            (steps := here.steps) is None
            or not steps.left
            or steps.version != manager.version.number
            or cache is not steps.cache()
            or (steps.batch is not None and steps.batch is not getattr(cache, "batch", None))
            or kwargs.keys() != steps.names
            or getattr(args[0] if args else kwargs.get("input_ids"), "shape", None) != steps.shape
            or (now := manager.clock()) >= steps.until
            or (device.available, device.budget) != steps.seen
            or device.reclaimed != steps.reclaimed
            or device.page_request
            or steps.decision is not self.decision
            or self._pace.listeners
            or graphs.GRAPHS.loosened
            or self._pace.capturing()
        ):
            return False
        steps.left -= 1
        here.looked, here.state = 0, steps.state
        running = manager.clients.running
        if running.ahead:
            with manager.lock:
                running.began(steps.state, now)
        else:  # the same, without its call
            steps.state.used = steps.state.activity.at = now
            running.on[get_ident()] = steps.state
        return True

    def look(self) -> int:
        """Notes that the step that begins is looked at, and returns the pages that the core has taken so far."""
        here = self._here
        here.steps, here.state, here.looked = None, None, here.looked + 1
        return self._device.reclaimed

    def looked(
        self, model: ModelClient, point: Point | None, cache: object, kwargs: Mapping[str, Any], reclaimed: int
    ) -> None:
        """Notes what holds for the next steps, if they are like this one, which is about to run. `reclaimed`: what
        `look` returned."""
        here, clients, batch = self._here, self._manager.clients, None
        if packed := not PACKED.isdisjoint(kwargs):
            batch = getattr(cache, "batch", None)
        if (
            here.looked < 2
            or point is None
            or point.phase != "decode"
            or cache is None
            or not _OTHERS.isdisjoint(kwargs)
            or (packed and batch is None)
            or (validity := self._manager.version.validity) is None
            or self.decision is None
            or model.plan.streamed
            or not self._timings.settled(point)
            or (state := clients.get(model)) is None
        ):
            return
        try:
            its = weakref.ref(cache)
        except TypeError:
            return
        shape = torch.Size((1, point.batch) if packed else (point.batch, 1))
        left = min(point.corner.length - point.length, self._manager.tuning.weights.sampled - 2)
        here.steps = _Steps(*validity, reclaimed, self.decision, state, its, batch, shape, frozenset(kwargs), left)

    def ended(self) -> tuple[bool, bool]:
        """Ends the step. Returns (was it looked at, is there more to note of its end)."""
        here, running, thread = self._here, self._manager.clients.running, get_ident()
        state, here.state = here.state, None
        if state is None or running.ahead or thread in running.read:
            return state is None, True
        state.activity.at = self._manager.clock()  # as `Running.ended`, without its call
        running.on.pop(thread, None)
        return False, False


@dataclass(slots=True)
class _Steps:
    """What holds for decode steps like the last. `version`, `until`, `seen`: of `Validity`; `reclaimed`: pages that the
    core has taken so far; `decision`: that is in force, for the model of `state`; `cache`: refers to that of the step;
    `batch`: of that, None where each sequence has a row; `shape`: of its tokens; `names`: of its arguments; `left`: how
    many may follow."""

    version: int
    until: float
    seen: tuple[int, int]
    reclaimed: int
    decision: StreamDecision
    state: ModelState
    cache: weakref.ref[Any]
    batch: object
    shape: torch.Size
    names: frozenset[str]
    left: int


class _Here(threading.local):
    """The steps of this thread. `looked`: at how many in a row; `state`: of the model in a step that `continues`."""

    steps: _Steps | None = None
    looked = 0
    state: ModelState | None = None
