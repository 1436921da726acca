"""The loops of a device take turns."""

from __future__ import annotations

import math
import weakref
from typing import Any

from ...offload.policy.turns import Turn, Waiting, next_turn

PATIENCE, MOST = 20.0, 4.0


class LoopTurns:
    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._loops: dict[int, weakref.ref[Any]] = {}
        self.turn, self._began, self._ended = Turn(0), -math.inf, {}

    def add(self, scheduler: Any) -> None:
        self._loops[id(scheduler)] = weakref.ref(scheduler)

    def has(self, scheduler: Any) -> bool:
        return self.turn.has in (0, id(scheduler))

    def ended(self, scheduler: Any) -> float:
        return self._ended.get(id(scheduler), -math.inf)

    def may_step(self, scheduler: Any) -> bool:
        now, models = self._manager.clock(), []
        loops = [loop for ref in self._loops.values() if (loop := ref()) is not None]
        for loop in loops:
            if loop.has_pending_requests():
                waiting = [s for s in loop.waiting_requests.values()]
                since = loop.waiting_since if waiting else None
                models.append(Waiting(id(loop), since, loop.runs, loop.missing_seconds))
            else:
                loop.waiting_since = None
        turn = next_turn(now, self.turn, self._began, models, PATIENCE, MOST)
        if turn.has != self.turn.has:
            self._ended[self.turn.has] = now
            self._began = now
        self.turn = turn
        if turn.has == id(scheduler) and not turn.admits:
            scheduler.block_new_requests = True
        elif turn.has == id(scheduler) and scheduler.blocked_by_turn:
            scheduler.block_new_requests = False
        scheduler.blocked_by_turn = turn.has == id(scheduler) and not turn.admits
        return self.has(scheduler)
