"""The governor with the reclaim list of the native core, on the stand-in: whose pages are taken, and that every weight
is there at any moment."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.allocator import _native
from ballonet.allocator.errors import PoolExhausted
from ballonet.offload.governor.governor import Governor
from ballonet.offload.policy.plan import Plan, smallest, spread
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Point

from .core import PAGE, Core, behind, holds, opened, physical, write
from .tuned import Clock

PAGES = (2,) * 6
BUDGET = 40


class Layers:
    """A model of six layers, two pages each; half of them hide behind a decode step, all but one behind a prefill.
    Layers that stream rest on their twins; the slots are there, and nobody uses them."""

    interval: int | Literal["auto"] | None = "auto"
    tpot_slo: float | None = None
    ttft_slo: float | None = None
    priority = 0
    floor = 0
    wanted: float | None = None

    def __init__(self, core: Core, governor: Governor, name: str, first: int) -> None:
        self.name = name
        self.governor = governor
        self.plan = Plan(PAGES)
        self.core = core
        self.group = core.device.group()
        self.ranges = [core.range(pages, "weights", self.group) for pages in PAGES]
        self.twins = [core.range(pages, "weights", self.group) for pages in PAGES]
        self.slots: list[_native.Range] = []
        self.first = first
        for layer, range_ in enumerate(self.ranges):
            range_.map(0, range_.pieces)
            write(range_.address, first + layer, range_.nbytes)
        governor.add(self)

    @property
    def running(self) -> bool:
        return self.group.leases > 0

    def seconds(self, point: Point) -> float | None:
        return 6.0 if point.phase == "decode" else 12.0

    def entry(self, layer: int) -> tuple[Any, list[Any]] | None:
        range_, twin = self.ranges[layer], self.twins[layer]
        return self.group, [(range_, 0, range_.pieces, twin, 0, [])]

    def arrange(self, plan: Plan) -> None:
        with self.governor.changing(self) as taken:
            away = {*self.plan.streamed} | taken
            for layer in {*plan.streamed} - away:
                self._cover(layer)
                assert self.ranges[layer].alias(0, self.twins[layer], 0, PAGES[layer])
            for slot in self.slots:
                slot.close()
            self.core.device.reap(wait=True)
            for layer in away - {*plan.streamed}:
                range_, twin = self.ranges[layer], self.twins[layer]
                assert range_.own(0, range_.pieces)
                ctypes.memmove(range_.address, twin.address, range_.nbytes)
                twin.close()
                self.twins[layer] = self.core.range(PAGES[layer], "weights", self.group)
            self.slots = [self.core.range(pages, "weights", self.group) for pages in plan.slot_pages]
            for slot in self.slots:
                slot.map(0, slot.pieces)
            self.plan = plan

    def step(self, phase: Literal["decode", "prefill"], kv: KV, change: int) -> bool:
        """An iteration with which the cache grows or shrinks; says whether there was room."""
        self.group.enter()
        try:
            decision = self.governor.before(self, Point(phase, 1, 1))
            if decision.plan != self.plan:
                self.arrange(decision.plan)
            return kv.change(change)
        finally:
            self.governor.after(self)
            self.group.leave()

    def check(self) -> None:
        """Every layer can be read, from the device or the host."""
        for layer, range_ in enumerate(self.ranges):
            assert holds(range_.address, self.first + layer, range_.nbytes), (self.name, layer)

    def _cover(self, layer: int) -> None:
        range_, twin = self.ranges[layer], self.twins[layer]
        if not twin.backed:
            twin.map_host(0, twin.pieces)
            ctypes.memmove(twin.address, range_.address, range_.nbytes)


class KV:
    def __init__(self, core: Core) -> None:
        self.core = core
        self.range = core.range(2 * BUDGET, "kv")
        self.pages = 0

    def change(self, by: int) -> bool:
        try:
            if by > 0:
                self.range.map(self.pages, by)
        except PoolExhausted:
            return False
        if by < 0:
            self.range.retire(self.pages + by, -by)
            self.core.device.reap(wait=True)
        self.pages += by
        return True


def test_the_cache_takes_pages_of_weights_when_none_is_free_and_gives_them_back() -> None:
    """Oneiros: when, which model, which layers, one direction, reversion."""
    with opened(budget=BUDGET, host_budget=64) as core:
        clock = Clock()
        governor = Governor(core.device, bandwidth=2 * PAGE, clock=clock)
        a, b = Layers(core, governor, "a", 1), Layers(core, governor, "b", 101)
        kv = KV(core)
        assert a.step("decode", kv, BUDGET - 24)
        assert core.pages()["free"] == 0
        assert a.step("decode", kv, 0)
        assert not any(twin.backed for twin in b.twins), "nothing is prepared"
        assert a.step("decode", kv, 1)
        assert core.pages()["free"] == 1, "one layer"
        assert behind(b.ranges[0].address)[0] == "host"
        assert a.step("decode", kv, 7)
        assert [behind(range_.address)[0] for range_ in b.ranges] == [
            "host",
            "host",
            "device",
            "host",
            "host",
            "device",
        ]
        assert [behind(range_.address)[0] for range_ in a.ranges] == ["device"] * 6
        gone = sum(twin.backed for twin in b.twins)
        assert core.device.snapshot()["copied"]["weights_d2h"] == gone * PAGE, "once, when they are taken"
        for each in (a, b):
            each.check()
        clock.now += 2 * DEFAULT.pages.idle
        assert b.step("prefill", kv, 0)
        assert b.plan.device_pages == 4
        assert b.plan.streamed == spread(PAGES, len(b.plan.streamed))
        b.check()
        assert kv.change(-kv.pages)
        for _ in range(40):
            clock.now += DEFAULT.pages.dwell / 8
            assert b.step("decode", kv, 0)
        assert b.plan == Plan(PAGES)
        assert [behind(range_.address)[0] for range_ in b.ranges] == ["device"] * 6
        for each in (a, b):
            each.check()
            governor.remove(each)
        assert core.device.published == []


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(-12, 12), st.booleans()), max_size=30))
def test_whoever_comes_and_goes_weights_are_whole_and_within_the_budget(
    steps: list[tuple[int, bool, int, bool]],
) -> None:
    with opened(budget=BUDGET, host_budget=64) as core:
        clock = Clock()
        governor = Governor(core.device, bandwidth=2 * PAGE, clock=clock)
        them = [Layers(core, governor, name, 1 + 50 * n) for n, name in enumerate("abc")]
        kv = KV(core)
        for which, decode, change, pause in steps:
            clock.now += 2 * DEFAULT.pages.idle if pause else 0.1
            them[which].step("decode" if decode else "prefill", kv, max(change, -kv.pages))
            assert physical() <= BUDGET * PAGE
            for model in them:
                model.check()
                assert model.plan.device_pages >= smallest(PAGES), "never a whole model: one slot"
            core.device.check()
        for each in them:
            governor.remove(each)
