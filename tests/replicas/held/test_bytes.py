"""Bytes of layers that are dropped and restored: with any writes, from any source, piece by piece; checksums."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import ManageError, WeightsFileChanged
from ballonet.hooks.replicas.held_layers import HeldLayers, RestoredLayer, checksum, cut
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.residency.weights_file import WeightsFile

from ...models import Output
from ...streaming.conftest import PAGE
from ...tuned import Tuned
from ...weights import CHANGES
from ..parts import Whole, steps, through
from .holding import LAYERS, WRITES, Peer, copied, loaded, logits, pages_of, prepared, say, settled, stocks_logits


def test_a_stage_copies_nothing_of_what_it_dropped(model: Any, original: Any, stock: Output) -> None:
    """Two replicas that dropped complementary halves run as a pipeline; then one loses its partner and goes on."""
    asked = steps(4)
    with install.stock():
        whole = Whole(copy.deepcopy(original))
        other = copy.deepcopy(model)
    spans = Span(0, 3), Span(3, LAYERS)
    with ballonet.manage(model) as one, ballonet.manage(other) as two, Splice(model) as a, Splice(other) as b:
        them = HeldLayers(one), HeldLayers(two)
        for stage in them:
            prepared(stage)
        for splice, stage, span in zip((a, b), them, spans, strict=True):
            splice.span = span
            stage.drop(span)
        here = copied("h2d")
        for step in asked:
            expected = whole.run(step)
            assert torch.equal(through([a, b], step, whole.before), expected)
        assert copied("h2d") == here, "not a byte"
        a.span = a.whole
        assert say(model).agrees(stock), "alone at once"
        assert copied("h2d") > here
        list(them[0].restore([5, 4, 3]))
        here = copied("h2d")
        assert say(model).agrees(stock)
        assert copied("h2d") == here


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("when", ["ready", "dropped", "restored"])
def test_written_weights_are_never_lost(
    model: Any, original: Any, held: HeldLayers, write: str, when: str, managed: ballonet.Managed
) -> None:
    """Neither to a layer that is ready, of which there are older copies, nor to one that is dropped."""
    expected = stocks_logits(original, WRITES[write])
    assert not torch.equal(expected, stocks_logits(original))
    prepared(held)
    if when != "ready":
        held.drop(Span(0, 3))
        logits(model)
    if when == "restored":
        list(held.restore([3, 4, 5]))
    WRITES[write](model)
    for _ in range(2):
        held.drop(Span(0, 3))
        assert torch.equal(logits(model), expected)
        assert len(list(held.restore([5, 4, 3]))) == 3
        assert torch.equal(logits(model), expected)
    devices.require().check()


def test_a_layer_that_somebody_refers_to_goes_to_host_pages(
    model: Any, managed: ballonet.Managed, held: HeldLayers, stock: Output
) -> None:
    """Whoever refers to it reads what it is, wherever it is, also where they took it after it was ready."""
    weight = model.model.layers[5].mlp.up_proj.weight
    prepared(held)
    other = model.model.layers[4].mlp.up_proj.weight
    before = [weight.detach().clone(), other.detach().clone()]
    held.drop(Span(0, 3))
    pages = pages_of(managed)
    assert managed.report().host_pages >= pages[4] + pages[5]
    assert torch.equal(weight, before[0])
    assert torch.equal(other, before[1])
    assert say(model).agrees(stock)
    assert torch.equal(model.model.layers[4].mlp.up_proj.weight, before[1])
    list(held.restore([3, 4, 5]))
    assert torch.equal(weight, before[0])
    assert say(model).agrees(stock)


def test_layers_come_from_a_peer(model: Any, original: Any, held: HeldLayers, stock: Output) -> None:
    """Next-needed first; nothing comes over from the backing."""
    prepared(held)
    held.drop(Span(2, 4))
    here, peer = copied("h2d"), Peer(original)
    restored = list(held.restore([4, 5, 0, 1], peer))
    assert [(layer.layer, layer.from_peer) for layer in restored] == [
        (4, True),
        (5, True),
        (0, True),
        (1, True),
    ]
    assert peer.asked == [4, 5, 0, 1]
    assert copied("h2d") == here
    assert say(model).agrees(stock)
    held.drop(Span(2, 4))
    assert say(model).agrees(stock)


def test_a_peer_s_wrong_bytes_are_not_taken(model: Any, original: Any, held: HeldLayers, stock: Output) -> None:
    """One bit of one weight, two that changed places, another's layer; nor does one that is gone keep a layer away."""

    def one_bit(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["mlp.down_proj.weight"].view(torch.uint8).view(-1)[-1] ^= 1

    def exchanged(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        rows = tensors["mlp.down_proj.weight"]
        rows[[0, 1]] = rows[[1, 0]]

    def another(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors.update(Peer(original)((layer + 1) % LAYERS) or {})

    def gone(layer: int, tensors: dict[str, torch.Tensor]) -> str:
        return "gone"

    prepared(held)
    for act in (one_bit, exchanged, another, gone):
        held.drop(Span(0, 4))
        restored = list(held.restore([4, 5], Peer(original, act)))
        assert restored == [RestoredLayer(layer.layer, layer.pages, False) for layer in restored]
        assert len(restored) == 2
        assert say(model).agrees(stock), act


def test_a_peer_s_other_tensors_are_refused_and_what_it_raises_is_raised(
    model: Any, original: Any, held: HeldLayers, stock: Output
) -> None:
    def half(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        tensors["mlp.down_proj.weight"] = tensors["mlp.down_proj.weight"].half()

    def lacks(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        del tensors["mlp.down_proj.weight"]

    def fails(layer: int, tensors: dict[str, torch.Tensor]) -> None:
        raise ConnectionError("the link is lost")

    held.drop(Span(0, 4))
    for act, error, text in (
        (half, ManageError, "lacks, or has in other shapes or dtypes: mlp.down_proj.weight"),
        (lacks, ManageError, "lacks, or has in other shapes or dtypes: mlp.down_proj.weight"),
        (fails, ConnectionError, "lost"),
    ):
        with pytest.raises(error, match=text):
            list(held.restore([4, 5], Peer(original, act)))
        assert held.dropped == (4, 5)
        assert say(model).agrees(stock)
        settled()
    assert [layer.from_peer for layer in held.restore([4, 5], Peer(original))] == [True, True]


def test_a_peer_that_has_older_weights_than_were_written_here_is_not_taken(
    model: Any, original: Any, held: HeldLayers
) -> None:
    expected = stocks_logits(original, WRITES["data"])
    prepared(held)
    held.drop(Span(0, 3))
    WRITES["data"](model)
    assert [layer.from_peer for layer in held.restore([3, 4, 5], Peer(original))] == [True, False, True]
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_has_changed_drops_nothing(own_folder: Path, stock: Output, change: str) -> None:
    """A typed error before anything is changed; what is made ready after that has host pages, unless the bytes are the
    same."""
    model = loaded(own_folder)
    with ballonet.manage(model) as managed:
        held = prepared(HeldLayers(managed))
        assert managed.report().host_pages == 0
        here = settled()
        CHANGES[change](own_folder / "model.safetensors")
        with pytest.raises(WeightsFileChanged):
            held.drop(Span(0, 3))
        assert (held.dropped, settled()) == ((), here)
        assert say(model).agrees(stock)
        pages = pages_of(managed)
        assert held.drop(Span(0, 3)) == sum(pages[3:]) - max(pages)
        assert say(model).agrees(stock)
        list(held.restore([3, 4, 5]))
        assert say(model).agrees(stock)


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_layers_are_dropped(
    own_folder: Path, original: Any, stock: Output, change: str
) -> None:
    """No layer is computed or restored from the changed file; a peer's bytes are used."""
    model = loaded(own_folder)
    with ballonet.manage(model) as managed:
        held = prepared(HeldLayers(managed))
        held.drop(Span(0, 3))
        CHANGES[change](own_folder / "model.safetensors")
        if change not in ("emptied", "halved", "shorter"):  # from which the stand-in refuses to copy
            with pytest.raises(WeightsFileChanged):
                say(model)
        with pytest.raises(WeightsFileChanged):
            list(held.restore([3]))
        with pytest.raises(WeightsFileChanged):
            list(held.restore([3], lambda layer: None))
        assert held.dropped == (3, 4, 5)
        assert [layer.from_peer for layer in held.restore([3, 4, 5], Peer(original))] == [True] * 3
        assert say(model).agrees(stock)
        with pytest.raises(WeightsFileChanged):
            held.drop(Span(0, 3))
        assert say(model).agrees(stock)
        held.close()


# Pieces


@pytest.fixture
def small_pieces(tuned: Tuned) -> None:
    """A piece is a page."""
    tuned(weights={"moved": PAGE})


@pytest.mark.usefixtures("small_pieces")
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
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    largest = max(parameter.nbytes for parameter in model.model.layers[0].parameters())
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


@pytest.mark.usefixtures("small_pieces")
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


# Checksums


def test_checksums_see_every_byte_and_where_it_is() -> None:
    with install.stock():  # it needs more than the device of these tests has
        generator = torch.Generator().manual_seed(5)
        for nbytes in (1, 7, 8, 4096 * 8, 4096 * 8 + 3, 3 * 4096 * 8 + 77):
            tensor = torch.randint(0, 256, (nbytes,), generator=generator).to(torch.uint8)
            same = checksum(tensor)
            assert checksum(torch.cat([tensor[:1], tensor])[1:]) == same, "at an odd address"
            for at in {0, nbytes // 2, nbytes - 1}:
                other = tensor.clone()
                other[at] ^= 128
                assert checksum(other) != same
                moved = tensor.roll(at or 1)
                assert torch.equal(moved, tensor) or checksum(moved) != same
        rows = torch.randint(
            -(2**62), 2**62, (256, 4096), generator=generator
        )  # each a block of its own, or a part of one
        for wide in (rows, rows.view(-1, 1024), rows.view(-1, 256)):
            other = wide.clone()
            other[[0, 1]] = other[[1, 0]]
            assert checksum(other) != checksum(wide)
        one = torch.arange(24.0)
        assert checksum(one.view(4, 6)) != checksum(one.view(6, 4))
        assert checksum(one.view(4, 6).t()) == checksum(one.view(4, 6).t().contiguous())
        assert checksum(one) != checksum(one.view(torch.int32))
        assert checksum(one.to(torch.bfloat16)) != checksum(one)
