"""Replicas of a simulation that join, stand still, end, and are fenced, as the controller hears of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ....offload.policy.replicas.events import Joined, Load, Lost

if TYPE_CHECKING:
    from .dropping import Drop

NOBODY_LEFT: Final = "no replica is left"


class Presence:
    """`failed`: why nothing is served, None while something is; `are_shut`: the supervisor has ended."""

    def __init__(self, keeper: Drop) -> None:
        self.failed: str | None = None
        self.are_shut = False
        self._keeper = keeper
        self._run = keeper.run
        self._members: set[int] = set()  # that have joined, until it is known that they have ended

    def join(self, member: int) -> None:
        """A replica that holds all layers, and nothing else, joins."""
        self._members.add(member)
        if self.failed == NOBODY_LEFT:
            self.failed = None
        self._keeper.pulls.held[member] = {*range(len(self._run.fleet.shape.layers))}
        self._keeper.tell(Joined(self._run.agenda.now, member, self._run.fleet.pages))

    def rejoin(self, member: int) -> None:
        """A replica that was fenced, and goes on, joins anew; each is told again and again until it does."""
        fenced = self._keeper.crew.fenced
        if member in fenced:
            fenced.discard(member)
            self._run.agenda.after(0.0, lambda: self.join(member))

    def kill(self, member: int) -> None:
        """The process of a replica ends. Nothing happens where it has ended."""
        keeper = self._keeper
        if member in self._members and member not in keeper.crew.ended:
            keeper.crew.end(member)
            keeper.changes.part(member)
            keeper.pulls.lose(member)
            self._run.agenda.after(self._run.tuning.period, lambda: self._lost(member))

    def stop(self, member: int, seconds: float | None) -> None:
        """A replica stands still for so long, or for good. Nothing happens where it does, or has ended."""
        if member in self._members and member not in self._run.silent:
            self._keeper.crew.stop(member, returns=seconds is not None)
            if seconds is not None:
                self._run.agenda.after(seconds, lambda: self._go_on(member))

    def shut(self, why: str) -> None:
        """The supervisor ends, and so do all replicas and requests."""
        keeper = self._keeper
        keeper.requests.end_all(why)
        self.failed, self.are_shut = why, True
        keeper.changes.end()
        for member in self._members:
            keeper.crew.end(member)
            keeper.formed.part(member)

    def fence(self, member: int) -> None:
        """Nobody listens to a replica any more. Its process is ended, unless it stands still out of reach."""
        self._keeper.formed.part(member)
        if self._keeper.crew.returns(member):
            self._keeper.crew.fenced.add(member)
        else:
            self.kill(member)

    def _go_on(self, member: int) -> None:
        keeper, crew = self._keeper, self._keeper.crew
        if member in crew.ended:
            return
        crew.go_on(member)
        if (pipe := keeper.formed.pipe_of(member)) is not None:
            pipe.stages.wake(member)
        keeper.changes.turn()
        if member in crew.fenced:
            keeper.tell(Load(self._run.agenda.now, member, keeper.formed.epochs[member], 0, 0, 0, keeper.looks))

    def _lost(self, member: int) -> None:
        """Tells the controller that the process of a replica has ended; the last one takes all requests with it."""
        self._keeper.formed.part(member)
        self._members.discard(member)
        self._keeper.tell(Lost(self._run.agenda.now, member))
        if not self._members and self.failed is None:
            self.failed = NOBODY_LEFT
            self._keeper.requests.leave_all(NOBODY_LEFT)
