"""When replicas are overloaded, and when the load has calmed down so that they may be restored (paper 003, §4.1, §4.4).

Note [Hysteresis]
    A drop starts at 95 % of the memory that there is, a restore at less than 50 % of what there would be without any
    drop, so the one does not cause the other. And it must have been so for a while (`dwell`), with nothing pending at
    any look, and the load must not be rising when it is decided: the mean of the later half of the last looks is no
    more than that of the earlier. A load that stays low and flat falls in that sense, or it would never be restored.
    So on a square wave there is at most one restore in each low half: the next one needs a drop before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ..tuning import DEFAULT
from ..tuning import Replicas as Tuning


@dataclass(frozen=True, slots=True)
class Usage:
    """Pages of all replicas together: `used` and `free` for KV, `pending` of queued prompts; `undropped` would be for
    KV if nothing were dropped."""

    used: int
    free: int
    pending: int
    undropped: int


def is_overloaded(usage: Usage, tuning: Tuning = DEFAULT.replicas) -> bool:
    """Whether memory is full and no less is pending than is free."""
    full = usage.used >= tuning.full * (usage.used + usage.free)
    return full and usage.pending > 0 and usage.pending >= usage.free


class Calm:
    """Looks at the load from time to time, and says when it has been calm for long enough. See Note [Hysteresis]."""

    def __init__(self, tuning: Tuning = DEFAULT.replicas) -> None:
        self._tuning = tuning
        self._since: float | None = None
        self._looks: deque[int] = deque(maxlen=tuning.looks)

    def look(self, at: float, usage: Usage) -> bool:
        """Whether replicas may be restored now."""
        self._looks.append(usage.used)
        if usage.pending or usage.used >= self._tuning.calm * usage.undropped:
            self._since = None
            return False
        if self._since is None:
            self._since = at
        return at - self._since >= self._tuning.dwell and not self._rises()

    def forget(self) -> None:
        """Starts anew, as what is used means something else now."""
        self._since = None
        self._looks.clear()

    def _rises(self) -> bool:
        looks = [*self._looks]
        half = len(looks) // 2
        earlier, later = looks[:half], looks[len(looks) - half :]
        return sum(later) > sum(earlier)
