"""What happens around the forwards of a managed model: leases that are held exactly as long as they must be."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ballonet
from ballonet import testing
from ballonet.allocator._native import Device
from ballonet.allocator.errors import ManageError
from ballonet.hooks.forward.lease import current
from ballonet.testing import chaos_of

from . import models
from .models import logits
from .pool import in_pool, installing


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(96 * 2**20, 64 * 2**10) as install:
        yield install()


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside: Callable[[int], None] = lambda depth: None
        self.after: Callable[[int], None] = lambda depth: None

    def forward(self, inputs: torch.Tensor, depth: int) -> torch.Tensor:
        self.inside(depth)
        outputs: torch.Tensor = self.linear(inputs if depth == 0 else self(inputs, depth - 1))
        self.after(depth)
        return outputs

    def fails(self, error: type[BaseException]) -> None:
        """Runs it until that is raised in the innermost call."""

        def fail(depth: int) -> None:
            if depth == 0:
                raise error("deep inside")

        self.inside = fail
        with pytest.raises(error, match="deep inside"):
            self(torch.ones(4), 2)


def test_nested_forwards_and_exceptions_release_the_lease_at_the_outermost_exit(device: Device) -> None:
    model = Recursive()
    managed = ballonet.manage(model)
    group = managed._weights.group
    seen: list[int] = []
    model.inside = model.after = lambda depth: seen.append(group.leases)
    model(torch.ones(4), 2)
    assert seen == [1] * 6, "before and after each call within"
    assert group.leases == 0

    model.fails(ValueError)
    assert group.leases == 0
    with pytest.raises(TypeError):
        model(torch.ones(4), 2, "one argument too many")
    assert group.leases == 0


def test_a_call_that_a_hook_of_someone_else_refuses_takes_no_lease_with_it(device: Device) -> None:
    model = Recursive()
    managed = ballonet.manage(model)
    seen: list[int] = []

    def refuse(module: nn.Module, args: Any) -> None:
        if args[1] == 0:
            raise ValueError("refused before our hook ran")

    def inside(depth: int) -> None:
        if depth == 5:
            with pytest.raises(ValueError, match="refused"):
                model(torch.ones(4), 0)
            seen.append(managed._weights.group.leases)

    model.inside = inside
    model.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="refused"):
        model(torch.ones(4), 5)
    assert seen == [1]
    assert managed._weights.group.leases == 0


def test_an_interrupt_leaves_no_lease_behind_the_next_forward(device: Device) -> None:
    model = Recursive()
    managed = ballonet.manage(model)
    group = managed._weights.group

    for _ in range(3):
        model.fails(KeyboardInterrupt)
        seen: list[int] = []
        model.inside = lambda depth, seen=seen: seen.append(group.leases)  # type: ignore[misc]
        model(torch.ones(4), 2)
        assert seen == [1, 1, 1]
        assert group.leases == 0
    model.fails(KeyboardInterrupt)
    managed.release()
    assert group.leases == 0
    assert not in_pool(model.linear.weight)


@pytest.mark.parametrize(("name", "part", "iterations"), [("t5gemma", "encoder", 0), ("llama", "", 1)])
def test_a_part_that_is_called_by_itself_holds_a_lease(device: Device, name: str, part: str, iterations: int) -> None:
    """As `generate()` calls the encoder: nothing is taken of what runs. It is an iteration where it runs all layers."""
    model = models.build(name)
    managed = ballonet.manage(model)
    group, begun, points = managed._weights.group, [], []
    managed._residency.before = lambda point, *_: points.append(point)  # type: ignore[method-assign]
    inner = model.get_submodule(f"model.{part}".strip("."))
    inner.layers[0].register_forward_hook(lambda *_: begun.append(group.leases))
    with torch.no_grad():
        inner(input_ids=torch.ones(1, 4, dtype=torch.int64))
    assert (begun, group.leases) == ([1], 0)
    assert [point is not None for point in points].count(True) == iterations


def test_a_thread_that_an_interrupt_ends_leaves_no_lease(device: Device) -> None:
    model = models.build("llama")
    managed = ballonet.manage(model)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def run() -> None:
        with pytest.raises(KeyboardInterrupt):
            logits(model)

    handle = model.model.layers[1].register_forward_hook(interrupt)
    gc.disable()  # nothing else ends it
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert managed._weights.group.leases == 0
    finally:
        gc.enable()
        handle.remove()
    managed.release()


def test_an_interrupted_model_that_is_collected_leaves_no_lease_either(device: Device) -> None:
    model: Any = Recursive()
    group = ballonet.manage(model)._weights.group

    model.fails(KeyboardInterrupt)
    assert group.leases == 1
    model = None
    gc.collect()
    assert group.leases == 0
    assert current() is None


def test_release_waits_for_no_one_and_refuses_while_a_forward_runs(device: Device) -> None:
    model = Recursive()
    managed = ballonet.manage(model)
    entered, leave = threading.Event(), threading.Event()

    def wait(depth: int) -> None:
        entered.set()
        assert leave.wait(600)

    model.inside = wait
    other = threading.Thread(target=model, args=(torch.ones(4), 0))
    other.start()
    assert entered.wait(600)
    with pytest.raises(ManageError, match="is running"):
        managed.release()
    assert in_pool(model.linear.weight)
    leave.set()
    other.join()

    errors = []

    def release(depth: int) -> None:
        with pytest.raises(ManageError, match="is running") as caught:
            managed.release()
        errors.append(caught.value)

    model.inside = release
    model(torch.ones(4), 0)
    assert len(errors) == 1
    managed.release()
    assert not in_pool(model.linear.weight)


def test_a_model_inside_a_module_generates_under_a_lease_too(device: Device) -> None:
    model = models.build("llama")
    inputs = models.prompts(2, 9)
    expected = models.generate(model, "greedy", inputs)
    outer = nn.Sequential(model)
    managed = testing.manage(outer, chaos=1)
    seen: set[int] = set()
    kept = model.model.layers[1].register_forward_hook(lambda *_: seen.add(managed._weights.group.leases))
    assert models.generate(model, "greedy", inputs).agrees(expected)
    assert seen == {1}
    assert chaos_of(managed) is not None
    moved = dict(chaos_of(managed).moved)
    assert all(count > 0 for way, count in moved.items() if way != "kv_unmapped"), "free pages that requests left"
    kept.remove()
    del outer
    gc.collect()
    assert managed.report().released
    assert models.generate(model, "greedy", inputs).agrees(expected)
    assert dict(chaos_of(managed).moved) == moved
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    ballonet.manage(model).release()
