"""Layers that stream, and those who would be shown a slot by mistake: each test is one way in which that could be."""

from __future__ import annotations

import copy
import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator.errors import ManageError
from ballonet.offload.decide import plan

from ..models import Output, generate
from ..portrait import bits, tensors
from .conftest import INPUTS

IDS = INPUTS["input_ids"]


@pytest.fixture(scope="module")
def stock(original: Any) -> Output:
    with install.stock():
        return say(original)


@pytest.fixture
def managed(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ballonet.Managed]:
    """Three layers in two slots."""
    monkeypatch.setattr(plan, "at_interval", lambda pages, _: plan.streaming(pages, plan.spread(pages, 3), 2))
    with ballonet.manage(model, interval=1) as it:
        yield it


def say(model: Any) -> Output:
    return generate(model, "greedy", INPUTS)


def fly(model: Any, managed: ballonet.Managed) -> None:
    say(model)
    assert managed.flying


def projection(model: Any, managed: ballonet.Managed, n: int = 2) -> Any:
    """A module that holds nothing but a streamed weight."""
    return model.model.layers[managed.streamed[n]].mlp.up_proj


def wanted(original: Any, managed: ballonet.Managed, n: int = 2) -> bytes:
    return bits(projection(original, managed, n).weight)


def test_memory_that_a_weight_had_before(model: Any, original: Any, managed: ballonet.Managed) -> None:
    """What averages of weights do: data is exchanged, and put back later."""
    fly(model, managed)
    weight = projection(model, managed).weight
    backup = weight.data
    weight.data = weight.data * 2
    del weight
    for _ in range(2):
        say(model)
        assert bits(backup) == wanted(original, managed)


def test_a_weight_that_was_replaced(model: Any, original: Any, managed: ballonet.Managed) -> None:
    fly(model, managed)
    module = projection(model, managed)
    old = module.weight
    module.weight = nn.Parameter(torch.zeros_like(old))
    for _ in range(2):
        say(model)
        assert bits(old) == wanted(original, managed)


def test_a_dictionary_of_weights_that_c_code_copies(model: Any, original: Any, managed: ballonet.Managed) -> None:
    expected = wanted(original, managed)
    module = projection(model, managed)
    for spread in (lambda it: dict(it), lambda it: {**it}, lambda it: {} | it, lambda it: it | {}):
        fly(model, managed)
        assert bits(spread(module._parameters)["weight"]) == expected
    fly(model, managed)
    other: dict[str, Any] = {}
    other.update(module._parameters)
    assert bits(other["weight"]) == expected
    other.clear()
    views = [module._parameters.items(), module._parameters.values()]
    say(model)
    (_, weight), *_ = views[0]
    same, *_ = views[1]
    assert weight is same
    assert bits(weight) == expected


def test_a_part_that_outlives_its_model(original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "at_interval", lambda pages, _: plan.streaming(pages, plan.spread(pages, 3), 2))
    with install.stock():
        model = copy.deepcopy(original)
    managed = ballonet.manage(model, interval=1)
    streamed = managed.streamed
    fly(model, managed)
    body = model.model
    del model
    gc.collect()
    assert managed.released
    for layer in streamed:
        name = f"layers.{layer}.mlp.up_proj.weight"
        assert bits(tensors(body)[name]) == bits(tensors(original.model)[name])
    with torch.no_grad():
        assert torch.equal(body(IDS).last_hidden_state, original.model(IDS).last_hidden_state)


def test_layers_that_are_taken_out_while_all_fly(model: Any, original: Any, managed: ballonet.Managed) -> None:
    with install.stock():
        pruned = copy.deepcopy(original)
    fly(model, managed)
    for it in (model, pruned):
        it.model.layers = it.model.layers[:4]
        it.config.num_hidden_layers = 4
    gc.collect()
    with install.stock():
        expected = say(pruned)
    assert say(model).agrees(expected)
    fly(model, managed)
    for it in (model, pruned):
        it.model.layers[managed.streamed[0]].mlp = copy.deepcopy(pruned.model.layers[1].mlp)
    gc.collect()
    with install.stock():
        expected = say(pruned)
    for _ in range(2):
        assert say(model).agrees(expected)
    runtime.require().check()


