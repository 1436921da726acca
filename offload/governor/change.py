"""A change of one model's plan or ranges, during which the core takes nothing of the model."""

from __future__ import annotations

from ..policy.plan import Plan
from ..policy.reclaim_order import Rung
from ..policy.remap import cap
from .client import ModelClient
from .client_state import ModelState
from .overview import Overview
from .reclaim_list import ReclaimList


class ModelChange:
    """The context of `Governor.changing`. `state`: the model's, None until `begin` has found it."""

    def __init__(self, known: Overview, reclaim: ReclaimList, model: ModelClient) -> None:
        self.model = model
        self.state: ModelState | None = None
        self.before = model.plan
        self.promised: Plan | None = None
        self.taken: frozenset[int] = frozenset()
        self.began = known.clock()
        self._known = known
        self._reclaim = reclaim

    def begin(self) -> frozenset[int]:
        """Withdraws the model's offers, and returns the layers that were taken. KeyError."""
        with self._known.lock:
            state = self.state = self._known.clients.of_model(self.model)
            self.before, self.promised = self.model.plan, state.faster
            state.held.add(self)
            self._known.models_changed()
            self._known.list.void()
        self._known.device.withdraw(state.keys())
        with self._known.lock:
            self._known.drain_core_events()
            self.taken = frozenset(state.taken)
        return self.taken

    def end(self, failed: bool) -> None:
        """Offers the model again, as its plan says now. `failed`: an exception leaves `changing`."""
        state, before = self.state, self.before
        if state is None:
            return
        with self._known.lock:
            try:
                if not failed and self in state.held:
                    state.taken -= self.taken
                    state.waking &= state.point is None or state.point.phase != "decode"
                    state.arranged(before, self.promised)
                    taken = sum(map(before.pages.__getitem__, self.taken))
                    if before.pages == state.model.plan.pages:  # else pages of the two plans cannot be compared
                        self._tell(state, state.model.plan.device_pages - before.device_pages + taken)
            finally:
                state.held.discard(self)
                state.grant = state.faster = None
                state.passes.clear()
                self._known.moved(state)
                self._known.list.void()
        if not failed:
            self._reclaim.publish()
            self._known.watch()

    def _tell(self, state: ModelState, more: int) -> None:
        """Logs that the layers have `more` device pages than before, or fewer. The caller holds the lock."""
        if not more:
            return
        known, plan = self._known, state.model.plan
        costs, measured = state.costs_at(state.point or state.last["decode"], known.link.page_seconds)
        rung = Rung.HIDDEN_WEIGHTS if len(plan.streamed) <= cap(costs) else Rung.STALLING_WEIGHTS
        predicted = max(0, more) * costs.page_seconds if measured else None
        took = known.clock() - self.began
        if more > 0:
            known.pages.went_back()
        verb = "revert" if more > 0 else "pull"
        known.events.decided(rung.label, verb, abs(more), what=state.name, predicted=predicted, measured=took)
