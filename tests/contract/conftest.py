"""The drivers of this machine: the host stand-in always, NVIDIA's where it has a device."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .driver import Driver, private_standin


@pytest.fixture(scope="session")
def loaded_standin(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(private_standin(tmp_path_factory.mktemp("standin")))


@pytest.fixture
def standin(loaded_standin: Driver) -> Iterator[Driver]:
    """A started stand-in of the suite's own, link unthrottled; everything made in it must be gone at the end."""
    loaded_standin.start()
    loaded_standin.configure()
    free, total = loaded_standin.memory()
    assert free == total
    yield loaded_standin
    loaded_standin.configure()
    assert loaded_standin.memory() == (total, total)
    loaded_standin.finish()


@pytest.fixture
def standin_library(tmp_path: Path) -> Path:
    """A stand-in that nobody has loaded yet."""
    return private_standin(tmp_path)


@pytest.fixture(params=["standin", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    if request.param == "standin":
        yield request.getfixturevalue("standin")
        return
    cuda = Driver("libcuda.so.1")
    cuda.start()
    yield cuda
    cuda.finish()
