"""Layers that stream, and those who would be shown a slot by mistake: each test is one way in which that could be."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import ManageError, PoolExhausted
from ballonet.hooks.device import managers
from ballonet.hooks.device.references import THIS, Interpreter
from ballonet.hooks.forward import lease
from ballonet.hooks.forward.hook_base import CALL
from ballonet.hooks.streaming import bound
from ballonet.hooks.streaming import streamed as streaming
from ballonet.offload.residency import ring

from ..faulting import at_each_line
from ..models import Output
from ..portrait import bits, tensors
from ..threads import elsewhere
from .conftest import INPUTS, as_stock, fly, say, streamed, streams

pytestmark = pytest.mark.chaos


IDS = INPUTS["input_ids"]


@pytest.fixture
def managed(model: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ballonet.Managed]:
    """Three layers in two slots, from which they were read."""
    with streamed(model, 3, 2, monkeypatch) as it:
        fly(model, it)
        yield it


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def projection(model: Any, managed: ballonet.Managed, n: int = 2) -> Any:
    """A module that holds nothing but a streamed weight."""
    return model.model.layers[managed.report().streamed[n]].mlp.up_proj


def wanted(original: Any, managed: ballonet.Managed, n: int = 2) -> bytes:
    return bits(projection(original, managed, n).weight)


# How a weight is looked at: by a model, the weight's name, and a reference from before


def of_its_layer(model: Any, name: str, _: object) -> torch.Tensor:
    """What its layer makes of some states."""
    states = torch.ones(1, 1, model.config.hidden_size)
    layer = model.get_submodule(name.partition(".mlp")[0])
    output = layer(states, position_embeddings=model.model.rotary_emb(states, torch.arange(1)[None]))
    return output[0] if isinstance(output, tuple) else output


def memory(model: Any, name: str, _: object) -> tuple[Any, ...]:
    """To which torch counts no reference."""
    weight = model.get_parameter(name)
    return weight.untyped_storage(), weight.storage_offset(), weight.shape


Look = Callable[[Any, str, Any], Any]
SHOWN: dict[str, Look] = {
    "attribute": lambda model, name, _: model.get_parameter(name),
    "parameters": lambda model, name, _: dict(model.named_parameters())[name],
    "state": lambda model, name, _: model.state_dict()[name],
    "view": lambda model, name, _: model.get_parameter(name)[:],
    "data": lambda model, name, _: model.get_parameter(name).data,
    "reference": lambda model, name, held: held,
    "data of a reference": lambda model, name, held: held.data,
}
LOOKS: dict[str, Look] = {
    **SHOWN,
    "row": lambda model, name, _: model.get_parameter(name)[1],
    "graph": lambda model, name, _: torch.enable_grad()(lambda: model.get_parameter(name) * 1.0)(),
    "layer": of_its_layer,
    **({"memory": memory} if THIS.counts_references else {}),  # docs/limits.md, Layers that stream
}
LAYERS = {"in the first": 0, "in the second": 1, "in the third": 2}  # of those that stream; the second has its own slot
MOMENTS = ("between forwards", "before the layers", *LAYERS, "on a thread", "after the layers", "after Ctrl-C")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    scores: torch.Tensor = model(IDS).logits
    return scores


def looked_at(model: Any, managed: ballonet.Managed, moment: str, look: Callable[[], object]) -> None:
    """Looks once, in that moment."""
    left = [(lambda: elsewhere(look)) if moment == "on a thread" else look]
    others = {"before the layers": model.model.embed_tokens, "after the layers": model.model.norm}
    module = others.get(moment, projection(model, managed, LAYERS.get(moment, 2)))
    if moment == "after Ctrl-C":
        with module.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            logits(model)
    elif moment != "between forwards":
        with module.register_forward_hook(lambda *_: left.pop()() if left else None):
            logits(model)
    if left:
        left.pop()()


def check_looks(
    model: Any, original: Any, managed: ballonet.Managed, moment: str, looks: dict[str, Look] = LOOKS
) -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in managed.report().streamed]
    doubled = as_stock(original, lambda it: [it.get_parameter(name).data.mul_(2) for name in names], logits)
    stock, kept, references, later = as_stock(original, ask=logits), list[Any](), dict[str, Any](), list[list[bytes]]()

    @torch.no_grad()
    def keep(look: Look) -> None:
        kept.extend(look(model, name, references.get(name)) for name in names)

    def values(found: list[Any]) -> list[bytes]:
        return [bits(torch.empty(0).set_(*tensor) if isinstance(tensor, tuple) else tensor) for tensor in found]

    hooks = [
        module.register_forward_hook(lambda *_: later.append(values(kept)) if kept else None)
        for module in (projection(model, managed, 0), model.model.norm)
    ]
    for how, look in looks.items():
        print(how)
        references.update({name: model.get_parameter(name) for name in names if "reference" in how})
        assert all(streams(managed, lambda: logits(model)) for _ in range(2))
        with install.stock(), torch.no_grad():
            expected = values([look(original, name, original.get_parameter(name)) for name in names])
        looked_at(model, managed, moment, partial(keep, look))
        assert all(seen == expected for seen in (values(kept), *later))
        for factor, right in ((2, doubled), (0.5, stock)) if how in SHOWN else ():
            for tensor in kept:
                tensor.detach().mul_(factor)
            for _ in range(2):
                assert torch.equal(logits(model), right)
            assert (values(kept) == expected) == (right is stock)
        later.clear()
        for _ in range(2):
            assert torch.equal(logits(model), stock)
        assert all(seen == expected for seen in (values(kept), *later))
        for group in (kept, references, later):
            group.clear()
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_look_at_a_streamed_weight_shows_the_weight(
    model: Any, original: Any, managed: ballonet.Managed, moment: str
) -> None:
    """At once, later in the forward and after others, of the layer that runs and of those before and after it; what is
    written to it is read."""
    check_looks(model, original, managed, moment)
    fly(model, managed)
    devices.require().check()


@torch.no_grad()
def test_parameters_held_since_before_layers_streamed_show_their_weights(
    model: Any, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an optimizer holds them: bound.py, Note [Why a layer's own addresses do not lead to its slot]."""
    held = list(model.parameters())
    with install.stock():
        weights = [bits(weight) for weight in original.parameters()]
    with streamed(model, 3, 2, monkeypatch) as managed:
        fly(model, managed)
        assert [bits(weight) for weight in held] == weights


