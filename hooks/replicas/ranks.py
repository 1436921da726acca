"""Replicas that the supervisor's machine runs, one of each rank: started, and started again where one is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.replacements import Replacements
from ...offload.policy.tuning import Replicas


class Processes(Protocol):
    """The processes of replicas that this machine runs, one of each rank."""

    def start(self, rank: int, cost: ChunkCost | None) -> None:
        """Starts the replica of a rank. `cost`: what chunks take there; None: it measures that. OSError."""

    def ended(self) -> list[tuple[int, str]]:
        """The ranks of those that have ended since the last call, and how."""

    def end(self, rank: int) -> None:
        """Ends the one of a rank at once. Nothing where there is none."""


class Ranks:
    """Used by one thread. `replaced`: replicas that were started instead of lost ones."""

    def __init__(
        self,
        count: int,
        processes: Processes,
        cost: ChunkCost | None,
        clock: Callable[[], float],
        say: Callable[[str], object],
        tuning: Replicas,
    ) -> None:
        """`cost`: what chunks take; None: the first measure that. `say`: with lines for people."""
        self.replaced = 0
        self._ranks = range(count)
        self._processes = processes
        self._cost = cost
        self._clock = clock
        self._say = say
        self._replacements = Replacements(count, tuning)
        self._members: dict[int, int] = {}  # by rank

    @property
    def expected(self) -> bool:
        """Whether a replica starts somewhere, or will."""
        return self._replacements.expected

    def start(self) -> None:
        """Starts all. OSError where a process cannot be started."""
        for rank in self._ranks:
            self._processes.start(rank, self._cost)

    def joined(self, rank: int, member: int, cost: ChunkCost) -> bool:
        """The replica of a rank is a member, and has measured that cost. False where none of that rank can have
        joined."""
        if not self._replacements.joined(rank, self._clock()):
            return False
        self._cost = self._cost or cost
        self._members[rank] = member
        return True

    def lost(self) -> Iterator[tuple[int | None, str]]:
        """Members whose processes have ended, and how; None: it had not joined. Others are started instead when they
        are due."""
        for rank, how in self._processes.ended():
            yield self._gone(rank, how)
        for rank in self._replacements.due(self._clock()):
            self.replaced += 1
            try:
                self._processes.start(rank, self._cost)
            except OSError as error:
                yield self._gone(rank, f"it could not be started: {error}")

    def end(self, member: int) -> bool:
        """Ends the process of a member. False where this machine runs none."""
        ranks = [rank for rank, each in self._members.items() if each == member]
        for rank in ranks:
            self._processes.end(rank)
        return bool(ranks)

    def end_starting(self) -> None:
        """Ends those that have not joined, and cannot be told."""
        for rank in self._ranks:
            if rank not in self._members:
                self._processes.end(rank)

    def _gone(self, rank: int, how: str) -> tuple[int | None, str]:
        member = self._members.pop(rank, None)
        who = "a replica that had not joined yet" if member is None else f"replica {member}"
        wait = self._replacements.ended(rank, self._clock())
        then = "" if wait is None else "; another one is started" + (f" in {wait:.1f} s" if wait else "")
        self._say(f"{who} has ended: {how}{then}")
        return member, how
