"""How much memory queued prompts need, how many tokens of KV fit into a group, and when replicas are overloaded, or
calm enough to restore (KunServe §4.1, §4.4).

Note [Capacity]
    An instance with B bytes for layers and KV, of which the model takes M, has (B - M) / κ tokens of KV, at κ bytes a
    token. k of them have k(B - M) / κ. Merged they hold one model together, and each keeps the KV of its own layers,
    κ / k a token: (kB - M) / κ tokens. A request must lie in one group as a whole, so a merge also allows longer ones.
    Spans are rarely equal, so `group_tokens` asks each member how many tokens of *its* layers fit beside its span and
    its slot; the fewest count.

Note [Hysteresis]
    A drop starts at 95 % of the present memory, a restore at less than 50 % of the memory without any drop, so the one
    does not cause the other. For a restore that has to last for the dwell, with nothing pending in any sample, and the
    load must not rise: the mean of the later half of the last samples is at most that of the earlier half. So a flat
    load is as good as a falling one: below half of the memory without any drop there is room for all of it, each moment
    with layers dropped costs the bubbles of a pipeline, and replicas without requests, whose load cannot fall, would
    never have their layers back. On a square wave there is at most one restore in each low half: the next one needs a
    drop before it.

Note [Growth]
    Little is queued when memory has just become full, so with the R of Fig. 6 a few replicas would merge, and the next
    ones a moment later, in another drop. So demand is extrapolated at the rate at which it has grown. As that is a
    guess, only the cheapest step relies on it: lone replicas become pairs (`drops.with_growth`). A further level
    needs both prompts that wait and growing demand, as a shrinking queue is gone before the next level helps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .groups import Group, slot
from .tuning import DEFAULT
from .tuning import ReplicaTuning as Tuning


@dataclass(frozen=True, slots=True)
class KVSize:
    """Bytes: of a `token`'s KV in all layers, and of a `page`. ValueError where one is below 1."""

    token: int
    page: int

    def __post_init__(self) -> None:
        if self.token < 1 or self.page < 1:
            raise ValueError("a token of KV and a page have at least one byte")

    def pages(self, tokens: int) -> int:
        """Returns the whole pages for so many tokens of one request."""
        return -(-tokens * self.token // self.page)


def prompt_pages(prompts: Iterable[int], kv: KVSize) -> int:
    """Returns the pages for prompts of so many tokens, each with one generated token."""
    return sum(kv.pages(tokens + 1) for tokens in prompts)


def needed_pages(pending: int, free: int) -> int:
    """Returns R of Fig. 6: the pages that `pending` needs beyond the `free` ones."""
    return max(0, pending - free)


def kv_pages(group: Group, capacity: Mapping[int, int], pages: Sequence[int]) -> dict[int, int]:
    """Returns each member's pages for KV: its `capacity` less its span's and its slot's. `pages`: of each layer."""
    return {
        member: max(0, capacity[member] - sum(pages[span.begin : span.end]) - slot(span, pages))
        for member, span in zip(group.members, group.spans, strict=True)
    }


def group_tokens(group: Group, room: Mapping[int, int], kv: KVSize) -> int:
    """Returns the tokens of KV that a group can hold: the fewest that fit any member's `room`, in pages. See
    Note [Capacity]."""
    return min(
        room[member] * kv.page * group.layers // (kv.token * len(span))
        for member, span in zip(group.members, group.spans, strict=True)
    )


# Overload and calm


@dataclass(frozen=True, slots=True)
class Usage:
    """Pages of all replicas together: `used` and `free` ones for KV; `pending`: of queued prompts; `undropped`: for KV
    if nothing were dropped."""

    used: int
    free: int
    pending: int
    undropped: int


def is_overloaded(usage: Usage, tuning: Tuning = DEFAULT) -> bool:
    """Returns whether memory is full and at least as much is pending as is free."""
    full = usage.used >= tuning.full * (usage.used + usage.free)
    return full and usage.pending > 0 and usage.pending >= usage.free


class Growth:
    """Extrapolates demand, the used and pending pages. See Note [Growth]."""

    def __init__(self, tuning: Tuning = DEFAULT) -> None:
        self._tuning = tuning
        self._looks: deque[tuple[float, int]] = deque(maxlen=tuning.looks)

    def observe(self, at: float, usage: Usage) -> None:
        """Adds a sample at the time `at`, in seconds."""
        self._looks.append((at, usage.used + usage.pending))

    @property
    def pages(self) -> int:
        """Pages by which demand will have grown in `tuning.ahead` seconds; not below 0."""
        if len(self._looks) < 2:
            return 0
        (begin, before), (end, now) = self._looks[0], self._looks[-1]
        return max(0, round((now - before) * self._tuning.ahead / (end - begin))) if end > begin else 0


class Calm:
    """Decides from samples of the load when it has been low for long enough. See Note [Hysteresis]."""

    def __init__(self, tuning: Tuning = DEFAULT) -> None:
        self._tuning = tuning
        self._since: float | None = None
        self._looks: deque[int] = deque(maxlen=tuning.looks)

    def observe(self, at: float, usage: Usage) -> bool:
        """Adds a sample. Returns whether replicas may be restored now."""
        self._looks.append(usage.used)
        if usage.pending or usage.used >= self._tuning.calm * usage.undropped:
            self._since = None
            return False
        if self._since is None:
            self._since = at
        return at - self._since >= self._tuning.dwell and not self._rises()

    def forget(self) -> None:
        """Starts anew, as the memory for KV has changed."""
        self._since = None
        self._looks.clear()

    def _rises(self) -> bool:
        looks = [*self._looks]
        half = len(looks) // 2
        earlier, later = looks[:half], looks[len(looks) - half :]
        return sum(later) > sum(earlier)
