"""The places of an extent's pages that are away: on the peer, or on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from .kv_extent import KVExtent
from .saving import Runs
from .states import PieceState


def on_peer(extent: KVExtent) -> int:
    """The pieces that are away and lie on the peer."""
    if extent.device.peer is None:
        return 0
    shown, pages = extent.range, extent.backing.pages
    return sum("peer" in (shown.leads_to(n), pages.leads_to(n)) for run in extent.away_runs() for n in range(*run))


def coldest(extent: KVExtent) -> list[int]:
    """The full pieces whose backings lie on the peer and have their bytes: first those that are not read there, then
    the others, the oldest tokens first."""
    if extent.device.peer is None:
        return []
    away, leaving = extent.away_runs(), extent.backing.leaving
    clean = extent.mover.states.within(0, extent.full, PieceState.CLEAN)
    of_away = [piece for first, end in away for piece in range(first, min(end, extent.full))]
    pieces = [*(piece for run in clean for piece in range(*run)), *of_away]
    return [piece for piece in pieces if piece not in leaving and extent.backing.pages.leads_to(piece) == "peer"]


def by_place(extent: KVExtent, pieces: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place in the sequence `pieces`, first, count) of neighbours among those that are away, whose backings lie in one
    place."""
    place_of = extent.backing.pages.place
    for at, first, count in _within(pieces, extent.away_runs()):
        if extent.device.peer is None:
            yield at, first, count
            continue
        for _, neighbours in groupby(range(first, first + count), place_of):
            here, *others = neighbours
            yield at + here - first, here, 1 + len(others)


def _within(pieces: Sequence[int], runs: Runs) -> Iterator[tuple[int, int, int]]:
    """(place in the sequence, first, count) of neighbours in the sequence that follow each other and lie in `runs`."""
    inside = {piece for first, end in runs for piece in range(first, end)}
    start = 0
    for at in range(1, len(pieces) + 1):
        last = pieces[at - 1]
        if at == len(pieces) or pieces[at] != last + 1 or (pieces[at] in inside) != (last in inside):
            if pieces[start] in inside:
                yield start, pieces[start], at - start
            start = at
