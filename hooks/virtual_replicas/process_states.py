"""The processes of simulated replicas: running, paused or ended. Delays the actions of a paused one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .fleet_run import FleetRun


class ProcessStates:
    """The states of replicas. `ended`: processes that have ended; `fenced`: paused processes that are fenced and cannot
    be reached to be killed. A paused replica's messages are delivered when it resumes."""

    def __init__(self, run: FleetRun) -> None:
        self.ended: set[int] = set()
        self.fenced: set[int] = set()
        self._run = run
        self._deferred: dict[int, list[Callable[[], None]]] = {}  # actions of each paused replica
        self._resuming: set[int] = set()  # paused replicas that will resume

    def schedule(self, member: int, act: Callable[[], None], seconds: float = 0.0) -> None:
        """Schedules an action of a replica, or a message to or from it, in so many seconds. If the replica is paused
        then, `act` is called when it resumes; if it has ended, never."""

        def due() -> None:
            if member in self._deferred:
                self._deferred[member].append(act)
            elif member not in self.ended:
                act()

        self._run.events.after(seconds, due)

    def will_resume(self, member: int) -> bool:
        """Returns whether a replica is paused and will resume."""
        return member in self._resuming

    def pause(self, member: int, *, resumes: bool) -> None:
        """Pauses a running replica. `resumes`: it will resume."""
        self._deferred[member] = []
        self._run.silent.add(member)
        if resumes:
            self._resuming.add(member)
        for link in self._run.links_of(member):
            link.pause()

    def resume(self, member: int) -> None:
        """Resumes a replica, and performs its deferred actions."""
        self._run.silent.discard(member)
        self._resuming.discard(member)
        for link in self._run.links_of(member):
            link.resume()
        for act in self._deferred.pop(member):
            act()

    def end(self, member: int) -> None:
        """Ends a process; its messages under way never arrive. Idempotent."""
        self.ended.add(member)
        self._run.silent.add(member)
        self._deferred.pop(member, None)
        self._resuming.discard(member)
        for link in self._run.links_of(member):
            link.end()
