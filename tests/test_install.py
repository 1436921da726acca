"""Putting the pool under torch: settings, repetition, failures half way, the wiring of the CUDA branch, statistics."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import _native, companion, devices, torch_parts
from ballonet.allocator import install as module
from ballonet.allocator.devices import set_budget
from ballonet.allocator.errors import BallonetError, ConfigError, DriverUnavailable, InstallError, UnsupportedVersion
from ballonet.allocator.install import allocator, install, restore, stock

from . import programs
from .pool import in_pool, take_out

SMALL: Mapping[str, Any] = {"budget": "8MiB", "page_size": "64KiB", "host_budget": "1MiB", "device": "cpu"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("BUDGET", "PAGE_SIZE", "HOST_BUDGET", "DEVICE", "LIBCUDA", "FAULT"):
        monkeypatch.delenv(f"BALLONET_{variable}", raising=False)
    yield
    gc.collect()
    restore()
    assert devices.current() is None


def activations_in_pool() -> bool:
    return in_pool(torch.empty(100_000))


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
    device = devices.require()
    install()
    install(**SMALL)
    install("8MiB")
    assert devices.require() is device
    set_budget("16MiB")
    install("16MiB")  # the budget in force
    install(**SMALL)  # the settings of the first time
    assert devices.require() is device


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
    device, budget = devices.require(), ballonet.stats().budget
    with pytest.raises(InstallError, match=remedy):
        install(**other)
    assert devices.require() is device
    assert (ballonet.stats().budget, ballonet.stats().page_size) == (budget, 64 * 2**10)
    assert activations_in_pool()


@pytest.mark.parametrize("used", [False, True])
def test_other_settings_once_the_old_pool_is_out_of_use(used: bool) -> None:
    install(**SMALL)
    tensor = torch.ones(1000) if used else None
    restore()
    restore()
    del tensor
    install(**{**SMALL, "page_size": "128KiB"})
    assert devices.require().page_size == 128 * 2**10
    assert activations_in_pool()


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
    assert (devices.require().budget, devices.require().page_size) == (12 * 2**20, 128 * 2**10)


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
    assert devices.current() is None


def test_threads_install_it_once() -> None:
    def work(_: int) -> _native.Device:
        install(**SMALL)
        return devices.require()

    with ThreadPoolExecutor(8) as pool:
        assert len({id(device) for device in pool.map(work, range(8))}) == 1


def test_a_model_loaded_before_keeps_its_memory() -> None:
    model = torch.nn.Linear(64, 64)
    expected = model(torch.ones(1, 64)).detach().numpy().copy()
    address = model.weight.data_ptr()
    install(**SMALL)
    assert model.weight.data_ptr() == address
    assert (model(torch.ones(1, 64)).detach().numpy() == expected).all()


FAULTS = """
import os, torch, ballonet
from ballonet.allocator import devices
from tests.faulting import faulted
from tests.pool import in_pool

def where():
    return in_pool(torch.empty(100_000))

def cycle():
    ballonet.install("8MiB", page_size="64KiB", host_budget="1MiB", device="cpu")
    calls = ballonet.stats().driver_calls
    try:
        assert where()
    except torch.OutOfMemoryError:
        assert where()  # a fault fires once
    devices.require().check()
    ballonet.restore()
    return dict(calls)

first, second = cycle(), cycle()
stopped = attempts = 0
for function in second:
    for call in faulted(function, second[function] - first[function], 6):
        os.environ["BALLONET_FAULT"] = ""
        while devices.current() is not None:
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
            if devices.current() is None:  # install() failed
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
    attempts, stopped = map(int, programs.run(FAULTS).split())
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
    assert devices.current() is None
    assert not activations_in_pool()
    install(**SMALL)
    assert activations_in_pool()


def test_another_cpu_allocator_in_the_way_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(companion.Companion, "install_cpu", lambda self: False)
        with pytest.raises(InstallError, match="another library"):
            install(**SMALL)
    assert devices.current() is None


def test_without_a_compiler_the_rest_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch_parts, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("BALLONET_CACHE_DIR", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="activations"):
        install(**SMALL)
    assert not activations_in_pool()
    device = devices.require()
    device.reserve(2**20, "kv", device.group()).map(0, 16)
    with stock():
        assert torch.ones(10).sum() == 10
    gc.collect()


def test_there_is_no_cuda_allocator_without_cuda() -> None:
    if torch.version.cuda is not None and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(InstallError, match="install"):
        ballonet.allocator()
    assert devices.current() is None
    install(**SMALL)
    with pytest.raises(InstallError, match="install"):
        allocator()


def test_frozen_garbage_is_collected_as_the_pool_is_taken_out() -> None:
    """As between the modules of these tests."""
    install(**SMALL)
    tensor = torch.ones(1000)
    cycle: list[object] = [tensor]
    cycle.append(cycle)
    gc.freeze()
    del tensor, cycle
    gc.collect()
    restore()
    assert devices.current() is not None
    take_out(patience=0.1)
    assert devices.current() is None
