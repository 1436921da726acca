"""Work on layers reports progress after each piece: the link and the file may be slow."""

from __future__ import annotations

from typing import Any

import pytest

import ballonet
from ballonet.hooks.replicas.held_layers import HeldLayers, cut
from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.residency.weights_file import WeightsFile

from ...streaming.conftest import PAGE
from ...tuned import Tuned
from .holding import LAYERS, Peer, copied


@pytest.fixture(autouse=True)
def pages(tuned: Tuned) -> None:
    """A piece is a page."""
    tuned(replicas={"moved": PAGE})


def test_no_more_than_a_piece_is_moved_between_two_signs_of_life(
    kind: str, managed: ballonet.Managed, model: Any, held: HeldLayers, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file a tensor is a piece, as each is smaller than what is compared at once."""
    read, came, most = WeightsFile.read, 0, 0
    from_file = 0

    def counted(self: WeightsFile, start: int, nbytes: int) -> bytes:
        nonlocal from_file
        from_file += nbytes
        return read(self, start, nbytes)

    def moved() -> int:
        return copied("d2h") + copied("h2d") + from_file

    def told() -> None:
        nonlocal came, most
        most, came = max(most, moved() - came), moved()

    monkeypatch.setattr(WeightsFile, "read", counted)
    layer = sum(each.nbytes for each in model.model.layers[0].parameters())
    largest = max(each.nbytes for each in model.model.layers[0].parameters())
    list(held.prepare(()))  # finds the files
    before = came = moved()
    held.pieces.on_progress = told
    list(held.prepare(range(LAYERS)))
    assert bool(from_file) == (kind == "file")
    assert moved() - before > 0.9 * LAYERS * layer
    held.drop(Span(0, 2))
    list(held.restore((2, 3)))
    list(held.restore((4, 5), Peer(original)))
    told()
    assert most <= max(PAGE, largest) < layer / 2


def test_copies_are_cut_into_pieces() -> None:
    parts = [(0, 100, 3), (10, 200, 9), (30, 300, 4)]
    assert list(cut(parts, 5)) == [
        [(0, 100, 3), (10, 200, 2)],
        [(12, 202, 5)],
        [(17, 207, 2), (30, 300, 3)],
        [(33, 303, 1)],
    ]
    assert list(cut(parts, 16)) == [parts]
    assert list(cut([], 5)) == []
