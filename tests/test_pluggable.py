"""The CUDA branch: its wiring, with torch's side played by the test, and on a GPU all of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from ballonet.allocator import devices, pluggable
from ballonet.allocator import install as module
from ballonet.allocator.errors import InstallError
from ballonet.allocator.install import install, restore
from ballonet.allocator.pluggable import HOOKS, CudaAllocator

pytestmark = pytest.mark.usefixtures("restored")
SMALL: Mapping[str, Any] = {"budget": "8MiB", "page_size": "64KiB", "device": "cpu"}


class FakeTorch:
    """What the CUDA branch uses of torch._C."""

    def __init__(self) -> None:
        self.current: object = None
        self.used = False
        self.hooks: dict[str, int] = {}

    def custom(self, alloc: int, free: int) -> FakeTorch:
        self.hooks |= {"alloc": alloc, "free": free}
        return self

    def change(self, other: object) -> None:
        if self.used:
            raise RuntimeError("Can't swap an already initialized allocator")
        self.current, self.used = other, True

    def __getattr__(self, setter: str) -> Any:
        if setter not in HOOKS:
            raise AttributeError(setter)
        return lambda address: self.hooks.update({setter: address})


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    fake = FakeTorch()
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", fake.custom, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_changeCurrentAllocator", fake.change, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getAllocator", lambda: fake.current, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: fake.used)
    return fake


def originals() -> list[object]:
    return [
        torch.cuda.mem_get_info,
        torch.cuda.memory.mem_get_info,
        torch._C._accelerator_getMemoryInfo,
        getattr(torch._C, "_cuda_memoryStats", None),
    ]


@pytest.mark.parametrize("compiled", [True, False])
def test_the_cuda_allocator_is_wired_and_put_in_place(fake_torch: FakeTorch, compiled: bool) -> None:
    install(**SMALL)
    before = originals()
    statistics = pluggable.TorchStatistics(devices.require())
    installed = module._installed
    assert installed is not None
    cuda = CudaAllocator(installed.companion if compiled else None, statistics)
    assert set(fake_torch.hooks) == {"alloc", "free", *HOOKS}
    assert 0 not in fake_torch.hooks.values()
    assert not cuda.in_place
    assert originals() == before
    torch.cuda.memory.change_current_allocator(cuda)
    assert cuda.in_place
    assert originals() != before
    with pytest.raises(InstallError, match="already"):
        torch.cuda.memory.change_current_allocator(cuda)
    statistics.restore()
    assert originals() == before


def test_cuda_that_was_used_is_reported_before_anything_changes(fake_torch: FakeTorch) -> None:
    install(**SMALL)
    before = originals()
    fake_torch.used = True
    cuda = CudaAllocator(None, pluggable.TorchStatistics(devices.require()))
    with pytest.raises(InstallError, match="before anything is moved to the GPU"):
        torch.cuda.memory.change_current_allocator(cuda)
    assert originals() == before


def test_a_cuda_allocator_whose_pool_is_gone_is_refused(fake_torch: FakeTorch) -> None:
    install(**SMALL)
    cuda = CudaAllocator(None, pluggable.TorchStatistics(devices.require()))
    restore()
    with pytest.raises(InstallError, match="again"):
        torch.cuda.memory.change_current_allocator(cuda)
    assert fake_torch.current is None


def test_a_cuda_allocator_in_place_is_not_restored(fake_torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    install(**SMALL)
    installed = module._installed
    assert installed is not None
    cuda = CudaAllocator(None, installed.statistics)
    monkeypatch.setattr(installed, "cuda", cuda)
    module._put(installed)
    assert fake_torch.current is cuda._allocator
    install()  # again is nothing
    with pytest.raises(InstallError, match="new process"):
        restore()
    assert devices.current() is not None
    fake_torch.current = None


# -- On a GPU ----------------------------------------------------------------------------------------------------------


def on_gpu(script: str) -> str:
    """Runs a script in a process of its own: torch's CUDA allocator can be changed once in each."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


GPU = """
import torch, ballonet
from ballonet.allocator import devices
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how", ["ballonet.install('2GiB')", "torch.cuda.memory.change_current_allocator(ballonet.allocator())"]
)
def test_gpu_tensors_lie_in_the_pool(how: str) -> None:
    on_gpu(f"""{GPU}
{how}
tensor = torch.ones(2**20, device="cuda")
device = devices.require()
assert device.kind == "cuda"
assert device.block_size(tensor.data_ptr()) == 2**22, device.block_size(tensor.data_ptr())
assert tensor.sum().item() == 2**20
assert torch.cuda.memory_allocated() >= 2**22
assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
del tensor
peak = torch.cuda.max_memory_allocated()
assert peak >= 2**22
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.max_memory_allocated() < peak
torch.cuda.empty_cache()
free, total = torch.cuda.mem_get_info()
assert 0 < free <= device.budget < total
device.check()
""")


@pytest.mark.gpu
def test_gpu_already_in_use_is_refused() -> None:
    on_gpu(f"""{GPU}
torch.ones(1, device="cuda")
try:
    torch.cuda.memory.change_current_allocator(ballonet.allocator())
except ballonet.BallonetError as error:
    assert "before anything is moved" in str(error), error
else:
    raise AssertionError("changed after CUDA was used")
assert devices.current() is None
assert torch.ones(10, device="cuda").sum().item() == 10
""")
