"""Copies of a range's pieces to their backing that are made in the background: `mark`, `save`, `submitted`, `saved`."""

from __future__ import annotations

from collections.abc import Iterable

from ...allocator._native import Done, Range
from ...allocator.errors import PoolExhausted
from .backing import Backing
from .pieces import Pieces
from .slots import Copies
from .states import PieceEvent, PieceState, PieceStates

Runs = list[tuple[int, int]]  # [first, end) each, ascending


class Saving:
    """The pieces of `range_` that are being copied, or are about to be. See mover.py for who may call what."""

    def __init__(self, range_: Range, backing: Backing, states: PieceStates) -> None:
        self._range = range_
        self._backing = backing
        self._states = states
        self._copies: dict[int, Done | None] = {}  # of what is SAVING, None where that is only marked

    def __contains__(self, piece: int) -> bool:
        return piece in self._copies

    @property
    def busy(self) -> bool:
        """Is anything being copied to the backing or from the peer, or was that interrupted? See `saved`."""
        return bool(self._copies or self._backing.going)

    def under_way(self) -> list[int]:
        """The pieces whose copies have been submitted. They may be taken: whoever takes pages waits for all streams
        first, those of copies too. On any thread."""
        copies = tuple(self._copies.items())
        return [piece for piece, done in copies if done is not None and piece in self._states[PieceState.SAVING]]

    def finish(self, piece: int) -> bool:
        """Waits for the copy of this piece, which is clean then. False where it is only marked. DriverError."""
        if (done := self._copies[piece]) is None:
            return False
        done.wait()
        self._states.move_run(PieceEvent.SAVED, piece, piece + 1)
        del self._copies[piece]
        return True

    def give_up(self, piece: int) -> None:
        """The piece that was marked is not saved: it is what it was."""
        self._states.move_run(PieceEvent.DIRTY, piece, piece + 1)
        del self._copies[piece]

    def forget(self, piece: int) -> None:
        """Somebody else has brought the piece to its backing, or given that up."""
        del self._copies[piece]

    def mark(self, pieces: Iterable[int]) -> None:
        """Marks these as about to be saved, and not takable from now on. The caller holds the lock."""
        for piece in pieces:
            self._copies[piece] = None
            self._states.move_run(PieceEvent.SAVE, piece, piece + 1)

    def save(self, pieces: Iterable[int], end: int) -> tuple[list[int], Copies]:
        """Gives backings of those that are still marked, and lie before `end`, pages, as many as there are: which, and
        what brings their bytes there. The caller holds the lock, and says when that has been submitted (`saving`)."""
        ready: list[int] = []
        for piece in pieces:
            known = piece in self._copies and piece < end
            if not known or self._range.backing(piece) != "device" or self._backing.has(piece):
                continue
            try:
                self._backing.map(piece)
            except PoolExhausted:
                break
            ready.append(piece)
        return ready, self._backing.saves(ready)

    def submitted(self, pieces: Iterable[int], done: Done) -> None:
        """The copies of these have been submitted. The caller holds the lock."""
        self._copies.update(dict.fromkeys(pieces, done))

    def saved(self) -> bool:
        """Pieces whose copies have passed are clean, those that were on their way from the peer to the host are there,
        and what was interrupted is undone. The caller holds the lock. Are more clean? DriverError."""
        self._backing.demoted()
        before, passed = len(self._copies), list[int]()
        for piece, done in tuple(self._copies.items()):
            if done is None:
                if self._range.backing(piece) != "alias":
                    self._backing.pages.retire(piece, 1)
                self._states.move_run(PieceEvent.DIRTY, piece, piece + 1)
                del self._copies[piece]
            elif done.passed():
                passed.append(piece)
        self._states.move(PieceEvent.SAVED, passed)  # first: they are offered once they are nowhere else
        for piece in passed:
            del self._copies[piece]
        return len(self._copies) != before

    def dirty(self, first: int, end: int, stream: int) -> Runs:
        """What the backing has of [first, end), where the device has it too, is not known any more: what `stream` is
        given from now on may write there, and waits for the copies. The caller holds a lease, and the lock. Returns the
        pieces, whose backings keep their pages yet."""
        found = Pieces(self._states.within(first, end, PieceState.CLEAN))
        for piece in [piece for piece in self._copies if first <= piece < end]:
            done = self._copies.pop(piece)
            if done is not None:
                done.before(stream)
            found.add(piece)
        self._states.move_run(PieceEvent.DIRTY, first, end)
        return list(found.runs)

    def stay(self, first: int, end: int, stream: int) -> None:
        """Keeps pieces of [first, end) from going from the peer to the host, as `Backing.stay`. The caller holds the
        lock."""
        self._backing.stay([piece for piece in self._backing.leaving if first <= piece < end], stream)
