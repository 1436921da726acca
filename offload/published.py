"""The reclaim list as the native core has it, and the next one while it is being made.

Note [Drafts]
    What may be taken is decided under the governor's lock, but entries are made by the models, without it. So a list is
    drafted, filled, and published if it is the latest draft by then, and nobody has forbidden it meanwhile (`void`).
    Until one is published what the core has counts as out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .seat import Seat


class Pool(Protocol):
    """The part of `Device` that the governor uses."""

    @property
    def page_size(self) -> int: ...
    @property
    def budget(self) -> int: ...
    @property
    def demand(self) -> int: ...
    def snapshot(self) -> dict[str, Any]: ...
    def publish(self, entries: list[Any]) -> None: ...
    def taken(self) -> list[tuple[int, int, int]]: ...
    def withdraw(self, keys: list[int]) -> None: ...


@dataclass(slots=True)
class Draft:
    """A list to be: layers in the order of taking."""

    number: int
    order: Sequence[tuple[Seat, int]]
    entries: list[Any] = field(default_factory=list)
    pages: dict[int, int] = field(default_factory=dict)  # by seat number

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(seat.key(layer) for seat, layer in self.order)

    def fill(self) -> None:
        """Asks the models for what they have."""
        for seat, layer in self.order:
            entry = seat.model.entry(layer)
            if entry is not None:
                self.entries.append((seat.key(layer), *entry))
                self.pages[seat.number] = self.pages.get(seat.number, 0) + seat.model.plan.pages[layer]


class Published:
    """Not thread-safe: whoever calls holds the governor's lock."""

    def __init__(self, device: Pool) -> None:
        self._device = device
        self._number = 0
        self._keys: tuple[int, ...] = ()
        self._current = True  # has the core what the models offered last?
        self.pages: dict[int, int] = {}  # that are in it, by seat number
        self.stale = False  # may the order be another one now?

    def void(self) -> None:
        """Nothing that is being made may be published, and what is there has to be made anew."""
        self._number += 1
        self._current = False
        self.stale = True

    def draft(self, order: Sequence[tuple[Seat, int]]) -> Draft | None:
        """None where the core has that already."""
        self.stale = False
        self._number += 1
        draft = Draft(self._number, order)
        if self._current and draft.keys == self._keys:
            return None
        self._current = False
        return draft

    def publish(self, draft: Draft) -> None:
        """Unless there has been another one since."""
        if draft.number == self._number:
            self._device.publish(draft.entries)
            self._keys, self.pages, self._current = draft.keys, draft.pages, True