def test_memory_that_a_weight_had_before(model: Any, original: Any, managed: ballonet.Managed) -> None:
    """What averages of weights do: data is exchanged, and put back later. Or the weight itself is replaced."""
    weight = projection(model, managed).weight
    backup = weight.data
    weight.data = weight.data * 2
    del weight
    module = projection(model, managed, 1)
    old, module.weight = module.weight, nn.Parameter(torch.zeros_like(module.weight))
    for _ in range(2):
        say(model)
        assert bits(backup) == wanted(original, managed)
        assert bits(old) == wanted(original, managed, 1)


def test_a_part_that_outlives_its_model(original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with install.stock():
        model = copy.deepcopy(original)
    managed = streamed(model, 3, 2, monkeypatch)
    layers = managed.report().streamed
    fly(model, managed)
    body = model.model
    del model
    gc.collect()
    assert managed.report().released
    for layer in layers:
        name = f"layers.{layer}.mlp.up_proj.weight"
        assert bits(tensors(body)[name]) == bits(tensors(original.model)[name])
    with torch.no_grad():
        assert torch.equal(body(IDS).last_hidden_state, original.model(IDS).last_hidden_state)


def test_layers_that_are_taken_out_while_all_fly(model: Any, original: Any, managed: ballonet.Managed) -> None:
    def prune(it: Any) -> None:
        it.model.layers = it.model.layers[:4]
        it.config.num_hidden_layers = 4

    def exchange(it: Any) -> None:
        it.model.layers[managed.report().streamed[0]].mlp = copy.deepcopy(original.model.layers[1].mlp)

    prune(model)
    gc.collect()
    assert say(model).agrees(as_stock(original, prune))
    fly(model, managed)
    exchange(model)
    gc.collect()
    for _ in range(2):
        assert say(model).agrees(as_stock(original, lambda it: (prune(it), exchange(it))))
    devices.require().check()


def test_cache_of_an_interrupted_forward_is_freed(model: Any, managed: ballonet.Managed) -> None:
    """A cache with its pages, above all, though the model does not run again."""
    cache = DynamicCache()
    with projection(model, managed).register_forward_pre_hook(interrupt), suppress(KeyboardInterrupt), torch.no_grad():
        model(IDS, past_key_values=cache)
    left = weakref.ref(cache)
    del cache
    gc.collect()
    assert left() is None


def test_a_call_whose_frame_has_the_id_of_one_that_ctrl_c_broke_off(
    model: Any, original: Any, managed: ballonet.Managed
) -> None:
    module = projection(model, managed)
    states = torch.ones(1, original.config.hidden_size)
    with projection(model, managed).register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        say(model)

    def take_its_id(*_: object) -> None:
        frame = sys._getframe(1)
        while frame.f_code is not CALL:
            assert frame.f_back is not None
            frame = frame.f_back
        assert vars(module)["_parameters"].bound.call, "nothing was broken off"
        vars(module)["_parameters"].bound.call = id(frame)

    with torch.no_grad(), module.register_forward_pre_hook(take_its_id):
        module.weight += 1
        assert torch.equal(module(states), nn.functional.linear(states, module.weight))


def test_a_layer_that_writes_to_its_own_weights_is_told(
    model: Any, original: Any, stock: Output, managed: ballonet.Managed
) -> None:
    """The slot goes to the next layer, and the write with it."""

    def write(module: Any, *_: object) -> None:
        module.up_proj.weight.mul_(1.5)

    mlp = model.model.layers[managed.report().streamed[1]].mlp
    with mlp.register_forward_hook(write):
        with pytest.raises(ManageError, match="has written to its own weights"):
            say(model)
        assert bits(mlp.up_proj.weight) == wanted(original, managed, 1)
        with managed.resident():
            say(model)
    assert bits(mlp.up_proj.weight) != wanted(original, managed, 1)
    mlp.up_proj.weight.data.copy_(original.model.layers[managed.report().streamed[1]].mlp.up_proj.weight)
    assert say(model).agrees(stock)
    fly(model, managed)


def test_gradients_after_ctrl_c(model: Any, original: Any, managed: ballonet.Managed) -> None:
    """A layer that is called by itself then must not take the turn that was left open for its own."""
    with projection(model, managed).register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        say(model)
    states = torch.randn(1, 3, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    gradients = []
    for it in (model, original):
        layers = it.model.layers
        position = it.model.rotary_emb(states, torch.arange(3)[None])
        value = states.clone().requires_grad_()
        result = value
        for layer in managed.report().streamed:
            result = layers[layer](result, position_embeddings=position)
        result = result[0] if isinstance(result, tuple) else result
        gradients.append(torch.autograd.grad(result.sum(), value)[0])
    assert torch.equal(*gradients)


def test_a_graph_that_another_thread_goes_back_through(model: Any, original: Any, managed: ballonet.Managed) -> None:
    def backward(it: Any, loss: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, it.model.embed_tokens.weight)[0]

    expected = backward(original, original(IDS, labels=IDS).loss)
    loss = model(IDS, labels=IDS).loss
    gradients: list[torch.Tensor] = []

    def act(*_: object) -> None:
        if not gradients:
            gradients.append(elsewhere(lambda: backward(model, loss)))

    with model.model.norm.register_forward_hook(act):
        say(model)
    assert torch.equal(gradients[0], expected)


def test_a_weight_that_is_given_other_memory_is_read_there(
    model: Any, original: Any, stock: Output, managed: ballonet.Managed
) -> None:
    """Where someone holds what it had before, too, so that nothing shows it; and where only its shape is another."""
    weight = projection(model, managed).weight
    before = weight.data
    weight.data = before * 2
    assert say(model).agrees(as_stock(original, lambda it: projection(it, managed).weight.data.mul_(2)))
    weight.data = before
    assert say(model).agrees(stock)

    def transpose(it: Any) -> None:
        square = it.model.layers[managed.report().streamed[2]].self_attn.q_proj.weight
        square.data = square.data.t()

    transpose(model)
    assert say(model).agrees(as_stock(original, transpose))


def test_copies_begin_before_the_pass_where_nobody_can_write(model: Any, managed: ballonet.Managed) -> None:
    ring = managed._weights.ring
    begin = ring.begin
    copied: list[int] = []

    def counted(*arguments: Any) -> None:
        before = ring.copied
        begin(*arguments)
        copied.append(ring.copied - before)

    ring.begin = counted  # type: ignore[method-assign]

    def begun() -> bool:
        with torch.no_grad():
            model(IDS)
        return copied[-1] > 0

    assert not begun()
    weight = projection(model, managed, 0).weight
    assert begun()
    assert begun()
    view = weight.data
    del weight
    assert begun()
    del view
    assert begun(), "somebody may have written before it began"
    assert not begun()


def test_the_copy_of_the_next_layer_begins_when_a_layer_is_left(model: Any, managed: ballonet.Managed) -> None:
    """The third layer that streams comes to the slot of the first one while the second computes."""
    copied: list[int] = []
    first, second = (model.model.layers[layer].mlp for layer in managed.report().streamed[:2])

    def note(*_: object) -> None:
        copied.append(managed._weights.ring.copied)

    with first.register_forward_hook(note), second.register_forward_hook(note), torch.no_grad():
        model(IDS)
    assert copied[0] < copied[1]


def test_where_references_cannot_be_counted_layers_are_copied_when_a_pass_begins(
    model: Any, original: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = managers.composed_with()
    unknown = before._replace(interpreter=Interpreter((3, 14), free_threaded=False, gil=True))
    copied = []
    try:
        for composition in (before, unknown):
            managers.compose_with(composition)
            with streamed(model, 3, 2, monkeypatch) as managed:
                fly(model, managed)
                first = managed.report().link_bytes
                with torch.no_grad():
                    model(IDS)
                copied.append(managed.report().link_bytes - first)
                for moment in ("between forwards", "in the third"):
                    check_looks(model, original, managed, moment, SHOWN)
            model.load_state_dict(original.state_dict())
    finally:
        managers.compose_with(before)
    assert not THIS.counts_references or copied[0] < copied[1]


def test_weight_written_earlier_in_the_forward_is_read(model: Any, original: Any, managed: ballonet.Managed) -> None:
    """The copy of the layer has begun by then."""

    def write(it: Any) -> Any:
        @torch.no_grad()
        def act(*_: object) -> None:
            for n in range(3):
                projection(it, managed, n).weight.mul_(1.01)

        return it.model.embed_tokens.register_forward_hook(act)

    expected = as_stock(original, write)
    with write(model):
        assert say(model).agrees(expected)


def test_attribute_of_a_weight_is_there_in_its_forward(model: Any, managed: ballonet.Managed) -> None:
    module = projection(model, managed)
    module.weight.scale = 3
    seen: list[Any] = []

    def act(*_: object) -> None:
        weight = module.weight
        weight.count = getattr(weight, "count", 0) + 1
        seen.append((type(weight), weight.scale, weight.requires_grad, weight.count, weight.is_leaf))

    with module.register_forward_pre_hook(act):
        fly(model, managed)
    assert seen == [(nn.Parameter, 3, True, n + 1, True) for n in range(len(seen))]
    assert module.weight.count == len(seen) > 0


def test_a_functional_call_reads_what_it_is_given(model: Any, original: Any, managed: ballonet.Managed) -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in managed.report().streamed]
    results = []
    for it in (model, original):
        given = {name: it.get_parameter(name).detach() * 2 for name in names}
        with torch.no_grad():
            results.append(torch.func.functional_call(it, given, (IDS,)).logits)
    assert torch.equal(*results)
    assert bits(projection(model, managed).weight) == wanted(original, managed)


def test_a_section_outlives_a_change_of_the_model(model: Any, stock: Output, managed: ballonet.Managed) -> None:
    with managed.resident():
        model.model.layers[0].register_buffer("new", torch.zeros(4096))
        assert not streams(managed, lambda: say(model).agrees(stock))
    fly(model, managed)


def test_a_module_in_several_layers(original: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with install.stock():
        model = copy.deepcopy(original)
        for layer in model.model.layers:
            layer.mlp.gate_proj = model.model.layers[0].mlp.gate_proj
            layer.register_buffer("shared", model.model.rotary_emb.inv_freq, persistent=False)
        expected = say(copy.deepcopy(model))
    with streamed(model, 3, 2, monkeypatch) as managed:
        for _ in range(2):
            assert say(model).agrees(expected)
        fly(model, managed)


@pytest.mark.parametrize(
    ("error", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (PoolExhausted, torch.OutOfMemoryError)]
)
def test_a_look_at_a_changed_model_that_breaks_off_is_made_up_for(
    model: Any,
    stock: Output,
    managed: ballonet.Managed,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BaseException],
    seen: type[BaseException],
) -> None:
    def break_off(*_: object) -> None:
        raise error

    model.model.layers[0].register_buffer("new", torch.zeros(4096))
    with monkeypatch.context() as patch:
        patch.setattr(managed._follower, "catch_up", break_off)
        with pytest.raises(seen):
            say(model)
    assert say(model).agrees(stock)
    fly(model, managed)


def test_ctrl_c_anywhere_in_a_pass(model: Any, stock: Output, managed: ballonet.Managed) -> None:
    expected = {name: bits(tensor) for name, tensor in tensors(model).items()}
    parts = (ring, streaming, bound, lease)

    @torch.no_grad()
    def run(_: object) -> None:
        model(IDS)

    for number, _ in enumerate(at_each_line(nullcontext, run, *parts, most=30, least=250)):
        assert all(bits(tensor) == expected[name] for name, tensor in tensors(model).items())
        if number % 5 == 0:
            assert say(model).agrees(stock)
        with managed.resident():
            pass
    fly(model, managed)
    devices.require().check()
