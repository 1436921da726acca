"""Turns and leases where they are hardest: interrupts between any two instructions, threads that wait in a circle."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator._native import Group
from ballonet.allocator.errors import DriverError, ManageError
from ballonet.hooks import forwards, lease
from ballonet.hooks.lease import Holding, current
from ballonet.hooks.streaming import stacks, turns
from ballonet.hooks.streaming.turns import Turn, Turns

from .models import build, prompts
from .pool import tiny_layers

BUDGET = 2**22
PAGE = 4096
INPUTS = prompts(batch=2, longest=9)
LONG = 60  # seconds, after which a thread hangs


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tiny_layers(monkeypatch, BUDGET, PAGE):
        yield


def started(act: Callable[[], object]) -> Future[Any]:
    """The result of `act`, or what it raised, on a thread of its own."""
    result: Future[Any] = Future()

    @torch.no_grad()
    def run() -> None:
        try:
            result.set_result(act())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def at_line(act: Callable[[], object], at: int, event: str, then: Callable[[], object], *modules: ModuleType) -> None:
    """Runs `act`, and `then` before the line or opcode with this number, of those that are run in the modules."""
    files = {module.__file__ for module in modules}
    seen = 0

    def trace(frame: FrameType, now: str, _: object) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = event == "opcode"
        if now == event:
            seen += 1
            if seen == at:
                sys.settrace(None)
                then()
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(None)


def call(it: Turns, inside: Callable[[], object] = lambda: None) -> None:
    """A forward, in which `inside` is called."""
    turn = it.begin(sys._getframe())
    try:
        it.fly(turn)
        inside()
    finally:
        it.land(turn)
        it.end(turn)


class Passes:
    """Counts what a model is asked for, and does not let two fly at once."""

    def __init__(self) -> None:
        self.flying = False
        self.flights = 0
        self.rests = 0
        self.fails = False

    def fly(self) -> None:
        assert not self.flying
        self.flying = True
        self.flights += 1

    def land(self) -> None:
        self.flying = False

    def rest(self) -> None:
        if self.fails:
            raise DriverError("cuMemMap", 1, "CUDA_ERROR", "a test")
        self.flying = False
        self.rests += 1


def streaming(name: str) -> tuple[Turns, Passes]:
    it, passes = Turns(name), Passes()
    it.passes = passes
    return it, passes


def waiting(it: Turns, count: int) -> None:
    """Returns when so many wait behind the one whose turn it is."""
    for _ in range(LONG * 1000):
        if len(it._queue) == count + 1:
            return
        threading.Event().wait(0.001)
    raise AssertionError("nobody waits")


# In which order


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    it, _ = streaming("it")
    order: list[int] = []
    results = []

    def first() -> None:
        for n in range(5):
            results.append(started(lambda n=n: call(it, lambda: order.append(n))))  # type: ignore[misc]
            waiting(it, n + 1)

    call(it, first)
    call(it, lambda: order.append(5))  # whoever has had it is behind those that wait
    for each in results:
        each.result(LONG)
    assert order == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", ["first", "waiting"])
def test_a_call_that_was_interrupted_keeps_no_one_waiting(place: str) -> None:
    it, _ = streaming("it")
    closed: list[str] = []

    def interrupted() -> None:
        turn = it.begin(sys._getframe())
        turn.abandon = lambda: closed.append("lease")

    def other() -> None:
        turn = turns.Turn(sys._getframe(), lends=True)
        turn.abandon = lambda: closed.append("lease")
        it._queue.append(turn)  # and Ctrl-C came before it was taken out again

    if place == "first":
        interrupted()
    else:
        call(it, other)
    started(lambda: call(it)).result(LONG)
    assert closed == ["lease"]
    assert not it._queue


def test_whoever_rests_after_an_interrupt_has_a_turn_of_its_own() -> None:
    """That of the call that was interrupted may be ended by anyone at any time."""
    it, passes = streaming("it")

    def interrupted() -> None:
        it.fly(it.begin(sys._getframe()))

    interrupted()
    assert passes.flying
    with it.at_rest():
        turn = it._turn
        assert turn is not None
        assert not turn.abandoned()
        assert not passes.flying
    assert not it._queue


def test_a_section_that_cannot_begin_is_not_open() -> None:
    it, passes = streaming("it")
    passes.fails = True
    with pytest.raises(DriverError), it.resident():
        pass
    assert not it.sections
    assert not it._queue


def test_a_stack_is_seen_whole_while_its_thread_goes_on() -> None:
    """A generator that yields while its stack is walked has no caller any more."""

    class Running:
        """A call that is in a generator until `go_on`, and then out of it until `stop`."""

        def __init__(self) -> None:
            self.inside, self.go_on, self.outside, self.stop = (threading.Event() for _ in range(4))
            it, _ = streaming("it")
            self.result = started(lambda: call(it, self.run))
            assert self.inside.wait(LONG)
            self.turn = it._turn

        def numbers(self) -> Iterator[int]:
            self.inside.set()
            self.go_on.wait(LONG)
            yield 1

        def run(self) -> None:
            numbers = self.numbers()
            next(numbers)
            self.outside.set()
            self.stop.wait(LONG)

    for at in range(1, 30):
        running = Running()
        assert running.turn is not None

        def go_on(running: Running = running) -> None:
            running.go_on.set()
            assert running.outside.wait(LONG)

        found: list[bool] = []
        look = running.turn.abandoned
        at_line(lambda: found.append(look()), at, "line", go_on, turns, stacks)  # noqa: B023
        assert found == [False], at
        running.go_on.set()
        running.stop.set()
        running.result.result(LONG)
        assert running.turn.abandoned()


@pytest.mark.parametrize("allowed", [True, False])
def test_no_garbage_is_collected_while_stacks_are_looked_at(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """Python 3.11 collects it wherever frames are made, and lets others run while it holds a lock that they want."""
    seen: list[bool] = []

    class Frame:
        """One of three."""

        def __init__(self, left: int = 2) -> None:
            self.left = left

        @property
        def f_back(self) -> Frame | None:
            seen.append(gc.isenabled())
            return Frame(self.left - 1) if self.left else None

    def frames() -> dict[int, Any]:
        seen.append(gc.isenabled())
        return {1: Frame()}

    monkeypatch.setattr(sys, "_current_frames", frames)
    (gc.enable if allowed else gc.disable)()
    try:
        assert [frame.left for frame in cast(Any, stacks.stack_of(1))] == [2, 1, 0]
        assert gc.isenabled() == allowed
        assert stacks.stack_of(2) == []
        assert gc.isenabled() == allowed
        monkeypatch.setattr(Frame, "f_globals", {}, raising=False)
        assert stacks._running(Future()) is None
        assert gc.isenabled() == allowed
    finally:
        gc.enable()
    assert seen == [False] * len(seen)
    assert len(seen) == 4 + 1 + 1 + 4


# In a circle


class Meeting:
    """Two threads that each have the turn of one model before they ask for that of the other."""

    def __init__(self, one: Turns, two: Turns) -> None:
        self.one, self.two = one, two
        self.here = threading.Barrier(2)

    def run(self, inside: Callable[[], object] = lambda: None) -> list[Future[Any]]:
        def into(other: Turns) -> None:
            self.here.wait(LONG)
            call(other, inside)

        return [
            started(lambda: call(self.one, lambda: into(self.two))),
            started(lambda: call(self.two, lambda: into(self.one))),
        ]


def test_two_models_that_call_each_other() -> None:
    (one, first), (two, second) = streaming("one"), streaming("two")
    for _ in range(20):
        for each in Meeting(one, two).run():
            each.result(LONG)
        assert not one._queue
        assert not two._queue
        assert not turns._waiting
    assert not first.flying
    assert not second.flying
    assert first.rests + second.rests >= 20
    call(one)
    assert not first.flying


def test_three_models_in_a_circle() -> None:
    models = [streaming(str(n)) for n in range(3)]
    here = threading.Barrier(3)

    def into(n: int) -> None:
        here.wait(LONG)
        call(models[(n + 1) % 3][0])

    running = [started(lambda n=n: call(models[n][0], lambda: into(n))) for n in range(3)]  # type: ignore[misc]
    for each in running:
        each.result(LONG)
    assert not any(it._queue for it, _ in models)


def test_a_look_into_a_model_that_waits_for_one() -> None:
    (one, first), (two, _) = streaming("one"), streaming("two")
    here = threading.Barrier(2)
    seen: list[bool] = []

    def look() -> None:
        here.wait(LONG)
        with one.at_rest():
            seen.append(first.flying)

    def into() -> None:
        here.wait(LONG)
        call(two)

    for each in started(lambda: call(one, into)), started(lambda: call(two, look)):
        each.result(LONG)
    assert seen == [False]


def test_a_turn_that_cannot_be_lent_because_its_layers_cannot_be_brought_to_rest() -> None:
    (one, first), (two, second) = streaming("one"), streaming("two")
    first.fails = second.fails = True
    results = [each.exception(LONG) for each in Meeting(one, two).run()]
    assert any(isinstance(each, DriverError) for each in results)
    assert not one._queue
    assert not two._queue
    first.fails = second.fails = False
    call(one)
    call(two)


def test_what_is_held_at_rest_is_not_lent() -> None:
    """Who holds it borrows the other one."""
    (one, _), (two, _) = streaming("one"), streaming("two")
    here = threading.Barrier(2)
    ended: list[str] = []

    def hold() -> None:
        with one.at_rest():
            here.wait(LONG)
            call(two)
            ended.append("hold")

    def into() -> None:
        here.wait(LONG)
        call(one)
        ended.append("into")

    for each in started(hold), started(lambda: call(two, into)):
        each.result(LONG)
    assert ended == ["hold", "into"]


def test_whoever_ended_and_waits_again_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had the turn when this thread looked, and is behind it now."""
    one, _ = streaming("one")
    behind: list[Turn] = []

    def waits(first: int, other: int) -> bool:
        if not behind:  # while the one looks the other ends, and begins again
            one.end(holder)
            behind.append(Turn(None, lends=False))
            one._queue.append(behind[0])
        return True

    holder = Turn(sys._getframe(), lends=False)
    holder.thread = -1  # of another thread
    monkeypatch.setattr(holder, "abandoned", lambda: False)
    one._queue.append(holder)
    monkeypatch.setattr(turns, "_waits", waits)
    call(one)
    one.end(behind[0])


