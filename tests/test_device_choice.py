"""How a device is chosen and what it is given where nothing was said."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ballonet.allocator import defaults, device_choice, devices, info, ram
from ballonet.allocator.config import Config
from ballonet.allocator.errors import BallonetError, ConfigError, DriverUnavailable

from .core import shim

PAGE = 65536
SMALL = Config(device="cpu", page_size=PAGE, budget=16 * PAGE, host_budget=4 * PAGE)


def test_the_cpu_is_the_stand_in_and_auto_is_where_torch_has_no_cuda() -> None:
    assert device_choice.choose(Config(device="cpu")).kind == "standin"
    assert device_choice.choose(Config(), torch_has_cuda=False).kind == "standin"


def test_a_named_library_that_is_the_stand_in_is_used_as_one() -> None:
    named = Config(libcuda=device_choice.standin_library())
    for device in ("auto", "cuda", "cuda:0"):
        target = device_choice.choose(dataclasses.replace(named, device=device), torch_has_cuda=False)
        assert (target.kind, target.library) == ("standin", named.libcuda)


def test_a_named_library_must_be_a_driver(tmp_path: Path) -> None:
    path = tmp_path / "libcuda.so"
    path.write_text("not a library")
    for device in ("auto", "cuda"):
        with pytest.raises(DriverUnavailable, match="BALLONET_DEVICE=cpu"):
            device_choice.choose(Config(device=device, libcuda=str(path)))
    assert device_choice.choose(Config(device="cpu", libcuda=str(path))).kind == "standin"


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(DriverUnavailable, match="no device 63"):
        device_choice.choose(Config(device="cuda:63", libcuda=device_choice.standin_library()))


@pytest.mark.gpu
def test_auto_takes_the_gpu_unless_torch_cannot() -> None:
    assert device_choice.choose(Config()).kind == "cuda"
    assert device_choice.choose(Config(), torch_has_cuda=True).kind == "cuda"
    with pytest.raises(DriverUnavailable, match="without CUDA"):
        device_choice.choose(Config(device="cuda"), torch_has_cuda=False)


@pytest.mark.parametrize(("kind", "good", "bad"), [("standin", 12288, 4097), ("cuda", 6 * 2**20, 3 * 2**20)])
def test_page_sizes(kind: str, good: int, bad: int) -> None:
    assert device_choice.page_size(Config(page_size=good), kind) == good  # type: ignore[arg-type]
    assert device_choice.page_size(Config(), kind) == defaults.PAGE_SIZE[kind]  # type: ignore[arg-type, index]
    with pytest.raises(ConfigError, match="multiple of"):
        device_choice.page_size(Config(page_size=bad), kind)  # type: ignore[arg-type]


def test_a_budget_is_whole_pages_and_not_too_few() -> None:
    assert device_choice.whole_pages(10 * PAGE + 1, PAGE, "it") == 10 * PAGE
    with pytest.raises(ConfigError, match=r"the budget is 128KiB.*4 pages of 64KiB"):
        device_choice.open_device(dataclasses.replace(SMALL, budget=2 * PAGE))


def test_the_default_budget_of_the_stand_in_is_half_of_what_is_available() -> None:
    device = device_choice.open_device(Config(device="cpu"))
    assert device.budget % device.page_size == 0
    assert device.budget == pytest.approx(ram.available() / 2, rel=0.25)
    device.close()


@pytest.mark.gpu
def test_the_default_budget_of_a_gpu_leaves_room_outside() -> None:
    device = device_choice.open_device(Config(device="cuda"))
    free, total = device.free_memory()
    assert 0 < device.budget <= free - defaults.OUTSIDE_BYTES
    assert device.budget <= total * (1 - defaults.OUTSIDE_SHARE)
    device.close()


def test_host_budgets() -> None:
    assert device_choice.host_budget(Config(host_budget=3 * PAGE + 1), "standin", PAGE) == 3 * PAGE
    rest = device_choice.host_budget(Config(budget=2**29), "standin", PAGE)
    assert rest == pytest.approx((ram.available() - 2**29) / 2, rel=0.25)
    assert device_choice.host_budget(Config(budget=2**60), "standin", PAGE) == 0


def test_a_device_in_use_is_not_closed() -> None:
    started = devices.start(SMALL)
    device = started.device
    block = device.allocate(100)
    with pytest.raises(BallonetError):
        devices.stop()
    assert devices.current() is started
    device.deallocate(block)
    devices.stop()


class Machine:
    """The kernel's files about memory, as a container may show them."""

    def __init__(self, folder: Path, membership: str) -> None:
        self.meminfo, self.cgroup, self.membership = folder / "meminfo", folder / "cgroup", folder / "self"
        self.meminfo.write_text("MemTotal:        8000 kB\nMemAvailable:    6000 kB\nHugePages_Total:       0\n")
        self.membership.write_text(membership)

    def limit(self, group: str, files: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
        folder = self.cgroup / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files[0]).write_text(f"{limit}\n")
        (folder / files[1]).write_text(f"{used * 1024}\n")
        (folder / "memory.stat").write_text(f"anon 12\n{files[2]} {cached * 1024}\n")

    def total(self) -> int:
        return ram.total(self.meminfo, self.cgroup, self.membership) // 1024

    def available(self) -> int:
        return ram.available(self.meminfo, self.cgroup, self.membership) // 1024


VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(
    ("membership", "root", "files"), [("0::/\n", "", VERSION_2), ("5:memory:/docker/12\n", "memory", VERSION_1)]
)
def test_a_container_s_limit_counts(membership: str, root: str, files: tuple[str, str, str], tmp_path: Path) -> None:
    machine = Machine(tmp_path, membership)
    assert (machine.total(), machine.available()) == (8000, 6000)
    machine.limit(root, files, "max" if files is VERSION_2 else str(2**63 - 4096), 3000, 500)
    assert (machine.total(), machine.available()) == (8000, 6000)
    machine.limit(root, files, str(4000 * 1024), 3000, 500)
    assert (machine.total(), machine.available()) == (4000, 1500)
    machine.limit(root, files, str(4000 * 1024), 9000, 500)
    assert machine.available() == 0


@pytest.mark.parametrize(
    ("membership", "root", "files"),
    [
        ("0::/user.slice/job.scope\n", "user.slice", VERSION_2),
        ("7:cpu,cpuacct:/elsewhere\n5:memory:/user.slice/job.scope\n", "memory/user.slice", VERSION_1),
    ],
)
def test_the_least_limit_on_the_way_to_the_root_counts(
    membership: str, root: str, files: tuple[str, str, str], tmp_path: Path
) -> None:
    machine = Machine(tmp_path, membership)
    machine.limit(root, files, str(3000 * 1024), 1000, 0)
    machine.limit(f"{root}/job.scope", files, str(5000 * 1024), 1000, 0)
    assert (machine.total(), machine.available()) == (3000, 2000)


def test_the_default_host_budget_is_for_a_container_what_that_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ram, "total", lambda: 64 * PAGE)
    monkeypatch.setattr(ram, "available", lambda: 40 * PAGE)
    assert device_choice.host_budget(Config(), "cuda", PAGE) == 16 * PAGE
    monkeypatch.setattr(ram, "available", lambda: 10 * PAGE)
    assert device_choice.host_budget(Config(), "cuda", PAGE) == 5 * PAGE


NO_DEVICE = "int cuInit(unsigned flags) {{ return {0}; }}"


@pytest.mark.parametrize("code", [100, 803, 999])
def test_a_driver_that_does_not_start_is_none(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = shim(tmp_path, NO_DEVICE.format(code))
    for device in ("auto", "cuda"):
        with pytest.raises(DriverUnavailable, match=rf"does not start .*{code}.*BALLONET_DEVICE=cpu"):
            device_choice.choose(Config(device=device, libcuda=library))
    monkeypatch.setattr(device_choice, "LIBCUDA", library)
    assert device_choice.choose(Config()).library == device_choice.standin_library()
    facts = info.gather(Config(), "0")
    assert facts["device"]["kind"] == "standin"
    refused = {check["name"]: check["detail"] for check in facts["checks"] if not check["works"]}
    assert f"{code})" in refused["CUDA"]
