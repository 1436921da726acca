"""Following a managed model through its changes: what is noticed, what is taken in again, what is left and why.

Changes are made with torch's own memory under them (`install.stock`), so that what is new lies outside of the pool
until it is taken in, and the kernel can tell the difference.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import ballonet
from ballonet.allocator import install
from ballonet.allocator._native import Device
from ballonet.allocator.errors import DriverError, PoolExhausted
from ballonet.hooks.forward.forwards import EnterLayer
from ballonet.hooks.weights import follow
from ballonet.hooks.weights.moving import MoveIn

from . import models
from .models import logits
from .pool import bytes_that_exist, in_pool, installing
from .portrait import all_in_pool, bits, conserved, contents, none_in_pool, tensors
from .test_managed_lives import Wrapper
from .tuned import Tuned

pytestmark = pytest.mark.chaos


PAGE = 4096
BUDGET = 2**24
LARGE = 2**13  # bytes of what has a range of its own


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[Device]:
    tuned(weights={"large": LARGE})  # as the matrices of tiny layers have
    with installing(BUDGET, PAGE) as now:
        yield now()


def build() -> Any:
    with install.stock():
        return models.build("llama", hidden_size=64, intermediate_size=96)


def tokens(model: Any) -> torch.Tensor:
    return models.generate(model, "greedy", models.prompts(2, 7), tokens=6).tokens


# Pages


@pytest.mark.counts
def test_the_pages_of_what_is_replaced_come_back_at_once(device: Device) -> None:
    model = build()
    managed = ballonet.manage(model)
    device.trim()
    before, exist = managed.report().pages, bytes_that_exist()
    head: torch.Tensor = model.lm_head.weight
    with install.stock():
        model.lm_head = nn.Linear(64, 199, bias=False)
        assert managed.report().pages == before  # someone still holds it
        whole = head.nbytes // PAGE - 1
        del head
        assert before - whole - 3 <= managed.report().pages <= before - whole
        device.reap(wait=True)
        device.trim()
        assert bytes_that_exist() <= exist - whole * PAGE
        model.half()
        device.reap(wait=True)
        device.trim()
        assert managed.report().pages == ballonet.stats().pages.weights == 0
        assert bytes_that_exist() <= exist - before * PAGE
        tokens(model)
    assert all_in_pool(model)
    assert 0 < managed.report().pages <= before // 2 + 8
    managed.release()


def test_small_tensors_on_one_page_keep_it_until_the_last_is_gone(device: Device) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    with ballonet.manage(model) as managed, install.stock():
        assert managed.report().pages == 1
        for layer in model[:3]:
            layer.double()
            assert managed.report().pages == 1
        model[3].double()
        assert managed.report().pages == 0


# What cannot be taken in


@pytest.mark.counts
def test_values_on_no_device_give_their_pages_back_and_come_back_as_new(device: Device) -> None:
    model, stock = build(), build()
    with ballonet.manage(model) as managed:
        model.to("meta")
        device.reap(wait=True)
        assert managed.report().pages == ballonet.stats().pages.weights == 0
        with pytest.raises(Exception, match=r"[Mm]eta"):
            model(**models.prompts(2, 7)).logits.tolist()
        assert managed.report().unmanaged_tensors.keys() == {name for name, _ in model.named_parameters()} | {
            name for name, _ in model.named_buffers()
        }
        assert "meta device" in managed.report().unmanaged_tensors["lm_head.weight"]
        with install.stock():
            model.to_empty(device="cpu")
            model.load_state_dict(stock.state_dict())
            model.model.rotary_emb = copy.deepcopy(stock.model.rotary_emb)
        assert torch.equal(tokens(model), tokens(stock))
        assert all_in_pool(model)
        assert not managed.report().unmanaged_tensors
    assert contents(model) == contents(stock)


def test_memory_that_is_shared_with_processes_from_now_on_leaves_the_pool(device: Device) -> None:
    model, stock = build(), build()
    with ballonet.manage(model) as managed:
        model.share_memory()
        device.reap(wait=True)
        assert managed.report().pages == 0
        assert torch.equal(tokens(model), tokens(stock))
        assert set(managed.report().unmanaged_tensors.values()) == {"it is shared with other processes"}
        assert none_in_pool(model)
    assert all(tensor.is_shared() for tensor in model.parameters())
    assert contents(model) == contents(stock)


@pytest.mark.counts
def test_where_there_is_no_room_the_model_runs_as_it_is(device: Device) -> None:
    model, stock = build(), build()
    with ballonet.manage(model) as managed:
        with install.stock():
            for variant in (model, stock):
                variant.double()
        device.reap(wait=True)
        filler = device.reserve(BUDGET, "kv", device.group())
        free = device.budget // PAGE - sum(device.snapshot()["pages"][owner] for owner in ("activations", "weights"))
        filler.map(0, free - 40)
        assert torch.equal(tokens(model), tokens(stock))
        assert managed.report().unmanaged_tensors.keys() == tensors(model).keys()
        assert "The smallest budget that works" in managed.report().unmanaged_tensors["lm_head.weight"]
        assert none_in_pool(model)
        filler.close()
        device.reap(wait=True)
        with install.stock():
            for variant in (model, stock):
                variant.add_module("extra", nn.LayerNorm(4))
        tokens(model)  # what was left once stays: its address may have been recorded meanwhile
        assert {name for name, tensor in tensors(model).items() if in_pool(tensor)} == {"extra.weight", "extra.bias"}
        assert managed.report().unmanaged_tensors.keys() == tensors(model).keys() - {"extra.weight", "extra.bias"}
        with install.stock():
            model.half()
            stock.half()
        assert torch.equal(tokens(model), tokens(stock))
    assert contents(model) == contents(stock)


@pytest.mark.counts
def test_a_model_whose_layers_were_taken_is_followed_without_room_for_a_slot(device: Device) -> None:
    model, stock = build(), build()
    filler, left = (device.reserve(nbytes, "kv", device.group()) for nbytes in (BUDGET, 20 * PAGE))
    left.map(0, 20)
    with ballonet.manage(model) as managed:
        with suppress(PoolExhausted):
            for page in range(device.budget // PAGE):  # takes what layers have
                filler.map(page, 1)
        left.close()
        with install.stock():
            norm = model.model.norm.weight
            model.model.norm.weight = nn.Parameter(norm.clone(), requires_grad=False)
            del norm
        assert torch.equal(logits(model), logits(stock))
        assert managed.report().streamed
        filler.close()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (lambda: DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN"), "cuMemMap failed"),
        (lambda: torch.OutOfMemoryError("others took the pages meanwhile"), "others took"),
    ],
    ids=["driver", "memory"],
)
def test_a_move_that_fails_leaves_the_model_as_it_is(
    device: Device, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], why: str
) -> None:
    model, stock = build(), build()
    with ballonet.manage(model) as managed:
        with install.stock():
            for variant in (model, stock):
                variant.half()

        weights = managed._weights
        looks: list[int] = []
        do, adopt = MoveIn.do, weights.adopt

        def fail(move: MoveIn, step: Any) -> None:
            looks[-1] += 1
            if looks[-1] == 4:
                raise error()
            do(move, step)

        monkeypatch.setattr(MoveIn, "do", fail)
        monkeypatch.setattr(weights, "adopt", lambda *some, **more: (looks.append(0), adopt(*some, **more)))
        assert torch.equal(tokens(model), tokens(stock))
        assert looks == [4], "it is tried at the first forward, and not again"
        assert managed.report().unmanaged_tensors.keys() == tensors(model).keys()
        assert managed.report().unmanaged_tensors["lm_head.weight"].startswith(why)
        assert none_in_pool(model)
        assert conserved(device, managed)
    assert contents(model) == contents(stock)


class Counting(nn.Module):
    """Assigns a buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        outputs: torch.Tensor = self.linear(inputs) * self.steps
        return outputs


