"""What a forward computes, written down: equal at every length, different where anything else is computed, and refused
by name where a graph would read what does not stay. On a CPU: nothing is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from ballonet.hooks.compat import cache_name
from ballonet.hooks.pieces import runner
from ballonet.hooks.pieces.attention import TorchListener
from ballonet.hooks.pieces.patches import recording
from ballonet.hooks.pieces.recipe import (
    OUTSIDE,
    EagerCall,
    Fresh,
    Given,
    LayerStep,
    Made,
    Number,
    Op,
    OutputFields,
    Recipe,
    WeightOperand,
    difference,
    eager_calls,
    operands,
    rebuild,
    same,
)
from ballonet.hooks.pieces.recorder import ForwardRecorder, RecordedLayers
from ballonet.hooks.weights.model_parts import decoder_layers

from . import models

CPU = torch.device("cpu")
LENGTHS = 9, 10, 14


class Noted(NamedTuple):
    """A forward that was recorded."""

    recipe: Recipe | None
    recorder: ForwardRecorder
    output: Any


@torch.no_grad()
def record(
    model: Any, length: int, *, rows: int = 2, away: Container[int] = (), fine: bool = True, **more: Any
) -> Noted:
    """A forward of one new token after `length` others."""
    cache = DynamicCache(config=model.config)
    ids = models.prompts(rows, max(LENGTHS))["input_ids"][:, :length]
    model(ids, use_cache=True, **{cache_name(model): cache})
    given = {
        "input_ids": torch.full((rows, 1), 7),
        "position_ids": torch.full((rows, 1), length),
        "attention_mask": torch.ones(rows, length + 1, dtype=torch.long),
        cache_name(model): cache,
        "use_cache": True,
    } | more
    recorder = ForwardRecorder(runner.weights_by_address(model), CPU, given, cache, runner.GROWS)
    hooks = RecordedLayers(recorder, decoder_layers(model), (), lambda layer: layer in away)
    with recording(recorder, model, hooks, fine):
        output = model(**given)
    return Noted(recorder.recipe(output), recorder, output)


@pytest.fixture
def llama() -> Any:
    return models.build("llama")


def recipe_of(model: Any, length: int = 9, **more: Any) -> Recipe:
    noted = record(model, length, **more)
    assert noted.recipe is not None, noted.recorder.refusal
    return noted.recipe


def ops_of(steps: Any) -> list[Op]:
    ops: list[Op] = []
    for step in steps:
        if isinstance(step, Op):
            ops.append(step)
        elif isinstance(step, LayerStep):
            ops += ops_of(step.body or ())
    return ops


# -- Of models


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral-window", "mixtral", "gemma3n_text"])
def test_recipes_of_all_lengths_are_equal(name: str) -> None:
    model = models.build(name)
    first, *others = [recipe_of(model, length) for length in LENGTHS]
    assert [difference(first, other) for other in others] == [""] * len(others)


def test_recorded_forward_returns_what_an_eager_one_does(llama: Any) -> None:
    cache = DynamicCache(config=llama.config)
    ids = models.prompts(2, max(LENGTHS))["input_ids"][:, :9]
    with torch.no_grad():
        given = {cache_name(llama): cache}
        llama(ids, **given)
        expected = llama(torch.full((2, 1), 7), position_ids=torch.full((2, 1), 9), **given).logits
    assert torch.equal(record(llama, 9).output.logits, expected)


def test_no_operator_reads_what_the_cache_or_a_mask_function_returned(llama: Any) -> None:
    given = models.prompts(2, 10)["attention_mask"]
    recipe = recipe_of(llama, attention_mask=given)
    calls = list(eager_calls(recipe.steps))
    read = [leaf for call in calls if call.kind == "attention" for leaf in operands((call.args, call.kwargs))]
    assert {type(leaf) for leaf in read} >= {Fresh, Made}, "attention reads them as they are"
    for op in ops_of(recipe.steps):
        assert not any(isinstance(leaf, (Fresh, Given)) for leaf in operands((op.args, op.kwargs))), op


def test_forward_of_another_batch_is_another_one(llama: Any) -> None:
    assert "other shapes" in difference(recipe_of(llama, rows=2), recipe_of(llama, rows=3))


def test_replaced_weight_is_named(llama: Any) -> None:
    before = recipe_of(llama)
    weight = llama.model.layers[1].mlp.up_proj.weight
    kept = weight.data
    weight.data = weight.data.clone()
    reason = difference(before, recipe_of(llama))
    assert reason.startswith("layer 1: aten.")
    assert f"at {kept.data_ptr():#x}" in reason


def test_weight_that_moved_is_not_read_from_where_it_was(llama: Any) -> None:
    weight = llama.lm_head.weight
    reference = WeightOperand(weight)
    assert reference.tensor() is weight
    weight.data = weight.data.clone()
    with pytest.raises(LookupError, match="replaced"):
        reference.tensor()
    gone = WeightOperand(nn.Parameter(torch.ones(3)))
    with pytest.raises(LookupError, match="replaced"):
        gone.tensor()


def test_changed_configuration_is_another_forward(llama: Any) -> None:
    before = recipe_of(llama)
    for norm in (llama.model.layers[2].input_layernorm,):
        norm.variance_epsilon = 1e-2
    assert difference(before, recipe_of(llama)).startswith("layer 2: aten.add")


def test_attention_of_another_implementation_is_another_function(llama: Any) -> None:
    before = recipe_of(llama)
    llama.set_attn_implementation("eager")
    assert difference(before, recipe_of(llama))


def test_function_of_activation_is_compared(llama: Any) -> None:
    before = recipe_of(llama)
    llama.model.layers[0].mlp.act_fn = nn.GELU()
    assert difference(before, recipe_of(llama)) == "layer 0: aten.silu.default comes in the place of aten.gelu.default"


def test_layer_that_is_skipped_is_missed(llama: Any) -> None:
    before = recipe_of(llama)
    llama.model.layers = llama.model.layers[:2]
    llama.config.num_hidden_layers = 2
    assert difference(before, recipe_of(llama))


def test_layer_that_was_away_counts_as_equal(llama: Any) -> None:
    whole, without = recipe_of(llama), recipe_of(llama, 10, away={1})
    assert [layer.body is None for layer in without.layers()] == [False, True, False]
    assert difference(whole, without) == difference(without, whole) == ""


def test_difference_in_another_layer_is_seen_though_one_was_away(llama: Any) -> None:
    without = recipe_of(llama, away={1})
    weight = llama.model.layers[2].mlp.up_proj.weight
    weight.data = weight.data.clone()
    assert "layer 2" in difference(without, recipe_of(llama))


def test_output_of_hidden_states_is_another_one(llama: Any) -> None:
    assert difference(recipe_of(llama), recipe_of(llama, output_hidden_states=True))


def test_recurrent_state_is_refused_where_attention_is_cut() -> None:
    noted = record(models.build("falcon_h1"), 9)
    assert noted.recipe is None
    assert "reads a tensor" in noted.recorder.refusal or "writes" in noted.recorder.refusal


# -- Of single operators

Work = Callable[["Toy", torch.Tensor], Any]


class Toy(nn.Module):
    """Something that computes with what it is given, a weight, a table that it keeps, a mask and a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.register_buffer("buffer", torch.ones(4))
        self.table = torch.full((4,), 3.0)
        self.mask = torch.ones(1, 9)
        self.cache = DynamicCache()
        self.cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)


