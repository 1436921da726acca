"""How a device is chosen and what it is given where nothing was said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ballonet.allocator import ram, runtime
from ballonet.allocator.config import Config
from ballonet.allocator.errors import BallonetError, ConfigError, DriverUnavailable, InstallError, NotInstalled

PAGE = 65536
SMALL = Config(device="cpu", page_size=PAGE, budget=16 * PAGE, host_budget=4 * PAGE)


def test_the_cpu_is_the_stand_in() -> None:
    assert runtime.choose(Config(device="cpu")).kind == "standin"


def test_a_named_library_that_is_the_stand_in_is_used_as_one() -> None:
    named = Config(libcuda=runtime.standin_library())
    for device in ("auto", "cuda", "cuda:0"):
        target = runtime.choose(dataclasses.replace(named, device=device), torch_has_cuda=False)
        assert (target.kind, target.library) == ("standin", named.libcuda)


def test_a_named_library_must_be_a_driver(tmp_path: Path) -> None:
    path = tmp_path / "libcuda.so"
    path.write_text("not a library")
    for device in ("auto", "cuda"):
        with pytest.raises(DriverUnavailable, match="BALLONET_DEVICE=cpu"):
            runtime.choose(Config(device=device, libcuda=str(path)))
    assert runtime.choose(Config(device="cpu", libcuda=str(path))).kind == "standin"


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DriverUnavailable, match="no device 63"):
        runtime.choose(Config(device="cuda:63", libcuda=runtime.standin_library()))


def test_where_torch_has_no_cuda_auto_is_the_stand_in() -> None:
    assert runtime.choose(Config(), torch_has_cuda=False).kind == "standin"


@pytest.mark.gpu
def test_auto_takes_the_gpu_unless_torch_cannot() -> None:
    assert runtime.choose(Config()).kind == "cuda"
    assert runtime.choose(Config(), torch_has_cuda=True).kind == "cuda"
    with pytest.raises(DriverUnavailable, match="without CUDA"):
        runtime.choose(Config(device="cuda"), torch_has_cuda=False)


@pytest.mark.parametrize(("kind", "good", "bad"), [("standin", 12288, 4097), ("cuda", 6 * 2**20, 3 * 2**20)])
def test_page_sizes(kind: str, good: int, bad: int) -> None:
    assert runtime.page_size(Config(page_size=good), kind) == good  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="multiple of"):
        runtime.page_size(Config(page_size=bad), kind)  # type: ignore[arg-type]


def test_default_page_sizes() -> None:
    assert runtime.page_size(Config(), "standin") == runtime.STANDIN_PAGE_SIZE
    assert runtime.page_size(Config(), "cuda") == runtime.CUDA_PAGE_SIZE


def test_a_budget_is_whole_pages_and_not_too_few() -> None:
    assert runtime.whole_pages(10 * PAGE + 1, PAGE, "it") == 10 * PAGE
    with pytest.raises(ConfigError, match=r"the budget is 128KiB.*4 pages of 64KiB"):
        runtime.open_device(dataclasses.replace(SMALL, budget=2 * PAGE))


def test_the_default_budget_of_the_stand_in_is_half_of_what_is_available() -> None:
    device = runtime.open_device(Config(device="cpu"))
    assert device.budget % device.page_size == 0
    assert device.budget == pytest.approx(ram.available() / 2, rel=0.25)
    device.close()


@pytest.mark.gpu
def test_the_default_budget_of_a_gpu_leaves_room_outside() -> None:
    device = runtime.open_device(Config(device="cuda"))
    free, total = device.free_memory()
    assert 0 < device.budget <= free - runtime.OUTSIDE_BYTES
    assert device.budget <= total * (1 - runtime.OUTSIDE_SHARE)
    device.close()


def test_host_budgets() -> None:
    assert runtime.host_budget(Config(host_budget=3 * PAGE + 1), "standin", PAGE) == 3 * PAGE
    quarter = runtime.host_budget(Config(), "cuda", PAGE)
    assert 0 <= ram.total() // 4 - quarter < PAGE
    rest = runtime.host_budget(Config(budget=2**29), "standin", PAGE)
    assert rest == pytest.approx((ram.available() - 2**29) / 2, rel=0.25)
    assert runtime.host_budget(Config(budget=2**60), "standin", PAGE) == 0


def test_one_device_per_process() -> None:
    assert runtime.current() is None
    with pytest.raises(NotInstalled):
        runtime.require()
    with pytest.raises(NotInstalled):
        runtime.settings()
    device = runtime.start(SMALL)
    try:
        assert runtime.current() is runtime.require() is device
        assert runtime.settings() == dataclasses.replace(SMALL, spill=True)
        with pytest.raises(InstallError, match="already"):
            runtime.start(SMALL)
    finally:
        runtime.stop()
    assert runtime.current() is None
    runtime.stop()  # of nothing


def test_a_device_in_use_is_not_closed() -> None:
    device = runtime.start(SMALL)
    block = device.allocate(100)
    with pytest.raises(BallonetError):
        runtime.stop()
    assert runtime.current() is device
    device.deallocate(block)
    runtime.stop()


def test_a_container_s_limit_counts(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    meminfo.write_text("MemTotal:        8000 kB\nMemAvailable:    6000 kB\nHugePages_Total:       0\n")
    assert ram.total(meminfo) == 8000 * 1024
    assert ram.available(meminfo, cgroup) == 6000 * 1024
    (cgroup / "memory.max").write_text("max\n")
    assert ram.available(meminfo, cgroup) == 6000 * 1024
    (cgroup / "memory.max").write_text(f"{4000 * 1024}\n")
    (cgroup / "memory.current").write_text(f"{3000 * 1024}\n")
    (cgroup / "memory.stat").write_text(f"anon 12\ninactive_file {500 * 1024}\n")
    assert ram.available(meminfo, cgroup) == 1500 * 1024
    (cgroup / "memory.current").write_text(f"{9000 * 1024}\n")
    assert ram.available(meminfo, cgroup) == 0
