"""Which states are kept, and the longest with which a prompt begins. Whoever calls holds the store's lock."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from .snapshot import StateSnapshot


class States:
    """By the tokens behind which they were kept."""

    def __init__(self) -> None:
        self._kept: dict[bytes, StateSnapshot] = {}
        self._behind: dict[bytes, list[StateSnapshot]] = {}  # by key of the last full block, or the salt

    def __contains__(self, state: object) -> bool:
        return isinstance(state, StateSnapshot) and self._kept.get(state.key) is state

    def __iter__(self) -> Iterator[StateSnapshot]:
        return iter(tuple(self._kept.values()))

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, wherever they are."""
        return sum(state.nbytes for state in self)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of those that have no pages of their own."""
        return sum(state.nbytes for state in self if state.pages is None)

    @property
    def device_pages(self) -> int:
        """Pages of the others that are on the device."""
        return sum(state.pages.device_pages for state in self if state.pages is not None)

    @property
    def dirty(self) -> int:
        """The pages of these whose bytes only the device has."""
        return sum(state.pages.dirty for state in self if state.pages is not None)

    def add(self, state: StateSnapshot) -> None:
        """None is kept behind the same tokens."""
        self._kept[state.key] = state
        self._behind.setdefault(_place(state), []).append(state)

    def drop(self, state: StateSnapshot) -> None:
        """Does nothing where it is not kept."""
        if state in self:
            del self._kept[state.key]
            state.let_go()  # the index may remember it for a while
            place = _place(state)
            self._behind[place].remove(state)
            if not self._behind[place]:
                del self._behind[place]

    def clear(self) -> None:
        for state in self:
            self.drop(state)

    def behind(self, place: bytes) -> Sequence[StateSnapshot]:
        """Returns the states behind that block and before the end of the next; of a salt, those before the end of the
        first."""
        return tuple(self._behind.get(place, ()))

    def longest(self, prompt: array[int], places: Sequence[bytes]) -> StateSnapshot | None:
        """With which a prompt begins. `places`: the salt, and keys of its full blocks, as far as they are needed."""
        for place in reversed(places):
            fitting = [state for state in self._behind.get(place, ()) if state.ids == prompt[: len(state.ids)]]
            if fitting:
                return max(fitting, key=lambda state: len(state.ids))
        return None


def _place(state: StateSnapshot) -> bytes:
    return state.blocks[-1] if state.blocks else state.salt