def noted_work(work: Work) -> Noted:
    toy, given = Toy(), {"input": torch.arange(4.0)}
    inputs = given | {"attention_mask": toy.mask, "cache": toy.cache}
    recorder = ForwardRecorder(runner.weights_by_address(toy), CPU, inputs, toy.cache, runner.GROWS)
    with torch.no_grad(), recorder:
        output = work(toy, given["input"])
    return Noted(recorder.recipe(output), recorder, output)


REFUSED: dict[str, tuple[Work, str]] = {
    "keys-of-the-cache": (lambda toy, x: x + toy.cache.layers[0].keys[0, 0, 0], "reads a tensor of"),
    "table": (lambda toy, x: x + toy.table, "reads a tensor of [4] that is not the model's"),
    "mask-in-place": (lambda toy, x: (toy.mask.add_(1), x + 1)[1], "writes to a mask"),
    "weight-in-place": (lambda toy, x: (toy.weight.data.mul_(1), x + 1)[1], "writes to weight[4]"),
    "buffer-in-place": (lambda toy, x: (toy.buffer.add_(1), x + 1)[1], "writes to weight[4]"),
    "buffer-as-result": (lambda toy, x: (torch.add(x, 1, out=toy.buffer), x + 1)[1], "writes to weight[4]"),
    "input-in-place": (lambda toy, x: x.add_(1), "writes to an argument of the forward"),
    "view-of-an-input-in-place": (lambda toy, x: (x[:2].add_(1), x + 1)[1], "writes to an argument of the forward"),
    "view-of-a-buffer-in-place": (lambda toy, x: (toy.buffer[:2].add_(1), x + 1)[1], "writes to weight[4]"),
    "size-by-its-values": (lambda toy, x: x.nonzero(), "shape is only known on the device"),
    "chosen-by-a-mask": (lambda toy, x: x[x > 1], "shape is only known on the device"),
    "value": (lambda toy, x: x + float(x.sum()), "the host needs its result"),
    "decision": (lambda toy, x: x + 1 if bool((x > 1).any()) else x, "the host needs its result"),
    "random": (lambda toy, x: x + torch.rand(4), "draws random numbers"),
    "dropout": (lambda toy, x: torch.dropout(x, 0.5, True), "draws random numbers"),
    "random-in-place": (lambda toy, x: (x + 1).normal_(), "draws random numbers"),
    "anothers-result": (lambda toy, x: x + elsewhere(), "reads a tensor of [4] that is not the model's"),
    "returned-table": (lambda toy, x: toy.table, "the forward returns a tensor of [4] that nothing recorded has made"),
    "returned-weight": (
        lambda toy, x: toy.weight,
        "the forward returns a tensor of [4] that nothing recorded has made",
    ),
}


