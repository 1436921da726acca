"""A drop that is not possible is refused, and nothing has changed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import DropRefused, ManageError, ModelInUse
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.offload.policy.replicas.groups import Span

from ... import graphs
from ...models import Output, build
from ...streaming.conftest import BUDGET, PAGE
from .holding import LAYERS, logits, pages_of, prepared, say, settled


def test_without_host_pages_nothing_is_dropped(host_model: Any, stock: Output) -> None:
    device = devices.require()
    with ballonet.manage(host_model) as managed:
        held = HeldLayers(managed)
        pages, here = pages_of(managed), settled()
        left = pages[3] + pages[4] + pages[5] // 2
        now = device.snapshot()
        filler = device.reserve(BUDGET - (now["host_pages"] - now["host_free"] + left) * PAGE, "kv", device.group())
        filler.map_host(0, filler.pieces)
        try:
            for _ in range(2):
                with pytest.raises(DropRefused, match=r"layer 5 of .* no host pages"):
                    held.drop(Span(0, 3))
                assert (held.dropped, held.ready, settled()) == ((), (3, 4), here)
                assert say(host_model).agrees(stock)
        finally:
            filler.close()
            device.reap(wait=True)
        assert held.drop(Span(0, 3)) == sum(pages[3:]) - max(pages)
        assert say(host_model).agrees(stock)


def test_what_cannot_be_dropped_is_refused(model: Any, managed: ballonet.Managed, held: HeldLayers) -> None:
    for span in (Span(2, LAYERS + 1), Span(LAYERS, LAYERS + 1)):
        with pytest.raises(ManageError, match="are none of it"):
            held.drop(span)
    failed: list[BaseException] = []

    def within(*_: object) -> None:
        for act in (lambda: held.drop(Span(0, 3)), held.release, lambda: list(held.restore([5]))):
            try:
                act()
            except ModelInUse as error:
                failed.append(error)

    held.drop(Span(0, 5))
    handle = model.model.layers[0].register_forward_pre_hook(within)
    logits(model)
    handle.remove()
    assert len(failed) == 3
    assert held.dropped == (5,)
    fixed = build("llama", num_hidden_layers=1)
    with ballonet.manage(fixed, interval=1) as other, pytest.raises(ManageError, match="interval=1"):
        HeldLayers(other)


def test_a_model_that_is_managed_no_more_has_nothing_to_drop(model: Any, stock: Output) -> None:
    managed = ballonet.manage(model)
    held = HeldLayers(managed)
    held.drop(Span(0, 3))
    managed.release()
    assert say(model).agrees(stock)
    assert held.dropped == ()
    for act in (lambda: held.drop(Span(0, 3)), lambda: list(held.prepare([0]))):
        with pytest.raises(ManageError, match="managed no more"):
            act()
    assert list(held.restore([3])) == []
    held.close()


def test_layers_in_cuda_graphs_are_not_dropped(host_model: Any, stock: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.pretend(monkeypatch)
    with ballonet.manage(host_model) as managed:
        held = prepared(HeldLayers(managed))
        graph = torch.cuda.CUDAGraph()
        with graphs.capture(graph):
            logits(host_model)
        here = settled()
        with pytest.raises(ManageError):
            held.drop(Span(0, 3))
        assert (held.dropped, settled()) == ((), here)
        del graph
        gc.collect()
        held.drop(Span(0, 3))
        assert say(host_model).agrees(stock)
