"""The reclaim list as the native core has it, and the next one while it is being made.

Note [Drafts]
    What may be taken is decided under the governor's lock, but entries are made by the models, without it. So a list is
    drafted, filled, and published if it is the latest draft by then, and it was not voided meanwhile (`void`). Until
    one is published what the core has counts as out of date.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from ...allocator.events import Named, unnamed
from ..policy.reclaim_order import Candidate, Rung
from ..residency.backing import FAR
from .client import KEYS_PER_CLIENT
from .client_state import ClientState

_RUNGS: Final = {rung.label: rung for rung in Rung}


class DeviceView(Protocol):
    """The part of `Device` that the governor uses."""

    @property
    def page_size(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def page_request(self) -> int: ...
    def yield_pages(self) -> int: ...
    def trim(self) -> int: ...
    def take(self, keys: list[int], pages: int | None = None) -> int: ...
    def snapshot(self) -> dict[str, Any]: ...
    def publish(self, entries: list[Any], limits: dict[int, int]) -> None: ...
    def taken(self) -> list[tuple[int, int, int]]: ...
    def withdraw(self, keys: list[int]) -> None: ...


@dataclass
class Draft:
    """The next list while it is made: candidates with their clients, in the order of taking."""

    number: int
    order: Sequence[tuple[ClientState, Candidate]]
    entries: list[Any] = field(default_factory=list)
    pages: dict[int, int] = field(default_factory=dict)  # by number of the client, within caps
    limits: dict[int, int] = field(default_factory=dict)  # pages of what is divisible, by key
    dirty: dict[int, int] = field(default_factory=dict)  # of `pages`, those whose bytes go to the host when taken
    in_use: dict[int, int] = field(default_factory=dict)  # and those that are in use: from `Rung.HIDDEN_WEIGHTS` on

    @property
    def keys(self) -> list[tuple[int, Rung, bool, int]]:
        """The facts by which lists differ: (key, rung, borrowed, pages where divisible) of each candidate."""
        return [
            (
                number * KEYS_PER_CLIENT + candidate.index,
                candidate.rung,
                candidate.borrowed,
                candidate.pages if candidate.divisible else 0,
            )
            for number, candidate in [(client.number, candidate) for client, candidate in self.order]
        ]

    def fill(self) -> None:
        """Gets the entries from the clients."""
        for client, candidate in self.order:
            entry = client.entry(candidate.index)
            if entry is not None:
                self.entries.append((client.key(candidate.index), *entry))
                if candidate.divisible:
                    self.limits[client.key(candidate.index)] = candidate.pages
                if candidate.rung is not Rung.LAST_WEIGHTS:
                    self.pages[client.number] = self.pages.get(client.number, 0) + candidate.pages
                    dirty = min(candidate.pages, _dirty(entry[1]))
                    self.dirty[client.number] = self.dirty.get(client.number, 0) + dirty
                    if candidate.rung >= Rung.HIDDEN_WEIGHTS:
                        self.in_use[client.number] = self.in_use.get(client.number, 0) + candidate.pages

    def names(self) -> dict[int, Named]:
        """The names of its entries, by key."""
        return {
            client.key(candidate.index): Named(
                candidate.lever, client.name, candidate.once, candidate.pages if candidate.divisible else 0
            )
            for client, candidate in self.order
        }


class Published:
    """The list that the core has. Not thread-safe, but for `named`: callers hold the governor's lock."""

    def __init__(self, device: DeviceView) -> None:
        self._device = device
        self._number = 0
        self._keys: list[tuple[int, Rung, bool, int]] = []
        self._current = True  # has the core the last list that was drafted?
        self._names: deque[Mapping[int, Named]] = deque(maxlen=2)  # of this list and the one before it, by key
        self.pages: dict[int, int] = {}  # in the list, within caps, by number of the client
        self.dirty: dict[int, int] = {}  # of these, those whose bytes go to the host when they are taken
        self.in_use: dict[int, int] = {}  # and those that are in use
        self.published = 0  # lists, so far
        self.stale = False  # may the order be another one now?

    def void(self) -> None:
        """Forbids to publish the present draft, and has the next list made anew."""
        self._number += 1
        self._current = False
        self.stale = True

    def draft(self, order: Sequence[tuple[ClientState, Candidate]]) -> Draft | None:
        """Begins a draft. None where the core has that list already."""
        self.stale = False
        self._number += 1
        draft = Draft(self._number, order)
        if self._current and draft.keys == self._keys:
            return None
        self._current = False
        return draft

    def publish(self, draft: Draft) -> None:
        """Publishes the draft, unless a later one was begun."""
        if draft.number == self._number:
            self._names.appendleft(draft.names())
            self._device.publish(draft.entries, draft.limits)
            self.published += 1
            self._keys, self._current = draft.keys, True
            self.pages, self.dirty, self.in_use = draft.pages, draft.dirty, draft.in_use

    def named(self, key: int) -> Named:
        """Returns the lever, client and predicted cost of the entry of this key. On any thread."""
        return next((names[key] for names in tuple(self._names) if key in names), unnamed(key))

    def comes_after(self, key: int, rung: Rung) -> bool:
        """Does the entry of this key come after that rung of the ladder?"""
        return _RUNGS.get(self.named(key).lever, rung) > rung


def _dirty(parts: Iterable[Any]) -> int:
    """Pieces of an entry whose backing has no page yet."""
    return sum(
        count
        for _, _, wanted, twin, first, _ in parts
        if twin is not None
        for _, count, backing in twin.runs(first, wanted)
        if backing not in FAR
    )
