"""The drivers of this machine: the host stand-in and the simulated device always, NVIDIA's where there is one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..simgpu.build import build_device
from .driver import Driver, private_copy, private_standin


@pytest.fixture
def standin_library(tmp_path: Path) -> Path:
    """A stand-in that nobody has loaded yet: it has a state of its own."""
    return private_standin(tmp_path)


@pytest.fixture
def standin(standin_library: Path) -> Iterator[Driver]:
    """A started stand-in, link unthrottled; everything made in it must be gone at the end."""
    driver = Driver(standin_library)
    driver.start()
    yield driver
    driver.configure()
    driver.clear()
    free, total = driver.memory()
    assert free == total, f"{total - free} bytes of device memory are left"
    driver.finish()


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A started simulated device with a state of its own; everything made in it must be gone at the end."""
    monkeypatch.setenv("SIMGPU_GRANULARITY", "64KiB")
    driver = Driver(private_copy(build_device() / "libcuda.so.1", tmp_path))
    driver.start()
    yield driver
    driver.clear()
    free, total = driver.memory()
    assert free == total, f"{total - free} bytes of device memory are left"
    driver.finish()


@pytest.fixture(params=["standin", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param != "cuda":
        yield request.getfixturevalue(request.param)
        return
    cuda = Driver("libcuda.so.1")
    cuda.start()
    yield cuda
    cuda.clear()
    cuda.finish()
