"""Steps of a loop that are like the last select nobody and ask nobody, until anything happens."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.batching.selection import Selection
from ballonet.hooks.device import managers
from ballonet.offload.manager.memory_manager import MemoryManager
from ballonet.offload.policy.admission import LogicalBuffer
from ballonet.offload.policy.progress import StepProgress
from ballonet.offload.policy.step_bound import StepBound
from ballonet.offload.policy.step_costs import REMEMBERED, RequestSLO, Step, StepCosts

from ..models import build
from ..pool import take_out
from ..tuned import Clock, Tuned
from .batches import PAGE, looping, stock

BLOCK = 256  # tokens: no request needs another one
TOKENS = 60
AT = 40  # the step, in which lengths have a size whose time is known


@pytest.fixture(autouse=True)
def installed(tuned: Tuned) -> Iterator[None]:
    tuned(weights={"large": 2**11}, clock=Clock(step=1e-4))  # so that tiny layers have ranges
    ballonet.install(1024 * PAGE, page_size=PAGE, host_budget=1024 * PAGE, device="cpu")
    yield
    gc.collect()
    devices.require().check()
    take_out()


class Steps:
    """The steps of a loop: in which of them requests were selected, and the manager was asked. `act` is called with the
    loop before the step `AT`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], object] = lambda manager: None) -> None:
        self.selected, self.asked = set[int](), set[int]()
        self.count = 0
        self._act = act
        select, before = Selection.select, MemoryManager.before

        def selecting(selection: Selection, *args: Any) -> Any:
            self.selected.add(self.count)
            return select(selection, *args)

        def asking(manager: MemoryManager, *args: Any) -> Any:
            self.asked.add(self.count - 1)
            return before(manager, *args)

        monkeypatch.setattr(Selection, "select", selecting)
        monkeypatch.setattr(MemoryManager, "before", asking)

    def run(self, requests: int = 2) -> list[list[int]]:
        """Returns the tokens of so many requests, in the order of their names."""
        model: Any = build("llama")
        asked = [[5, 6, 7 + n] for n in range(requests)]
        with ballonet.manage(model), looping(model, TOKENS, page_size=BLOCK) as manager:

            def begin(*_: Any) -> None:
                self.count += 1
                if self.count == AT:
                    self._act(manager)

            hook = model.register_forward_pre_hook(begin)
            names = [manager.add_request(prompt, request_id=str(n)) for n, prompt in enumerate(asked)]
            outputs = dict[str, list[int]]()
            while len(outputs) < len(names):
                output = manager.get_result(timeout=600)
                assert output.error is None
                outputs[output.request_id] = output.generated_tokens
            hook.remove()
        return [outputs[name] for name in names]


def test_steps_like_the_last_select_and_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    tokens = steps.run()
    later = range(AT, steps.count)
    assert not steps.selected.intersection(later)
    assert not steps.asked.intersection(later)
    assert tokens == [answer.tokens for answer in stock(build("llama"), [[5, 6, 7], [5, 6, 8]], TOKENS)]


def note_an_slo(manager: Any) -> None:
    manager.batch_processor.scheduler.slos.note("0", RequestSLO(tpot=100.0))


def lower_the_budget(manager: Any) -> None:
    ballonet.set_budget(1000 * PAGE)


def note_an_event(manager: Any) -> None:
    managers.of(devices.require()).version.bump()


def free_a_block(manager: Any) -> None:
    cache = manager.batch_processor.cache
    with cache.pages.client.lock:
        cache.pool.take(1)
        cache.pool.allocate_sector(0)
        cache.pool.free_blocks(0, cache.pool.get_free_blocks(0, 1))


@pytest.mark.parametrize("act", [note_an_slo, lower_the_budget, note_an_event, free_a_block])
def test_a_step_after_an_event_is_looked_at(act: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, act)
    steps.run()
    assert AT in steps.selected, "the step after that in which it happened"
    assert AT - 1 not in steps.selected


def test_a_forward_of_other_requests_asks_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many of them, so nothing else tells."""

    def others(manager: Any) -> None:
        manager.batch_processor.cache.batch = object()

    steps = Steps(monkeypatch, others)
    steps.run()
    assert steps.asked.intersection(range(AT - 1, AT + 2))


def test_a_step_with_a_new_request_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, lambda manager: manager.add_request([9, 8], request_id="2"))
    steps.run()
    assert {AT, AT + 1} <= steps.selected, "its prompt, and the step in which all decode"


def test_calm_iterations_are_noted_at_once_as_one_by_one() -> None:
    one, all_ = LogicalBuffer(64, 1, 32), LogicalBuffer(64, 1, 32)
    for late in (True, True, False, True):
        for buffer in (one, all_):
            buffer.observe(tpot=late, ttft=False)
        for _ in range(3):
            one.observe(tpot=False, ttft=False)
        all_.observe_calm(3)
        assert one.size == all_.size == 32
    bounds = StepBound(), StepBound()
    for bound in bounds:
        bound.observe(Step(1, 1), 2.0)
    bounds[0].pass_over(10)
    for _ in range(10):
        bounds[1].observe(Step(1, 1), 0.0)
    assert bounds[0].seconds == pytest.approx(bounds[1].seconds)


def test_where_nothing_was_lost_tokens_make_up_for_nothing() -> None:
    progress = StepProgress()
    assert progress.settled
    for lose in (lambda: progress.lose({"0": 1, "1": 1}, False), lambda: progress.lose({"0": 1}, False), progress.wait):
        lose()
        assert not progress.settled
        while not progress.settled:
            progress.give(["0", "1"])
        limits = progress.requests, progress.tokens
        progress.give(["0"])
        assert (progress.requests, progress.tokens) == limits
        assert progress.settled


def test_the_time_of_a_step_is_known_once_such_steps_ran() -> None:
    costs, sizes = StepCosts(), [Step(1, 3), Step(1, 9), Step(2, 40)]
    for n in range(REMEMBERED):
        assert not any(costs.settled(step) for step in sizes), n
        for step in sizes:
            costs.observe(step, 1e-3 * step.read)
    assert all(costs.settled(step) for step in sizes)
    assert not costs.settled(Step(4, 40)), "none of that size ran"
