"""Models whose layers stream: the tokens of stock, and weights that are what they are for whoever looks.

Weights of layers that do not run lie under poison or under another layer's bytes (offload/residency/ring.py), and the
stand-in's order checker is on: a read that waits for nothing shows.
"""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ballonet
from ballonet.allocator import install, runtime
from ballonet.allocator.errors import BudgetError, ManageError
from ballonet.hooks.weights import room
from ballonet.offload.policy import plan

from ..models import MODES, Output, build, generate
from ..pool import bytes_that_exist
from ..portrait import Portrait, bits, none_in_pool, tensors
from .conftest import BUDGET, INPUTS, LAYERS, PAGE, streams

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def stock(original: Any) -> dict[str, Output]:
    with install.stock():
        return {mode: generate(original, mode, INPUTS) for mode in MODES}


def say(model: Any, mode: str = "greedy") -> Output:
    return generate(model, mode, INPUTS)


def copied() -> dict[str, int]:
    moved: dict[str, int] = runtime.require().snapshot()["copied"]
    return moved


FEW = [(1, 1), (3, 2), (LAYERS, 3)]
SHAPES = [*FEW, (LAYERS, 1), (LAYERS - 1, 2)]  # layers that stream, and slots; all of them: test_ring.py


def streamed(model: Any, m: int, slots: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> ballonet.Managed:
    """Managed with just these many layers in so many slots."""
    monkeypatch.setattr(
        plan, "at_interval", lambda pages, interval: plan.streaming(pages, plan.spread(pages, m), slots)
    )
    return ballonet.manage(model, interval=1, **options)


@pytest.mark.parametrize(("m", "slots"), SHAPES)
def test_tokens_equal_stock(model: Any, stock: dict[str, Output], m: int, slots: int, monkeypatch: Any) -> None:
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


@pytest.mark.parametrize(("m", "slots"), FEW)
def test_whoever_looks_sees_the_weights(
    model: Any, original: Any, m: int, slots: int, monkeypatch: Any, tmp_path: Path
) -> None:
    """Between the steps the model runs, so that slots hold something else."""
    expected = {name: bits(tensor) for name, tensor in tensors(original).items()}
    with streamed(model, m, slots, monkeypatch) as managed:

        def fly() -> None:
            assert streams(managed, lambda: say(model))

        def same(state: Any) -> bool:
            return all(bits(tensor) == expected[name] for name, tensor in state.items())

        fly()
        assert same(model.state_dict())
        fly()
        assert same(dict(model.named_parameters()))
        fly()
        model.save_pretrained(tmp_path)
        assert same(load_file(tmp_path / "model.safetensors"))
        fly()
        twin = copy.deepcopy(model)
        fly()
        assert same(tensors(twin))
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert same(tensors(model))
        fly()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        fly()
        assert same(tensors(torch.load(file, weights_only=False)))
        fly()
        layer = managed.report().streamed[0]
        states = torch.randn(1, 3, model.config.hidden_size)
        with torch.no_grad():
            fly()
            assert torch.equal(model.model.layers[layer].mlp(states), original.model.layers[layer].mlp(states))
        fly()
        weight = model.model.layers[layer].mlp.up_proj.weight
        assert bits(weight) == expected[f"model.layers.{layer}.mlp.up_proj.weight"]
        fly()
        assert bits(weight) == expected[f"model.layers.{layer}.mlp.up_proj.weight"]
        view = weight.data[1:]
        del weight
        fly()
        assert bits(view) == expected[f"model.layers.{layer}.mlp.up_proj.weight"][-view.nbytes :]
        del view
        fly()


@pytest.mark.parametrize(("m", "slots"), FEW)
def test_whoever_writes_changes_the_weights(model: Any, original: Any, m: int, slots: int, monkeypatch: Any) -> None:
    with install.stock():
        changed = copy.deepcopy(original)

    def change(it: Any) -> None:
        with torch.no_grad():
            for layer in it.model.layers:
                layer.mlp.up_proj.weight += 0.25
                layer.self_attn.q_proj.weight.data *= 1.5

    def load(it: Any) -> None:
        it.load_state_dict({name: tensor * 0.5 for name, tensor in original.state_dict().items()})

    def convert(it: Any) -> None:
        it.bfloat16()
        it.float()

    def train(it: Any) -> None:
        optimizer = torch.optim.SGD(it.parameters(), lr=0.1)
        it(INPUTS["input_ids"], labels=INPUTS["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    with streamed(model, m, slots, monkeypatch) as managed:
        for work in (change, train, load, change, convert):
            say(model)
            work(model)
            with install.stock():
                work(changed)
                expected = say(changed)
            gc.collect()
            assert say(model).agrees(expected), work.__name__
            assert not managed.report().unmanaged_tensors
        runtime.require().check()
    assert all(bits(tensor) == bits(tensors(changed)[name]) for name, tensor in tensors(model).items())


def test_resident_and_editable(model: Any, stock: dict[str, Output], monkeypatch: Any) -> None:
    with streamed(model, 3, 2, monkeypatch) as managed:
        say(model)
        with managed.resident():
            assert not streams(managed, lambda: say(model))
            assert say(model).agrees(stock["greedy"])
        assert streams(managed, lambda: say(model))
        with managed.editable():
            model.model.layers[managed.report().streamed[0]].mlp.up_proj.weight.data.zero_()
        assert not say(model).agrees(stock["greedy"])


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_forward_that_breaks_off_leaves_a_model_that_works(
    model: Any, stock: dict[str, Output], monkeypatch: Any, kind: type[BaseException]
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
            assert say(model).agrees(stock["greedy"])
        other: list[Output] = []
        thread = threading.Thread(target=lambda: other.append(say(model)))
        thread.start()
        thread.join()
        assert other[0].agrees(stock["greedy"])
        assert streams(managed, lambda: say(model))


def test_a_turn_that_was_interrupted_does_not_block_other_threads(
    model: Any, stock: dict[str, Output], monkeypatch: Any
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with streamed(model, 3, 2, monkeypatch):
        handle = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            say(model)
        handle.remove()
        other: list[Output] = []
        thread = threading.Thread(target=lambda: other.append(say(model)))
        thread.start()
        thread.join(60)
        assert other[0].agrees(stock["greedy"])


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
        assert all(each.agrees(stock["greedy"]) for each in outputs)
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


def test_what_was_compiled_before_it_streamed(model: Any, original: Any, monkeypatch: Any) -> None:
    ids = INPUTS["input_ids"]
    with torch.no_grad():
        expected = original(ids).logits
        compiled = torch.compile(model, backend="eager")
        assert torch.allclose(compiled(ids).logits, expected, atol=1e-5)
        with streamed(model, 3, 2, monkeypatch):
            say(model)
            assert torch.allclose(compiled(ids).logits, expected, atol=1e-5)
        assert torch.allclose(compiled(ids).logits, expected, atol=1e-5)
    torch.compiler.reset()


def test_a_model_larger_than_its_budget(original: Any, stock: dict[str, Output]) -> None:
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
            assert say(model).agrees(stock["greedy"])
            assert bytes_that_exist() <= smallest
        ballonet.set_budget(smallest + 12 * PAGE)
        with ballonet.manage(model) as managed:
            assert 0 < len(managed.report().streamed) < LAYERS
            assert say(model).agrees(stock["greedy"])
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


def test_an_interval_by_number(model: Any, stock: dict[str, Output]) -> None:
    for interval, layers in ((1, (0, 1, 2, 3)), (2, (1, 3)), (4, (3,)), (None, ())):
        with ballonet.manage(model, interval=interval) as managed:
            assert managed.report().streamed == layers
            assert say(model).agrees(stock["greedy"])


def test_too_little_host_memory_is_said_before_anything_moves(model: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(room, "host_pages_left", lambda device: 3)
    before = Portrait(model)
    with pytest.raises(ManageError, match="host"):
        ballonet.manage(model, interval=1)
    assert before.is_of(model)
    assert none_in_pool(model)
