"""The drivers of this machine: the host stand-in always, NVIDIA's where it has a device."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .driver import Driver, private_standin


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
    free, total = driver.memory()
    assert free == total, f"{total - free} bytes of device memory are left"
    driver.finish()


@pytest.fixture(params=["standin", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "standin":
        yield request.getfixturevalue("standin")
        return
    cuda = Driver("libcuda.so.1")
    cuda.start()
    yield cuda
    cuda.finish()
