"""Threads that look at weights while another runs the model: what they hold stays, and locks have an order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.hooks import manage, managed
from ballonet.hooks.device import managers
from ballonet.hooks.forward.lease import Turn, Turns
from ballonet.hooks.streaming import captured
from ballonet.offload.policy.plan import Plan, streaming

from .. import graphs
from .conftest import INPUTS

pytestmark = pytest.mark.chaos


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(INPUTS["input_ids"]).logits
    return scores


@pytest.fixture
def stock(original: Any) -> torch.Tensor:
    with install.stock():
        return logits(original)


class Told:
    """A managed model that is told what to stream."""

    def __init__(self, model: Any, it: ballonet.Managed, patch: pytest.MonkeyPatch) -> None:
        self.model, self.it = model, it
        self.pages = it._residency.plan.pages
        self.plan = Plan(self.pages)
        manager = managers.of(devices.require())
        before = manager.before
        patch.setattr(manager, "before", lambda *it: replace(before(*it), plan=self.plan))

    def stream(self, *layers: int) -> torch.Tensor:
        """Runs the model, with these streaming from now on."""
        self.it._residency._patience = 0
        self.plan = streaming(self.pages, layers, 1) if layers else Plan(self.pages)
        return logits(self.model)


@pytest.fixture
def told(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    with ballonet.manage(model) as it:
        yield Told(model, it, monkeypatch)


def test_layers_stay_as_they_are_in_a_section(told: Told, stock: torch.Tensor) -> None:
    told.stream(1)
    with told.it.resident():
        for layers in ((), (1, 2)):
            assert torch.equal(told.stream(*layers), stock)
            assert list(told.it.report().streamed) == [1]
        assert told.it._residency.entry(0) is None
    assert torch.equal(told.stream(), stock)
    assert list(told.it.report().streamed) == []


def test_a_change_that_is_made_in_a_section_is_taken_in(told: Told, stock: torch.Tensor) -> None:
    told.stream(1)
    with told.it.editable():
        weight = told.model.model.layers[1].mlp.up_proj.weight
        told.model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight.detach().clone() * 2)
        assert not torch.equal(told.stream(1), stock)
        told.model.model.layers[1].mlp.up_proj.weight.data.div_(2)
        del weight
        assert torch.equal(told.stream(1), stock)
        assert not told.it.report().unmanaged_tensors
    assert torch.equal(told.stream(1), stock)


# The order of locks

ORDER = ("turn", "manage", "model", "manager", "traffic")  # docs/architecture.md


class Recorder:
    """Which lock a thread waited for while it had which others."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self._mine = threading.local()

    @property
    def held(self) -> list[tuple[str, int]]:
        locks: list[tuple[str, int]] = self._mine.__dict__.setdefault("held", [])
        return locks

    def waits(self, name: str, key: int) -> None:
        if (name, key) not in self.held:
            self.pairs.update((before, name) for before, _ in self.held)

    def lock(self, name: str, inner: Any) -> Recorded:
        return Recorded(self, name, inner)


class Recorded:
    def __init__(self, recorder: Recorder, name: str, inner: Any) -> None:
        self._recorder, self._inner, self._me = recorder, inner, (name, id(self))

    def acquire(self, blocking: bool = True) -> bool:
        if blocking:
            self._recorder.waits(*self._me)
        acquired: bool = self._inner.acquire(blocking)
        if acquired:
            self._recorder.held.append(self._me)
        return acquired

    def release(self) -> None:
        self._recorder.held.remove(self._me)
        self._inner.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records all locks above the core, from now on."""
    it, manager = Recorder(), managers.of(devices.require())
    take, end = Turns.take, Turns.end

    def recorded_take(self: Turns, turn: Turn) -> bool:
        it.waits("turn", id(self))
        taken = take(self, turn)
        if taken:
            it.held.append(("turn", id(self)))
        return taken

    def recorded_end(self: Turns, turn: Turn) -> None:
        while ("turn", id(self)) in it.held:
            it.held.remove(("turn", id(self)))
        end(self, turn)

    class Threading:
        RLock: Callable[[], Recorded] = staticmethod(lambda: it.lock("model", threading.RLock()))

    monkeypatch.setattr(Turns, "take", recorded_take)
    monkeypatch.setattr(Turns, "end", recorded_end)
    monkeypatch.setattr(captured, "threading", Threading)
    lock = it.lock("manage", managed.lock)
    for module in (manage, managed):
        monkeypatch.setattr(module, "lock", lock)
    lock = it.lock("manager", manager._known.lock)
    monkeypatch.setattr(manager._known, "lock", lock)
    monkeypatch.setattr(manager.link, "_lock", lock)
    if manager.link._watcher is not None:
        monkeypatch.setattr(manager.link._watcher, "_lock", it.lock("traffic", manager.link._watcher._lock))
    return it


def test_locks_are_taken_in_one_order(
    recorder: Recorder, model: Any, stock: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs.pretend(monkeypatch)
    with ballonet.manage(model) as it:
        told = Told(model, it, monkeypatch)
        for layers in ((1, 2), (1,), (), (0, 3)):
            assert torch.equal(told.stream(*layers), stock)
        told.stream()
        graph = torch.cuda.CUDAGraph()
        with graphs.capture(graph):
            logits(model)
        del graph
        told.stream()
        assert model.model.layers[0].mlp.up_proj.weight is not None  # of a layer that might be taken
        with it.editable():
            logits(model)
        model.model.layers[1].mlp.up_proj.register_buffer("more", torch.zeros(2))
        told.stream(2)
        assert model.state_dict()
        it.report()
    assert {("turn", "manage"), ("turn", "model"), ("manage", "model"), ("model", "manager")} <= recorder.pairs
    for before, after in recorder.pairs:
        assert ORDER.index(before) < ORDER.index(after), f"{after} is waited for by who has {before}"
