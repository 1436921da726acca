"""A link that is not as it was assumed: once it and the iterations have been measured, the other number of slots."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator._native import Device
from ballonet.hooks import managed
from ballonet.hooks.device import managers
from ballonet.hooks.device.streams import HostMarks
from ballonet.offload.policy.plan import Fewest, Plan, fewest
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record import link

from ..models import Output
from ..tuned import Clock, Tuned
from .conftest import INPUTS, PAGE, full, say


@pytest.fixture(scope="module")
def stock_of_larger(larger: Any) -> Output:
    with install.stock():
        return say(larger)


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """What is measured takes a millisecond from one look at the clock to the next, so a forward one for itself and one
    for each layer that it waits for; nothing is given back."""
    ticks = count(step=10**6)
    monkeypatch.setattr(managed, "marks_of", lambda device, clock: HostMarks(lambda: next(ticks)))
    tuned(clock=Clock(), prices={"returns": math.inf})
    managers.of(devices.require()).link.bandwidth = 1e12


def frees(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for all layers but so many."""

    def choose(rule: Fewest, pages: Sequence[int], available: int) -> Plan | None:
        return fewest(pages, sum(pages) - layers * max(pages), rule.ratio)

    monkeypatch.setattr(Fewest, "choose", choose)


@pytest.mark.parametrize(
    ("freed", "ratio", "before", "after"),
    [(2, 2.0, (3, 1), (4, 2)), (4, 20.0, (6, 2), (5, 1)), (4, 4.0, (6, 2), (6, 2))],
)
def test_measured_link_leads_to_the_faster_number_of_slots(
    larger: Any,
    stock_of_larger: Output,
    monkeypatch: pytest.MonkeyPatch,
    freed: int,
    ratio: float,
    before: tuple[int, int],
    after: tuple[int, int],
) -> None:
    """Twice as fast as assumed, two slots free two layers of eight sooner; five times as slow, one slot frees four."""
    frees(freed, monkeypatch)
    with install.stock():
        model = copy.deepcopy(larger)
    with ballonet.manage(model) as found, full(managers.of(devices.require()).pages.mark):  # none come back by rental
        report, pages, moved = found.report(), found.report().pages, ballonet.stats().copied.weights_h2d
        assert (len(report.streamed), report.slots) == before
        resident = (before[0] + 1) * 1e-3
        managers.of(devices.require()).link.bandwidth = sum(found._residency.plan.pages) * PAGE / (resident * ratio)
        passes = 0
        while passes < 2 * DEFAULT.weights.look:
            assert say(model).agrees(stock_of_larger)
            passes += stock_of_larger.tokens.shape[1] - INPUTS["input_ids"].shape[1]
        report = found.report()
        assert (len(report.streamed), report.slots) == after
        assert found.report().pages == pages, "as many as before"
        assert ballonet.stats().copied.weights_h2d > moved
        slotted = after[0] + len(found._weights.ring.own.layers)  # pages are scarce, so that host copies stay
        assert report.times["decode"].resident == pytest.approx((slotted + 1) * 1e-3), "as a rule"
        elastic, point = found._residency, found._residency.timings.last["decode"].point
        assert point is not None
        for _ in range(2):
            assert elastic.timings.record is not None
            elastic.timings.record = elastic.timings.record.learned(point, 1.0)
        assert elastic.timings.seconds(point) == 1.0, "that is what an SLO would be judged by"
        assert found.report().times["decode"].resident == report.times["decode"].resident
        devices.require().check()
    assert say(model).agrees(stock_of_larger)


def test_a_link_that_could_not_be_measured_at_first_is_measured_later(
    larger: Any, stock_of_larger: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    frees(2, monkeypatch)
    manager, measure = managers.of(devices.require()), link.measure
    monkeypatch.setattr(manager.link, "_bandwidth", None)
    asked: list[int] = []

    def ask(device: Device, leave: int, **_: object) -> float | None:
        asked.append(leave)
        return measure(device, leave=leave) if len(asked) > 2 else None

    monkeypatch.setattr(link, "measure", ask)
    with install.stock():
        model = copy.deepcopy(larger)
    with ballonet.manage(model) as found:
        assert asked == [0]
        with monkeypatch.context() as patch:
            patch.setattr(found._pace, "capturing", lambda: True)
            for _ in range(3):
                assert say(model).agrees(stock_of_larger)
        assert asked == [0]
        for _ in range(3):
            assert say(model).agrees(stock_of_larger)
            if manager.link.bandwidth is None:
                assert "assumed" in found.report().why
                assert found.report().times["decode"].predicted is None
        assert asked == [0, manager.pages.mark, manager.pages.mark], "some pages stay free, and it is enough"
        assert manager.link.bandwidth is not None
        assert say(model).agrees(stock_of_larger)
        assert "assumed" not in found.report().why
        assert found.report().times["decode"].predicted is not None
        devices.require().check()
