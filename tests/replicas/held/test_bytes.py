"""Bytes of layers that are dropped and restored: with any writes, and from any source."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import ManageError, WeightsFileChanged
from ballonet.hooks.replicas.held_layers import HeldLayers, RestoredLayer
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.replicas.groups import Span

from ...models import Output
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
        for each in them:
            prepared(each)
        for splice, each, span in zip((a, b), them, spans, strict=True):
            splice.span = span
            each.drop(span)
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
def test_what_is_written_is_never_lost(
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
    found = list(held.restore([4, 5, 0, 1], peer))
    assert [(each.layer, each.from_peer) for each in found] == [(4, True), (5, True), (0, True), (1, True)]
    assert peer.asked == [4, 5, 0, 1]
    assert copied("h2d") == here
    assert say(model).agrees(stock)
    held.drop(Span(2, 4))
    assert say(model).agrees(stock)


def test_a_peer_s_wrong_bytes_are_not_taken(model: Any, original: Any, held: HeldLayers, stock: Output) -> None:
    """One bit of one weight, two that changed places, another's layer; nor does one that is gone keep a layer away."""

    def one_bit(layer: int, found: dict[str, torch.Tensor]) -> None:
        found["mlp.down_proj.weight"].view(torch.uint8).view(-1)[-1] ^= 1

    def exchanged(layer: int, found: dict[str, torch.Tensor]) -> None:
        rows = found["mlp.down_proj.weight"]
        rows[[0, 1]] = rows[[1, 0]]

    def another(layer: int, found: dict[str, torch.Tensor]) -> None:
        found.update(Peer(original)((layer + 1) % LAYERS) or {})

    def gone(layer: int, found: dict[str, torch.Tensor]) -> str:
        return "gone"

    prepared(held)
    for act in (one_bit, exchanged, another, gone):
        held.drop(Span(0, 4))
        found = list(held.restore([4, 5], Peer(original, act)))
        assert found == [RestoredLayer(each.layer, each.pages, False) for each in found]
        assert len(found) == 2
        assert say(model).agrees(stock), act


def test_a_peer_s_other_tensors_are_refused_and_what_it_raises_is_raised(
    model: Any, original: Any, held: HeldLayers, stock: Output
) -> None:
    def half(layer: int, found: dict[str, torch.Tensor]) -> None:
        found["mlp.down_proj.weight"] = found["mlp.down_proj.weight"].half()

    def lacks(layer: int, found: dict[str, torch.Tensor]) -> None:
        del found["mlp.down_proj.weight"]

    def fails(layer: int, found: dict[str, torch.Tensor]) -> None:
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
    assert [each.from_peer for each in held.restore([4, 5], Peer(original))] == [True, True]


def test_a_peer_that_has_older_weights_than_were_written_here_is_not_taken(
    model: Any, original: Any, held: HeldLayers
) -> None:
    expected = stocks_logits(original, WRITES["data"])
    prepared(held)
    held.drop(Span(0, 3))
    WRITES["data"](model)
    assert [each.from_peer for each in held.restore([3, 4, 5], Peer(original))] == [True, False, True]
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
        assert [each.from_peer for each in held.restore([3, 4, 5], Peer(original))] == [True] * 3
        assert say(model).agrees(stock)
        with pytest.raises(WeightsFileChanged):
            held.drop(Span(0, 3))
        assert say(model).agrees(stock)
        held.close()
