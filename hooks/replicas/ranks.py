"""The replicas on the supervisor's machine, one of each rank: started, and replaced where one is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.replacements import Replacements
from ...offload.policy.tuning import Replicas


class Processes(Protocol):
    """The processes of replicas on this machine, one of each rank."""

    def start(self, rank: int, cost: ChunkCost | None) -> None:
        """Starts the replica of a rank. `cost`: of chunks; None: the replica measures it. OSError."""

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the processes that have ended since the last call, and how each did."""

    def end(self, rank: int) -> None:
        """Kills the process of a rank, if there is one."""


class Ranks:
    """Starts and replaces replicas. Used by one thread. `replaced`: number of replacements so far."""

    def __init__(
        self,
        count: int,
        processes: Processes,
        cost: ChunkCost | None,
        clock: Callable[[], float],
        say: Callable[[str], object],
        tuning: Replicas,
    ) -> None:
        """`count`: of ranks; `cost`: of chunks; None: the first replicas measure it. `say`: prints a line."""
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
        """Whether a replica is starting, or will be started."""
        return self._replacements.expected

    def start(self) -> None:
        """Starts the replicas of all ranks. OSError where a process cannot be started."""
        for rank in self._ranks:
            self._processes.start(rank, self._cost)

    def joined(self, rank: int, member: int, cost: ChunkCost) -> bool:
        """Notes that the replica of a rank has joined as a member, with its cost of chunks. False where that cannot be:
        no process of the rank runs, or its replica has joined already."""
        if not self._replacements.joined(rank, self._clock()):
            return False
        self._cost = self._cost or cost
        self._members[rank] = member
        return True

    def lost(self) -> Iterator[tuple[int | None, str]]:
        """Yields the members whose processes have ended, and how; None: the replica had not joined. Starts the
        replacements that are due."""
        for rank, how in self._processes.ended():
            yield self._gone(rank, how)
        for rank in self._replacements.due(self._clock()):
            self.replaced += 1
            try:
                self._processes.start(rank, self._cost)
            except OSError as error:
                yield self._gone(rank, f"it could not be started: {error}")

    def end(self, member: int) -> bool:
        """Kills the process of a member. False where this machine runs none."""
        ranks = [rank for rank, each in self._members.items() if each == member]
        for rank in ranks:
            self._processes.end(rank)
        return bool(ranks)

    def end_starting(self) -> None:
        """Kills the processes of replicas that have not joined, and so cannot be sent a message."""
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