def test_a_turn_that_has_ended_is_not_lent() -> None:
    one, _ = streaming("one")
    borrower = Turn(sys._getframe(), lends=True)
    one._queue.append(borrower)
    borrower.thread = -1
    turns._lend(one, borrower)
    assert not borrower.borrowed
    assert one._queue == [borrower]
    one.end(borrower)


def joins(act: Callable[[], object], timeout: float | None = None) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(timeout)


def asks(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act).result()


def leaves(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(act)


@pytest.mark.parametrize("wait", [joins, asks, leaves])
def test_a_forward_that_waits_for_a_thread_that_wants_its_turn(wait: Callable[..., None]) -> None:
    it, _ = streaming("it")
    errors: list[str] = []

    def other() -> None:
        with pytest.raises(ManageError, match=r"it is run by a thread that waits.*run it on the thread") as error:
            call(it)
        errors.append(str(error.value))

    started(lambda: call(it, lambda: wait(other))).result(LONG)
    assert len(errors) == 1
    assert not it._queue


def test_a_forward_that_waits_for_a_while_only() -> None:
    it, _ = streaming("it")
    ran: list[bool] = []
    started(lambda: call(it, lambda: joins(lambda: call(it, lambda: ran.append(True)), timeout=0.2))).result(LONG)
    for _ in range(LONG * 1000):
        if ran:
            break
        threading.Event().wait(0.001)
    assert ran


def test_whoever_waits_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "LONG", 0.0)
    it, _ = streaming("the model")
    done = threading.Event()

    def other() -> None:
        with pytest.warns(RuntimeWarning, match="the model has layers that stream"):
            call(it)

    def first() -> None:
        result.append(started(other))
        waiting(it, 1)
        done.wait(3 * turns.LOOK_AGAIN)

    result: list[Future[Any]] = []
    call(it, first)
    result[0].result(LONG)


