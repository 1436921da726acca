"""When a lost replica is replaced: what a supervisor does about processes that have ended (REPLICAS, process model).

Note [Again, and again]
    Replicas of a machine are numbered by rank, and who replaces a lost one has its rank. That is done at once. Where
    replicas are lost soon after they have joined, again and again, it is done later each time, twice as late as before:
    what ends them may be the machine, or a request. A rank of which no replica has ever joined is given up, as what its
    process said is the reason: a model that does not load, a budget that is too small. Where replicas have served
    before, a start that fails is tried again, a few times.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tuning import DEFAULT
from ..tuning import Replicas as Tuning


@dataclass(slots=True)
class _Rank:
    joined: float | None = None  # since when the replica that runs there is a member; None: it is none yet
    runs: bool = True
    served: bool = False  # a replica of it has joined before
    short: int = 0  # replicas in a row that ended soon after they had joined
    failed: int = 0  # starts in a row that did not come to join
    due: float = 0.0  # when the next one is started


class Replacements:
    """The ranks of one supervisor. All of them start when it does."""

    def __init__(self, ranks: int, tuning: Tuning = DEFAULT.replicas) -> None:
        self._tuning = tuning
        self._ranks = {number: _Rank() for number in range(ranks)}

    @property
    def expected(self) -> bool:
        """Whether a replica starts somewhere, or will."""
        return any(each.joined is None for each in self._ranks.values())

    def joined(self, rank: int, at: float) -> bool:
        """The replica of a rank is a member, or not: False where no process of that rank runs, as it ended while it
        joined, or one of it has joined already."""
        found = self._ranks.get(rank)
        if found is None or not found.runs or found.joined is not None:
            return False
        found.joined, found.served, found.failed = at, True, 0
        return True

    def ended(self, rank: int, at: float) -> float | None:
        """The process of a rank has ended. Returns after how many seconds there is a new one; None: there is none any
        more."""
        found = self._ranks.get(rank)
        if found is None:
            return None
        found.runs, tuning = False, self._tuning
        if found.joined is None:
            found.failed += 1
            if not found.served or found.failed >= tuning.starts:
                del self._ranks[rank]
                return None
        else:
            found.short = found.short + 1 if at - found.joined < tuning.steady else 0
        found.joined = None
        again = found.short + found.failed
        wait = 0.0 if again <= 1 and not found.failed else min(tuning.start_wait * 2**again, tuning.longest_wait)
        found.due = at + wait
        return wait

    def due(self, at: float) -> list[int]:
        """The ranks of which a new process is to be started now: each is returned once."""
        found = [number for number, each in self._ranks.items() if not each.runs and each.due <= at]
        for number in found:
            self._ranks[number].runs = True
        return found