def elsewhere() -> torch.Tensor:
    """What another thread has computed meanwhile."""
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(4)))
    thread.start()
    thread.join()
    return made[0]


@pytest.mark.parametrize("name", REFUSED)
def test_work_no_graph_may_do_is_refused_by_name(name: str) -> None:
    work, why = REFUSED[name]
    noted = noted_work(work)
    assert noted.recipe is None, noted.recipe.steps
    assert why in noted.recorder.refusal


@pytest.mark.parametrize("name", [name for name in REFUSED if "random" not in name and name != "dropout"])
def test_refused_forward_returns_what_it_does_anyway(name: str) -> None:
    work, _ = REFUSED[name]
    toy = Toy()
    with torch.no_grad():
        expected = work(toy, torch.arange(4.0))
    assert torch.equal(noted_work(work).output, expected)


ALLOWED: dict[str, Work] = {
    "weights and buffers": lambda toy, x: x * toy.weight + toy.buffer,
    "own results in place": lambda toy, x: (x + 1).mul_(2),
    "chosen by numbers": lambda toy, x: x[torch.zeros(3, dtype=torch.long).add(1)],
    "what nothing reads": lambda toy, x: (x.exp(), x + 1)[1],
}


@pytest.mark.parametrize("name", ALLOWED)
def test_work_a_graph_may_do_is_written_down(name: str) -> None:
    noted = noted_work(ALLOWED[name])
    assert noted.recipe is not None, noted.recorder.refusal
    assert not any("exp" in str(step) for step in noted.recipe.steps), "what nothing reads is left out"