def test_a_write_after_ctrl_c_is_not_lost(model: Any, original: Any, managed: ballonet.Managed) -> None:
    """Torch runs no hook for it, so nobody says that the layer runs no more."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    fly(model, managed)
    module = projection(model, managed)
    handle = module.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        say(model)
    handle.remove()
    with torch.no_grad():
        module.weight += 1
    with install.stock():
        changed = copy.deepcopy(original)
        with torch.no_grad():
            projection(changed, managed).weight += 1
        expected = say(changed)
    assert say(model).agrees(expected)


def test_a_layer_that_writes_to_its_own_weights_is_told(
    model: Any, original: Any, stock: Output, managed: ballonet.Managed
) -> None:
    """The slot goes to the next layer, and the write with it."""

    def write(module: Any, *_: object) -> None:
        module.up_proj.weight.mul_(1.5)

    fly(model, managed)
    mlp = model.model.layers[managed.streamed[1]].mlp
    handle = mlp.register_forward_hook(write)
    with pytest.raises(ManageError, match="has written to its own weights"):
        say(model)
    assert bits(mlp.up_proj.weight) == wanted(original, managed, 1)
    with managed.resident():
        say(model)
    handle.remove()
    assert bits(mlp.up_proj.weight) != wanted(original, managed, 1)
    mlp.up_proj.weight.data.copy_(original.model.layers[managed.streamed[1]].mlp.up_proj.weight)
    assert say(model).agrees(stock)
    fly(model, managed)


def test_gradients_after_ctrl_c(model: Any, original: Any, managed: ballonet.Managed) -> None:
    """A layer that is called by itself then must not take the turn that was left open for its own."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    fly(model, managed)
    handle = projection(model, managed).register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        say(model)
    handle.remove()
    states = torch.randn(1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    gradients = []
    for it in (model, original):
        layers = it.model.layers
        position = it.model.rotary_emb(states, torch.arange(3)[None])
        value = states.clone().requires_grad_()
        result = value
        for layer in managed.streamed:
            result = layers[layer](result, position_embeddings=position)
        result = result[0] if isinstance(result, tuple) else result
        gradients.append(torch.autograd.grad(result.sum(), value)[0])
    assert torch.equal(*gradients)


def test_a_hook_that_keeps_weights_for_later_in_the_forward(
    model: Any, original: Any, managed: ballonet.Managed
) -> None:
    fly(model, managed)
    kept: list[Any] = []
    seen: list[bytes] = []
    last = projection(model, managed)
    handles = [
        last.register_forward_hook(lambda module, *_: kept.append(module.weight)),
        model.model.norm.register_forward_hook(lambda *_: seen.append(bits(kept[-1]))),
    ]
    say(model)
    for handle in handles:
        handle.remove()
    assert set(seen) == {wanted(original, managed)}


def test_a_graph_that_another_thread_goes_back_through(model: Any, original: Any, managed: ballonet.Managed) -> None:
    expected = torch.autograd.grad(original(IDS, labels=IDS).loss, original.model.embed_tokens.weight)[0]
    fly(model, managed)
    loss = model(IDS, labels=IDS).loss
    found: list[torch.Tensor] = []

    def backward() -> None:
        found.extend(torch.autograd.grad(loss, model.model.embed_tokens.weight))

    def act(*_: object) -> None:
        if not found:
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()

    handle = model.model.norm.register_forward_hook(act)
    say(model)
    handle.remove()
    assert torch.equal(found[0], expected)


def test_a_thread_that_looks_between_two_forwards(model: Any, original: Any, managed: ballonet.Managed) -> None:
    """It is stopped at the last moment before it has the weight, and the model runs meanwhile."""
    module = projection(model, managed)
    fly(model, managed)
    looked, go_on = threading.Event(), threading.Event()
    found: list[bytes] = []

    def pause(frame: FrameType, event: str, _: object) -> Any:
        if event == "return" and frame.f_code.co_name == "_look":
            looked.set()
            go_on.wait(60)
        return pause

    def look() -> None:
        sys.settrace(pause)
        weight = module.weight
        sys.settrace(None)
        found.append(bits(weight))

    thread = threading.Thread(target=look)
    thread.start()
    assert looked.wait(60)

    def act(*_: object) -> None:
        if not found:
            go_on.set()
            thread.join(60)

    handle = model.model.norm.register_forward_hook(act)
    say(model)
    handle.remove()
    assert found == [wanted(original, managed)]


def test_whoever_has_all_at_rest_keeps_its_turn(model: Any, managed: ballonet.Managed) -> None:
    fly(model, managed)
    turns = managed._turns
    with turns.at_rest():
        turn = turns._turn
        assert turn is not None
        held: list[bool] = []
        thread = threading.Thread(target=lambda: held.append(not turn.abandoned()))
        thread.start()
        thread.join()
    assert held == [True]


def test_a_section_outlives_a_change_of_the_model(model: Any, stock: Output, managed: ballonet.Managed) -> None:
    fly(model, managed)
    with managed.resident():
        model.model.layers[0].register_buffer("new", torch.zeros(4096))
        assert say(model).agrees(stock)
        assert not managed.flying
    fly(model, managed)


def test_a_module_in_several_layers_does_not_keep_them_from_flying(
    original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "at_interval", lambda pages, _: plan.streaming(pages, plan.spread(pages, 3), 2))
    with install.stock():
        model = copy.deepcopy(original)
        for layer in model.model.layers:
            layer.mlp.gate_proj = model.model.layers[0].mlp.gate_proj
            layer.register_buffer("shared", model.model.rotary_emb.inv_freq, persistent=False)
        expected = say(copy.deepcopy(model))
    with ballonet.manage(model, interval=1) as managed:
        rested = []
        before = type(managed._elastic.streaming._ring).rest  # type: ignore[union-attr]
        monkeypatch.setattr(
            type(managed._elastic.streaming._ring), "rest", lambda ring: (rested.append(ring.flying), before(ring))
        )
        for _ in range(2):
            assert say(model).agrees(expected)
            assert managed.flying
        assert not any(rested)


def test_swapping_tensors(model: Any, stock: Output, managed: ballonet.Managed) -> None:
    fly(model, managed)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    gc.collect()
    assert say(model).agrees(stock)
    fly(model, managed)


def test_a_look_at_a_changed_model_that_breaks_off_is_made_up_for(
    model: Any, stock: Output, managed: ballonet.Managed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    fly(model, managed)
    model.model.layers[0].register_buffer("new", torch.zeros(4096))
    with monkeypatch.context() as patch:
        patch.setattr(managed._follower, "catch_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            say(model)
    assert say(model).agrees(stock)
    fly(model, managed)


@pytest.mark.parametrize("flying", [True, False])
def test_ctrl_c_anywhere_in_the_ring(model: Any, stock: Output, managed: ballonet.Managed, flying: bool) -> None:
    """Whatever line of it was interrupted, the weights are what they are and the model goes on."""
    expected = {name: bits(tensor) for name, tensor in tensors(model).items()}
    ring = sys.modules["ballonet.offload.move.ring"].__file__

    def interrupted_at(line: int) -> bool:
        seen = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal seen
            if frame.f_code.co_filename != ring:
                return None
            if event == "line":
                seen += 1
                if seen == line:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            with torch.no_grad():
                model(IDS)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    line = 0
    while True:
        if flying:
            fly(model, managed)
        assert managed.flying == flying
        if not interrupted_at(line := line + 1):
            break
        assert all(bits(tensor) == expected[name] for name, tensor in tensors(model).items()), line
        if line % 8 == 0:
            assert say(model).agrees(stock), line
        with managed.resident():
            pass
    assert line > 50
    fly(model, managed)
    runtime.require().check()
