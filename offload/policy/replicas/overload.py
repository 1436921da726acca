"""When replicas are overloaded, and when the load has calmed down so that they may be restored (paper 003, §4.1, §4.4).

Note [Hysteresis]
    A drop starts at 95 % of the memory that there is, a restore at less than 50 % of what there would be without any
    drop, so the one does not cause the other. And it must have been so for a while (`dwell`), with nothing pending at
    any look, and the load must not be rising when it is decided: the mean of the later half of the last looks is no
    more than that of the earlier. A load that stays low and flat falls in that sense, or it would never be restored.
    So on a square wave there is at most one restore in each low half: the next one needs a drop before it.

Note [Growth]
    What is queued when memory has just become full is little, so the R of Fig. 6 would have a few replicas merge, and
    the next ones a moment later, in a drop of their own. So demand is also looked at ahead, at the rate at which it has
    grown. As that is a guess, it is only worth what costs least: that replicas on their own become pairs
    (`drop_plan.with_growth`). A further level needs both: prompts that wait, and demand that still grows, as a queue
    that gets shorter will be gone before the next level helps.
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


class Growth:
    """How demand, used and pending, grows. See Note [Growth]."""

    def __init__(self, tuning: Tuning = DEFAULT.replicas) -> None:
        self._tuning = tuning
        self._looks: deque[tuple[float, int]] = deque(maxlen=tuning.looks)

    def look(self, at: float, usage: Usage) -> None:
        """Remembers the demand of a time."""
        self._looks.append((at, usage.used + usage.pending))

    @property
    def pages(self) -> int:
        """Pages by which demand will have grown when it has been looked `ahead`; not below 0."""
        if len(self._looks) < 2:
            return 0
        (begin, before), (end, now) = self._looks[0], self._looks[-1]
        return max(0, round((now - before) * self._tuning.ahead / (end - begin))) if end > begin else 0


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
