"""One device of small pages for models whose layers stream, and a tiny model whose layers do."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator._native import Range

from ..models import build, prompts
from ..pool import take_out
from ..tuned import Tuned

LAYERS = 4
INPUTS = prompts(batch=2, longest=9)
BUDGET = 2**22
PAGE = 4096


@pytest.fixture(scope="module", autouse=True)
def installed() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operators: a second thread only waits
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield
    gc.collect()
    runtime.require().check()
    take_out()
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def tiny(tuned: Tuned) -> None:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges


@pytest.fixture(scope="module")
def original() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=LAYERS)


def streams(managed: ballonet.Managed, act: Callable[[], object]) -> bool:
    """Does this have layers read from slots?"""
    ring = managed._weights.ring
    enter, found = ring.enter, list[Range | None]()

    def counted(layer: int, stream: int) -> Range | None:
        found.append(enter(layer, stream))
        return found[-1]

    ring.enter = counted  # type: ignore[method-assign]
    try:
        act()
    finally:
        del ring.enter
    return any(each is not None for each in found)


@pytest.fixture
def model(original: Any) -> Any:
    with install.stock():
        return copy.deepcopy(original)
