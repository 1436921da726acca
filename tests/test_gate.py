"""A model that is managed, or released, while other threads run it or begin to."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList

import ballonet
from ballonet.allocator import install
from ballonet.allocator.errors import ModelInUse
from ballonet.hooks.cache_argument import given_cache
from ballonet.hooks.forward import gate as gates
from ballonet.hooks.forward.gate import Gate
from ballonet.hooks.manage import managed
from ballonet.hooks.managed import managed_as
from ballonet.hooks.measure.timings import Timings
from ballonet.hooks.options import ManageOptions
from ballonet.hooks.programs import first_use
from ballonet.hooks.programs.first_use import FirstUse
from ballonet.hooks.weights.moving import MoveIn
from ballonet.hooks.weights.ranges import Weights

from .core import eventually
from .faulting import at_each_line
from .models import build, logits, prompts
from .pool import tiny_layers
from .portrait import Portrait, none_in_pool
from .threads import ActingThread
from .tuned import Tuned

BUDGET = 2**22
PAGE = 4096
LAYERS = 5
INPUTS = prompts(batch=2, longest=9)
ROW = torch.ones(1, 3, 32)  # what a single layer takes
LONG = 60  # seconds, after which a thread hangs


@pytest.fixture(autouse=True)
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, BUDGET, PAGE):
        yield


@pytest.fixture
def model() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=LAYERS)


def tokens(model: Any, **more: Any) -> torch.Tensor:
    output: torch.Tensor = model.generate(**INPUTS, max_new_tokens=6, min_new_tokens=6, do_sample=False, **more)
    return output


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-4)


class Held:
    """A thread whose forward stops in a module until `go_on` is set."""

    def __init__(self, inside: nn.Module, act: Callable[[], Any]) -> None:
        self.go_on = threading.Event()
        self.inside = threading.Event()
        self._stopped = 0  # the thread that stops
        self._handle = inside.register_forward_pre_hook(self._stop)

        def run() -> Any:
            self._stopped = threading.get_ident()
            return act()

        self.thread = ActingThread(run)

    def _stop(self, *_: Any) -> None:
        if threading.get_ident() == self._stopped:
            self.inside.set()
            self.go_on.wait(LONG)

    def reached(self) -> Held:
        assert self.inside.wait(LONG)
        return self

    def result(self) -> Any:
        self.go_on.set()
        answer = self.thread.result()
        self._handle.remove()
        return answer


def gate_of(module: nn.Module) -> Gate | None:
    """The one that is closed now."""
    return next((hook.gate for hook in module._forward_pre_hooks.values() if isinstance(hook, gates._Door)), None)


def leases_of(model: nn.Module) -> int:
    managed = managed_as(model)
    return 0 if managed is None else managed._weights.group.leases


def waits_for_first_use(thread: ActingThread) -> bool:
    stack = traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
    return not thread.is_alive() or any(frame.f_code is first_use._Taking.wait.__code__ for frame, _ in stack)


def at_gate_or_over(module: nn.Module, thread: ActingThread) -> Callable[[], bool]:
    def met() -> bool:
        gate = gate_of(module)
        return not thread.is_alive() or (gate is not None and thread.ident in gate._waiting)

    return met


def test_manage_within_a_forward_of_the_model_is_refused(model: Any) -> None:
    raised = []

    def act(*_: Any) -> None:
        with pytest.raises(ModelInUse, match="within a forward") as error:
            ballonet.manage(model)
        raised.append(error)

    handle = model.model.layers[1].register_forward_hook(act)
    logits(model)
    handle.remove()
    assert len(raised) == 1


@pytest.mark.parametrize("interval", [1, None])
def test_generate_goes_on_right_where_it_is_managed_between_two_forwards(model: Any, interval: Any) -> None:
    expected, reached, go_on = tokens(model), threading.Event(), threading.Event()

    def stop(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        reached.set()
        go_on.wait(LONG)
        return scores

    generating = ActingThread(lambda: tokens(model, logits_processor=LogitsProcessorList([stop])))
    assert reached.wait(LONG)
    with ballonet.manage(model, interval=interval):
        assert torch.equal(tokens(model), expected)
        go_on.set()
        assert torch.equal(generating.result(), expected)
        assert torch.equal(tokens(model), expected)


class Beginning:
    """A forward of the model, and of a layer by itself, that begin while the weights move, in step `at` of `move`; they
    wait for that."""

    def __init__(self, model: Any, patch: pytest.MonkeyPatch, owner: type, move: str, at: int) -> None:
        self.layer = model.model.layers[3].mlp
        with torch.no_grad():
            self.expected = logits(model), self.layer(ROW)
        self.begun = list[ActingThread]()
        steps, inner = iter(range(99)), getattr(owner, move)

        def do(*arguments: Any) -> None:
            if next(steps) == at:
                works = (lambda: logits(model), torch.no_grad()(lambda: self.layer(ROW)))
                self.begun += [ActingThread(work) for work in works]
                for module, thread in zip((model, self.layer), self.begun, strict=True):
                    eventually(at_gate_or_over(module, thread))
                assert all(started.is_alive() for started in self.begun)
            inner(*arguments)

        patch.setattr(owner, move, do)

    def check(self, model: Any) -> None:
        whole, layer = (thread.result() for thread in self.begun)
        assert same(whole, self.expected[0])
        assert torch.equal(layer, self.expected[1])
        assert gate_of(model) is None


@pytest.mark.parametrize("step", [0, 4, 8])
def test_forward_that_begins_while_weights_move_in_waits(
    model: Any, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    beginning = Beginning(model, monkeypatch, MoveIn, "do", step)
    leases = list[int]()
    handle = model.lm_head.register_forward_pre_hook(lambda *_: leases.append(leases_of(model)))
    with ballonet.manage(model, interval=None) as managed:
        beginning.check(model)
        assert leases == [1], "it began without the hooks of manage() and runs with them"
        handle.remove()
        assert managed._weights.group.leases == 0
        assert not managed._forwards.running()
        assert same(logits(model), beginning.expected[0])


@pytest.mark.parametrize(("interval", "step"), [(None, 0), (None, 8), (1, 0), (1, 4)])
def test_forward_that_begins_while_weights_move_out_waits(
    model: Any, monkeypatch: pytest.MonkeyPatch, interval: Any, step: int
) -> None:
    beginning = Beginning(model, monkeypatch, Weights, "_step_out", step)
    managed = ballonet.manage(model, interval=interval)
    logits(model)
    managed.release()
    beginning.check(model)
    assert none_in_pool(model)


def test_a_forward_that_passed_before_the_gate_closed_waits_for_release(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(model)
    managed = ballonet.manage(model, interval=None)
    reached, go_on = threading.Event(), threading.Event()
    open_lease, move = managed._forwards._lease, Weights._step_out

    def stop() -> Any:
        reached.set()
        go_on.wait(LONG)
        return open_lease()

    def do(self: Weights, moved: Any) -> None:
        go_on.set()
        eventually(at_gate_or_over(model, beginning))
        assert beginning.is_alive()
        move(self, moved)

    monkeypatch.setattr(managed._forwards, "_lease", stop)
    beginning = ActingThread(lambda: logits(model))
    assert reached.wait(LONG)
    monkeypatch.setattr(Weights, "_step_out", do)
    managed.release()
    assert same(beginning.result(), expected)
    assert none_in_pool(model)


def test_a_report_is_made_while_another_thread_measures_its_first_step(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, typical = ballonet.manage(model), Timings.typical

    def measured_meanwhile(timings: Timings, point: Any) -> float | None:
        timings.last["decode"] = timings.last["prefill"]
        return typical(timings, point)

    with torch.no_grad():
        for _ in range(3):
            model(**INPUTS)
    assert handle.report().times["prefill"].measured is not None
    monkeypatch.setattr(Timings, "typical", measured_meanwhile)
    assert handle.report().times["prefill"].measured is not None
    handle.release()


def test_threads_that_use_a_model_that_comes_and_goes(model: Any, hasty: None) -> None:
    """None runs as `manage()` is called: such a forward has no hooks."""
    expected, over = tokens(model), threading.Event()
    turn, running, managing = threading.Condition(), set[int](), list[bool]()
    wrong = list[torch.Tensor]()
    rounds = [0] * 3  # of each user

    def use(number: int) -> None:
        while not over.is_set():
            with turn:
                turn.wait_for(lambda: not managing)
                running.add(number)
            if not torch.equal(output := tokens(model), expected):
                wrong.append(output)
            with turn:
                running.discard(number)
                turn.notify_all()
            rounds[number] += 1
            time.sleep(0.005)  # so that now and then no forward runs, and it can be released

    def each_was_there(times: int) -> bool:
        return min(rounds) >= times or not all(user.is_alive() for user in users)

    users = [ActingThread(partial(use, number)) for number in range(3)]
    try:
        eventually(lambda: each_was_there(1))
        for interval in (1, 2, "auto", None):
            with turn:
                managing.append(True)
                turn.wait_for(lambda: not running)
                managed = ballonet.manage(model, interval=interval)
                managing.clear()
                turn.notify_all()
            while not managed.report().released:
                with suppress(ModelInUse):
                    managed.release()
                time.sleep(0.001)
        eventually(lambda: each_was_there(2))
    finally:
        over.set()
    for user in users:
        user.result()
    assert wrong == []


def test_a_second_first_use_waits_until_the_model_is_managed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(model)
    paused, go_on = threading.Event(), threading.Event()
    kinds = list[type]()

    def manage(model: Any, options: ManageOptions, **_: object) -> Any:
        paused.set()
        assert go_on.wait(LONG)
        logits(model)  # as measuring does
        return managed(model, options)

    def note(_: Any, args: Any, kwargs: Any) -> None:
        kinds.append(type(given_cache(kwargs).layers[0]))

    monkeypatch.setattr(first_use, "managed", manage)
    watching = FirstUse()
    try:
        first = ActingThread(lambda: tokens(model))
        assert paused.wait(LONG)
        model.model.layers[0].self_attn.register_forward_pre_hook(note, with_kwargs=True)
        second = ActingThread(lambda: tokens(model))
        inner = ActingThread(lambda: model.model(**INPUTS))
        eventually(lambda: waits_for_first_use(second) and waits_for_first_use(inner))
        assert kinds == []
        go_on.set()
        assert torch.equal(first.result(), expected)
        assert torch.equal(second.result(), expected)
        inner.result()
        assert [kind.__name__ for kind in kinds].count("ElasticLayer") >= 12
        assert len(watching.managed) == 1
    finally:
        go_on.set()
        watching.close()
    watching.managed[0].release()


def test_ctrl_c_anywhere_in_a_gate_leaves_it_open() -> None:
    with install.stock():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    before = Portrait(module)
    for _ in at_each_line(nullcontext, lambda _: ballonet.manage(module).release(), gates, most=30, least=50):
        if (managed := managed_as(module)) is not None:
            managed.release()
        assert before.is_of(module)


def test_ctrl_c_anywhere_in_a_first_use_keeps_nobody_waiting(model: Any) -> None:
    expected = logits(model)

    @contextmanager
    def begin() -> Iterator[FirstUse]:
        watching = FirstUse(ManageOptions(interval=None))
        yield watching
        watching.close()
        if (managed := managed_as(model)) is not None:
            managed.release()
        assert none_in_pool(model)

    for watching, done in at_each_line(begin, lambda _: logits(model), first_use, most=20, least=15):
        assert not watching._taking
        assert same(ActingThread(lambda: logits(model)).result(), expected)
        assert len(watching.managed) == 1 or not done


def test_the_child_of_a_fork_does_not_wait_for_a_thread_that_it_lacks(model: Any) -> None:
    gate, closed, over = Gate(model), threading.Event(), threading.Event()

    def close() -> None:
        gate._owner = threading.get_ident()
        with gate.closed():
            closed.set()
            over.wait(LONG)

    closing = ActingThread(close)
    assert closed.wait(LONG)
    if not (child := os.fork()):
        gate.wait()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    over.set()
    closing.result()
