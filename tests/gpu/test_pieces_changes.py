"""A model, or the state of its thread, changes between two calls or two tokens: the next token is stock's.

Stock is a twin that nothing manages, changed in the same way.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import ballonet
from ballonet.hooks.pieces.runner import KEYS

from .. import models
from .decoding import SHORT, TOKENS, answer, apart, between, by_graphs, captures, decoding, prompt, replays
from .scene import Place, scene
from .stock import small_layers

Change = Callable[[Any], object]


def twins(place: Place, name: str = "llama", **changes: Any) -> tuple[Any, Any]:
    model = models.build(name, **changes).to(place.kind)
    return model, copy.deepcopy(model)


def up(model: Any) -> nn.Parameter:
    weight: nn.Parameter = model.model.layers[1].mlp.up_proj.weight
    return weight


def drawn(like: torch.Tensor, seed: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(like.shape, generator=generator) * 0.2).to(like.device, like.dtype)


def replace_data(model: Any) -> None:
    up(model).data = drawn(up(model))


def replace_parameter(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(drawn(up(model)))


def assign_state(model: Any) -> None:
    state = {name: drawn(value) if value.dim() > 1 else value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def copy_state(model: Any) -> None:
    model.load_state_dict({name: drawn(value) for name, value in model.state_dict().items()})


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        up(model).mul_(-1)


def widen_epsilon(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.1


def replace_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def replace_module(model: Any) -> None:
    fresh = nn.Linear(32, 48, bias=True).to(up(model).device)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.copy_(drawn(parameter))
    model.model.layers[1].mlp.up_proj = fresh


def drop_layer(model: Any) -> None:
    del model.model.layers[1]
    model.config.num_hidden_layers = len(model.model.layers)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index


def rescale_positions(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def scale_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.1


CHANGES: Mapping[str, Change] = {
    "data": replace_data,
    "parameter": replace_parameter,
    "assigned state": assign_state,
    "copied state": copy_state,
    "in place": write_in_place,
    "half": lambda model: model.half(),
    "twice as precise": lambda model: model.double(),
    "eager attention": lambda model: model.set_attn_implementation("eager"),
    "attribute": widen_epsilon,
    "activation": replace_activation,
    "module": replace_module,
    "layer less": drop_layer,
    "positions": rescale_positions,
    "scale of attention": scale_attention,
    "more tokens": lambda model: model.resize_token_embeddings(model.config.vocab_size + 8, mean_resizing=False),
    "to the host and back": lambda model: model.to("cpu").to("cuda"),
}


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("change", CHANGES)
def test_change_between_calls_is_in_the_next_one(place: Place, change: str) -> None:
    model, twin = twins(place)
    given = prompt("llama", place)
    stock = answer(twin, given)
    with decoding(model) as managed:
        answer(model, given)
        assert not apart(answer(model, given), stock)
        torch.manual_seed(9)
        CHANGES[change](model)
        torch.manual_seed(9)
        CHANGES[change](twin)
        expected = answer(twin, given)
        for _ in range(3):
            assert not apart(answer(model, given), expected)
        assert not managed.report().pieces.why, "graphs of before were compared with what changed"


@scene(only="cuda", needs_host=True, pages=128, host_pages=64)
@pytest.mark.parametrize("change", ["data", "assigned state", "in place"])
def test_change_of_a_model_that_streams_is_in_the_next_call(place: Place, change: str) -> None:
    model, twin = twins(place)
    given = prompt("llama", place)
    with small_layers(), decoding(model, interval=2):
        answer(model, given)
        for either in (model, twin):
            CHANGES[change](either)
        expected = answer(twin, given)
        for _ in range(3):
            assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
def test_change_and_back_replays_what_was_captured(place: Place) -> None:
    model, twin = twins(place)
    given = prompt("llama", place)
    with ballonet.manage(model) as managed:
        for epsilon in (1e-6, 0.1, 1e-6, 0.1):
            for either in (model, twin):
                either.model.layers[0].input_layernorm.variance_epsilon = epsilon
            expected = answer(twin, given)
            for _ in range(2):
                assert not apart(answer(model, given), expected)
            with by_graphs(managed):
                answer(model, given)
        assert captures(managed) == 2


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("change", ["data", "parameter", "assigned state", "in place", "module"])
def test_weights_replaced_between_two_tokens_are_in_the_next_one(place: Place, change: str) -> None:
    """The one call began with others."""
    model, twin = twins(place)
    given = prompt("llama", place)
    act = CHANGES[change]
    expected = answer(twin, given, **between(lambda _: act(twin), at=6))
    assert apart(expected, answer(twins(place)[0], given)), "the change is to be seen"
    with decoding(model):
        answer(model, given)
        assert not apart(answer(model, given, **between(lambda _: act(model), at=6)), expected)
        expected = answer(twin, given)
        for _ in range(2):
            assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("setting", ["adapter", "attention", "epsilon"])
def test_settings_changed_between_two_tokens_hold_for_the_next_one(place: Place, setting: str) -> None:
    """Later in the call those of before are set again."""
    model, twin = twins(place)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = {}
    for side in (model, twin):
        torch.manual_seed(1)
        adapted[side] = peft.get_peft_model(side, config)
        adapted[side].add_adapter("second", config)

    def change(side: Any, back: bool) -> None:
        if setting == "adapter":
            adapted[side].set_adapter("default" if back else "second")
        elif setting == "attention":
            side.set_attn_implementation("sdpa" if back else "eager")
        else:
            side.model.layers[0].input_layernorm.variance_epsilon = 1e-6 if back else 0.1

    given = prompt("llama", place)

    def changed(side: Any) -> models.Output:
        change(side, back=True)
        return answer(side, given, 16, **between(lambda step: change(side, back=step == 10) if step in (6, 10) else 0))

    expected = changed(twin)
    with decoding(model):
        answer(model, given)
        for _ in range(2):
            assert not apart(changed(model), expected)


# -- Adapters


@scene(only="cuda", pages=128)
def test_adapters_that_are_switched_between_calls_are_each_their_own(place: Place) -> None:
    peft = pytest.importorskip("peft")
    model, twin = twins(place)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = []
    for base in (model, twin):
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(base, config)
        wrapped.add_adapter("second", config)
        adapted.append(wrapped)
    given = prompt("llama", place)
    expected = {}
    for name in ("default", "second"):
        adapted[1].set_adapter(name)
        expected[name] = answer(twin, given)
    with adapted[1].disable_adapter():
        expected[""] = answer(twin, given)
    assert len({tuple(output.tokens.flatten().tolist()) for output in expected.values()}) == 3
    with ballonet.manage(model) as managed:
        for name in ("default", "second", "default", "", "second", ""):
            with adapted[0].disable_adapter() if not name else nullcontext():
                if name:
                    adapted[0].set_adapter(name)
                for _ in range(2):
                    assert not apart(answer(model, given), expected[name]), name
        for name in ("default", "second"):
            adapted[0].set_adapter(name)
            with by_graphs(managed):
                answer(model, given)
                assert not apart(answer(model, given), expected[name])
    adapted.clear()
    del wrapped, base


# -- Who watches


@scene(only="cuda", pages=128)
def test_foreign_hooks_are_called_for_every_token(place: Place) -> None:
    """Hooks: one that was registered before a call, in the middle of one, on one module and on all; one that changes
    something is in the tokens."""
    model, twin = twins(place)
    given = prompt("llama", place)
    seen = dict.fromkeys(("model", "twin"), 0)

    def watch(whose: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            seen[whose] += 1

        return hook

    def double(*args: Any) -> Any:
        return args[-1] * 2

    hooks: dict[str, Callable[[Any, str], Any]] = {
        "watches": lambda it, whose: it.model.layers[1].mlp.register_forward_hook(watch(whose)),
        "watches before": lambda it, whose: it.model.layers[0].mlp.register_forward_pre_hook(watch(whose)),
        "changes": lambda it, _: it.model.layers[1].mlp.register_forward_hook(double),
        "on all modules": lambda _, whose: nn.modules.module.register_module_forward_hook(watch(whose)),
    }
    with ballonet.manage(model) as managed:
        for _ in range(2):
            answer(model, given)
        for name, register in hooks.items():
            for middle in (False, True):
                answers = {}
                seen.update(model=0, twin=0)
                for whose, either in (("twin", twin), ("model", model)):
                    handles: list[Any] = []

                    def add(*_: object, handles: list[Any] = handles, either: Any = either, whose: str = whose) -> None:
                        handles.append(register(either, whose))  # noqa: B023

                    if not middle:
                        add()
                    answers[whose] = answer(either, given, **(between(add, at=6) if middle else {}))
                    handles.pop().remove()
                assert not apart(answers["model"], answers["twin"]), name
                if name.startswith("watches"):
                    assert seen["model"] == seen["twin"] > 0, f"{name}, {'in the middle' if middle else 'before'}"
                assert seen["model"] >= seen["twin"]
        expected = answer(twin, given)
        with by_graphs(managed):
            assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
def test_replaced_forward_of_a_module_is_called(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    given, calls = prompt("llama", place), []
    expected = answer(model, given)
    with decoding(model) as managed:
        answer(model, given)
        mlp = model.model.layers[1].mlp
        stock = mlp.forward
        mlp.forward = lambda *args: (calls.append(1), stock(*args))[1]
        before = replays(managed)
        assert not apart(answer(model, given), expected)
        assert len(calls) == TOKENS
        assert replays(managed) == before
        del mlp.forward
        with by_graphs(managed):
            assert not apart(answer(model, given), expected)


# -- The state of the thread


@scene(only="cuda", pages=128)
def test_direct_call_of_the_model_is_eager(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    with decoding(model) as managed, torch.no_grad():
        answer(model, given)
        answer(model, given)
        before = managed.report().pieces
        cache = model(**given, use_cache=True)
        from ballonet.hooks.compat import cache_name

        kept = cache.past_key_values if hasattr(cache, "past_key_values") else cache.cache
        for _ in range(6):
            model(torch.full((2, 1), 7, device=place.kind), **{cache_name(model): kept})
        after = managed.report().pieces
        assert (after.replayed, after.captures) == (before.replayed, before.captures)
        del cache, kept


@scene(only="cuda", pages=128)
def test_autocast_and_gradients_are_eager_and_right(place: Place) -> None:
    model, twin = twins(place)
    given = prompt("llama", place)
    with decoding(model) as managed:
        for _ in range(2):
            answer(model, given)
        before = replays(managed)
        with torch.autocast(place.kind, torch.bfloat16):
            assert not apart(answer(model, given), answer(twin, given))
        settings = {
            "max_new_tokens": TOKENS,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        generate = type(model).generate
        while hasattr(generate, "__wrapped__") and "no_grad" not in repr(generate.__closure__):
            generate = generate.__wrapped__
        outputs = [type(model).generate.__wrapped__(either, **given, **settings) for either in (model, twin)]
        assert torch.equal(*[torch.stack(output.logits).detach() for output in outputs])
        assert replays(managed) >= before
        del outputs
        with torch.inference_mode():
            expected = answer(twin, given)
            for _ in range(3):
                assert not apart(answer(model, given), expected)
        for _ in range(2):
            assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
def test_captures_of_a_program_of_its_own_go_on_beside_pieces(place: Place) -> None:
    """A user captures and replays direct calls of the model; its pieces are replayed before and after."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    ids = given["input_ids"]
    with torch.no_grad():
        right = model(ids, use_cache=False).logits
    with ballonet.manage(model), torch.no_grad():
        for _ in range(2):
            answer(model, given)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                model(ids, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            made = model(ids, use_cache=False).logits
        for _ in range(2):
            assert not apart(answer(model, given), expected)
            graph.replay()
            assert torch.equal(made, right)
        del graph, made
        gc.collect()


@scene(only="cuda", pages=128)
def test_other_streams_of_one_thread_see_each_others_tokens(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    lanes = [place.lane() for _ in range(2)]
    with decoding(model):
        for which in (0, 1, 0, 1, 1):
            lane = lanes[which]
            lane.follow()
            with lane():
                actual = answer(model, given)
            lane.lead()
            assert not apart(actual, expected)


# -- Calls


@scene(only="cuda", pages=128)
def test_calls_of_fewer_than_four_tokens_capture_nothing(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = {tokens: answer(model, given, tokens) for tokens in (1, 2, 3)}
    with ballonet.manage(model) as managed:
        for _ in range(3):
            for tokens, right in expected.items():
                assert not apart(answer(model, given, tokens), right)
        pieces = managed.report().pieces
        assert (pieces.captures, pieces.graphs, pieces.pages) == (0, 0, 0)


@scene(only="cuda", pages=128)
def test_kinds_of_forwards_whose_graphs_are_kept_are_bounded(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    with ballonet.manage(model) as managed:
        runner = managed._pieces
        most = KEYS
        rows = range(1, most + 4)
        for count in rows:
            answer(model, prompt("llama", place, SHORT, rows=count), 6)
            assert len(runner._plans) <= most
        assert captures(managed) == len(rows)
        for count in (rows[0], rows[-1]):
            given = prompt("llama", place, SHORT, rows=count)
            with by_graphs(managed):
                answer(model, given, 6)
        assert captures(managed) == len(rows) + 1, "the first was given up, the last was kept"


@scene(only="cuda", pages=128)
def test_kinds_of_forwards_that_are_never_captured_are_bounded(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    with ballonet.manage(model) as managed:
        for count in range(1, KEYS + 9):
            answer(model, prompt("llama", place, 4, rows=count), 3)
        assert len(managed._pieces._plans) <= KEYS


# -- What decides by length, and what others capture and compile


ROTARY: Mapping[str, Mapping[str, Any]] = {
    "dynamic": {"factor": 2.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 2.5, 3.0],
        "original_max_position_embeddings": 20,
    },
}


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("rotary", ROTARY)
def test_positions_that_change_beyond_a_length_change_in_the_middle_of_a_call(place: Place, rotary: str) -> None:
    """The limit is crossed once graphs are replayed; the next call is below it again."""
    rope = {"rope_type": rotary, "rope_theta": 10000.0, **ROTARY[rotary]}
    model = models.build("llama", max_position_embeddings=20, rope_parameters=rope).to(place.kind)
    given = prompt("llama", place)
    before: list[torch.Tensor] = []
    expected = answer(model, given, 20, **between(lambda _: before.append(model.model.rotary_emb.inv_freq.clone())))
    assert not torch.equal(before[0], before[-1]), "no limit was crossed"
    with decoding(model) as managed:
        for _ in range(3):
            with by_graphs(managed):
                assert not apart(answer(model, given, 20), expected)


@scene(only="cuda", pages=128)
def test_compiled_forward_is_computed_as_it_was_compiled(place: Place) -> None:
    model, twin = twins(place, num_hidden_layers=1)
    given = prompt("llama", place)
    with decoding(model) as managed:
        answer(model, given, 6)
        for side in (model, twin):
            side.forward = torch.compile(side.forward, backend="eager", dynamic=True)
        expected, before = answer(twin, given, 6), replays(managed)
        for _ in range(2):
            assert not apart(answer(model, given, 6), expected)
        assert replays(managed) == before
        del model.forward, twin.forward
        expected = answer(twin, given, 6)
        with by_graphs(managed):
            assert not apart(answer(model, given, 6), expected)
    torch._dynamo.reset()


@scene(only="cuda", pages=128)
def test_capture_of_a_program_of_its_own_between_two_tokens_disturbs_neither(place: Place) -> None:
    """Before the first forward by graphs, and between two such."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    given_to_graph = torch.arange(8.0, device=place.kind)
    graphs: list[Any] = []

    def capture(_: int) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            doubled = given_to_graph * 2
        graphs.append((graph, doubled))

    with decoding(model):
        for at in (1, 2, 3, 7, 7):
            assert not apart(answer(model, given, **between(capture, at=at)), expected), f"after token {at}"
        for graph, doubled in graphs:
            doubled.zero_()
            graph.replay()
            assert torch.equal(doubled, given_to_graph * 2)
        graphs.clear()
        del graph, doubled
