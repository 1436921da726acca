"""Traffic on the link, asked of an NVML that is made up, and of none."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ballonet.offload import link


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


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_what_a_gpu_receives(nvml: FakeNvml) -> None:
    assert [link.received("GPU-a") for _ in range(3)] == [3000 * 1024] * 3
    assert nvml.opened == 1


def test_nobody_knows(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert link.received("GPU-virtual") is None
    assert link.received("somewhere else") is None
    nvml.driver = False
    assert link.received("GPU-b") is None, "no driver"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert link.received("GPU-a") is None, "not installed"
