"""The processes of replicas in a simulation: whether each runs, stands still or has ended, and when it is heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fleet_run import FleetRun


class ProcessStates:
    """Numbers of replicas. `ended`: their processes are no more; `fenced`: nobody listens to them, and they could not
    be ended, as they stand still where nobody reaches them. Who stands still hears and says all when it goes on."""

    def __init__(self, run: FleetRun) -> None:
        self.ended: set[int] = set()
        self.fenced: set[int] = set()
        self._run = run
        self._late: dict[int, list[Callable[[], None]]] = {}  # what those do that stand still, once they go on
        self._returns: set[int] = set()  # those of them that will go on

    def does(self, member: int, act: Callable[[], None], seconds: float = 0.0) -> None:
        """Has a replica act, or say something, so many seconds from now: later if it stands still then, never if it has
        ended."""

        def due() -> None:
            if member in self._late:
                self._late[member].append(act)
            elif member not in self.ended:
                act()

        self._run.events.after(seconds, due)

    def returns(self, member: int) -> bool:
        """Whether it stands still and will go on."""
        return member in self._returns

    def stop(self, member: int, *, returns: bool) -> None:
        """A replica that runs stands still from now on. `returns`: it will go on."""
        self._late[member] = []
        self._run.silent.add(member)
        if returns:
            self._returns.add(member)
        for link in self._run.links_of(member):
            link.stop()

    def go_on(self, member: int) -> None:
        """Has a replica go on, and do what it is late with."""
        self._run.silent.discard(member)
        self._returns.discard(member)
        for link in self._run.links_of(member):
            link.go_on()
        for act in self._late.pop(member):
            act()

    def end(self, member: int) -> None:
        """Ends a process; what it was sending never comes. Idempotent."""
        self.ended.add(member)
        self._run.silent.add(member)
        self._late.pop(member, None)
        self._returns.discard(member)
        for link in self._run.links_of(member):
            link.end()
