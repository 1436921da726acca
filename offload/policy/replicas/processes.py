"""The processes of replicas on a machine: whether they fit into its memory, and when a lost one is replaced.

Note [Backoff]
    Replicas of a machine are numbered by rank, and a replacement has the rank of the lost one. It is started at once.
    Where replicas of a rank end soon after they have joined, the delay doubles each time: the cause may be the machine,
    or a request. A rank of which no replica has ever joined is given up, as its process printed the reason: a model
    that does not load, a budget that is too small. Where a replica has served before, a failed start is retried a few
    times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....allocator.errors import ConfigError
from ....allocator.units import format_size
from .tuning import DEFAULT
from .tuning import ReplicaTuning as Tuning


def check_fits(replicas: int, nbytes: int, memory: Sequence[tuple[str, int]]) -> None:
    """Raises ConfigError where a device cannot hold its replicas of `nbytes` bytes. `memory`: (name, bytes) of each
    device, to which replicas are dealt in turns."""
    fitting = sum(room // nbytes for _, room in memory)
    for number, (name, room) in enumerate(memory):
        count = len(range(number, replicas, len(memory)))
        if count * nbytes > room:
            needed = f"{count} of {replicas} replicas" if len(memory) > 1 else f"{replicas} replicas"
            raise ConfigError(
                f"{needed} with {format_size(nbytes)} each need {format_size(count * nbytes)} of {name}, which has "
                f"{format_size(room)}: {f'--replicas {fitting} would fit, or ' if fitting else ''}give a lower --budget"
            )


def share(replicas: int, room: int, page: int) -> int:
    """Returns the default bytes of each replica, in whole pages, where all share `room`."""
    return max(page, room // replicas // page * page)


@dataclass(slots=True)
class _Rank:
    joined: float | None = None  # when its present replica joined; None: not yet
    runs: bool = True
    served: bool = False  # a replica of this rank has joined before
    short: int = 0  # replicas in a row that ended soon after they had joined
    failed: int = 0  # starts in a row that did not get to join
    due: float = 0.0  # when the next one is started


class Replacements:
    """The ranks of one supervisor, all of which start with it. See Note [Backoff]."""

    def __init__(self, ranks: int, tuning: Tuning = DEFAULT) -> None:
        self._tuning = tuning
        self._ranks = {number: _Rank() for number in range(ranks)}

    @property
    def expected(self) -> bool:
        """Whether a replica is starting, or will be started."""
        return any(rank.joined is None for rank in self._ranks.values())

    def joined(self, rank: int, at: float) -> bool:
        """Notes that the replica of a rank has joined. False where that cannot be: no process of the rank runs, or its
        replica has joined already."""
        state = self._ranks.get(rank)
        if state is None or not state.runs or state.joined is not None:
            return False
        state.joined, state.served, state.failed = at, True, 0
        return True

    def ended(self, rank: int, at: float) -> float | None:
        """Notes that the process of a rank has ended. Returns the seconds until its replacement starts; None: there
        will be none."""
        state = self._ranks.get(rank)
        if state is None:
            return None
        state.runs, tuning = False, self._tuning
        if state.joined is None:
            state.failed += 1
            if not state.served or state.failed >= tuning.starts:
                del self._ranks[rank]
                return None
        else:
            state.short = state.short + 1 if at - state.joined < tuning.steady else 0
        state.joined = None
        again = state.short + state.failed
        wait = 0.0 if again <= 1 and not state.failed else min(tuning.start_wait * 2**again, tuning.longest_wait)
        state.due = at + wait
        return wait

    def due(self, at: float) -> list[int]:
        """Returns the ranks whose replacement is to be started now, each once."""
        ranks = [number for number, rank in self._ranks.items() if not rank.runs and rank.due <= at]
        for number in ranks:
            self._ranks[number].runs = True
        return ranks
