"""The link: its speed by a clock that is set by hand; its kind and traffic, asked of an NVML that is made up."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from ballonet.allocator._native import Transfer
from ballonet.offload.record import link

from .core import PAGE, Core, opened


class Missing(Exception):
    pass


class FakeNvml(ModuleType):
    """Two GPUs, of which one has no counter."""

    NVMLError = Missing
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.opened = 0
        self.driver = True

    def nvmlInit(self) -> None:
        if not self.driver:
            raise Missing
        self.opened += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not self.opened or not uuid.startswith("GPU-"):
            raise Missing
        return uuid

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        if handle == "GPU-virtual":
            raise Missing
        return {0: 7, 1: 3000}[counter]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        if handle == "GPU-virtual":
            raise Missing
        return 5

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.65.06"

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_bytes_that_a_gpu_receives_are_those_of_nvml(nvml: FakeNvml) -> None:
    assert [link.received("GPU-a") for _ in range(3)] == [3000 * 1024] * 3
    assert nvml.opened == 1


def test_link_is_described_by_nvml(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert link.described("GPU-a") == "PCIe 5 x16"
    assert link.driver("GPU-a") == "580.65.06"
    assert link.described("GPU-virtual") == link.driver("none") == ""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert link.described("GPU-a") == link.driver("GPU-a") == ""


def test_nobody_knows(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert link.received("GPU-virtual") is None
    assert link.received("somewhere else") is None
    nvml.driver = False
    assert link.received("GPU-b") is None, "no driver"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert link.received("GPU-a") is None, "not installed"


# -- how fast it is


class Counted:
    """A stream of copies, and what it was asked for."""

    parts: ClassVar[list[int]] = []  # bytes of each

    def __init__(self, device: Any) -> None:
        self._transfer = Transfer(device)

    def copy(self, parts: list[tuple[int, int, int]], **how: Any) -> Any:
        done = self._transfer.copy(parts, **how)
        self.parts.extend(nbytes for _, _, nbytes in parts)
        return done


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "Transfer", Counted)
    monkeypatch.setattr(Counted, "parts", [])


class Tape:
    """A clock that is as late as there are bytes: so many per second, and some time for each look at it."""

    def __init__(self, core: Core, rate: float, look: float = 0.0, disturbed: int = 0) -> None:
        self.core = core
        self.rate = rate
        self.look = look
        self.disturbed = disturbed  # this look comes late
        self.looks = 0
        self.late = 0.0
        self.bytes: list[int] = []

    def __call__(self) -> float:
        copied = sum(Counted.parts)
        self.bytes.append(copied)
        self.looks += 1
        self.late += self.look + 9 * (self.looks == self.disturbed)
        return float(copied / self.rate + self.late)


def held(core: Core) -> tuple[int, int]:
    return core.pages()["weights"], sum(core.device.snapshot()["copied"].values())


@pytest.mark.parametrize(("rate", "budget", "host"), [(1e6, 2, 2), (2e8, 3, 9), (2e8, 64, 5), (5e10, 1024, 1024)])
def test_the_speed_of_the_link(rate: float, budget: int, host: int) -> None:
    with opened(budget=budget, host_budget=host) as core:
        tape = Tape(core, rate)
        for _ in range(2):  # what it has taken comes back
            assert link.measure(core.device, tape) == pytest.approx(rate)
            assert core.pages()["weights"] == 0
        most = max(after - before for before, after in zip(tape.bytes, tape.bytes[1:], strict=False))
        assert most <= max(rate / 10, 2**20), "a slow link is not kept for long"


def test_disturbed_measurement_does_not_count() -> None:
    with opened(budget=512, host_budget=512) as core:
        quiet = Tape(core, 1e9, look=1e-4)
        bandwidth = link.measure(core.device, quiet)
        assert bandwidth is not None
        assert 0.99e9 < bandwidth < 1e9, "copies are long enough for the looks not to count"
        for late in range(quiet.looks):
            assert link.measure(core.device, Tape(core, 1e9, disturbed=late + 1)) == pytest.approx(1e9)


def test_under_a_pool_that_is_nearly_full() -> None:
    with opened(budget=8, host_budget=8) as core:
        mine, twin = core.range(7, "weights"), core.range(5, "weights")
        mine.map(0, 7)
        twin.map_host(0, 5)
        before = held(core)
        assert link.measure(core.device, Tape(core, 1e9)) == pytest.approx(1e9)
        assert held(core) == before
        core.device.check()
        rest = core.range(1, "kv")
        rest.map(0, 1)
        assert link.measure(core.device) is None, "no page of the device"
        rest.close()
        core.device.reap(wait=True)
        rest = core.range(3, "weights")
        rest.map_host(0, 3)
        assert link.measure(core.device) is None, "no page of the host"
        assert link.measure(SimpleNamespace(host_pages=False, page_size=PAGE)) is None  # type: ignore[arg-type]


def test_a_link_of_the_stand_in_is_no_faster_than_it_was_set_to() -> None:
    """The clock is the real one; that a copy takes no less than its time the stand-in's engine sees to."""
    with opened(budget=64, host_budget=64, link_bandwidth=100_000_000) as core:
        bandwidth = link.measure(core.device)
        assert bandwidth is not None
        assert bandwidth <= 100_000_000 * 1.01


class Beside:
    """Work of a second, or of one and a half while a copy is on its way; and copies of six seconds, one after the
    other."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self.most = 0  # copies on their way at a time

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.now += 1.5 if self.now < self.free else 1.0

    def copy(self, parts: list[tuple[int, int, int]], **how: Any) -> Any:
        assert len(parts) == 1
        self.free = due = max(self.now, self.free) + 6.0
        self.most = max(self.most, round((due - self.now) / 6))
        return SimpleNamespace(passed=lambda: self.now >= due, wait=lambda: self._wait(due))

    def _wait(self, until: float) -> None:
        self.now = max(self.now, until)


def test_time_that_work_loses_beside_copies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(budget=64, host_budget=64) as core:
        before, beside = held(core), Beside()
        monkeypatch.setattr(link, "Transfer", lambda device: beside)
        copied = {"layer": 2 * PAGE, "beside": 5 * 2 * PAGE / 1e6}  # five copies
        assert link.lost(core.device, 1e6, beside.work, beside, **copied) == pytest.approx(1 / 3)
        assert beside.most == 2, "one is on its way, and one behind it"
        assert held(core) == before
    with opened(budget=2, host_budget=0) as core:
        assert link.lost(core.device, 1e6, beside.work, beside) == 0.0, "there are no host pages to copy"
