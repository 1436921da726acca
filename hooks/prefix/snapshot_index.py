"""The kept states, and the longest one of a prompt's beginning. The caller holds the store's lock."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from .snapshot import StateSnapshot


class States:
    """The kept states, by the tokens before them."""

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
        """Bytes of all states, on the device or the host."""
        return sum(state.nbytes for state in self)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of states in torch's memory."""
        return sum(state.nbytes for state in self if state.pages is None)

    @property
    def device_pages(self) -> int:
        """Device pages of states that have their own pages."""
        return sum(state.pages.device_pages for state in self if state.pages is not None)

    @property
    def dirty(self) -> int:
        """Pages among these whose bytes only the device has."""
        return sum(state.pages.dirty for state in self if state.pages is not None)

    def add(self, state: StateSnapshot) -> None:
        """Adds a state; there is none behind the same tokens."""
        self._kept[state.key] = state
        self._behind.setdefault(_place(state), []).append(state)

    def drop(self, state: StateSnapshot) -> None:
        """Removes a state, if it is kept."""
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
        """Returns the states behind that block and before the end of the next one; for a salt, those before the end of
        the first block."""
        return tuple(self._behind.get(place, ()))

    def longest(self, prompt: array[int], places: Sequence[bytes]) -> StateSnapshot | None:
        """Returns the longest state of a prompt's beginning. `places`: the salt, and the keys of its full blocks, as
        far as they are needed."""
        for place in reversed(places):
            fitting = [state for state in self._behind.get(place, ()) if state.ids == prompt[: len(state.ids)]]
            if fitting:
                return max(fitting, key=lambda state: len(state.ids))
        return None


def _place(state: StateSnapshot) -> bytes:
    return state.blocks[-1] if state.blocks else state.salt
