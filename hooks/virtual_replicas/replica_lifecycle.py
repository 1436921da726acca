"""The lifecycle of simulated replicas: they join, are paused, end, and are fenced, with events for the controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...offload.policy.replicas.events import Joined, Load, Lost

if TYPE_CHECKING:
    from .drop_policy import DropPolicy

NOBODY_LEFT: Final = "no replica is left"


class ReplicaLifecycle:
    """Replicas that join and end. `failed`: why nothing can be served; None: requests can be; `is_shut_down`: the
    supervisor has ended."""

    def __init__(self, policy: DropPolicy) -> None:
        self.failed: str | None = None
        self.is_shut_down = False
        self._policy = policy
        self._run = policy.run
        self._members: set[int] = set()  # replicas that have joined, until the supervisor notices their end

    def join(self, member: int) -> None:
        """Adds a replica, with all layers and no KV."""
        self._members.add(member)
        if self.failed == NOBODY_LEFT:
            self.failed = None
        self._policy.pulls.held[member] = {*range(len(self._run.fleet.shape.layers))}
        self._policy.tell(Joined(self._run.events.now, member, self._run.fleet.pages))

    def rejoin(self, member: int) -> None:
        """Has a fenced replica that has resumed join anew, once; later calls do nothing."""
        fenced = self._policy.processes.fenced
        if member in fenced:
            fenced.discard(member)
            self._run.events.after(0.0, lambda: self.join(member))

    def kill(self, member: int) -> None:
        """Kills the process of a replica. Nothing where it has ended."""
        policy = self._policy
        if member in self._members and member not in policy.processes.ended:
            policy.processes.end(member)
            policy.changes.detach(member)
            policy.pulls.lose(member)
            self._run.events.after(self._run.tuning.period, lambda: self._lost(member))

    def stop(self, member: int, seconds: float | None) -> None:
        """Pauses a replica for so many seconds; None: for good. Nothing where it is paused, or has ended."""
        if member in self._members and member not in self._run.silent:
            self._policy.processes.pause(member, resumes=seconds is not None)
            if seconds is not None:
                self._run.events.after(seconds, lambda: self._resume(member))

    def shut(self, why: str) -> None:
        """Ends the supervisor, all replicas and all requests."""
        policy = self._policy
        policy.requests.end_all(why)
        self.failed, self.is_shut_down = why, True
        policy.changes.end()
        for member in self._members:
            policy.processes.end(member)
            policy.active.detach(member)

    def fence(self, member: int) -> None:
        """Fences a replica. Its process is killed, unless it is paused and unreachable."""
        self._policy.active.detach(member)
        if self._policy.processes.will_resume(member):
            self._policy.processes.fenced.add(member)
        else:
            self.kill(member)

    def _resume(self, member: int) -> None:
        policy, processes = self._policy, self._policy.processes
        if member in processes.ended:
            return
        processes.resume(member)
        if (pipe := policy.active.pipe_of(member)) is not None:
            pipe.stages.wake(member)
        policy.changes.retry_switches()
        if member in processes.fenced:
            policy.tell(Load(self._run.events.now, member, policy.active.epochs[member], 0, 0, 0, policy.ticks))

    def _lost(self, member: int) -> None:
        """Tells the controller that the process of a replica has ended; after the last one all requests fail."""
        self._policy.active.detach(member)
        self._members.discard(member)
        self._policy.tell(Lost(self._run.events.now, member))
        if not self._members and self.failed is None:
            self.failed = NOBODY_LEFT
            self._policy.requests.leave_all(NOBODY_LEFT)