@pytest.mark.counts
def test_weight_replaced_again_and_again_is_left_alone(device: Device) -> None:
    model = Counting()
    with ballonet.manage(model) as managed:
        for step in range(1, 20):
            assert model(torch.ones(1, 4)).shape == (1, 4)
            assert model.steps == step
        assert list(managed.report().unmanaged_tensors) == ["steps"]
        assert "replaced it more than 8 times" in managed.report().unmanaged_tensors["steps"]
        assert not managed._follower.pending
        assert in_pool(model.linear.weight)
    assert model.steps == 19


@pytest.mark.counts
def test_weights_are_not_moved_under_another_thread(device: Device) -> None:
    model = build()
    with ballonet.manage(model) as managed:
        with install.stock():
            model.half()
        managed._weights.group.enter()
        try:
            tokens(model)
            assert none_in_pool(model)
        finally:
            managed._weights.group.leave()
        tokens(model)
        assert all_in_pool(model)


def test_threads_that_run_while_weights_are_replaced_see_the_same_values(device: Device) -> None:
    """Whoever finds the model changed moves it only where no other forward runs; the others never see it half done."""
    model = build()
    expected = logits(model)
    wrong: list[str] = []
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            try:
                if not torch.equal(logits(model), expected):
                    wrong.append("other values")
            except Exception as error:
                wrong.append(repr(error))

    with ballonet.manage(model) as managed:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for layer in (*model.model.layers, *model.model.layers):
                for module in (layer.mlp.up_proj, layer.self_attn.q_proj):
                    module.weight = nn.Parameter(module.weight.detach().clone())
                    logits(model)
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert not wrong
        assert torch.equal(logits(model), expected)
        assert not managed.report().unmanaged_tensors
        assert not managed._follower.pending
        assert conserved(device, managed)


