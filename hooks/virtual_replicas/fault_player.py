"""Plays faults in a simulation of replicas."""

from __future__ import annotations

from collections.abc import Iterable

from .drop_policy import DropPolicy
from .faults import (
    ClientLeft,
    DamagedKV,
    FaultRefused,
    FileChanged,
    Hung,
    Killed,
    LinkLost,
    NewReplica,
    PlayedFault,
    Shutdown,
    SupervisorFails,
    check_faults,
)


def play_faults(policy: DropPolicy, faults: Iterable[PlayedFault]) -> None:
    """Schedules faults in a run that has not begun. ManageError where one cannot happen."""
    given = [*faults]
    check_faults(given, policy.run.fleet.replicas, len(policy.run.jobs))
    for fault in given:
        policy.run.events.at(fault.at, lambda fault=fault: _happens(policy, fault))  # type: ignore[misc]


def _happens(policy: DropPolicy, fault: PlayedFault) -> None:
    match fault:
        case Killed():
            policy.replicas.kill(fault.member)
        case Hung():
            policy.replicas.stop(fault.member, fault.seconds)
        case LinkLost():
            policy.changes.lose_link(fault.member, fault.other)
        case FaultRefused():
            policy.changes.prepared.refusing[fault.member] = fault.why
        case FileChanged():
            policy.pulls.changed.add(fault.member)
        case DamagedKV():
            policy.changes.damaging.add(fault.member)
        case ClientLeft():
            policy.requests.leave(policy.run.jobs[fault.request], "its client is gone")
        case NewReplica():
            policy.replicas.join(fault.member)
        case SupervisorFails():
            policy.replicas.shut("the supervisor has ended")
        case Shutdown():
            policy.replicas.shut("the server shuts down")
        case _:
            raise TypeError(f"{fault!r} is no fault that can be played")
