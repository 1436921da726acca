"""Layers that come and go while a model is in use: through files, by a manager's plans, and because pages run out."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import WeightsFileChanged
from ballonet.hooks.weights import ranges
from ballonet.offload.policy.plan import Plan, spread, streaming
from ballonet.offload.residency.weights_file import WeightsFile

from ..core import PAGE_CALLS, calls
from ..models import Output
from ..pool import bytes_that_exist
from .conftest import BUDGET, LAYERS, PAGE, say, streams

pytestmark = pytest.mark.chaos


@pytest.fixture
def folder(original: Any, tmp_path: Path) -> Path:
    original.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def loaded(original: Any, folder: Path) -> Any:
    """As `ballonet.from_pretrained` loads it: nobody has seen its weights, which are where its file is mapped."""
    return ballonet.from_pretrained(folder, interval=1)


def tensors(model: Any) -> dict[str, bytes]:
    return {name: bytes(tensor.numpy().tobytes()) for name, tensor in model.state_dict().items()}


def plans(managed: ballonet.Managed) -> Iterator[Plan]:
    """Every number of layers and slots."""
    pages = managed._residency.plan.pages
    for count, slots in product(range(LAYERS + 1), (1, 2)):
        yield streaming(pages, spread(pages, count), slots)


def change(managed: ballonet.Managed, plan: Plan) -> None:
    """As between two iterations."""
    managed._residency.rearrange(plan)


LOOKS: dict[str, Callable[[Any], object]] = {
    "state": lambda it: it.state_dict(),
    "parameters": lambda it: list(it.parameters()),
    "one": lambda it: it.model.layers[2].mlp.up_proj.weight,
    "thread": lambda it: _on_a_thread(it.state_dict),
    "part": lambda it: it.model.layers[2].mlp(torch.ones(1, it.config.hidden_size)),
    "gradients": lambda it: it(torch.arange(4)[None]).logits.sum().backward(),
    "compiled": lambda it: torch.compile(it.model.layers[2].mlp, backend="eager")(torch.ones(1, it.config.hidden_size)),
}


def _on_a_thread(act: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(act()))
    thread.start()
    thread.join(600)
    return results


@pytest.mark.counts
@pytest.mark.parametrize("how", LOOKS)
def test_loaded_model_streams_from_its_file(loaded: Any, original: Any, stock: Output, how: str) -> None:
    """Until somebody looks: from then on its pages are in host memory, where they can be read and written."""
    before = bytes_that_exist("host")
    with ballonet.manage(loaded) as managed:
        assert managed.report().streamed == tuple(range(LAYERS))
        assert managed.report().host_pages == 0
        assert streams(managed, lambda: say(loaded).agrees(stock))
        assert bytes_that_exist("host") <= before + PAGE, "no second copy"
        held = LOOKS[how](loaded)
        assert managed.report().host_pages > 0, "whoever looked was shown pages"
        loaded.zero_grad()
        assert say(loaded).agrees(stock)
        assert tensors(loaded) == tensors(original)
        del held
        assert streams(managed, lambda: say(loaded).agrees(stock))
    assert tensors(loaded) == tensors(original)
    assert ballonet.stats().copied.weights_d2h == 0


def test_a_look_that_the_host_has_no_page_for_is_out_of_memory(loaded: Any, original: Any, stock: Output) -> None:
    device = devices.require()
    taken = []
    with ballonet.manage(loaded):
        while ranges.host_pages_left(device):
            taken.append(device.reserve(PAGE, "kv", device.group()))
            taken[-1].map(0, 1)
            taken[-1].move(0, "host")
        for look in ("state", "parameters", "one", "part", "gradients"):
            with pytest.raises(torch.OutOfMemoryError, match="host"):
                LOOKS[look](loaded)
            assert say(loaded).agrees(stock)
        for held in taken:
            held.close()
        assert tensors(loaded) == tensors(original)


def test_a_file_is_looked_at_twice_in_a_forward(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first copy, and after its last."""
    looks: list[str] = []
    check = WeightsFile.check
    monkeypatch.setattr(WeightsFile, "check", lambda self: (looks.append(self.path), check(self))[1])
    with ballonet.manage(loaded):
        for _ in range(3):
            looks.clear()
            with torch.no_grad():
                loaded(torch.arange(4)[None])
            assert len(looks) == 2


@pytest.mark.parametrize("backing", ["model", "loaded"], ids=["host pages", "a file"])
def test_every_way_from_one_plan_to_another(
    request: pytest.FixtureRequest, original: Any, stock: Output, backing: str
) -> None:
    it = request.getfixturevalue(backing)
    with ballonet.manage(it) as managed:
        all_plans = list(plans(managed))
        for plan in [*all_plans, all_plans[7], all_plans[2], all_plans[9], all_plans[0]]:
            change(managed, plan)
            assert managed.report().streamed == plan.streamed
            assert managed.report().pages <= plan.device_pages + sum(
                range_.backed for range_ in managed._weights.ranges.get(None, ())
            )
            assert say(it).agrees(stock)
            devices.require().check()
        assert tensors(it) == tensors(original)


