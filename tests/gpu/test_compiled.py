"""torch.compile with CUDA graphs under the pool: inductor's graph trees (`mode="reduce-overhead"`), which take graphs'
pools back to checkpoints. Their backend here is "cudagraphs": the same trees, over eager kernels, with no Triton."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.configuration_utils import CompileConfig

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import BudgetInUse

from .. import models
from .scene import Place, scene

pytestmark = pytest.mark.gpu


def compiled(module: torch.nn.Module | Callable[..., Any]) -> Any:
    return torch.compile(module, backend="cudagraphs")


def recorded() -> int:
    """How many graphs the trees have recorded."""
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(0, False)
    assert manager is not None, "no graph tree"
    return sum(1 + node.num_descendants() for nodes in manager.roots.values() for node in nodes)


def others(place: Place) -> list[torch.Tensor]:
    """Takes what a graph's memory must not be: any page that can be had."""
    return [torch.full((place.page // 4,), 7, dtype=torch.int32, device="cuda") for _ in range(6)]


@scene(only="cuda", pages=96)
def test_forwards(place: Place) -> None:
    """A tree with branches: two modules, two shapes, in changing orders, with outputs that live on."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
    second = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).cuda()
    fast = compiled(first), compiled(second)
    wanted, kept, live = [], [], []
    with torch.no_grad():
        for step in range(12):
            torch.compiler.cudagraph_mark_step_begin()
            given = torch.randn(1 + step % 2, 64, device="cuda")
            order = (0, 1, 0) if step % 3 else (1, 0)
            right, got = given, given
            for which in order:
                right, got = (first, second)[which](right), fast[which](got)
            wanted.append(right)
            kept.append(got.clone())
            live.append(others(place))
            if step % 4 == 3:
                live.clear()
                torch.cuda.empty_cache()
    assert all(torch.equal(a, b) for a, b in zip(wanted, kept, strict=True))
    assert all(tensor.eq(7).all().item() for tensors in live for tensor in tensors)
    assert recorded() >= 4
    del got
    before = place.pages("activations")
    torch._dynamo.reset()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert place.pages("activations") <= before


@scene(only="cuda", pages=128, host_pages=96)
def test_static_cache(place: Place) -> None:
    """generate(cache_implementation="static"), which transformers compiles: stock's tokens, also when weights of the
    model have to leave the device between two calls."""
    model = models.build("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=10).to("cuda")
    inputs = {name: tensor.to("cuda") for name, tensor in models.prompts(2, 9).items()}
    compiling = CompileConfig(backend="cudagraphs", mode=None)

    def generate(**options: Any) -> list[list[int]]:
        tokens = model.generate(**inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False, **options)
        return tokens.tolist()

    def static() -> list[list[int]]:
        return generate(cache_implementation="static", compile_config=compiling)

    def shrink() -> None:
        """Asks for the room of a layer."""
        torch.cuda.empty_cache()
        ballonet.set_budget((place.device.snapshot()["created"] - 2) * place.page, timeout="20s")

    stock = generate()
    ballonet.manage(model)
    budget, weights = devices.require().budget, place.pages("weights")
    for _ in range(20):  # twins are made in the background, by a thread that must leave the compiler's state alone
        with contextlib.suppress(BudgetInUse):
            shrink()
            break
        assert generate() == stock
    assert place.pages("weights") < weights
    ballonet.set_budget(budget)
    assert [static(), static()] == [stock, stock]
    assert recorded() >= 1
    with contextlib.suppress(BudgetInUse):  # layers that its graphs read stay
        shrink()
    assert static() == stock
