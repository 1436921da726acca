"""A tiny model on a device of small pages, whose layers a test drops and restores."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ballonet
from ballonet.allocator import install
from ballonet.hooks.replicas.held_layers import HeldLayers

from ...models import Output, build
from ...streaming.conftest import installed, tiny
from .holding import LAYERS, loaded, say

__all__ = ["installed", "tiny"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    with install.stock():
        build("llama", num_hidden_layers=LAYERS).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def original() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def stock(original: Any) -> Output:
    with install.stock():
        return say(original)


@pytest.fixture(params=["host", "file"])
def kind(request: pytest.FixtureRequest) -> str:
    """Where dropped layers lie."""
    return str(request.param)


@pytest.fixture
def model(kind: str, host_model: Any, folder: Path) -> Any:
    return loaded(folder) if kind == "file" else host_model


@pytest.fixture
def host_model(original: Any) -> Any:
    """A model whose dropped layers lie in host pages."""
    with install.stock():
        return copy.deepcopy(original)


@pytest.fixture
def managed(model: Any) -> Iterator[ballonet.Managed]:
    with ballonet.manage(model) as it:
        yield it


@pytest.fixture
def held(managed: ballonet.Managed) -> Iterator[HeldLayers]:
    layers = HeldLayers(managed)
    yield layers
    layers.close()


@pytest.fixture
def own_folder(folder: Path, tmp_path: Path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
        os.utime(tmp_path / file.name, ns=(10**18, 10**18))
    return tmp_path
