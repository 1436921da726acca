"""Models whose layers stream: the tokens of stock, and weights that are what they are for whoever looks.

Weights of layers that do not run lie under poison or under another layer's bytes (offload/residency/ring.py), and the
stand-in's order checker is on: a read that waits for nothing shows.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator.errors import BudgetError, ManageError
from ballonet.hooks.weights import room

from ..models import MODES, Output, build, generate
from ..pool import bytes_that_exist
from ..portrait import Portrait, bits, none_in_pool
from .conftest import BUDGET, INPUTS, LAYERS, PAGE, say, streamed, streams

pytestmark = pytest.mark.chaos


def copied() -> dict[str, int]:
    moved: dict[str, int] = runtime.require().snapshot()["copied"]
    return moved


SHAPES = [
    (1, 1),
    (3, 2),
    (LAYERS, 3),
    (LAYERS, 1),
    (LAYERS - 1, 2),
]  # layers that stream, and slots; all of them: test_ring.py


@pytest.mark.parametrize(("m", "slots"), SHAPES)
def test_tokens_equal_stock(model: Any, original: Any, m: int, slots: int, monkeypatch: Any) -> None:
    with install.stock():
        stock = {mode: say(original, mode) for mode in MODES}
    before = Portrait(model)
    moved = copied()
    with streamed(model, m, slots, monkeypatch) as managed:
        for mode in MODES:
            assert say(model, mode).agrees(stock[mode]), mode
        assert len(managed.report().streamed) == m
        assert copied()["weights_h2d"] > moved["weights_h2d"]
        assert copied()["weights_d2h"] == moved["weights_d2h"]
        assert bytes_that_exist() <= BUDGET
        runtime.require().check()
    assert before.is_of(model)
    assert none_in_pool(model)


def test_resident_and_editable(model: Any, stock: Output, monkeypatch: Any) -> None:
    with streamed(model, 3, 2, monkeypatch) as managed:
        say(model)
        with managed.resident():
            assert not streams(managed, lambda: say(model))
            assert say(model).agrees(stock)
        assert streams(managed, lambda: say(model))
        with managed.editable():
            model.model.layers[managed.report().streamed[0]].mlp.up_proj.weight.data.zero_()
        assert not say(model).agrees(stock)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_forward_that_breaks_off_leaves_a_model_that_works(
    model: Any, stock: Output, monkeypatch: Any, kind: type[BaseException]
) -> None:
    with streamed(model, 3, 2, monkeypatch) as managed:
        for layer in range(LAYERS):
            calls = iter(range(100))

            def break_off(*_: object, calls: Iterator[int] = calls) -> None:
                if next(calls) == 3:
                    raise kind

            handle = model.model.layers[layer].mlp.register_forward_pre_hook(break_off)
            with pytest.raises(kind):
                say(model)
            handle.remove()
            assert bits(model.model.layers[layer].mlp.up_proj.weight)
            assert say(model).agrees(stock)
        other: list[Output] = []
        thread = threading.Thread(target=lambda: other.append(say(model)))
        thread.start()
        thread.join()
        assert other[0].agrees(stock)
        assert streams(managed, lambda: say(model))


def test_threads_take_turns_and_two_models_alternate(model: Any, original: Any, stock: Any, monkeypatch: Any) -> None:
    with install.stock():
        second = copy.deepcopy(original)
    with streamed(model, 3, 2, monkeypatch), streamed(second, 4, 2, monkeypatch, chaos=3):
        outputs: list[Output] = []

        def run(which: Any) -> None:
            for _ in range(2):
                outputs.append(say(which))

        threads = [threading.Thread(target=run, args=(which,)) for which in (model, second, model)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outputs) == 6
        assert all(each.agrees(stock) for each in outputs)
        runtime.require().check()


def test_assisted_decoding(model: Any, original: Any, monkeypatch: Any) -> None:
    one = {name: tensor[:1] for name, tensor in INPUTS.items()}
    with install.stock():
        helper = build("llama", num_hidden_layers=2)
        expected = generate(original, "greedy", one, tokens=20)
    with streamed(model, 4, 2, monkeypatch), streamed(helper, 2, 1, monkeypatch):
        assert torch.equal(generate(model, "greedy", one, tokens=20, assistant_model=helper).tokens, expected.tokens)
        assert torch.equal(generate(model, "greedy", one, tokens=20, assistant_early_exit=2).tokens, expected.tokens)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_model(model: Any, original: Any, monkeypatch: Any, fullgraph: bool) -> None:
    ids = INPUTS["input_ids"]
    torch.compiler.reset()  # a graph of another model of this class would do: torch guards no hooks
    with torch.no_grad():
        expected = original(ids).logits
        with streamed(model, 3, 2, monkeypatch):
            compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
            if fullgraph:
                with pytest.raises(Exception, match="ballonet streams"):
                    compiled(ids)
            else:
                for _ in range(3):
                    assert torch.allclose(compiled(ids).logits, expected, atol=1e-5)
            assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    torch.compiler.reset()


def test_a_model_larger_than_its_budget(original: Any, stock: Output) -> None:
    """The fewest layers stream; where all of them would not do, the error of old."""
    with install.stock():
        model = copy.deepcopy(original)
    before = runtime.require().budget
    with ballonet.manage(model) as managed:
        assert managed.report().streamed == ()
        resident = managed.report().pages * PAGE
    ballonet.set_budget(30 * PAGE)
    try:
        with pytest.raises(BudgetError) as refused:
            ballonet.manage(model)
        smallest = refused.value.smallest
        assert refused.value.required >= resident
        ballonet.set_budget(smallest)
        with ballonet.manage(model) as managed:
            assert len(managed.report().streamed) == LAYERS
            assert (managed.report().pages + managed.report().host_pages) * PAGE >= resident
            assert say(model).agrees(stock)
            assert bytes_that_exist() <= smallest
        ballonet.set_budget(smallest + 12 * PAGE)
        with ballonet.manage(model) as managed:
            assert 0 < len(managed.report().streamed) < LAYERS
            assert say(model).agrees(stock)
            assert bytes_that_exist() <= smallest + 12 * PAGE
        with pytest.raises(BudgetError):
            ballonet.manage(model, interval=None)
    finally:
        ballonet.set_budget(before)


@pytest.mark.parametrize("interval", [0, LAYERS + 1, -1, 1.5, "often", True])
def test_intervals_that_make_no_sense(model: Any, interval: Any) -> None:
    with pytest.raises(ManageError, match="interval"):
        ballonet.manage(model, interval=interval)
    assert none_in_pool(model)


def test_an_interval_by_number(model: Any, stock: Output) -> None:
    for interval, layers in ((1, (0, 1, 2, 3)), (2, (1, 3)), (4, (3,)), (None, ())):
        with ballonet.manage(model, interval=interval) as managed:
            assert managed.report().streamed == layers
            assert say(model).agrees(stock)


def test_too_little_host_memory_is_said_before_anything_moves(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "host_pages_left", lambda device: 3)
    before = Portrait(model)
    with pytest.raises(ManageError, match="host"):
        ballonet.manage(model, interval=1)
    assert before.is_of(model)
    assert none_in_pool(model)
