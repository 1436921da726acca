"""Layers that come and go while a model is in use: through files, by a governor's plans, and because pages run out."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator.errors import WeightsFileChanged
from ballonet.hooks import governors
from ballonet.hooks.streaming.elastic import Elastic
from ballonet.offload.decide.plan import Plan, spread, streaming

from ..pool import bytes_that_exist
from .conftest import BUDGET, LAYERS, PAGE
from .test_remapping import full, until
from .test_streaming import Output, say


@pytest.fixture(scope="module")
def stock(original: Any) -> Output:
    with install.stock():
        return say(original)


@pytest.fixture
def folder(original: Any, tmp_path: Path) -> Path:
    original.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def loaded(original: Any, folder: Path) -> Iterator[Any]:
    """As transformers loads it: its weights are views of the mapped file."""
    with install.stock_everywhere():
        yield type(original).from_pretrained(folder)


def tensors(model: Any) -> dict[str, bytes]:
    return {name: bytes(tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()}


def plans(managed: ballonet.Managed) -> Iterator[Plan]:
    """Every number of layers and slots."""
    pages = managed._elastic.plan.pages
    for count, slots in product(range(LAYERS + 1), (1, 2)):
        yield streaming(pages, spread(pages, count), slots)


def change(managed: ballonet.Managed, plan: Plan) -> None:
    """As between two iterations, with nobody at work on twins."""
    for thread in threading.enumerate():
        if thread.name == "ballonet-twins":
            thread.join(60)
    managed._elastic._change(plan)


def test_what_was_loaded_from_a_file_streams_from_it(loaded: Any, original: Any, stock: Output) -> None:
    before = bytes_that_exist("host")
    with ballonet.manage(loaded, interval=1) as managed:
        assert managed.streamed == tuple(range(LAYERS))
        assert managed.host_pages == 0
        assert say(loaded).agrees(stock)
        assert managed.flying
        assert bytes_that_exist("host") == before, "no second copy"
        assert tensors(loaded) == tensors(original)
        assert managed.host_pages > 0, "whoever looked was shown pages"
        assert say(loaded).agrees(stock)
        gc.collect()
        assert say(loaded).agrees(stock)
        assert managed.host_pages == 0, "the file has what they held"
    assert tensors(loaded) == tensors(original)
    assert ballonet.stats().copied.weights_d2h == 0


def test_twins_that_are_made_while_it_runs_are_in_its_file_too(
    loaded: Any, stock: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, before = ballonet.stats().copied.weights_d2h, bytes_that_exist("host")
    monkeypatch.setattr(Elastic, "running", property(lambda self: True))
    governors.of(runtime.require()).bandwidth = 1e12  # every layer's copy is hidden
    with ballonet.manage(loaded) as managed, full(but=200):
        assert say(loaded).agrees(stock)
        until(lambda: managed.twins[0] > 0)
        assert managed.host_pages == 0
        assert say(loaded).agrees(stock)
        assert bytes_that_exist("host") <= before, "no second copy"
    assert ballonet.stats().copied.weights_d2h == moved


def test_what_is_written_at_rest_is_not_taken_from_the_file_again(loaded: Any, original: Any, stock: Output) -> None:
    with ballonet.manage(loaded, interval=1) as managed:
        assert say(loaded).agrees(stock)
        with managed.editable(), torch.no_grad():
            loaded.model.layers[1].mlp.down_proj.weight.mul_(2)
        gc.collect()
        with torch.no_grad():
            original.model.layers[1].mlp.down_proj.weight.mul_(2)
        try:
            for _ in range(2):
                assert say(loaded).agrees(say(original))
            assert managed.flying
            assert managed.host_pages > 0, "that layer's twin is in memory now"
        finally:
            with torch.no_grad():
                original.model.layers[1].mlp.down_proj.weight.div_(2)


@pytest.mark.parametrize("damage", ["written", "truncated", "replaced"])
def test_a_file_that_changes_under_a_twin(loaded: Any, folder: Path, stock: Output, damage: str) -> None:
    path = folder / "model.safetensors"
    managed = ballonet.manage(loaded, interval=1)
    assert say(loaded).agrees(stock)
    if damage == "written":
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\1\2\3")
    elif damage == "truncated":
        os.truncate(path, 4096)
    else:
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").rename(path)
    for _ in range(2):
        with pytest.raises(WeightsFileChanged, match="load the model again"):
            say(loaded)
    runtime.require().check()
    del managed, loaded


def test_every_way_from_one_plan_to_another(model: Any, original: Any, stock: Output) -> None:
    with ballonet.manage(model) as managed:
        found = list(plans(managed))
        for plan in [*found, *reversed(found), found[7], found[2], found[9], found[0]]:
            change(managed, plan)
            assert managed.streamed == plan.streamed
            assert managed.pages <= plan.device_pages + sum(
                each.backed for each in managed._weights.ranges.get(None, ())
            )
            assert say(model).agrees(stock)
            runtime.require().check()
        assert tensors(model) == tensors(original)


def test_twins_are_made_once(model: Any, stock: Output) -> None:
    """To the host weights go when they first leave, and never again."""
    before = ballonet.stats().copied.weights_d2h
    with ballonet.manage(model) as managed:
        found = list(plans(managed))
        change(managed, found[-1])
        copied = ballonet.stats().copied.weights_d2h
        assert copied - before == managed.host_pages * PAGE > 0
        for plan in (found[0], found[3], found[-2], found[0], found[-1]):
            change(managed, plan)
            assert say(model).agrees(stock)
        assert ballonet.stats().copied.weights_d2h == copied


def test_a_layer_that_somebody_holds_stays(model: Any, stock: Output) -> None:
    with ballonet.manage(model) as managed:
        held = model.model.layers[1].mlp.up_proj.weight
        plan = list(plans(managed))[-1]
        with pytest.raises(ballonet.BallonetError, match="from outside"):
            change(managed, plan)
        assert say(model).agrees(stock)
        del held
        gc.collect()
        change(managed, plan)
        assert say(model).agrees(stock)


def test_where_there_is_no_page_for_a_slot(model: Any, stock: Output) -> None:
    """The first layers that leave give theirs."""
    with ballonet.manage(model) as managed:
        device = runtime.require()
        device.trim()
        device.reap(wait=True)
        used = sum(count for owner, count in device.snapshot()["pages"].items() if owner != "free")
        group = device.group()
        filler = device.reserve((BUDGET // PAGE - used) * PAGE, "kv", group)
        filler.map(0, filler.pieces)
        try:
            plan = list(plans(managed))[-1]
            change(managed, plan)
            assert managed.streamed == plan.streamed
        finally:
            filler.close()
            device.reap(wait=True)
        assert say(model).agrees(stock)


def test_a_release_that_fails_leaves_a_model_whose_layers_come_and_go(
    model: Any, stock: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ballonet.manage(model) as managed:
        with monkeypatch.context() as patched:
            patched.setattr(managed._weights, "restore", lambda model: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                managed.release()
        assert say(model).agrees(stock)
        assert managed._elastic.decision is not None
        managed._elastic.decision = None
        assert say(model).agrees(stock)
        assert managed._elastic.decision is not None, "it is asked about again"


def test_after_a_release_that_fails_nobody_reads_a_slot(
    model: Any, original: Any, stock: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ballonet.manage(model, interval=1) as managed:
        assert say(model).agrees(stock)
        assert managed.flying
        with monkeypatch.context() as patched:
            patched.setattr(managed._weights, "restore", lambda model: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                managed.release()
        assert tensors(model) == tensors(original)
        assert say(model).agrees(stock)
