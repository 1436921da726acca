"""Putting the pool under torch: settings, repetition, failures half way, the wiring of the CUDA branch, statistics."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import _native, companion, runtime, torch_stats
from ballonet.allocator import install as module
from ballonet.allocator.errors import (
    BallonetError,
    ConfigError,
    DriverUnavailable,
    InstallError,
    UnsupportedVersion,
)
from ballonet.allocator.install import allocator, install, restore, set_budget, stock
from ballonet.allocator.pluggable import HOOKS, CudaAllocator

SMALL: Mapping[str, Any] = {"budget": "8MiB", "page_size": "64KiB", "host_budget": "1MiB", "device": "cpu"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("BUDGET", "PAGE_SIZE", "HOST_BUDGET", "DEVICE", "LIBCUDA", "FAULT"):
        monkeypatch.delenv(f"BALLONET_{variable}", raising=False)
    yield
    gc.collect()
    restore()
    assert runtime.current() is None


def activations_in_pool() -> bool:
    address = torch.empty(100_000).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:ballonet-device" in line:
            begin, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            if begin <= address < end:
                return True
    return False


def test_the_facade_offers_it() -> None:
    ballonet.install(**SMALL)
    assert activations_in_pool()
    assert ballonet.stats().budget == 8 * 2**20
    ballonet.set_budget("16MiB")
    assert ballonet.stats().budget == 16 * 2**20
    ballonet.restore()
    assert not activations_in_pool()
    with pytest.raises(BallonetError):
        ballonet.stats()


def test_twice_is_once() -> None:
    install(**SMALL)
    device = runtime.require()
    install()
    install(**SMALL)
    install("8MiB")
    assert runtime.require() is device
    set_budget("16MiB")
    install("16MiB")  # the budget in force
    install(**SMALL)  # the settings of the first time
    assert runtime.require() is device


@pytest.mark.parametrize(
    ("other", "remedy"),
    [
        ({"budget": "9MiB"}, "set_budget"),
        ({"page_size": "128KiB"}, "restore"),
        ({"host_budget": "2MiB"}, "restore"),
        ({"device": "cuda:3"}, "restore"),
    ],
)
def test_other_settings_are_refused(other: dict[str, str], remedy: str) -> None:
    install(**SMALL)
    device, budget = runtime.require(), ballonet.stats().budget
    with pytest.raises(InstallError, match=remedy):
        install(**other)
    assert runtime.require() is device
    assert (ballonet.stats().budget, ballonet.stats().page_size) == (budget, 64 * 2**10)
    assert activations_in_pool()


def test_other_settings_after_restore() -> None:
    install(**SMALL)
    restore()
    restore()
    install(**{**SMALL, "page_size": "128KiB"})
    assert runtime.require().page_size == 128 * 2**10


def test_other_settings_while_the_old_pool_is_in_use() -> None:
    install(**SMALL)
    tensor = torch.ones(1000)
    restore()
    with pytest.raises(InstallError, match="page_size"):
        install(**{**SMALL, "page_size": "128KiB"})
    assert tensor.numpy().sum() == 1000
    assert not activations_in_pool()


def test_the_environment_fills_what_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLONET_BUDGET", "12MiB")
    monkeypatch.setenv("BALLONET_PAGE_SIZE", "64KiB")
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    install(page_size="128KiB")
    assert (runtime.require().budget, runtime.require().page_size) == (12 * 2**20, 128 * 2**10)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"budget": "lots"}, ConfigError),
        ({"budget": "-1GiB"}, ConfigError),
        ({"budget": "100KiB", "page_size": "64KiB"}, ConfigError),
        ({"page_size": "5000"}, ConfigError),
        ({"host_budget": "no"}, ConfigError),
        ({"device": "tpu"}, ConfigError),
        ({"device": "cuda:77"}, DriverUnavailable),
    ],
)
def test_bad_settings_change_nothing(settings: dict[str, str], error: type[BallonetError]) -> None:
    with pytest.raises(error):
        install(**{"device": "cpu", **settings})
    assert not activations_in_pool()
    with pytest.raises(BallonetError):
        ballonet.stats()


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cu128")
    with pytest.raises(UnsupportedVersion, match=r"2\.11"):
        install(**SMALL)
    assert runtime.current() is None


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.0a0+git1234", "3.0.1"])
def test_a_newer_torch_is_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    module._check_torch()


def test_threads_install_it_once() -> None:
    found: list[_native.Device] = []

    def work() -> None:
        install(**SMALL)
        found.append(runtime.require())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_a_model_loaded_before_keeps_its_memory() -> None:
    model = torch.nn.Linear(64, 64)
    expected = model(torch.ones(1, 64)).detach().numpy().copy()
    address = model.weight.data_ptr()
    install(**SMALL)
    assert model.weight.data_ptr() == address
    assert (model(torch.ones(1, 64)).detach().numpy() == expected).all()


FAULTS = """
import os, torch, ballonet
from ballonet.allocator import runtime

