"""Threads that look at weights while another runs the model: what they hold stays, and locks have an order."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime
from ballonet.hooks import governors, managed
from ballonet.hooks.streaming import captured
from ballonet.hooks.streaming.turns import Turn, Turns
from ballonet.offload.decide.plan import Plan, streaming

from .. import graphs
from .conftest import INPUTS
from .test_remapping import until

LONG = 60.0  # seconds


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(INPUTS["input_ids"]).logits
    return found


@pytest.fixture
def stock(original: Any) -> torch.Tensor:
    with install.stock():
        return logits(original)


class Told:
    """A managed model that is told what to stream."""

    def __init__(self, model: Any, it: ballonet.Managed, patch: pytest.MonkeyPatch) -> None:
        self.model, self.it = model, it
        self.pages = it._elastic.plan.pages
        self.plan = Plan(self.pages)
        governor = governors.of(runtime.require())
        before = governor.before
        patch.setattr(governor, "before", lambda *it: replace(before(*it), plan=self.plan))

    def stream(self, *layers: int) -> torch.Tensor:
        """Runs the model, with these streaming from now on."""
        self.it._elastic._patience = 0
        self.plan = streaming(self.pages, layers, 1) if layers else Plan(self.pages)
        return logits(self.model)


@pytest.fixture
def told(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    with ballonet.manage(model) as it:
        yield Told(model, it, monkeypatch)


def test_a_layer_that_somebody_holds_does_not_come_home(told: Told, stock: torch.Tensor) -> None:
    told.stream(1, 2)
    held = told.model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(told.stream(2), stock)
    assert list(told.it.streamed) == [1, 2], "it may be read at any moment"
    del held
    gc.collect()
    assert torch.equal(told.stream(2), stock)
    assert list(told.it.streamed) == [2]


def test_what_was_taken_and_is_held_does_not_come_home(told: Told, stock: torch.Tensor) -> None:
    told.stream(1)
    told.it._weights.ring.forget()  # as what was taken: it is away, and in no slot
    held = told.model.model.layers[1].mlp.up_proj.weight
    assert torch.equal(told.stream(), stock)
    assert list(told.it.streamed) == [1]
    del held
    gc.collect()
    assert torch.equal(told.stream(), stock)
    assert list(told.it.streamed) == []


def test_whoever_looks_at_a_layer_that_comes_home_waits_for_it(
    told: Told, original: Any, stock: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, seen = told.model.model.layers[1].mlp.up_proj, []
    wanted = original.model.layers[1].mlp.up_proj.weight
    looker = threading.Thread(target=lambda: seen.append(torch.equal(module.weight, wanted)))
    ring, turns = told.it._weights.ring, told.it._turns
    bring_home = ring._bring_home

    def look(*arguments: Any) -> None:
        looker.start()
        until(lambda: len(turns._queue) == 2 or not looker.is_alive())
        assert not seen, "it looks while the layer leads to nothing"
        bring_home(*arguments)

    told.stream(1)
    with told.it.resident():
        pass  # at rest whoever looks need not wait, else
    monkeypatch.setattr(ring, "_bring_home", look)
    assert torch.equal(told.stream(), stock)
    looker.join(LONG)
    assert seen == [True]
    assert told.it._elastic.entry(1) is None, "it may have been written since its twin was made"


def test_nothing_comes_or_goes_in_a_section(told: Told, stock: torch.Tensor) -> None:
    told.stream(1)
    with told.it.resident():
        for layers in ((), (1, 2)):
            assert torch.equal(told.stream(*layers), stock)
            assert list(told.it.streamed) == [1]
    assert torch.equal(told.stream(), stock)
    assert list(told.it.streamed) == []


def test_who_makes_a_twin_does_not_wait_for_the_lock_with_the_turn(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has the lock may wait for the turn: a finalizer of the model that runs wherever garbage is collected."""
    it, asked, came = told.it._elastic, threading.Event(), threading.Event()
    it._wanted = (0,)

    class Lock(Recorded):
        def acquire(self, blocking: bool = True) -> bool:
            asked.set()
            return super().acquire(blocking)

    def take_turn() -> None:
        with told.it._turns.at_rest():
            came.set()

    inner = it._lock
    monkeypatch.setattr(it, "_lock", Lock(Recorder(), "model", inner))
    threads = [threading.Thread(target=it._cover_wanted), threading.Thread(target=take_turn)]
    with inner:
        for each in threads:
            each.start()
            assert asked.wait(LONG)
        assert came.wait(LONG)
    for each in threads:
        each.join(LONG)
    assert it._ready == {0}


# The order of locks

ORDER = ("turn", "manage", "model", "governor", "traffic")  # docs/architecture.md


class Recorder:
    """Which lock a thread waited for while it had which others."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self._mine = threading.local()

    @property
    def held(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = self._mine.__dict__.setdefault("held", [])
        return found

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
        found: bool = self._inner.acquire(blocking)
        if found:
            self._recorder.held.append(self._me)
        return found

    def release(self) -> None:
        self._recorder.held.remove(self._me)
        self._inner.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Of all locks above the core, from now on."""
    it, governor = Recorder(), governors.of(runtime.require())
    take, end = Turns._take, Turns.end

    def recorded_take(self: Turns, turn: Turn) -> None:
        it.waits("turn", id(self))
        take(self, turn)
        it.held.append(("turn", id(self)))

    def recorded_end(self: Turns, turn: Turn) -> None:
        while ("turn", id(self)) in it.held:
            it.held.remove(("turn", id(self)))
        end(self, turn)

    class Threading:
        RLock: Callable[[], Recorded] = staticmethod(lambda: it.lock("model", threading.RLock()))

    monkeypatch.setattr(Turns, "_take", recorded_take)
    monkeypatch.setattr(Turns, "end", recorded_end)
    monkeypatch.setattr(captured, "threading", Threading)
    monkeypatch.setattr(managed, "_lock", it.lock("manage", managed._lock))
    monkeypatch.setattr(governor, "_lock", it.lock("governor", governor._lock))
    if governor._watcher is not None:
        monkeypatch.setattr(governor._watcher, "_lock", it.lock("traffic", governor._watcher._lock))
    return it


def test_locks_are_taken_in_one_order(
    recorder: Recorder, model: Any, stock: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is done with a model, alone or while another thread uses it."""
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
        monkeypatch.setattr(governors.of(runtime.require()).pages, "scarce", True)
        told.stream()
        until(lambda: it.twins[0] == it.twins[1] > 0)
        assert model.model.layers[0].mlp.up_proj.weight is not None  # of a layer that might be taken
        with it.editable():
            logits(model)
        model.model.layers[1].mlp.up_proj.register_buffer("more", torch.zeros(2))
        told.stream(2)
        assert model.state_dict()
        it.report()
    assert {("turn", "manage"), ("turn", "model"), ("manage", "model"), ("model", "governor")} <= recorder.pairs
    for before, after in recorder.pairs:
        assert ORDER.index(before) < ORDER.index(after), f"{after} is waited for by who has {before}"
