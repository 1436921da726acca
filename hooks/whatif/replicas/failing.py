"""Plays faults in a simulation of replicas."""

from __future__ import annotations

from collections.abc import Iterable

from .dropping import Drop
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


def play_faults(keeper: Drop, faults: Iterable[PlayedFault]) -> None:
    """Has each happen at its time, in a run that has not begun. ManageError where one cannot happen."""
    given = [*faults]
    check_faults(given, keeper.run.fleet.replicas, len(keeper.run.jobs))
    for fault in given:
        keeper.run.agenda.at(fault.at, lambda fault=fault: _happens(keeper, fault))  # type: ignore[misc]


def _happens(keeper: Drop, fault: PlayedFault) -> None:
    match fault:
        case Killed():
            keeper.replicas.kill(fault.member)
        case Hung():
            keeper.replicas.stop(fault.member, fault.seconds)
        case LinkLost():
            keeper.changes.lose_link(fault.member, fault.other)
        case FaultRefused():
            keeper.changes.prepared.refusing[fault.member] = fault.why
        case FileChanged():
            keeper.pulls.changed.add(fault.member)
        case DamagedKV():
            keeper.changes.damaging.add(fault.member)
        case ClientLeft():
            keeper.requests.leave(keeper.run.jobs[fault.request], "its client is gone")
        case NewReplica():
            keeper.replicas.join(fault.member)
        case SupervisorFails():
            keeper.replicas.shut("the supervisor has ended")
        case Shutdown():
            keeper.replicas.shut("the server shuts down")
        case _:
            raise TypeError(f"{fault!r} is no fault that can be played")
