"""What torch's memory statistics say under ballonet, and that torch gets its own functions back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from ballonet.allocator import _native, devices, pluggable
from ballonet.allocator.devices import set_budget
from ballonet.allocator.install import install

pytestmark = pytest.mark.usefixtures("restored")
SMALL: Mapping[str, Any] = {"budget": "8MiB", "page_size": "64KiB", "device": "cpu"}


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[_native.Device]:
    """A stand-in device under torch's CUDA statistics, which think that CUDA is in use."""
    install(**SMALL)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    statistics = pluggable.TorchStatistics(devices.require())
    statistics.patch()
    statistics.patch()
    yield devices.require()
    statistics.restore()


def test_torchs_own_functions_give_the_numbers(patched: _native.Device) -> None:
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    tensor = torch.ones(2**18)
    assert torch.cuda.memory_allocated(0) - before == 2**20
    assert torch.cuda.memory.memory_reserved(0) >= torch.cuda.memory_allocated(0)
    del tensor
    assert torch.cuda.memory_allocated(0) == before
    assert torch.cuda.max_memory_allocated(0) >= before + 2**20
    torch.cuda.memory.reset_peak_memory_stats(0)
    assert torch.cuda.max_memory_allocated(0) == before
    assert torch.cuda.max_memory_reserved(0) >= torch.cuda.max_memory_allocated(0)
    assert torch.cuda.memory_stats(0)["allocated_bytes.all.current"] == before
    torch.cuda.reset_accumulated_memory_stats(0)
    assert torch.cuda.memory_stats(0)["allocation.all.allocated"] == 0
    assert torch.cuda.memory_stats(0)["allocated_bytes.all.freed"] == 0
    assert "CUDA memory summary" in torch.cuda.memory_summary(0)


def test_pages_of_ranges_count_as_allocated(patched: _native.Device) -> None:
    before = torch.cuda.memory_allocated(0)
    pages = patched.reserve(2**20, "kv", patched.group())
    pages.map(0, 4)
    assert torch.cuda.memory_allocated(0) - before == 4 * 64 * 2**10
    pages.close()


def test_memory_info_follows_the_budget(patched: _native.Device) -> None:
    free, total = torch.cuda.mem_get_info(0)
    assert 0 < free <= 8 * 2**20 < total
    assert torch.cuda.memory.mem_get_info is torch.cuda.mem_get_info
    set_budget("4MiB")
    assert torch.cuda.mem_get_info(torch.device("cuda:0"))[0] <= 4 * 2**20
    assert torch.accelerator.memory.memory_allocated(0) == torch.cuda.memory_allocated(0)


def test_another_device_is_empty(patched: _native.Device) -> None:
    tensor = torch.ones(1000)
    assert torch.cuda.memory_allocated(1) == 0
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated(0) >= tensor.nbytes
