"""A set of pieces of a range, kept as runs: a change of thousands of neighbours takes one step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


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
