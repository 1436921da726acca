"""Who is alive: a count of iterations that a main loop makes, and what is thought of one that stands still.

Note [Progress]
    A heartbeat from a thread of its own would beat on while a kernel hangs. So the main loop itself beats, at every
    iteration, and while it waits for work. A member whose count stands still for `silent` seconds, or for `iterations`
    times what an iteration of its takes, whichever is more, is dead, whatever becomes of it later: it is fenced off
    (epoch.py). How long its iterations take it says itself: the longest of the latest ones, and the one that it is
    about to begin, by its cost model; so a long prefill is no death. Who watches may have stood still too: between two
    looks no more than half of `silent` counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from ...offload.policy.tuning import DEFAULT, Replicas
from .errors import NoAnswer
from .store import Store


@dataclass(frozen=True, slots=True)
class Beat:
    """`count`: iterations so far. In seconds: `longest` of the latest ones, and what the next one is `expected` to
    take."""

    count: int
    longest: float = 0.0
    expected: float = 0.0

    def encode(self) -> str:
        return f"{self.count} {self.longest!r} {self.expected!r}"

    @classmethod
    def decode(cls, text: str) -> Self:
        """What `encode` was called on. ValueError."""
        count, longest, expected = text.split()
        return cls(int(count), float(longest), float(expected))


def limit(beat: Beat, tuning: Replicas) -> float:
    """Seconds that a member with this beat may stand still."""
    return max(tuning.silent, tuning.iterations * max(beat.longest, beat.expected))


class Watch:
    """Decides who is dead. No I/O; `clock` in seconds."""

    def __init__(self, clock: Callable[[], float], tuning: Replicas = DEFAULT.replicas) -> None:
        self._clock = clock
        self._tuning = tuning
        self._looked = clock()
        self._seen: dict[int, tuple[Beat, float]] = {}  # the latest beat of each, and since when it is the same

    def add(self, member: int) -> None:
        """Watches a member from now on."""
        self._seen[member] = Beat(0), self._clock()

    def remove(self, member: int) -> None:
        """Nothing if it is not watched."""
        self._seen.pop(member, None)

    def look(self, beats: Mapping[int, Beat]) -> tuple[int, ...]:
        """The members that are dead by what is read now, in order. Beats of who is not watched do not count."""
        now = self._clock()
        lost = max(0.0, now - self._looked - self._tuning.silent / 2)
        self._looked = now
        for member, (before, since) in self._seen.items():
            beat = beats.get(member, before)
            self._seen[member] = (beat, now) if beat.count != before.count else (beat, since + lost)
        return tuple(
            member for member, (beat, since) in sorted(self._seen.items()) if now - since > limit(beat, self._tuning)
        )


class Heart:
    """Beats for one member, from its main loop."""

    def __init__(
        self, store: Store, member: int, clock: Callable[[], float], tuning: Replicas = DEFAULT.replicas
    ) -> None:
        self._store = store
        self._key = _key(member)
        self._clock = clock
        self._count = 0
        self._last: float | None = None
        self._took: deque[float] = deque(maxlen=tuning.remembered)

    def beat(self, expected: float = 0.0) -> None:
        """An iteration is over, and the next begins, which will take so many seconds. SupervisorLost."""
        now = self._clock()
        if self._last is not None:
            self._took.append(now - self._last)
        self._last = now
        self._count += 1
        self._store.set(self._key, Beat(self._count, max(self._took, default=0.0), expected).encode())


def begin_beats(store: Store, member: int) -> None:
    """Done by the supervisor when it admits a member. SupervisorLost."""
    store.set(_key(member), Beat(0).encode())


def end_beats(store: Store, member: int) -> None:
    """Deletes what a member leaves in the store. SupervisorLost."""
    store.delete(_key(member))


def read_beats(store: Store, members: Iterable[int]) -> dict[int, Beat]:
    """The latest beats of members that were admitted, in one round trip. A beat that cannot be read is left out, as if
    it had not come. SupervisorLost."""
    asked = [*members]
    found: dict[int, Beat] = {}
    try:
        texts = store.get_all([_key(member) for member in asked])
    except NoAnswer:
        return found
    for member, text in zip(asked, texts, strict=True):
        try:
            found[member] = Beat.decode(text)
        except ValueError:
            continue
    return found


def _key(member: int) -> str:
    return f"beat/{member}"