def test_operator_between_update_and_attention_is_refused() -> None:
    def work(toy: Toy, x: torch.Tensor) -> torch.Tensor:
        recorder = toy_recorder[0]
        recorder.call("update", lambda cache: (torch.ones(4), torch.ones(4)), (toy.cache,), {})
        return x + 1

    toy_recorder = list[ForwardRecorder]()
    toy = Toy()
    recorder = ForwardRecorder(runner.weights_by_address(toy), CPU, {"input": torch.ones(4)}, toy.cache, runner.GROWS)
    toy_recorder.append(recorder)
    with torch.no_grad(), recorder:
        output = work(toy, recorder.given["input"])
    assert recorder.recipe(output) is None
    assert recorder.refusal == "aten.add.Tensor runs between an update of the cache and its attention"


def test_update_without_attention_is_refused() -> None:
    toy = Toy()
    recorder = ForwardRecorder(runner.weights_by_address(toy), CPU, {"input": torch.ones(4)}, toy.cache, runner.GROWS)
    with torch.no_grad(), recorder:
        output = recorder.given["input"] + 1
        recorder.call("update", lambda cache: None, (toy.cache,), {})
    assert recorder.recipe(output) is None
    assert "ends between" in recorder.refusal


def test_eager_call_with_another_cache_is_refused() -> None:
    toy = Toy()
    recorder = ForwardRecorder(runner.weights_by_address(toy), CPU, {"input": torch.ones(4)}, toy.cache, runner.GROWS)
    with torch.no_grad(), recorder:
        recorder.call("update", lambda cache: None, (DynamicCache(),), {})
    assert "another cache" in recorder.refusal


def test_eager_call_with_an_object_of_unknown_state_is_refused() -> None:
    toy = Toy()
    recorder = ForwardRecorder(runner.weights_by_address(toy), CPU, {"input": torch.ones(4)}, toy.cache, runner.GROWS)
    with torch.no_grad(), recorder:
        recorder.call("attention", lambda thing: None, (object(),), {})
    assert "is given a object" in recorder.refusal


# -- Trees

A, B = Made(OUTSIDE, 1), Made(0, 1)


def test_call_of_another_thread_sees_hooks_before_their_keywords_are_noted() -> None:
    """torch puts a hook in first, and then notes that it takes keyword arguments."""
    layer, module = nn.Linear(2, 2), nn.Linear(2, 2)
    elsewhere: Any = SimpleNamespace(thread=-1, refusal="", records=True, _layers=[])
    hooks = RecordedLayers(elsewhere, [layer], [module], lambda _: False)
    hooks.add()
    for watched in (layer, module):
        watched._forward_pre_hooks_with_kwargs.clear()
        assert watched(torch.ones(2)).shape == (2,)


def test_named_tuples_keep_their_type() -> None:
    class Pair(NamedTuple):
        one: Any
        other: Any

    rebuilt = rebuild(Pair(A, [2]), lambda leaf: B if leaf is A else leaf)
    assert rebuilt == Pair(B, [2])
    assert type(rebuilt) is Pair


def number(value: Any) -> Number:
    return Number(torch.tensor(value))


