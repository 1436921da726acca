"""Background copies of a range's pieces to their backing, in this order: `mark`, `save`, `submitted`, `saved`."""

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
        self._copies: dict[int, Done | None] = {}  # of pieces that are SAVING, None where only marked

    def __contains__(self, piece: int) -> bool:
        return piece in self._copies

    @property
    def busy(self) -> bool:
        """Is anything being copied to the backing or from the peer, or was that interrupted? See `saved`."""
        return bool(self._copies or self._backing.going)

    def under_way(self) -> list[int]:
        """The pieces whose copies have been submitted. They may be taken: the core waits for all streams first, those
        of copies too. On any thread."""
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
        """Undoes `mark`: the piece is not saved."""
        self._states.move_run(PieceEvent.DIRTY, piece, piece + 1)
        del self._copies[piece]

    def forget(self, piece: int) -> None:
        """Drops the piece: another call has brought it to its backing, or given that up."""
        del self._copies[piece]

    def mark(self, pieces: Iterable[int]) -> None:
        """Marks pieces as about to be saved, and not takable from now on. The caller holds the lock."""
        for piece in pieces:
            self._copies[piece] = None
            self._states.move_run(PieceEvent.SAVE, piece, piece + 1)

    def save(self, pieces: Iterable[int], end: int) -> tuple[list[int], Copies]:
        """Maps backing pages of pieces that are still marked, and lie before `end`, as many as there are. Returns the
        pieces that got one, and the copies to submit before `submitted` is called. The caller holds the lock."""
        ready: list[int] = []
        for piece in pieces:
            known = piece in self._copies and piece < end
            if not known or self._range.leads_to(piece) != "device" or self._backing.has(piece):
                continue
            try:
                self._backing.map(piece)
            except PoolExhausted:
                break
            ready.append(piece)
        return ready, self._backing.saves(ready)

    def submitted(self, pieces: Iterable[int], done: Done) -> None:
        """Notes that the copies of these pieces have been submitted. The caller holds the lock."""
        self._copies.update(dict.fromkeys(pieces, done))

    def saved(self) -> bool:
        """Notes which copies have passed, to backings and from the peer to the host, and undoes what was interrupted.
        Returns whether more pieces are clean. The caller holds the lock. DriverError."""
        self._backing.demoted()
        before, passed = len(self._copies), list[int]()
        for piece, done in tuple(self._copies.items()):
            if done is None:
                if self._range.leads_to(piece) != "alias":
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
        """Marks pieces of [first, end) that the device has as dirty: what `stream` is given from now on may write
        there, and waits for the copies. The caller holds a lease, and the lock. Returns the pieces, whose backings keep
        their pages yet."""
        pieces = Pieces(self._states.within(first, end, PieceState.CLEAN))
        for piece in [piece for piece in self._copies if first <= piece < end]:
            done = self._copies.pop(piece)
            if done is not None:
                done.before(stream)
            pieces.add(piece)
        self._states.move_run(PieceEvent.DIRTY, first, end)
        return list(pieces.runs)

    def stay(self, first: int, end: int, stream: int) -> None:
        """Keeps pieces of [first, end) from going from the peer to the host, as `Backing.stay`. The caller holds the
        lock."""
        self._backing.stay([piece for piece in self._backing.leaving if first <= piece < end], stream)
