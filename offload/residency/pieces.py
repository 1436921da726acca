"""Sets of pieces of a range, kept as runs (`Pieces`), the states of its pieces, and what may become of each: a pure
table.

A piece is one page-sized part of a range, or anything else with a number that is moved as one. In runs a change of
thousands of neighbours takes one step.

    RESIDENT    the device has the only copy of its bytes
    SAVING      the same, and a copy to the backing has begun
    CLEAN       the device has it, and its backing the same bytes
    OFFLOADED   only its backing has the bytes; its addresses lead there (host-mapped)
    IN_SLOT     the same, and its addresses lead to a slot that it shares
    ARRIVING    it has a page of the device again, whose bytes are on their way, or about to be

Note [Interrupts]
    Ctrl-C comes between any two lines. So a piece is in a state that something is under way (SAVING, IN_SLOT, ARRIVING)
    before anything is done for it, and in one that something is true (CLEAN, RESIDENT) after. What is found later in
    one of the first, with no call at work on it, was interrupted. Each of those has its undo in the table, which
    depends on nothing but what the addresses lead to.

Note [Readers]
    Changes take turns (`PieceStates.changing`). Others may read sets meanwhile: a set is replaced at once, and a piece
    comes to its new set before it leaves the old one, so that it is never in none. Who looks where addresses lead, and
    applies an event by that, does both in one turn: a piece that comes home between the two would count as away while
    it is written to, and keep a backing with bytes of before.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Final, NamedTuple


class Pieces:
    """A set of pieces as ascending runs. One thread at a time may change it; others may read it meanwhile, as a change
    replaces `runs` at once."""

    __slots__ = ("count", "runs")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        """`runs`: [first, end) each."""
        self.runs: tuple[tuple[int, int], ...] = ()  # [first, end), ascending, none of which touch; not to be set
        self.count = 0  # pieces
        for first, end in runs:
            self.add_run(first, end)

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[int]:
        for first, end in self.runs:
            yield from range(first, end)

    def __contains__(self, piece: int) -> bool:
        runs = self.runs
        at = bisect_right(runs, (piece, float("inf"))) - 1
        return at >= 0 and piece < runs[at][1]

    def __repr__(self) -> str:
        return f"Pieces({list(self.runs)})"

    def copy(self) -> Pieces:
        """Returns an independent copy."""
        made = Pieces()
        made.runs, made.count = self.runs, self.count
        return made

    def within(self, first: int, end: int) -> list[tuple[int, int]]:
        """Returns the runs of its pieces in [first, end)."""
        return [(max(a, first), min(b, end)) for a, b in self.runs if a < end and b > first]

    def gaps(self, first: int, end: int) -> list[tuple[int, int]]:
        """Returns the runs of [first, end) that are not in it."""
        runs = []
        for a, b in self.within(first, end):
            if first < a:
                runs.append((first, a))
            first = b
        if first < end:
            runs.append((first, end))
        return runs

    def add_run(self, first: int, end: int) -> None:
        """Adds all of [first, end)."""
        if first >= end:
            return
        runs = self.runs
        low = bisect_left(runs, first, key=_end)  # the first run that ends at `first` or behind it
        high = bisect_right(runs, end, key=_first)
        if low < high:
            if runs[low][0] <= first and end <= runs[low][1]:
                return  # it has them, and stays the same object
            first, end = min(first, runs[low][0]), max(end, runs[high - 1][1])
        self._become((*runs[:low], (first, end), *runs[high:]))

    def discard_run(self, first: int, end: int) -> None:
        """Removes all of [first, end)."""
        runs = self.runs
        low = bisect_right(runs, first, key=_end)  # the first run that ends behind `first`
        high = bisect_left(runs, end, key=_first)
        if first >= end or low >= high:
            return
        cut = [(runs[low][0], min(first, runs[low][1])), (max(end, runs[high - 1][0]), runs[high - 1][1])]
        self._become((*runs[:low], *[(a, b) for a, b in cut if a < b], *runs[high:]))

    def add(self, piece: int) -> None:
        self.add_run(piece, piece + 1)

    def discard(self, piece: int) -> None:
        self.discard_run(piece, piece + 1)

    def update(self, pieces: Iterable[int]) -> None:
        """Adds `pieces`."""
        for first, end in runs_of(pieces):
            self.add_run(first, end)

    def difference_update(self, pieces: Iterable[int]) -> None:
        """Removes `pieces`."""
        for first, end in runs_of(pieces):
            self.discard_run(first, end)

    def clear(self) -> None:
        self._become(())

    def _become(self, runs: tuple[tuple[int, int], ...]) -> None:
        self.runs, self.count = runs, sum([end - first for first, end in runs])


def runs_of(pieces: Iterable[int]) -> list[tuple[int, int]]:
    """Returns the runs [first, end) of pieces, whatever their order."""
    if isinstance(pieces, range):
        return [(pieces.start, pieces.stop)] if pieces.step == 1 and pieces else [(at, at + 1) for at in pieces]
    if isinstance(pieces, Pieces):
        return list(pieces.runs)
    runs: list[tuple[int, int]] = []
    for piece in sorted(pieces):
        if runs and runs[-1][1] >= piece:
            runs[-1] = runs[-1][0], max(runs[-1][1], piece + 1)
        else:
            runs.append((piece, piece + 1))
    return runs


def _first(run: tuple[int, int]) -> int:
    return run[0]


def _end(run: tuple[int, int]) -> int:
    return run[1]


class PieceState(Enum):
    RESIDENT = auto()
    SAVING = auto()
    CLEAN = auto()
    OFFLOADED = auto()
    IN_SLOT = auto()
    ARRIVING = auto()


class PieceEvent(Enum):
    SAVE = auto()  # a copy to the backing is about to begin
    SAVED = auto()  # it has passed
    DIRTY = auto()  # the device's bytes may change, or the copy was given up
    TAKEN = auto()  # its addresses lead to the backing, which has the bytes: its page was taken or given
    BIND = auto()  # its addresses are about to lead to a slot
    UNBIND = auto()  # they lead to its backing again
    FETCH = auto()  # it is about to get a page of the device
    RECALL = auto()  # that page is given up
    ARRIVED = auto()  # it has its bytes, and so has its backing
    MOVED = auto()  # the same, and its backing has none any more
    DROP = auto()  # its bytes are of no use


class Transition(NamedTuple):
    """`before`: states in which the event may come; `guard`: what has to be true then; `undo`: the event that goes back
    where what was begun cannot be ended."""

    before: frozenset[PieceState]
    after: PieceState
    guard: str
    undo: PieceEvent | None = None


def _from(*states: PieceState) -> frozenset[PieceState]:
    return frozenset(states)


TABLE: Final[dict[PieceEvent, Transition]] = {
    PieceEvent.SAVE: Transition(_from(PieceState.RESIDENT), PieceState.SAVING, "nobody writes to it", PieceEvent.DIRTY),
    PieceEvent.SAVED: Transition(_from(PieceState.SAVING), PieceState.CLEAN, "the copy has passed"),
    PieceEvent.DIRTY: Transition(
        _from(PieceState.SAVING, PieceState.CLEAN),
        PieceState.RESIDENT,
        "a lease; who writes waits for the copy; the backing is freed",
    ),
    PieceEvent.TAKEN: Transition(
        _from(PieceState.RESIDENT, PieceState.SAVING, PieceState.CLEAN),
        PieceState.OFFLOADED,
        "a lease, or the core's own rules; every stream that used its page has passed",
    ),
    PieceEvent.BIND: Transition(
        _from(PieceState.OFFLOADED),
        PieceState.IN_SLOT,
        "a lease; nobody holds a tensor over the range",
        PieceEvent.UNBIND,
    ),
    PieceEvent.UNBIND: Transition(
        _from(PieceState.IN_SLOT), PieceState.OFFLOADED, "a lease; or the slot's page was taken"
    ),
    PieceEvent.FETCH: Transition(
        _from(PieceState.OFFLOADED, PieceState.IN_SLOT),
        PieceState.ARRIVING,
        "a lease; the backing has a page",
        PieceEvent.RECALL,
    ),
    PieceEvent.RECALL: Transition(
        _from(PieceState.ARRIVING), PieceState.OFFLOADED, "a lease; the backing still has the bytes"
    ),
    PieceEvent.ARRIVED: Transition(
        _from(PieceState.ARRIVING), PieceState.CLEAN, "who reads waits for the copy; nobody writes to it"
    ),
    PieceEvent.MOVED: Transition(
        _from(PieceState.ARRIVING, PieceState.OFFLOADED),
        PieceState.RESIDENT,
        "who reads waits for the copy; the backing is freed",
    ),
    PieceEvent.DROP: Transition(frozenset(PieceState), PieceState.RESIDENT, "a lease; nobody reads it any more"),
}


class PieceStates:
    """The states of the pieces of one range, at first all RESIDENT. Calls with runs take as many steps as there are
    runs, however many pieces. `changing`: held while states change, see Note [Readers]."""

    __slots__ = ("_of", "changing")

    def __init__(self) -> None:
        self.changing = threading.RLock()  # a finalizer may come in the middle of a change
        self._of: dict[PieceState, Pieces] = {
            state: Pieces() for state in PieceState if state is not PieceState.RESIDENT
        }

    def __getitem__(self, state: PieceState) -> Pieces:
        """The pieces in this state, which is not RESIDENT: always the same object. Read it, do not change it."""
        return self._of[state]

    def of(self, piece: int) -> PieceState:
        """Returns the state of a piece."""
        return next((state for state, pieces in self._of.items() if piece in pieces), PieceState.RESIDENT)

    def within(self, first: int, end: int, *states: PieceState) -> list[tuple[int, int]]:
        """The runs of pieces of [first, end) that are in one of these states, ascending."""
        if len(states) == 1:
            return self._of[states[0]].within(first, end)
        pieces = Pieces()
        for state in states:
            for run in self._of[state].within(first, end):
                pieces.add_run(*run)
        return list(pieces.runs)

    def move(self, event: PieceEvent, pieces: Iterable[int]) -> None:
        """Applies an event to pieces. Those in a state in which it cannot come stay as they are."""
        for run in runs_of(pieces):
            self.move_run(event, *run)

    def move_run(self, event: PieceEvent, first: int, end: int) -> None:
        """Applies an event to all pieces of [first, end), as `move`."""
        before, after, _, _ = TABLE[event]
        with self.changing:
            if PieceState.RESIDENT in before and after is not PieceState.RESIDENT:
                for gap in self._resident(first, end):
                    self._of[after].add_run(*gap)
            for state, members in self._of.items():
                if state in before and state is not after:
                    for run in members.within(first, end):
                        if after is not PieceState.RESIDENT:
                            self._of[after].add_run(*run)
                        members.discard_run(*run)

    def _resident(self, first: int, end: int) -> list[tuple[int, int]]:
        others = Pieces()
        for members in self._of.values():
            for run in members.within(first, end):
                others.add_run(*run)
        return others.gaps(first, end)