def where():
    address = torch.empty(100_000).data_ptr()
    spans = [line.split()[0] for line in open("/proc/self/maps") if "memfd:ballonet-device" in line]
    return any(int(a, 16) <= address < int(b, 16) for a, _, b in (span.partition("-") for span in spans))

def cycle():
    ballonet.install("8MiB", page_size="64KiB", host_budget="1MiB", device="cpu")
    calls = ballonet.stats().driver_calls
    try:
        assert where()
    except torch.OutOfMemoryError:
        assert where()  # a fault fires once
    runtime.require().check()
    ballonet.restore()
    return dict(calls)

first, second = cycle(), cycle()
stopped = attempts = 0
for function in second:
    for call in range(1, second[function] - first[function] + 1):
        os.environ["BALLONET_FAULT"] = ""
        while runtime.current() is not None:
            ballonet.restore()
        while True:
            try:
                now = cycle()
                break
            except ballonet.BallonetError:
                pass
        os.environ["BALLONET_FAULT"] = f"{function}:{now[function] + call}"
        attempts += 1
        try:
            cycle()
        except ballonet.BallonetError as error:
            if runtime.current() is None:  # install() failed
                stopped += 1
                assert not where(), (function, call)
                try:
                    ballonet.stats()
                    raise SystemExit(f"stats() after install() failed: {error}")
                except ballonet.BallonetError:
                    pass
print(attempts, stopped)
"""


def test_a_fault_at_any_driver_call_unwinds() -> None:
    result = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    attempts, stopped = map(int, result.stdout.split())
    assert attempts > 20
    assert stopped > 5


@pytest.mark.parametrize("step", ["load", "TorchStatistics"])
def test_a_failure_after_the_device_was_started_unwinds(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*args: object) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(module, step, fail)
        with pytest.raises(MemoryError):
            install(**SMALL)
    assert runtime.current() is None
    assert not activations_in_pool()
    install(**SMALL)
    assert activations_in_pool()


def test_another_cpu_allocator_in_the_way_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(companion.Companion, "install_cpu", lambda self: False)
        with pytest.raises(InstallError, match="another library"):
            install(**SMALL)
    assert runtime.current() is None


def test_without_a_compiler_the_rest_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(companion, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("BALLONET_CACHE_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="activations"):
        install(**SMALL)
    assert not activations_in_pool()
    device = runtime.require()
    device.reserve(2**20, "kv", device.group()).map(0, 16)
    with stock():
        assert torch.ones(10).sum() == 10
    gc.collect()


def test_there_is_no_cuda_allocator_without_cuda() -> None:
    if torch.version.cuda is not None and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InstallError, match="install"):
        ballonet.allocator()
    assert runtime.current() is None
    install(**SMALL)
    with pytest.raises(InstallError, match="install"):
        allocator()


# -- The CUDA branch: torch's side of it is played by the test --------------------------------------------------------


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
    statistics = torch_stats.TorchStatistics(runtime.require())
    installed = module._installed
    assert installed is not None
    cuda = CudaAllocator(installed.companion if compiled else None, statistics)
    hooks = {"alloc", "free", *HOOKS} if compiled else {"alloc", "free", "set_reset_fn", "set_record_stream_fn"}
    assert set(fake_torch.hooks) == hooks
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
    cuda = CudaAllocator(None, torch_stats.TorchStatistics(runtime.require()))
    with pytest.raises(InstallError, match="before anything is moved to the GPU"):
        torch.cuda.memory.change_current_allocator(cuda)
    assert originals() == before


def test_a_cuda_allocator_whose_pool_is_gone_is_refused(fake_torch: FakeTorch) -> None:
    install(**SMALL)
    cuda = CudaAllocator(None, torch_stats.TorchStatistics(runtime.require()))
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
    assert runtime.current() is not None
    fake_torch.current = None


# -- torch's statistics ------------------------------------------------------------------------------------------------


SNAPSHOT: Mapping[str, Any] = {
    "page_size": 1000,
    "budget": 20_000,
    "created": 14,
    "pages": {"free": 2, "weights": 3, "activations": 5, "kv": 3, "retiring": 1},
    "physical_peak": 16_000,
    "driver_calls": {"cuMemCreate": 17, "cuMemRelease": 3, "cuMemMap": 40},
    "heap": {
        "live": 4_000, "live_peak": 4_500, "requested": 3_900, "requested_peak": 4_400, "reserved": 5_000,
        "reserved_peak": 6_000, "blocks": 7, "allocations": 30, "frees": 23, "hits": 20,
    },
}  # fmt: skip


def test_statistics_from_a_snapshot() -> None:
    stats = torch_stats.memory_stats(SNAPSHOT, allocations=10, frees=9)
    assert stats["allocated_bytes"]["all"] | {"allocated": 0} == {
        "current": 10_000, "peak": 10_500, "allocated": 0, "freed": 0,
    }  # fmt: skip
    assert stats["requested_bytes"]["all"]["current"] == 9_900
    assert (stats["reserved_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["peak"]) == (14_000, 16_000)
    assert stats["allocation"]["all"] == {"current": 7, "peak": 7, "allocated": 20, "freed": 14}
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (17, 3)
    assert stats["allocated_bytes"]["small_pool"]["current"] == 0


def test_a_peak_is_never_above_what_existed_nor_below_what_is() -> None:
    peak = dict(SNAPSHOT) | {"physical_peak": 10_200}
    assert torch_stats.memory_stats(peak)["allocated_bytes"]["all"]["peak"] == 10_200
    peak |= {"physical_peak": 9_000}
    assert torch_stats.memory_stats(peak)["allocated_bytes"]["all"]["peak"] == 10_000


@pytest.mark.parametrize(
    ("free", "budget", "expected"),
    [(100_000, 20_000, 8_000), (3_500, 20_000, 5_000), (100_000, 14_000, 2_000), (100_000, 9_000, 2_000)],
)
def test_what_can_still_be_had(free: int, budget: int, expected: int) -> None:
    assert torch_stats.mem_get_info(dict(SNAPSHOT) | {"budget": budget}, free, 10**6) == (expected, 10**6)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[_native.Device]:
    """A stand-in device under torch's CUDA statistics, which think that CUDA is in use."""
    install(**SMALL)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    statistics = torch_stats.TorchStatistics(runtime.require())
    statistics.patch()
    statistics.patch()
    yield runtime.require()
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


