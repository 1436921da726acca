"""Turns and leases where they are hardest: interrupts between any two instructions, threads that wait in a circle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
from torch import nn

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator._native import Group
from ballonet.hooks.forward import forwards, lease
from ballonet.hooks.forward.lease import GroupLease, Turn, Turns, current
from ballonet.hooks.streaming import streamed
from ballonet.offload.policy.tuning import Waiting

from .core import eventually
from .faulting import at_each_line
from .models import build, prompts
from .pool import tiny_layers
from .portrait import none_in_pool
from .threads import ActingThread
from .tuned import Clock, Tuned

pytestmark = pytest.mark.chaos


BUDGET = 2**22
PAGE = 4096
INPUTS = prompts(batch=2, longest=9)
LONG = 60  # seconds, after which a thread hangs


@pytest.fixture
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, BUDGET, PAGE):
        yield


def started(act: Callable[[], object]) -> ActingThread:
    """What `act` does on a thread of its own, without gradients, which are off for one thread only."""
    return ActingThread(torch.no_grad()(act))


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    it = Turns(cast(Group, None), clock=Clock())
    first, order, results = Turn(), list[int](), list[ActingThread]()
    assert it.take(first)

    def wait(n: int) -> None:
        turn = Turn()
        assert it.take(turn)
        order.append(n)
        it.end(turn)

    for n in range(5):
        results.append(started(lambda n=n: wait(n)))  # type: ignore[misc]
        eventually(lambda n=n: len(it._queue) == n + 2)  # type: ignore[misc]
    it.end(first)
    for result in results:
        result.result()
    assert order == list(range(5))
    assert it._first() is None


def test_whoever_waits_in_vain_goes_without_and_nobody_waits_for_the_same_one_again() -> None:
    clock = Clock(step=1.0)  # a second passes at each look, and none otherwise
    it = Turns(cast(Group, None), Waiting(slots=0.5), clock)
    holder = Turn()
    assert it.take(holder)

    def other() -> tuple[bool, bool]:
        turn = Turn()
        return it.take(turn), it.has(turn)

    assert started(other).result() == (False, False)
    clock.step = 0.0
    assert started(other).result() == (False, False)
    assert it.has(holder)
    it.end(holder)
    assert started(other).result() == (True, True)


def test_nobody_goes_without_while_the_clock_stands_however_long_it_takes() -> None:
    """A loaded machine takes its time: what is decided depends on the clock that it was given."""
    clock = Clock()
    it = Turns(cast(Group, None), Waiting(slots=1e-3, slots_look=1e-3), clock)
    holder = Turn()
    assert it.take(holder)
    waiting = started(lambda: it.take(Turn()))
    eventually(lambda: len(it._queue) == 2)
    time.sleep(0.02)
    assert waiting.is_alive()
    assert not holder.given_up
    clock.now = 1.0
    assert waiting.result() is False
    assert holder.given_up


def test_a_turn_ends_with_whoever_has_it() -> None:
    it = Turns(cast(Group, None))
    assert started(lambda: it.take(Turn())).result()
    assert it._first() is None
    mine = Turn()
    assert it.take(mine)
    it.end(mine)
    it.end(mine)
    assert not it.has(mine)


def test_a_section_is_leased_and_ends(installed: None) -> None:
    group = devices.require().group()
    it = Turns(group)
    with it.section():
        assert it.leases == group.leases == 1
        assert started(lambda: it.leases).result() == 0
    assert not it.sections
    assert it.leases == group.leases == 0


def joins(act: Callable[[], object], timeout: float | None = None) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(timeout)


def asks(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


# With models


def test_streaming_models_that_call_each_other(installed: None, tuned: Tuned) -> None:
    tuned(waiting={"slots": 0.05})
    with install.stock():
        models = [build("llama", num_hidden_layers=3), build("llama", num_hidden_layers=3, hidden_size=48)]
        with torch.no_grad():
            expected = [model(**INPUTS).logits for model in models]
    managed = [ballonet.manage(model, interval=1) for model in models]
    for _ in range(3):
        here = threading.Barrier(2)
        inner: dict[int, torch.Tensor] = {}

        def run(n: int, here: threading.Barrier = here, inner: dict[int, torch.Tensor] = inner) -> torch.Tensor:
            def meet(*_: object) -> None:
                here.wait(LONG)
                inner[1 - n] = models[1 - n](**INPUTS).logits

            handle = models[n].model.norm.register_forward_pre_hook(
                lambda *_: meet() if threading.get_ident() == own else None
            )
            own = threading.get_ident()
            logits: torch.Tensor = models[n](**INPUTS).logits
            handle.remove()
            return logits

        running = [started(lambda n=n: run(n)) for n in range(2)]  # type: ignore[misc]
        outer = [future.result() for future in running]
        for n in range(2):
            assert torch.allclose(outer[n], expected[n], atol=1e-5)
            assert torch.allclose(inner[n], expected[n], atol=1e-5)
    with torch.no_grad():
        for model in models:
            model(**INPUTS)
    assert all(owner._weights.group.leases == 0 for owner in managed)
    for owner in managed:
        owner.release()


class Parallel(nn.Module):
    """Runs its parts on threads, as mixtures of experts do."""

    def __init__(self, inner: nn.Module, wait: Callable[[Callable[[], object]], None]) -> None:
        super().__init__()
        self.inner = inner
        self.wait = wait

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        outputs: list[torch.Tensor] = []

        def run() -> None:
            with torch.no_grad():
                outputs.append(self.inner(states))

        self.wait(run)
        return outputs[0]


@pytest.mark.parametrize("wait", [joins, asks])
def test_a_layer_that_computes_on_threads(installed: None, wait: Callable[..., None]) -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=4)
        with torch.no_grad():
            expected = model(**INPUTS).logits
    for layer in model.model.layers:
        layer.mlp = Parallel(layer.mlp, wait)
    with ballonet.manage(model, interval=2), torch.no_grad():
        for _ in range(3):
            assert torch.allclose(started(lambda: model(**INPUTS)).result().logits, expected, atol=1e-5)
        devices.require().check()


@pytest.mark.parametrize("wait", [joins, asks])
def test_a_layer_that_runs_the_whole_model_on_a_thread(
    installed: None, tuned: Tuned, wait: Callable[..., None]
) -> None:
    tuned(waiting={"slots": 0.05})
    with install.stock():
        model = build("llama", num_hidden_layers=4)
        with torch.no_grad():
            expected = model(**INPUTS).logits
    with ballonet.manage(model, interval=2), torch.no_grad():
        model(**INPUTS)
        inner: list[torch.Tensor] = []

        def act(*_: object) -> None:
            handle.remove()
            wait(lambda: inner.append(torch.no_grad()(model)(**INPUTS).logits))

        handle = model.model.layers[1].mlp.register_forward_pre_hook(act)
        outer = started(lambda: model(**INPUTS)).result().logits
        assert torch.allclose(outer, expected, atol=1e-5)
        assert torch.allclose(inner[0], expected, atol=1e-5)
        devices.require().check()


@pytest.mark.parametrize("interval", [None, 2])
def test_a_forward_that_begins_takes_nothing_in_once_the_model_is_released(
    installed: None, monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    """One thread releases the model just as another begins to use it."""
    reached, go_on = threading.Event(), threading.Event()
    with install.stock():
        model = build("llama", num_hidden_layers=5)
        with torch.no_grad():
            expected = model(**INPUTS).logits
    managed = ballonet.manage(model, interval=interval)
    with torch.no_grad():
        model(**INPUTS)
    with install.stock():
        model.register_buffer("extra", torch.zeros(PAGE))
    open_lease = managed._forwards._lease

    def stop() -> Any:
        reached.set()
        assert go_on.wait(LONG)
        return open_lease()

    monkeypatch.setattr(managed._forwards, "_lease", stop)
    future = started(lambda: model(**INPUTS).logits)
    assert reached.wait(LONG)
    managed.release()
    go_on.set()
    assert torch.allclose(future.result(), expected, atol=1e-5)
    assert none_in_pool(model)


# Ctrl-C anywhere


class Caching(nn.Module):
    """Uses a cache in its forward, which is leased from then on."""

    def __init__(self, cache: Group) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache = [cache]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for group in self.cache:
            with GroupLease(group):
                pass
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def test_ctrl_c_between_any_two_instructions_leaves_no_lease(installed: None) -> None:
    cache = devices.require().group()
    model = Caching(cache)
    managed = ballonet.manage(model)
    inputs = torch.ones(4)
    for _ in at_each_line(nullcontext, lambda _: model(inputs), lease, each="opcode", least=100):
        model(inputs)
        assert managed._weights.group.leases == 0
        assert cache.leases == 0
        assert current() is None
    managed.release()

    def alone(_: object) -> None:
        with GroupLease(cache):
            assert cache.leases == 1

    for _ in at_each_line(nullcontext, alone, lease, each="opcode", least=30):
        assert cache.leases == 0


def test_ctrl_c_between_any_two_lines_of_a_forward_leaves_neither_turns_nor_leases(
    installed: None, tuned: Tuned
) -> None:
    tuned(waiting={"slots": 0.01})
    with install.stock():
        model = build("llama", num_hidden_layers=1)
        with torch.no_grad():
            expected = model(**INPUTS).logits
    managed = ballonet.manage(model, interval=1)

    @torch.no_grad()
    def run(_: object = None) -> torch.Tensor:
        logits: torch.Tensor = model(**INPUTS).logits
        return logits

    for at, _ in enumerate(at_each_line(nullcontext, run, lease, forwards, streamed, least=100)):
        if at % 2:
            assert torch.allclose(started(run).result(), expected, atol=1e-5)
        assert torch.allclose(run(), expected, atol=1e-5)
        assert managed._weights.group.leases == 0
        assert managed._turns._first() is None
    managed.release()
