"""Twins of layers at home, made and used while the model runs, is written to, looked at and deleted."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator.errors import ManageError
from ballonet.hooks import governors
from ballonet.hooks.streaming import elastic
from ballonet.offload.decide.plan import spread, streaming
from ballonet.offload.govern.pages import FORGET
from ballonet.offload.move.twins import Twin

from .conftest import BUDGET, INPUTS, LAYERS, PAGE
from .test_remapping import until

IDS = INPUTS["input_ids"]


@pytest.fixture(scope="module")
def original() -> Any:
    """Large enough that a layer may be taken."""
    from ..models import build

    with install.stock():
        return build("llama", num_hidden_layers=2 * LAYERS)


@pytest.fixture(autouse=True)
def governor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whose pages are always scarce."""
    found = governors.of(runtime.require())
    monkeypatch.setattr(found.pages, "scarce", True)
    monkeypatch.setattr(found, "_clock", lambda: 0.0)
    found.bandwidth = 1e12
    return found


@pytest.fixture
def managed(model: Any, governor: Any) -> Iterator[ballonet.Managed]:
    """With a layer that may be taken, the first."""
    with ballonet.manage(model) as managed:
        logits(model)
        prepare(governor)
        until(lambda: managed._elastic.entry(0) is not None)
        yield managed


def prepare(governor: Any) -> None:
    """Twins are made now."""
    governor._list.void()
    governor._publish()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def stock(model: Any) -> torch.Tensor:
    with install.stock():
        return logits(model)