# With models


def test_streaming_models_that_call_each_other(installed: None) -> None:
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
            found: torch.Tensor = models[n](**INPUTS).logits
            handle.remove()
            return found

        running = [started(lambda n=n: run(n)) for n in range(2)]  # type: ignore[misc]
        outer = [each.result(LONG) for each in running]
        for n in range(2):
            assert torch.allclose(outer[n], expected[n], atol=1e-5)
            assert torch.allclose(inner[n], expected[n], atol=1e-5)
    with torch.no_grad():
        for model in models:
            model(**INPUTS)
    assert all(each.flying for each in managed)
    assert all(each._weights.group.leases == 0 for each in managed)
    for each in managed:
        each.release()


class Parallel(nn.Module):
    """Runs its parts on threads, as mixtures of experts do."""

    def __init__(self, inner: nn.Module, wait: Callable[[Callable[[], object]], None]) -> None:
        super().__init__()
        self.inner = inner
        self.wait = wait

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def run() -> None:
            with torch.no_grad():
                found.append(self.inner(states))

        self.wait(run)
        return found[0]


@pytest.mark.parametrize("wait", [joins, asks])
def test_a_layer_that_computes_on_threads(installed: None, wait: Callable[..., None]) -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=4)
        with torch.no_grad():
            expected = model(**INPUTS).logits
    for layer in model.model.layers:
        layer.mlp = Parallel(layer.mlp, wait)
    with ballonet.manage(model, interval=2) as managed, torch.no_grad():
        for _ in range(3):
            assert torch.allclose(started(lambda: model(**INPUTS)).result(LONG).logits, expected, atol=1e-5)
        assert managed.flying
        runtime.require().check()