UNEQUAL: dict[str, tuple[Any, Any]] = {
    "tensors": (A, B),
    "what is made and what is given": (Made(0, 1), Fresh((0, 1), 1)),
    "keywords": ({"a": 1}, {"b": 1}),
    "lengths": ((1, 2), (1, 2, 3)),
    "kinds of numbers": (1, 1.0),
    "truth and number": (True, 1),
    "scalars": (number(1.0), number(2.0)),
    "scalars of other types": (number(1), number(1.0)),
    "modules": (nn.Identity(), nn.Identity()),
    "outputs": (OutputFields(dict, {"a": A}), OutputFields(dict, {"a": B})),
    "kinds of outputs": (OutputFields(dict, {"a": A}), OutputFields(list, {"a": A})),
    "nothing": (None, 0),
    "signs of zero": (0.0, -0.0),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_trees_that_differ_are_not_the_same(name: str) -> None:
    one, other = UNEQUAL[name]
    assert not same(one, other)
    assert not same([one], [other])


def test_equal_trees_are_the_same() -> None:
    for make in (
        lambda: (A, [1, None]),
        lambda: {"a": number(2.0)},
        lambda: number(float("nan")),
        lambda: float("nan"),
    ):
        assert same(make(), make())


def op(function: Any, *args: Any, result: Made = B) -> Op:
    return Op(function, args, {}, (result,), ())


def recipe(*steps: Any, output: Any = B) -> Recipe:
    return Recipe({"input_ids": A}, list(steps), output)


ADD, MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
DIFFERENT: dict[str, tuple[Recipe, Recipe, str]] = {
    "operators": (
        recipe(op(ADD, A, A)),
        recipe(op(MUL, A, A)),
        "aten.add.Tensor comes in the place of aten.mul.Tensor",
    ),
    "constants": (recipe(op(ADD, A, 9)), recipe(op(ADD, A, 10)), "aten.add.Tensor is called with 9 and 10"),
    "one more": (recipe(op(ADD, A, A)), recipe(op(ADD, A, A), op(MUL, B, B)), "aten.mul.Tensor is not always computed"),
    "outputs": (recipe(op(ADD, A, A)), recipe(op(ADD, A, A), output=A), "another output"),
    "inputs": (recipe(), Recipe({"inputs_embeds": A}, [], B), "the forward takes other arguments"),
    "order": (
        recipe(op(ADD, A, A), op(MUL, A, A)),
        recipe(op(MUL, A, A), op(ADD, A, A)),
        "aten.add.Tensor comes in the place of aten.mul.Tensor",
    ),
    "calls": (
        recipe(EagerCall((OUTSIDE, 1), "mask", min, (A,), {})),
        recipe(EagerCall((OUTSIDE, 1), "mask", max, (A,), {})),
        "mask 1 is another function",
    ),
    "layers": (
        recipe(LayerStep(0, EagerCall((OUTSIDE, 1), "module", min, (), {}), [])),
        recipe(LayerStep(1, EagerCall((OUTSIDE, 1), "module", min, (), {}), [])),
        "layer 0 comes in the place of layer 1",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_difference_names_the_step(name: str) -> None:
    one, other, said = DIFFERENT[name]
    assert difference(one, other) == said
    assert difference(other, one)


def test_methods_of_another_object_are_another_function() -> None:
    one, other = Toy(), Toy()

    def called(function: Any) -> Recipe:
        return recipe(EagerCall((OUTSIDE, 1), "attention", function, (), {}))

    assert not difference(called(one.forward), called(one.forward))
    assert difference(called(one.forward), called(other.forward))


# -- Functions of transformers that are known


def listened(function: Callable[[], Any], known: dict[int, Any]) -> Any:
    listener = TorchListener(lambda tensor: known.get(id(tensor)))
    with listener:
        result = function()
    return listener.returned(result)


def test_calls_of_an_attention_function_are_noted_with_what_they_read() -> None:
    x, y = torch.ones(2), torch.ones(2)
    calls = listened(lambda: (torch.add(x, y).mul(2), None), {id(x): A, id(y): Fresh((0, 1), 0)})
    assert calls is not None
    assert len(calls) == 2
    assert calls[0].args == (A, Fresh((0, 1), 0))


def test_attention_that_reads_an_unknown_tensor_is_called_as_a_whole() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert listened(lambda: (torch.add(x, y), None), {id(x): A}) is None


def test_attention_that_reads_an_argument_of_the_forward_is_called_as_a_whole() -> None:
    x, mask = torch.ones(2), torch.ones(2)
    assert listened(lambda: (torch.add(x, mask), None), {id(x): A, id(mask): Given("attention_mask.full")}) is None


def test_attention_that_works_in_place_is_called_as_a_whole() -> None:
    x = torch.ones(2)
    assert listened(lambda: (x.add_(1), None), {id(x): A}) is None