def test_written_weight_is_not_taken_from_the_file_again(loaded: Any, original: Any, stock: Output) -> None:
    with ballonet.manage(loaded) as managed:
        assert say(loaded).agrees(stock)
        with managed.editable(), torch.no_grad():
            loaded.model.layers[1].mlp.down_proj.weight.mul_(2)
        gc.collect()
        with torch.no_grad():
            original.model.layers[1].mlp.down_proj.weight.mul_(2)
        try:
            for _ in range(2):
                assert streams(managed, lambda: say(loaded).agrees(say(original)))
        finally:
            with torch.no_grad():
                original.model.layers[1].mlp.down_proj.weight.div_(2)


@pytest.mark.parametrize("damage", ["written", "truncated", "replaced"])
def test_a_file_that_changes_under_a_twin(loaded: Any, folder: Path, stock: Output, damage: str) -> None:
    path = folder / "model.safetensors"
    managed = ballonet.manage(loaded)
    assert say(loaded).agrees(stock)
    devices.require().synchronize()  # what is copied from a page that is gone then, the stand-in reports as an error
    if damage == "written":
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\1\2\3")
    elif damage == "truncated":
        os.truncate(path, 4096)
    else:
        path.with_suffix(".new").write_bytes(path.read_bytes())
        path.with_suffix(".new").rename(path)
    copied = managed._weights.ring.copied
    for _ in range(2):
        with pytest.raises(WeightsFileChanged, match="load the model again"):
            say(loaded)
    assert managed._weights.ring.copied == copied
    devices.require().check()
    del managed, loaded


def test_held_view_is_the_weight_wherever_it_is(model: Any, original: Any, stock: Output) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    row = weight.data[3]
    expected = bytes(original.model.layers[1].mlp.up_proj.weight.detach().numpy().tobytes())
    with ballonet.manage(model) as managed:
        view = weight.data[1:]
        for plan in [*plans(managed)][::3]:
            change(managed, plan)
            assert bytes(weight.detach().numpy().tobytes()) == expected
            assert bytes(view.numpy().tobytes()) == expected[-view.nbytes :]
            view.mul_(2)
            assert not say(model).agrees(stock)
            view.div_(2)
            assert say(model).agrees(stock)
        del view
    assert bytes(row.numpy().tobytes()) == expected[3 * row.nbytes : 4 * row.nbytes]


@pytest.mark.counts
def test_no_token_moves_a_page(model: Any) -> None:

    @torch.no_grad()
    def tokens() -> None:
        for _ in range(5):
            model(torch.arange(4)[None], use_cache=False)

    with ballonet.manage(model, interval=1) as managed:
        tokens()
        before = {name: calls().get(name, 0) for name in PAGE_CALLS}
        assert streams(managed, tokens)
        assert {name: calls().get(name, 0) for name in PAGE_CALLS} == before


def test_a_wait_for_a_layer_that_is_back_counts_for_no_absence(model: Any, stock: Output) -> None:
    """At first it is read from a slot of its own, whose copy the pass waits for."""
    with ballonet.manage(model) as managed:
        pages = managed._residency.plan.pages
        for count in (2, 0):
            change(managed, streaming(pages, spread(pages, count), 1))
        for _ in range(2):
            assert say(model).agrees(stock)
        assert ballonet.stats().copied.weights_h2d, "something was waited for"
        assert (managed.report().streamed, managed._residency.waited) == ((), 0)


def test_where_there_is_no_page_for_a_slot(model: Any, stock: Output) -> None:
    with ballonet.manage(model) as managed:
        device = devices.require()
        device.trim()
        device.reap(wait=True)
        used = sum(count for owner, count in device.snapshot()["pages"].items() if owner != "free")
        group = device.group()
        filler = device.reserve((BUDGET // PAGE - used) * PAGE, "kv", group)
        filler.map(0, filler.pieces)
        try:
            plan = list(plans(managed))[-1]
            change(managed, plan)
            assert managed.report().streamed == plan.streamed
        finally:
            filler.close()
            device.reap(wait=True)
        assert say(model).agrees(stock)


@pytest.mark.parametrize("interval", ["auto", 1])
def test_a_release_that_fails_leaves_a_model_whose_layers_come_and_go(
    model: Any, original: Any, stock: Output, monkeypatch: pytest.MonkeyPatch, interval: Any
) -> None:
    with ballonet.manage(model, interval=interval) as managed:
        assert say(model).agrees(stock)
        with monkeypatch.context() as patched:
            patched.setattr(managed._weights, "restore", lambda model: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                managed.release()
        assert ballonet.manage(model, interval=interval) is managed
        assert tensors(model) == tensors(original)
        assert say(model).agrees(stock)
        managed._residency.decision = None
        assert say(model).agrees(stock)
        assert managed._residency.decision is not None, "it is asked about again"
