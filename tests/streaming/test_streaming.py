"""Models whose layers stream: the tokens of stock, and weights that are what they are for whoever looks.

Weights of layers that do not run lie under poison or under another layer's bytes (offload/residency/ring.py), and the
stand-in's order checker is on: a read that waits for nothing shows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import BudgetError, ManageError
from ballonet.hooks.weights import ranges
from ballonet.offload.policy.plan import spread

from ..models import MODES, Output, ask, build, generate
from ..pool import bytes_that_exist
from ..portrait import Portrait, bits, none_in_pool
from ..threads import elsewhere
from ..tuned import Tuned
from .conftest import BUDGET, INPUTS, LAYERS, PAGE, say, streamed, streams

pytestmark = pytest.mark.chaos


def copied() -> dict[str, int]:
    moved: dict[str, int] = devices.require().snapshot()["copied"]
    return moved


@pytest.fixture(scope="module")
def answers(original: Any) -> dict[str, Output]:
    """What stock says in each mode."""
    with install.stock():
        return {mode: say(original, mode) for mode in MODES}


SHAPES = [(1, 1), (3, 2), (LAYERS, 1)]  # layers that stream, and slots; all of them: test_ring.py


@pytest.mark.parametrize(("m", "slots"), SHAPES)
def test_tokens_equal_stock(
    model: Any, answers: dict[str, Output], m: int, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Portrait(model)
    moved = copied()
    with streamed(model, m, slots, monkeypatch) as managed:
        for mode in MODES:
            assert say(model, mode).agrees(answers[mode]), mode
        assert len(managed.report().streamed) == m
        assert copied()["weights_h2d"] > moved["weights_h2d"]
        assert copied()["weights_d2h"] == moved["weights_d2h"]
        assert bytes_that_exist() <= BUDGET
        devices.require().check()
    assert before.is_of(model)
    assert none_in_pool(model)


UNEVEN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_hidden_layers": 5, "first_k_dense_replace": 2},  # dense layers before those with experts
    "jamba": {"num_hidden_layers": 5, "expert_layer_period": 3},  # attention or a state, with experts or without
    "qwen3_next": {},  # attention or a state, all with experts
}


@pytest.mark.parametrize("name", UNEVEN)
def test_layers_that_are_not_alike_stream_by_their_sizes(name: str, monkeypatch: Any, tuned: Tuned) -> None:
    """In slots as large as the largest layer that uses them."""
    tuned(weights={"large": 2**10})  # bytes: less than a matrix of these
    with install.stock():
        model = build(name, **UNEVEN[name])
        expected = {way: ask(model, name, way) for way in ("padded", "beam")}
    with ballonet.manage(model, interval=None) as managed:
        pages, resident = managed._residency.plan.pages, managed.report().pages
    assert name == "qwen3_next" or 2 * max(pages) > 3 * min(pages), "they are alike"
    moved = copied()
    for count, slots in ((2, 2), (len(pages), 1), (len(pages), 2)):
        chosen = spread(pages, count)
        largest = [max(pages[layer] for layer in chosen[slot::slots]) for slot in range(slots)]
        with streamed(model, count, slots, monkeypatch) as managed:
            for way in expected:
                assert ask(model, name, way).agrees(expected[way]), (count, slots, way)
            assert managed.report().streamed == chosen
            assert all(managed._weights.ring.slot(layer) for layer in chosen), "each has a slot that it fits in"
            assert managed.report().pages == resident - sum(pages[layer] for layer in chosen) + sum(largest)
    assert copied()["weights_d2h"] == moved["weights_d2h"]


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

            with model.model.layers[layer].mlp.register_forward_pre_hook(break_off), pytest.raises(kind):
                say(model)
            assert bits(model.model.layers[layer].mlp.up_proj.weight)
            assert say(model).agrees(stock)
        assert elsewhere(lambda: say(model)).agrees(stock)
        assert streams(managed, lambda: say(model))


def test_threads_take_turns_and_two_models_alternate(model: Any, original: Any, stock: Any, monkeypatch: Any) -> None:
    with install.stock():
        second = copy.deepcopy(original)
    with streamed(model, 3, 2, monkeypatch), streamed(second, 4, 2, monkeypatch, chaos=3):
        with ThreadPoolExecutor(3) as threads:
            outputs = [*threads.map(lambda which: [say(which) for _ in range(2)], (model, second, model))]
        assert all(output.agrees(stock) for both in outputs for output in both)
        devices.require().check()


def test_assisted_decoding(model: Any, original: Any, monkeypatch: Any) -> None:
    one = {name: tensor[:1] for name, tensor in INPUTS.items()}
    with install.stock():
        helper = build("llama", num_hidden_layers=2)
        expected = generate(original, "greedy", one, tokens=20)
    with streamed(model, 4, 2, monkeypatch), streamed(helper, 2, 1, monkeypatch):
        assert torch.equal(generate(model, "greedy", one, tokens=20, assistant_model=helper).tokens, expected.tokens)
        assert torch.equal(generate(model, "greedy", one, tokens=20, assistant_early_exit=2).tokens, expected.tokens)


def test_a_model_compiled_as_a_whole_is_refused(monkeypatch: Any) -> None:
    """With breaks in its graph it is not: test_host_copies.py."""
    ids = INPUTS["input_ids"]
    with install.stock():
        model, original = (build("llama", num_hidden_layers=2) for _ in range(2))
    torch.compiler.reset()  # a graph of another model of this class would do: torch guards no hooks
    with torch.no_grad():
        expected = original(ids).logits
        with streamed(model, 2, 1, monkeypatch):
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            with pytest.raises(Exception, match="ballonet streams"):
                compiled(ids)
            assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    torch.compiler.reset()


def test_a_model_larger_than_its_budget(original: Any, stock: Output) -> None:
    """The fewest layers stream; where all of them would not do, the error of old."""
    with install.stock():
        model = copy.deepcopy(original)
    before = devices.require().budget
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
    monkeypatch.setattr(ranges, "host_pages_left", lambda device: 3)
    before = Portrait(model)
    with pytest.raises(ManageError, match="host"):
        ballonet.manage(model, interval=1)
    assert before.is_of(model)
    assert none_in_pool(model)
