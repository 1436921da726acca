"""Sets of pieces that are kept as runs."""

from __future__ import annotations

import random

from ballonet.offload.residency.pieces import Pieces, runs_of


def test_runs_are_those_of_brute_force() -> None:
    for seed in range(400):
        drawn, expected, pieces = random.Random(seed), set[int](), Pieces()
        for _ in range(30):
            first = drawn.randrange(30)
            end = first + drawn.randrange(8)
            some = [drawn.randrange(30) for _ in range(drawn.randrange(4))]
            if drawn.random() < 0.5:
                expected |= {*range(first, end), *some}
                pieces.add_run(first, end)
                pieces.update(some)
            else:
                expected -= {*range(first, end), *some}
                pieces.discard_run(first, end)
                pieces.difference_update(some)
            assert [*pieces] == sorted(expected)
            assert len(pieces) == len(expected)
            assert bool(pieces) == bool(expected)
            assert all((piece in pieces) == (piece in expected) for piece in range(40))
            assert pieces.runs == tuple(runs_of(expected)), "none of which touch"
            low = drawn.randrange(20)
            high = low + drawn.randrange(20)
            within = [piece for run in pieces.within(low, high) for piece in range(*run)]
            gaps = [piece for run in pieces.gaps(low, high) for piece in range(*run)]
            assert within == [piece for piece in range(low, high) if piece in expected]
            assert gaps == [piece for piece in range(low, high) if piece not in expected]


def test_pieces_side_by_side_are_one_run() -> None:
    pieces = Pieces([(0, 10**9)])
    pieces.discard(5)
    assert pieces.runs == ((0, 5), (6, 10**9))
    assert len(pieces) == 10**9 - 1
    before = pieces.runs
    pieces.add_run(2, 4)
    assert pieces.runs == before
    pieces.clear()
    assert not pieces


def test_a_copy_is_on_its_own() -> None:
    pieces = Pieces([(2, 5), (8, 9)])
    copy = pieces.copy()
    pieces.discard_run(0, 4)
    copy.add_run(5, 8)
    assert (list(pieces), len(pieces)) == ([4, 8], 2)
    assert (list(copy), len(copy)) == ([2, 3, 4, 5, 6, 7, 8], 7)