# -- On a GPU ----------------------------------------------------------------------------------------------------------


def on_gpu(script: str) -> str:
    """Runs a script in a process of its own: torch's CUDA allocator can be changed once in each."""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


GPU = """
import torch, ballonet
from ballonet.allocator import runtime
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "how", ["ballonet.install('2GiB')", "torch.cuda.memory.change_current_allocator(ballonet.allocator())"]
)
def test_gpu_tensors_lie_in_the_pool(how: str) -> None:
    on_gpu(f"""{GPU}
{how}
tensor = torch.ones(2**20, device="cuda")
device = runtime.require()
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
def test_gpu_out_of_memory_is_torchs_error() -> None:
    on_gpu(f"""{GPU}
ballonet.install("256MiB")
try:
    torch.empty(2**30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "set_budget" in str(error), error
else:
    raise AssertionError("1 GiB fitted into 256 MiB")
assert torch.ones(2**20, device="cuda").sum().item() == 2**20
""")


@pytest.mark.gpu
def test_gpu_already_in_use_is_refused() -> None:
    on_gpu(f"""{GPU}
torch.ones(1, device="cuda")
try:
    ballonet.install()
except ballonet.BallonetError as error:
    assert "before anything is moved" in str(error), error
else:
    raise AssertionError("installed after CUDA was used")
assert runtime.current() is None
assert torch.ones(10, device="cuda").sum().item() == 10
""")


@pytest.mark.gpu
def test_gpu_streams_and_graphs() -> None:
    on_gpu(f"""{GPU}
ballonet.install("2GiB")
side = torch.cuda.Stream()
for round in range(50):
    tensor = torch.full((2**18,), float(round), device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000)
        total = tensor.sum()
    tensor.record_stream(side)
    del tensor
    torch.full((2**18,), -1.0, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    assert total.item() == 2**18 * round
fixed = torch.zeros(1024, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = (fixed + 1) * 2
for value in (1.0, 5.0):
    fixed.fill_(value)
    graph.replay()
    assert out.eq((value + 1) * 2).all().item()
runtime.require().check()
""")
