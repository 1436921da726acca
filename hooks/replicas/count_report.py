"""Reports a replica's counts to the supervisor: bytes moved, layers held, and times of microbatches."""

from __future__ import annotations

from .epoch_state import EpochState
from .layer_moves import LayerMoves
from .messages import Counted, Seen
from .notes import machine
from .replica_setup import ReplicaSetup


class CountReport:
    """Sends `Counted` and `Seen`. Used by one thread."""

    def __init__(self, setup: ReplicaSetup, state: EpochState, moves: LayerMoves) -> None:
        self._setup = setup
        self._state = state
        self._moves = moves
        self._machine = machine()
        self._told: Counted | None = None
        self._told_at = -float("inf")

    def send(self, at_once: bool = False) -> None:
        """Sends the counts that have changed, at most once a period unless `at_once`. SupervisorLost."""
        setup, now = self._setup, self._setup.clock()
        if not at_once and now - self._told_at < setup.tuning.counting:
            return
        self._told_at = now
        times = setup.replica.times
        if times is not None:
            times.poll()
        measured = () if times is None else (times.busy, times.open, times.error)
        held = setup.layers - len(setup.holds.dropped)
        found = Counted(self._state.sent, self._moves.sent, held, *measured)
        if found != self._told:
            self._told = found
            setup.supervisor.post(found)
        if bars := setup.notes.take():
            setup.supervisor.post(Seen(self._machine, now, bars))
