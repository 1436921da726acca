"""`generate()` of a managed model: the tokens of stock on many architectures, plain and while pages move."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import ballonet
from ballonet.allocator import install, runtime
from ballonet.hooks.kv import ElasticLayer

from .models import ARCHITECTURES, LAYERS, MODES, Output, before_each_forward, build, generate, prompts
from .pool import bytes_that_exist, in_pool

INPUTS = prompts(batch=3, longest=12)
BUDGET = 2**25


@pytest.fixture(scope="module", params=[4096, 65536], ids=["4KiB", "64KiB"], autouse=True)
def installed(request: pytest.FixtureRequest) -> Iterator[None]:
    """With small pages each layer has a range of its own and several pages; with large ones all layers share one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny operators: a second thread only waits
    ballonet.install(BUDGET, page_size=request.param, device="cpu")
    yield
    gc.collect()
    runtime.require().check()
    assert bytes_that_exist() <= BUDGET
    ballonet.restore()
    assert runtime.current() is None, "memory of the pool is still in use"
    torch.set_num_threads(threads)


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    with install.stock():
        return build(name)


@functools.cache
def stock(name: str, mode: str) -> Output:
    """What the model says on its own, in torch's memory."""
    with install.stock():
        return generate(model_of(name), mode, INPUTS)


def managed(
    name: str, mode: str, act: Callable[[int, Any], None] = lambda step, cache: None, chaos: int | None = None
) -> tuple[Output, dict[str, int]]:
    """What the managed model says, and what chaos has moved. `act` is called before each forward."""
    model = model_of(name)
    elastic = 0

    def check_then_act(step: int, cache: Any) -> None:
        nonlocal elastic
        assert type(cache) is DynamicCache
        assert [type(layer) for layer in cache.layers] == [ElasticLayer] * LAYERS
        if step:
            elastic += all(layer.elastic for layer in cache.layers)
            if chaos is None:  # else it may be on the host now
                assert in_pool(cache.layers[step % LAYERS].keys)
        act(step, cache)

    with ballonet.manage(model, chaos=chaos) as handle, before_each_forward(model, check_then_act):
        output = generate(model, mode, INPUTS)
        moved = {} if handle.chaos is None else dict(handle.chaos.moved)
    assert elastic == output.logits.shape[0] - 1
    return output, moved


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_stock(name: str, mode: str) -> None:
    output, _ = managed(name, mode)
    assert output.agrees(stock(name, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_equal_stock_under_chaos(name: str, mode: str) -> None:
    output, moved = managed(name, mode, chaos=len(name))
    assert output.agrees(stock(name, mode))
    assert min(moved["weights"], moved["kv_device"], moved["kv_host"]) > 5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_wrong_row_is_noticed(name: str, mode: str) -> None:
    def plant(step: int, cache: Any) -> None:
        if step == 3:  # one token of one sequence in one layer gets what its neighbour has
            layer = cache.layers[1]
            layer.keys[0, :, 10], layer.values[0, :, 10] = layer.keys[0, :, 9], layer.values[0, :, 9]

    output, _ = managed(name, mode, plant)
    assert not output.agrees(stock(name, mode))
