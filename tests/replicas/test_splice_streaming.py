"""Spans of managed models: what does not run is not copied, and all else is as without a span."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.hooks.managed import managed_as, residency_of
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy import plan
from ballonet.offload.policy.replicas.groups import Span
from ballonet.testing import chaos_of

from ..models import build
from ..pool import take_out
from ..test_ring import model as ring_model
from ..tuned import Tuned
from .parts import Whole, cuts, in_one, inputs_of, steps, through

LAYERS = 6
BUDGET = 2**22
PAGE = 4096
ASKED = steps(4)


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield
    gc.collect()
    devices.require().check()
    take_out()


@pytest.fixture(autouse=True)
def tiny(tuned: Tuned) -> None:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges


@pytest.fixture
def model() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=LAYERS)


def streamed(model: Any, layers: tuple[int, ...], slots: int, monkeypatch: Any, **options: Any) -> ballonet.Managed:
    """Managed with just these layers in so many slots."""
    monkeypatch.setattr(plan, "at_interval", lambda pages, interval: plan.streaming(pages, layers, slots))
    return testing.manage(model, interval=1, **options)


def copied() -> int:
    return int(devices.require().snapshot()["copied"]["weights_h2d"])


class Filled:
    """The layers that were copied to slots."""

    def __init__(self, managed: ballonet.Managed, monkeypatch: Any) -> None:
        self.layers: list[int] = []
        ring = managed._weights.ring
        copies = ring.copies
        monkeypatch.setattr(ring, "copies", lambda member, slot: self.layers.append(member) or copies(member, slot))


@pytest.mark.parametrize("slots", [1, 2])
def test_dropped_layers_cause_no_copies(model: Any, slots: int, monkeypatch: Any) -> None:
    """Layers 3 to 5 lie on the host, and nobody runs them: not a byte of them comes over, nor of anything else."""
    with install.stock():
        expected = in_one(model, ASKED)
    with Splice(model) as splice, streamed(model, (3, 4, 5), slots, monkeypatch) as managed:
        splice.span = Span(0, 3)
        splice.run(inputs_of(model, ASKED[0], "past_key_values", None))  # and what was begun before
        filled, before = Filled(managed, monkeypatch), copied()
        for _ in range(5):
            splice.run(inputs_of(model, ASKED[0], "past_key_values", None))
        assert filled.layers == []
        assert copied() == before
        splice.span = splice.whole
        assert all(map(torch.equal, in_one(model, ASKED), expected))
        assert set(filled.layers) == {3, 4, 5}
        assert copied() > before


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_of_layers_that_stream_only_those_of_the_span_are_copied(model: Any, slots: int, monkeypatch: Any) -> None:
    with install.stock():
        whole = Whole(copy.deepcopy(model))
    spans = [Span(0, 2), Span(2, 3), Span(3, 6)]
    with Splice(model) as splice, streamed(model, (1, 2, 3, 5), slots, monkeypatch) as managed:
        splice.span = spans[0]
        filled = Filled(managed, monkeypatch)
        for step in ASKED:
            expected = whole.run(step)
            states: Any = None
            for span in spans:
                splice.span = span
                filled.layers.clear()
                cache = copy.deepcopy(whole.before)
                states = splice.run(inputs_of(model, step, "past_key_values", cache), states)
                assert filled.layers
                assert set(filled.layers) <= {*range(span.begin, span.end)} & {1, 2, 3, 5}
            assert torch.equal(states[0], expected)
        devices.require().check()


def test_a_view_that_is_kept_of_a_slot_shared_with_layers_elsewhere(model: Any, monkeypatch: Any) -> None:
    """The slot moves to other addresses, for the layers too that do not run now and do later."""
    with install.stock():
        expected = in_one(model, ASKED)
    with Splice(model) as splice, streamed(model, (1, 4), 1, monkeypatch):
        splice.span = Span(0, 3)
        kept: list[torch.Tensor] = []
        linear = model.model.layers[1].mlp.up_proj
        handle = linear.register_forward_hook(lambda *_: kept.append(linear.weight))
        splice.run(inputs_of(model, ASKED[0], "past_key_values", None))
        handle.remove()
        assert len(kept) == 1
        splice.span = splice.whole
        assert all(map(torch.equal, in_one(model, ASKED), expected))
        assert torch.equal(kept.pop(), linear.weight)


def test_layers_from_files_that_do_not_run_are_not_read(tmp_path: Path, monkeypatch: Any) -> None:
    """A forward that gets no slots reads the host: of the layers that run, which are brought there."""
    with install.stock():
        build("llama", num_hidden_layers=LAYERS).save_pretrained(tmp_path)
    model = ballonet.from_pretrained(tmp_path, interval=1)
    managed = managed_as(model)
    assert managed is not None
    streaming = residency_of(managed).streaming
    with Splice(model) as splice:
        splice.span = Span(0, 2)
        assert streaming._hidden == set(range(LAYERS))
        monkeypatch.setattr(managed._turns, "take", lambda turn: False)
        splice.run(inputs_of(model, ASKED[0], "past_key_values", None))
        assert streaming._hidden == {2, 3, 4, 5}
        splice.span = splice.whole
        splice.run(inputs_of(model, ASKED[0], "past_key_values", None))
        assert streaming._hidden == set()
    managed.release()


def test_own_slots_of_layers_that_do_not_run_are_not_filled() -> None:
    with ring_model([2, 3, 1, 2], [0, 1, 2, 3], 1) as it:
        it.arrange([0])  # the others have slots of their own from now on
        it.ring.share(lambda layer: layer < 2)
        before = it.copied()
        it.ring.begin(0)
        assert it.copied() - before == 2 + 3
        it.run(0)
        it.run(1)
        it.ring.begin(0, lambda layer: True)
        assert it.copied() - before == 2 + 3
        it.ring.share(lambda layer: True)
        it.ring.begin(0, lambda layer: True)
        assert it.copied() - before == 2 + 3 + (2 + 1)  # what shared slots held is forgotten, own slots keep it
        for layer in range(4):
            it.run(layer)
        assert it.copied() - before == 2 + 3 + (2 + 1 + 2)  # each is opened one layer ahead


@pytest.mark.parametrize("layers", [(), (0, 2, 3, 5)])
@pytest.mark.parametrize("seed", [3, 11])
def test_parts_under_chaos_are_the_whole(model: Any, layers: tuple[int, ...], seed: int, monkeypatch: Any) -> None:
    """Two managed replicas of a model, whose pages move at random: the same bits."""
    with install.stock():
        whole = Whole(copy.deepcopy(model))
        other = build("llama", num_hidden_layers=LAYERS)
    spans = cuts(LAYERS, 2)
    with (
        streamed(model, layers, 2, monkeypatch, chaos=seed) as one,
        streamed(other, layers, 2, monkeypatch, chaos=seed + 1) as two,
        Splice(model) as first,
        Splice(other) as second,
    ):
        first.span, second.span = spans
        for step in ASKED:
            expected = whole.run(step)
            assert torch.equal(through([first, second], step, whole.before), expected)
        assert all(chaos_of(part).moved["weights"] > 0 for part in (one, two))
        devices.require().check()