def test_a_layer_that_runs_the_whole_model_on_a_thread_is_told(installed: None) -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=4)
        with torch.no_grad():
            expected = model(**INPUTS).logits
    with ballonet.manage(model, interval=2) as managed, torch.no_grad():
        model(**INPUTS)

        def act(*_: object) -> None:
            handle.remove()
            asks(lambda: model(**INPUTS))

        handle = model.model.layers[1].mlp.register_forward_pre_hook(act)
        with pytest.raises(ManageError, match="LlamaForCausalLM is run by a thread that waits for this one"):
            started(lambda: model(**INPUTS)).result(LONG)
        assert torch.allclose(started(lambda: model(**INPUTS)).result(LONG).logits, expected, atol=1e-5)
        assert managed.flying


# Ctrl-C anywhere


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted(act: Callable[[], object], at: int, event: str, *modules: ModuleType) -> bool:
    """Runs `act` and interrupts it there. Was there such a line or opcode?"""
    try:
        at_line(act, at, event, interrupt, *modules)
    except KeyboardInterrupt:
        return True
    return False


class Caching(nn.Module):
    """Uses a cache in its forward, which is leased from then on."""

    def __init__(self, cache: Group) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cache = [cache]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for group in self.cache:
            with Holding(group):
                pass
        outputs: torch.Tensor = self.linear(inputs)
        return outputs


def test_ctrl_c_between_any_two_instructions_leaves_no_lease(installed: None) -> None:
    cache = runtime.require().group()
    model = Caching(cache)
    managed = ballonet.manage(model)
    inputs = torch.ones(4)
    at = 0
    while interrupted(lambda: model(inputs), at := at + 1, "opcode", lease):
        model(inputs)
        assert managed._weights.group.leases == 0, at
        assert cache.leases == 0, at
        assert current() is None, at
    assert at > 100
    managed.release()

    def alone() -> None:
        with Holding(cache):
            assert cache.leases == 1

    at = 0
    while interrupted(alone, at := at + 1, "opcode", lease):
        assert cache.leases == 0, at
    assert at > 30


def test_ctrl_c_between_any_two_lines_of_a_forward_leaves_neither_turns_nor_leases(installed: None) -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=1)
        with torch.no_grad():
            expected = model(**INPUTS).logits
    managed = ballonet.manage(model, interval=1)

    @torch.no_grad()
    def run() -> torch.Tensor:
        found: torch.Tensor = model(**INPUTS).logits
        return found

    run()
    at = 0
    while interrupted(run, at := at + 1, "line", turns, forwards):
        if at % 2:
            assert torch.allclose(started(run).result(LONG), expected, atol=1e-5), at
        assert torch.allclose(run(), expected, atol=1e-5), at
        assert managed._weights.group.leases == 0, at
        assert not managed._turns._queue, at
    assert at > 100
    assert managed.flying
    managed.release()


class _Ended:
    """Whoever asks whether layers stream finds them ended the next time: another thread was between."""

    def __init__(self, passes: Any) -> None:
        self.passes = passes

    def __get__(self, turns: Any, owner: Any) -> Any:
        found, self.passes = self.passes, None
        return found

    def __set__(self, turns: Any, passes: Any) -> None:
        self.passes = passes


@pytest.mark.parametrize("what", ["fly", "land", "_rest"])
def test_streaming_that_ends_while_a_forward_begins(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    passes = SimpleNamespace(
        fly=lambda: done.append("fly"), land=lambda: done.append("land"), rest=lambda: done.append("_rest")
    )
    queue = Turns("a model")
    queue.passes = cast(Any, passes)
    turn = queue.begin(sys._getframe())
    monkeypatch.setattr(Turns, "passes", _Ended(passes), raising=False)
    try:
        getattr(queue, what)(*[] if what == "_rest" else [turn])
    finally:
        monkeypatch.undo()
        queue.end(turn)
    assert done == [what]