def take() -> None:
    """Pages run out for a moment: what may be taken is."""
    device = runtime.require()
    gc.collect()
    device.trim()
    device.reap(wait=True)
    used = sum(count for owner, count in device.snapshot()["pages"].items() if owner != "free")
    filler = device.reserve((BUDGET // PAGE - used + 1) * PAGE, "kv", device.group())
    try:
        filler.map(0, filler.pieces)
    finally:
        filler.close()
        device.reap(wait=True)


@contextmanager
def in_its_forward(module: Any, act: Any) -> Iterator[None]:
    handle = module.register_forward_pre_hook(lambda *_: act())
    try:
        yield
    finally:
        handle.remove()


def halve(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def test_a_twin_that_is_made_while_its_model_runs(model: Any, original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait() -> None:
        for thread in threading.enumerate():
            if thread.name == "ballonet-twins":
                thread.join(60)

    expected, shown = stock(original), []

    @contextmanager
    def noted(title: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda nbytes: shown.append((title, nbytes, total))

    monkeypatch.setattr(elastic, "progress", noted)
    with ballonet.manage(model) as managed:
        logits(model)
        with in_its_forward(model.model.layers[-1], wait):
            for _ in range(3):
                logits(model)
        assert managed.twins[0] > 0
        assert managed.host_pages > 0
        assert sum(nbytes for _, nbytes, _ in shown) == managed.host_pages * PAGE <= shown[0][2]
        assert {title for title, _, _ in shown} == {"Twins of LlamaForCausalLM"}, "how far it is is shown"
        take()
        assert managed.streamed
        for _ in range(3):
            assert torch.equal(logits(model), expected)


def test_a_layer_at_home_that_writes_to_itself(model: Any, original: Any, managed: ballonet.Managed) -> None:
    for each in (original_copy := _copy(original), model):
        module = each.model.layers[0].mlp.down_proj
        with in_its_forward(module, lambda module=module: halve(module.weight)):
            (stock if each is original_copy else logits)(each)
    with pytest.raises(Exception, match="can be had"):
        take()
    assert torch.equal(logits(model), stock(original_copy))


def test_a_layer_at_home_that_writes_to_itself_and_is_taken_meanwhile(model: Any, managed: ballonet.Managed) -> None:
    """Its twin is from before."""
    module = model.model.layers[0].mlp.down_proj

    def act() -> None:
        halve(module.weight)
        take()

    with in_its_forward(module, act), pytest.raises(ManageError, match="gave its pages"):
        logits(model)
    assert logits(model).isfinite().all()


def test_a_layer_at_home_that_an_exception_ends(model: Any, original: Any, managed: ballonet.Managed) -> None:
    kept = []

    def fail() -> None:
        kept.append(module.weight)
        raise ArithmeticError

    module = model.model.layers[0].mlp.down_proj
    with in_its_forward(module, fail), pytest.raises(ArithmeticError):
        logits(model)
    halve(kept.pop())
    with pytest.raises(Exception, match="can be had"):
        take()
    changed = _copy(original)
    halve(changed.model.layers[0].mlp.down_proj.weight)
    assert torch.equal(logits(model), stock(changed))


def test_what_was_written_at_rest_comes_home_although_a_file_has_something_else(original: Any, tmp_path: Path) -> None:
    original.save_pretrained(tmp_path)
    with install.stock_everywhere():
        loaded = type(original).from_pretrained(tmp_path)
    changed = _copy(original)
    halve(changed.model.layers[0].mlp.down_proj.weight)
    with ballonet.manage(loaded, interval=1) as managed:
        logits(loaded)
        assert managed.host_pages == 0
        assert managed.flying
        halve(loaded.model.layers[0].mlp.down_proj.weight)
        pages = managed._elastic.plan.pages
        managed._elastic._change(streaming(pages, spread(pages, 0), 1))
        assert managed.streamed == ()
        assert torch.equal(logits(loaded), stock(changed))
        written = sum(part.home.backed for part in managed._weights.covered()[0])
        assert managed.host_pages == written, "what the file has is in memory once"


def test_whoever_waits_for_a_change_finds_a_layer_that_streams(
    model: Any, original: Any, managed: ballonet.Managed
) -> None:
    """And takes its twin for one of a layer at home no more."""
    module, elastic = model.model.layers[0].mlp.down_proj, managed._elastic
    pages = elastic.plan.pages
    looker = threading.Thread(target=lambda: halve(module.weight))
    with elastic._lock:
        looker.start()
        looker.join(0.05)  # it waits for the lock
        elastic._change(streaming(pages, (0,), 1))
    looker.join(60)
    changed = _copy(original)
    halve(changed.model.layers[0].mlp.down_proj.weight)
    for _ in range(2):
        assert torch.equal(logits(model), stock(changed))
    assert managed.streamed == (0,)


def test_a_model_that_is_collected_while_its_thread_asks_the_governor(
    model: Any, original: Any, governor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    other = _copy(original)
    with ballonet.manage(model):
        managed = ballonet.manage(other)
        logits(model)
        logits(other)
        object.__setattr__(other, "itself", other)  # only the garbage collector finds it

        def clock() -> float:
            if governor._lock.locked() and not managed.released:  # a thread that makes its twins may still hold it
                gc.collect()
                found.append(managed.released)
            return 0.0

        def use() -> None:
            while not managed.released:
                logits(model)

        monkeypatch.setattr(governor, "_clock", clock)
        gc.disable()
        del other
        try:
            done = threading.Thread(target=use, daemon=True)
            done.start()
            done.join(60)
        finally:
            gc.enable()
        assert not done.is_alive()
        assert found[-1]
        assert len(governor._clients.seats) == 1
        monkeypatch.setattr(governor, "_clock", lambda: 0.0)


@pytest.mark.parametrize("late", [False, True])
def test_a_model_that_is_collected_while_a_twin_of_it_is_made(
    original: Any, governor: Any, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """In its forward, which ends meanwhile: the bytes stay until they are copied, and the twin goes with the model,
    which nobody remembers."""
    begun, go = threading.Event(), threading.Event()
    copy_home = Twin.copy_home

    def slow(self: Twin, spans: Any) -> None:
        if late:
            copy_home(self, spans)
        begun.set()
        assert go.wait(60)
        if not late:
            copy_home(self, spans)

    def wait() -> None:
        assert begun.wait(60)

    monkeypatch.setattr(Twin, "copy_home", slow)
    before = ballonet.stats().host_pages
    it = _copy(original)
    governor.pages.scarce = False  # or a twin might be made before its forward
    managed = ballonet.manage(it)
    governor.pages.scarce = True
    governor._list.stale = True
    remembered = managed._elastic
    try:
        with in_its_forward(it.model.layers[-1], wait):
            logits(it)
        del it
        gc.collect()
    finally:
        go.set()
    until(lambda: not any(thread.name == "ballonet-twins" for thread in threading.enumerate()))
    gc.collect()
    assert managed.released
    assert remembered.trouble == ""
    runtime.require().reap(wait=True)
    runtime.require().check()
    assert ballonet.stats().host_pages == before
    gone = weakref.ref(remembered)
    del remembered, managed
    gc.collect()
    assert gone() is None


def test_layers_that_go_before_the_thread_comes_to_them(
    original: Any, governor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next forward tells which are left."""
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: failed.append(arguments.exc_type))
    governor.pages.scarce = False
    it, other = _copy(original), _copy(original)
    with ballonet.manage(it) as managed:
        logits(it)
        for each in (it, other):
            del each.model.layers[LAYERS:]
        managed._elastic.cover(range(2 * LAYERS))
        (worker,) = [thread for thread in threading.enumerate() if thread.name == "ballonet-twins"]
        worker.join(0.1)  # it looks, and looks again
        assert worker.is_alive()
        assert torch.equal(logits(it), stock(other))
        managed._elastic._wanted = ()
        worker.join(60)
        assert not worker.is_alive()
    assert not failed


def test_once_pages_have_been_ample_nothing_is_left_of_what_was_prepared(
    original: Any, governor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No twin, and nobody who watches; when pages are scarce again there are."""
    it = _copy(original)
    expected = stock(it)
    runtime.require().trim()
    before = ballonet.stats().host_pages
    plain = type(it.model.layers[0].__dict__["_parameters"])

    def prepared() -> bool:
        assert torch.equal(logits(it), expected)
        return managed.twins[0] > 0

    with ballonet.manage(it) as managed:
        streaming = managed._elastic.streaming
        for now in (0.0, 2 * FORGET):
            monkeypatch.setattr(governor, "_clock", lambda now=now: now)
            governor.pages.scarce = True
            prepare(governor)
            until(prepared)
            until(lambda: managed.twins[0] == managed.twins[1])
            assert ballonet.stats().host_pages > before
            assert streaming.watched
            monkeypatch.setattr(governor, "_clock", lambda now=now: now + 1)
            assert prepared()
            monkeypatch.setattr(governor, "_clock", lambda now=now: now + 1 + FORGET)
            prepared()
            assert not prepared()
            runtime.require().reap(wait=True)
            runtime.require().trim()
            assert ballonet.stats().host_pages == before
            assert not streaming.watched
            assert all(type(each.__dict__["_parameters"]) is plain for each in it.modules())
            assert managed._elastic._turns.passes is None
    runtime.require().check()


def _copy(model: Any) -> Any:
    with install.stock():
        return copy.deepcopy(model)
