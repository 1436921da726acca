"""The place of a generation loop among those of its device, which may have to take turns (offload/manager/turns.py)."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from transformers.generation.continuous_batching.requests import RequestStatus

from ...offload.manager.turns import LoopWork
from .cache import ElasticPagedCache
from .selection import RequestSLOs

_STEPS: Final = 32  # of which the part that computes prompts counts, on average: some second of a loop. Chosen


class PlaceInTurns:
    """The place of one loop for as long as it lives. Used by its thread, but for `until`. `wake`: has the loop try soon
    to make a batch."""

    def __init__(self, cache: ElasticPagedCache, slos: RequestSLOs, takes: bool) -> None:
        """`takes`: does it take turns? Else it is as if there were no other loop."""
        self.wake: Callable[[], object] = lambda: None
        self._cache = cache
        self._slos = slos
        self._clock = cache.pages.client.manager.clock
        self._turns, known = cache.pages.client.manager.turns, weakref.ref(self)
        self._seat = self._turns.seat(self, cache.model.client, lambda: None if (it := known()) is None else it.wake())
        if takes:
            self._turns.join(self._seat)
        self.seats: Final = self._turns.seats if takes else {}  # of all loops of the device with which it takes turns
        self._came: float | None = None  # since when requests wait that have not begun; None: none does
        self._prompts: dict[str, float] = {}  # when requests came whose prompts are to be computed
        self._prompting = 0.0  # the part of its last steps that computed prompts
        self._ended = 0  # answers, up to as many as count
        self._answer = 0.0  # tokens of its last answers, on average; before any has ended the most that they may have
        self._counted = 0, 0, 0, 0  # requests that have begun, those that wait, and bytes of KV that all of them need

    @property
    def admits(self) -> bool:
        """May requests begin?"""
        return self._turns.admits(self._seat)

    @property
    def waits(self) -> bool:
        """Does the loop wait for its turn?"""
        return self._seat.until is not None

    @property
    def until(self) -> float:
        """Until when the model is needed while it has requests, by the manager's clock: infinity if it may compute."""
        return math.inf if (until := self._seat.until) is None else until

    def may_step(self, active: Mapping[str, Any], waiting: Mapping[str, Any]) -> bool:
        """May the loop compute now, with requests of which these have begun, and those wait?"""
        if not waiting:
            self._came = None
        elif self._came is None:
            self._came = self._clock()
        if (len(active), len(waiting)) != self._counted[:2]:
            begun, kv = (
                self._cache.bytes_of(*(max(state.current_len(), len(state.initial_tokens)) for state in some))
                for some in (active.values(), waiting.values())
            )
            self._counted = len(active), len(waiting), begun + kv, begun
            if not self._ended:
                most = [state.max_new_tokens or 0 for some in (active, waiting) for state in some.values()]
                self._answer = sum(most) / max(1, len(most))
        due = self._slos.due(active, waiting.values(), self._seat.could)
        work = LoopWork(
            kv=self._counted[2],
            runs=len(active),
            since=self._came,
            due=due,
            begun=self._counted[3],
            waits=len(waiting),
            prompts=self._prompting,
            fixed=self._cache.model.costs.fixed,
            answer=self._answer,
        )
        return self._turns.may_step(self._seat, work)

    def candidates(self, candidates: Sequence[Any], active: Mapping[str, Any], waiting: Mapping[str, Any]) -> list[Any]:
        """Returns those of the candidates that the next step may be of, where `active` requests have begun, and
        `waiting` ones not: none, unless the model may compute; and see offload/manager/turns.py."""
        if not self.may_step(active, waiting):
            return []
        begin, room = self.admits, self._turns.room(self._seat) - self._counted[3]
        chosen = list[Any]()
        for state in candidates:
            if state.request_id not in active:
                size = self._cache.bytes_of(len(state.initial_tokens))
                if not begin or (size > room and (active or chosen)):
                    begin = False
                    continue
                room -= size
            chosen.append(state)
        prompts = {state.request_id for state in chosen if state.status != RequestStatus.DECODING}
        if prompts and not self._may_prompt(prompts):
            chosen, prompts = [state for state in chosen if state.request_id not in prompts], set()
        if chosen:
            self._prompting += (bool(prompts) - self._prompting) / _STEPS
        return chosen

    def _may_prompt(self, prompts: Collection[str]) -> bool:
        """May the next step compute prompts of these requests?"""
        known, now = self._prompts, self._clock()
        self._prompts = {name: known.get(name, now) for name in prompts}
        return self._turns.may_prompt(self._seat, min(self._prompts.values(), default=None))

    def note_answer(self, tokens: int) -> None:
        """Notes that an answer of so many tokens has ended."""
        self._ended = min(self._ended + 1, _STEPS)
        self._answer += (tokens - self._answer) / self._ended

    def let_prompts_pass(self) -> None:
        """Notes that none of its prompts could be computed: those of others that wait go before them."""
        self._prompts = {}
        self._turns.may_prompt(self._seat, None)

    def rest(self) -> None:
        """Notes that there are no requests."""
        if self._prompts:
            self._may_prompt(())
        if self._seat.work is not None:
            self._turns.may_step(self._seat, None)