@pytest.mark.counts
def test_weight_new_at_a_capture_stays(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    with ballonet.manage(model) as managed:
        with install.stock():
            model.half()
        with monkeypatch.context() as patch:
            patch.setattr(managed._follower, "_cuda", True)
            patch.setattr(follow, "_capturing", lambda: True)
            tokens(model)
        assert none_in_pool(model)
        with install.stock():
            model.lm_head = copy.deepcopy(model.lm_head)
        tokens(model)
        assert {name for name, tensor in tensors(model).items() if in_pool(tensor)} == {"lm_head.weight"}
        assert "graph" in managed.report().unmanaged_tensors["model.norm.weight"]


@pytest.mark.counts
def test_weight_taken_in_without_gradients_can_be_trained() -> None:
    model, twin = build(), build()
    with ballonet.manage(model):
        for variant in (model, twin):
            with install.stock():
                variant.double()
            with torch.inference_mode():
                variant(**models.prompts(2, 7))
            variant(**models.prompts(2, 7)).logits.square().sum().backward()
        assert all_in_pool(model)
        assert bits(model.lm_head.weight.grad) == bits(twin.lm_head.weight.grad)


@pytest.mark.counts
def test_a_graph_made_before_a_change_is_walked_back_after_it(device: Device) -> None:
    model, twin = build(), build()
    with ballonet.manage(model):
        losses = []
        for variant in (model, twin):
            losses.append(variant(**models.prompts(2, 7)).logits.square().sum())
            with install.stock():
                variant.lm_head.weight.data = variant.lm_head.weight.data.clone()
        logits(model)
        assert not in_pool(model.lm_head.weight)  # the graph holds what was there before, so that nothing is missing
        model.add_module("extra", nn.Identity())
        logits(model)
        assert in_pool(model.lm_head.weight)
        for loss in losses:
            loss.backward()
        for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert one.grad is not None
            assert bits(one.grad) == bits(other.grad), name
        model.zero_grad()
        del losses, loss


@pytest.mark.counts
def test_functions_of_weights_that_are_not_its_own(device: Device) -> None:
    """As `torch.func` has them: for a call the model has other tensors, some with no memory to be moved."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inputs = torch.randn(3, 4)
    weights = {name: torch.stack([value, 2 * value]).detach() for name, value in model.named_parameters()}
    call = torch.func.vmap(lambda own: torch.func.functional_call(model, own, (inputs,)))
    expected = call(weights)
    with ballonet.manage(model) as managed:
        with install.stock():
            model.add_module("2", nn.Identity())
            model[1].weight = nn.Parameter(model[1].weight.detach().clone())
        assert managed._follower.pending
        assert torch.equal(call(weights), expected)
        assert torch.equal(call(weights), expected)
        model(inputs)
        assert in_pool(model[0].weight)
    assert torch.equal(call(weights), expected)


@pytest.mark.counts
def test_a_weight_of_two_managed_models_stays_with_the_first(device: Device) -> None:
    first, second, stock = build(), build(), build()
    for variant in (second, stock):
        variant.model.embed_tokens.weight = first.model.embed_tokens.weight
    expected = tokens(stock)
    handles = ballonet.manage(first), ballonet.manage(second)
    shared = first.model.embed_tokens.weight
    address = shared.data_ptr()
    assert handles[1].report().unmanaged_tensors.keys() == {"model.embed_tokens.weight"}
    assert "another managed model" in handles[1].report().unmanaged_tensors["model.embed_tokens.weight"]
    for _ in range(2):
        for variant in (first, second):
            with install.stock():
                variant.lm_head = copy.deepcopy(variant.lm_head)
            assert torch.equal(tokens(variant), expected)
            assert all_in_pool(variant)
    assert shared.data_ptr() == address
    handles[0].release()
    assert not in_pool(shared)
    assert torch.equal(tokens(second), expected)
    handles[1].release()
    assert torch.equal(tokens(first), expected)
    assert none_in_pool(second)


# Layers


def order(model: Any) -> list[int]:
    """Which boundaries are passed in one forward."""
    seen, enter = list[int](), EnterLayer.__call__

    def entered(hook: EnterLayer, *args: Any) -> Any:
        seen.append(hook._layer)
        return enter(hook, *args)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(EnterLayer, "__call__", entered)
        model(**models.prompts(1, 5))
    return seen


LAYERS: dict[str, tuple[Callable[[nn.ModuleList], object], int]] = {
    "as it is": (lambda layers: None, 3),
    "appended": (lambda layers: layers.append(copy.deepcopy(layers[0])), 4),
    "inserted": (lambda layers: layers.insert(1, copy.deepcopy(layers[0])), 4),
    "removed": (lambda layers: layers.pop(0), 2),
    "wrapped": (lambda layers: layers.__setitem__(0, Wrapper(layers[0])), 3),
    "turned round": (lambda layers: layers.extend([layers.pop(0), layers.pop(0)]), 3),
}


@pytest.mark.counts
@pytest.mark.parametrize(("name", "configured"), [*((name, True) for name in LAYERS), ("appended", False)])
def test_every_layer_has_its_boundary_and_its_ranges(device: Device, name: str, configured: bool) -> None:
    change, count = LAYERS[name]
    model, twin = build(), build()
    managed = ballonet.manage(model)
    removed = model.model.layers[0]
    for variant in (model, twin):
        with install.stock():
            change(variant.model.layers)
        for index, layer in enumerate(variant.model.layers):
            getattr(layer, "inner", layer).self_attn.layer_idx = index
        if configured:
            variant.config.num_hidden_layers = variant.model.config.num_hidden_layers = len(variant.model.layers)
            variant.config.layer_types = ["full_attention"] * len(variant.model.layers)
    seen = order(model)
    assert seen == list(range(len(seen)))
    assert len(seen) == (count if configured else min(count, 3))
    assert f"{count} decoder layers" in repr(managed)
    for index, layer in enumerate(model.model.layers):
        places = sorted((range_.address, range_.address + range_.nbytes) for range_ in managed._weights.ranges[index])
        assert all(end <= first for (_, end), (first, _) in pairwise(places))
        for tensor in tensors(layer).values():
            assert in_pool(tensor)
            inside = any(first <= tensor.data_ptr() < end for first, end in places)
            assert inside == (tensor.nbytes >= LARGE)
    if name == "removed":
        assert not removed._forward_pre_hooks
    if configured or count == 3:
        assert torch.equal(tokens(model), tokens(twin))
    managed.release()
    assert none_in_pool(model)
