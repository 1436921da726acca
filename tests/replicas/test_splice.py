"""Splices of models: the logits of the whole for all architectures in parts, what a Splice does to its model, what it
refuses, that nothing of it stays, and layers of caches that are elsewhere.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import ballonet
from ballonet import SpliceError
from ballonet.allocator import devices
from ballonet.hooks.compat import DynamicLayer
from ballonet.hooks.kv.cache import KVCache
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.splice import elsewhere
from ballonet.hooks.splice import splice as splicing
from ballonet.hooks.splice.elsewhere import Elsewhere
from ballonet.hooks.splice.forms import Hidden, Logits, record
from ballonet.hooks.splice.splice import Splice, SpliceStage
from ballonet.hooks.weights.model_parts import decoder_layers
from ballonet.offload.policy.replicas.groups import Span

from ..caches import installed, kv_pages
from ..models import build, prompts
from ..portrait import Portrait
from .parts import NAMES, Pipeline, Step, cuts, deeper, in_one, in_parts, inputs_of, steps

INPUTS = {**prompts(2, 7), "use_cache": True}


@pytest.fixture
def model() -> Any:
    return build("llama", num_hidden_layers=4)


def hooks(model: torch.nn.Module) -> list[object]:
    """Returns all hooks that a Splice may have added."""
    return [
        (name, dict(module._forward_pre_hooks), dict(module._forward_hooks), module.__dict__.get("forward"))
        for name, module in model.named_modules()
    ]


def test_the_model_is_put_back_exactly(model: Any) -> None:
    own = model.model.layers[0].forward
    model.model.layers[0].forward = own  # as accelerate does
    before, portrait = hooks(model), Portrait(model)
    expected = model(**INPUTS).logits
    with Splice(model) as splice:
        assert hooks(model) == before
        for span in (Span(1, 3), Span(0, 2), Span(3, 4), splice.whole, Span(2, 4)):
            splice.span = span
            assert (hooks(model) == before) == (span == splice.whole)
    assert hooks(model) == before
    assert portrait.is_of(model)
    assert model.model.layers[0].__dict__["forward"] is own
    assert torch.equal(model(**INPUTS).logits, expected)
    splice.close()
    with pytest.raises(SpliceError, match="closed"):
        splice.span = Span(0, 1)
    with pytest.raises(SpliceError, match="closed"):
        SpliceStage(splice).run(INPUTS)
    assert hooks(model) == before


def test_splice_does_not_keep_the_model() -> None:
    model = build("llama")
    splice = Splice(model)
    splice.span = Span(1, 2)
    known = weakref.ref(model)
    del splice, model
    gc.collect()
    assert known() is None


def test_two_splices_of_a_model_are_refused(model: Any) -> None:
    with Splice(model), pytest.raises(SpliceError, match="spliced already"):
        Splice(model)
    Splice(model).close()
    Splice(model)  # which nobody keeps
    gc.collect()
    Splice(model).close()


@pytest.mark.parametrize("span", [Span(0, 5), Span(4, 5)])
def test_layers_that_do_not_exist_are_refused(model: Any, span: Span) -> None:
    with Splice(model) as splice, pytest.raises(SpliceError, match=r"has the layers \[0, 4\)"):
        splice.span = span
    with pytest.raises(SpliceError, match="no decoder layers"):
        Splice(torch.nn.Linear(1, 1))


def test_wrong_inputs_of_a_part_are_refused(model: Any) -> None:
    with Splice(model) as splice:
        stage = SpliceStage(splice)
        whole = stage.run(INPUTS)
        assert isinstance(whole, Logits)
        splice.span = Span(0, 2)
        with pytest.raises(SpliceError, match="given what layer -1 sends, or nothing"):
            stage.run(INPUTS, Hidden(()))
        with pytest.raises(SpliceError, match="output_hidden_states"):
            stage.run({**INPUTS, "output_hidden_states": True})
        with pytest.raises(SpliceError, match=r"only layers \[0, 2\)"):
            model(**INPUTS)
        sent = stage.run(INPUTS)
        assert isinstance(sent, Hidden)
        assert splice.travels(2) == (("args", 0),)
        splice.span = Span(2, 4)
        with pytest.raises(SpliceError, match="are given what layer 1 sends"):
            stage.run(INPUTS)
        with pytest.raises(SpliceError, match=r"only layers \[2, 4\)"):
            model(**INPUTS)
        with pytest.raises(SpliceError, match="all stages of a forward are called with the same tokens"):
            stage.run(INPUTS, Hidden((sent.tensors[0][:, 1:],)))
        with pytest.raises(SpliceError, match="is given 2 tensors"):
            stage.run(INPUTS, Hidden(sent.tensors * 2))
        sent_on = stage.run(INPUTS, sent)
        assert isinstance(sent_on, Logits)
        assert torch.equal(sent_on.logits, whole.logits)
        assert not sent_on.logits.requires_grad


def test_a_span_does_not_change_in_a_forward(model: Any) -> None:
    with Splice(model) as splice:
        splice.span = Span(0, 2)

        def change(*_: object) -> None:
            splice.span = Span(0, 1)

        handle = model.model.layers[1].register_forward_hook(change)
        with pytest.raises(SpliceError, match="a forward runs"):
            SpliceStage(splice).run(INPUTS)
        handle.remove()
        assert splice.span == Span(0, 2)
        splice.span = Span(0, 1)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_surroundings(model: Any, around: Callable[[], Any]) -> None:
    asked = steps(4)
    expected = in_one(model, asked)
    with around():
        for parts in (2, 3):
            logits = in_parts(model, cuts(4, parts), asked)
            assert all(map(torch.equal, logits, expected))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", range(4))
def test_a_forward_that_raises_leaves_nothing_behind(model: Any, where: int, kind: type[BaseException]) -> None:
    asked = steps(9)
    expected = in_one(model, asked)
    spans = cuts(4, 2)
    with Splice(model) as splice:
        splice.span = spans[0]

        def fail(*_: object) -> None:
            raise kind("on purpose")

        handle = model.model.layers[where].mlp.register_forward_hook(fail)
        given = None
        for span in spans:
            splice.span = span
            if where in span:
                with pytest.raises(kind, match="on purpose"):
                    SpliceStage(splice).run(INPUTS, given)
                break
            sent = SpliceStage(splice).run(INPUTS, given)
            assert isinstance(sent, Hidden)
            given = sent
        handle.remove()
        with pytest.raises(SpliceError, match="only layers"):
            model(**INPUTS)
        splice.span = splice.whole
        pipeline = Pipeline([splice])
        assert all(torch.equal(pipeline.run(step), logits) for step, logits in zip(asked, expected, strict=True))
    assert all(map(torch.equal, in_parts(model, spans, asked), expected))


@pytest.mark.parametrize("span", [Span(0, 2), Span(1, 4), Span(1, 2)])
def test_a_part_is_not_copied(model: Any, span: Span) -> None:
    with Splice(model) as splice:
        expected = copy.deepcopy(model)(**INPUTS).logits
        splice.span = span
        with pytest.raises(SpliceError, match="before it is copied or pickled"):
            copy.deepcopy(model)
        splice.span = splice.whole
        assert torch.equal(copy.deepcopy(model)(**INPUTS).logits, expected)


def test_two_threads_run_a_stage(model: Any) -> None:
    """Each has its own requests, and is given its own states."""
    asked = {"one": steps(9), "two": steps(4)}
    expected = {name: in_one(model, own_steps) for name, own_steps in asked.items()}
    logits: dict[str, list[torch.Tensor]] = {}
    splices = [Splice(copy.deepcopy(model)) for _ in cuts(4, 3)]
    for splice, span in zip(splices, cuts(4, 3), strict=True):
        splice.span = span

    def work(name: str) -> None:
        for _ in range(10):
            pipeline = Pipeline(splices)
            logits[name] = [pipeline.run(step) for step in asked[name]]

    threads = [threading.Thread(target=work, args=(name,)) for name in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(all(map(torch.equal, logits[name], expected[name])) for name in asked)


# The proof


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splicing, "_known", {})


def test_proof_is_made_once_for_models_that_are_alike(model: Any, unknown: None, monkeypatch: Any) -> None:
    made = []
    prove = splicing._prove
    monkeypatch.setattr(splicing, "_prove", lambda splice: made.append(splice) or prove(splice))
    shorter = copy.deepcopy(model)
    del shorter.model.layers[3]
    for other in (model, build("llama", num_hidden_layers=4), build("llama", num_hidden_layers=3), shorter):
        with Splice(other) as splice:
            for span in (splice.whole, Span(0, 1), Span(1, 2)):
                splice.span = span
    assert len(made) == 3


def test_a_model_that_trains_is_refused(model: Any, unknown: None) -> None:
    with Splice(model.train()) as splice:
        with pytest.raises(SpliceError, match="training mode"):
            splice.span = Span(0, 1)
        model.eval()
        splice.span = Span(0, 1)


def test_states_that_travel_by_another_way_are_refused(model: Any, unknown: None) -> None:
    """The third layer adds what the first one has left in a list."""
    left: list[torch.Tensor] = []
    layers = model.model.layers
    layers[0].register_forward_hook(lambda *call: left.append(call[2]))
    layers[2].register_forward_hook(lambda *call: call[2] + left[-1])
    before = hooks(model)
    with Splice(model) as splice:
        layers[0].register_forward_pre_hook(lambda *each: left.clear())
        with pytest.raises(SpliceError, match=r"layer 2 alone fails in a prompt|the logits of a prompt differ"):
            splice.span = Span(0, 1)
        assert splice.span == splice.whole
    assert len(hooks(model)) == len(before)


def test_a_state_in_a_module_is_refused(model: Any, unknown: None) -> None:
    """Right for one request at a time, and wrong for the next one."""
    kept: list[torch.Tensor] = []

    def keep(_: object, given: object, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] > 1:
            kept[:] = [output.mean()]
            return output
        return output + kept[0]

    model.model.layers[1].mlp.register_forward_hook(keep)
    with Splice(model) as splice, pytest.raises(SpliceError, match=r"logits of a decode step differ .*in modules"):
        splice.span = Span(0, 1)


def test_layers_in_another_order_are_refused(model: Any) -> None:
    layers = decoder_layers(model)
    with torch.no_grad(), pytest.raises(SpliceError, match=r"in the order \[3, 2, 1, 0\]"):
        record(model, layers[::-1], INPUTS)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


def test_a_layer_that_runs_twice_is_refused(model: Any, unknown: None) -> None:
    model.model.layers[3] = model.model.layers[0]
    with Splice(model) as splice, pytest.raises(SpliceError, match=r"its own forward cannot run two rows"):
        splice.span = Span(0, 1)


def test_the_error_is_one_of_the_facade() -> None:
    assert issubclass(ballonet.SpliceError, ballonet.BallonetError)


# All architectures


REFUSED = {  # what the proof says of them
    "recurrent_gemma": "neither in their calls nor in the cache",
    "rwkv": r"its own logits of a decode step of 2 rows have the shape \(2, 2, 199\)",
}
# Architectures whose own forward fails with several tokens behind others and the mask of all
WHOLE_PROMPTS = {"mamba", "falcon_mamba"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_parts_are_the_whole(name: str) -> None:
    model = deeper(name)
    asked = steps(9 if name in WHOLE_PROMPTS else 4)
    expected = in_one(model, asked)
    assert not any(logits.isnan().any() for logits in expected)
    layers = len(decoder_layers(model))
    assert layers >= 4 or name == "nemotron_h"
    for parts in range(2, min(layers, 4) + 1):
        in_spans = in_parts(model, cuts(layers, parts), asked)
        assert [
            index for index, pair in enumerate(zip(in_spans, expected, strict=True)) if not torch.equal(*pair)
        ] == []


@pytest.mark.parametrize("name", REFUSED)
def test_architecture_that_cannot_run_in_parts_is_refused_with_the_reason(name: str) -> None:
    model = deeper(name)
    with Splice(model) as splice:
        for _ in range(2):
            with pytest.raises(SpliceError, match=f"cannot be split between replicas: .*{REFUSED[name]}"):
                splice.span = Span(0, 1)
        assert splice.span == splice.whole


def test_most_architectures_run_in_parts() -> None:
    assert len(NAMES) - len(REFUSED) >= 97


@pytest.fixture(autouse=True, scope="module")
def nothing_stays() -> Iterator[None]:
    yield
    deeper.cache_clear()


# Caches


# with layers of attention, with windows, with states, with both in one, with an index
CACHED = ["llama", "gemma2", "qwen3_next", "falcon_h1", "glm_moe_dsa", "minimax", "gemma3n_text", "mamba", "gpt2"]


def bytes_of(layer: Any) -> int:
    """Bytes of the tensors that a layer of a cache has."""
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    for value in vars(layer).values():
        tensors += [one for one in value.values() if isinstance(one, torch.Tensor)] if isinstance(value, dict) else []
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())  # the size of a window is a tensor, too


@pytest.mark.parametrize("name", CACHED)
def test_each_holds_its_own_layers_and_answers_for_all(name: str) -> None:
    model = deeper(name)
    with Splice(model) as splice:
        count = len(splice.layers)
        asked = [step for step in steps(9) if step.request == "first"]
        whole: Any = None
        for step in asked:
            whole = SpliceStage(splice).run(inputs_of(model, step, splice.cache_name, whole and whole.cache))
        for span in (Span(0, 1), Span(1, count), Span(count - 1, count)):
            given: list[Any] = []
            if span.begin:
                splice.span = Span(0, span.begin)
                before: Any = None
                for step in asked:
                    before = SpliceStage(splice).run(inputs_of(model, step, splice.cache_name, before and before.cache))
                    given.append(before)
            splice.span = span
            cache: Any = None
            for index, step in enumerate(asked):
                sent = SpliceStage(splice).run(
                    inputs_of(model, step, splice.cache_name, cache), given[index] if given else None
                )
                cache = sent.cache
            if name not in ("mamba", "minimax"):
                assert [type(layer).__name__.removesuffix("Elsewhere") for layer in cache.layers] == [
                    type(layer).__name__ for layer in whole.cache.layers
                ]
            for mine, its in zip(cache.layers, whole.cache.layers, strict=False):
                if hasattr(its, "get_seq_length"):
                    assert mine.get_seq_length() == its.get_seq_length()
                    assert mine.get_mask_sizes(3) == its.get_mask_sizes(3)
                if hasattr(its, "has_previous_state"):
                    assert mine.has_previous_state == its.has_previous_state
                if isinstance(mine, Elsewhere):
                    assert not bytes_of(mine)
                    with pytest.raises(SpliceError, match="are on another replica"):
                        mine.update(torch.zeros(1), torch.zeros(1))


def one_part(model: Any, splice: Splice) -> Any:
    """The cache of the first half after a prompt."""
    splice.span = Span(0, 2)
    return SpliceStage(splice).run(inputs_of(model, steps(9)[0], "past_key_values", None)).cache


def test_changes_of_a_cache_change_lengths_of_layers_elsewhere() -> None:
    model = build("llama", num_hidden_layers=4)
    with Splice(model) as splice:
        cache = one_part(model, splice)
        kinds = [isinstance(layer, Elsewhere) for layer in cache.layers]
        assert kinds == [False, False, True, True]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2]))
        assert [layer.get_seq_length() for layer in cache.layers] == [9] * 4
        cache.crop(-2)
        assert [layer.get_seq_length() for layer in cache.layers] == [7] * 4
        cache.reset()
        assert [layer.get_seq_length() for layer in cache.layers] == [0] * 4


def test_layers_are_handed_over() -> None:
    """What a replica does whose span grows, and one whose span shrinks: the tokens of the whole."""
    model, asked = build("llama", num_hidden_layers=4), [step for step in steps(9) if step.request == "first"]
    expected = in_one(model, asked)
    with Splice(model) as splice:
        caches: list[Any] = [None, None]
        for number, step in enumerate(asked):
            if number == 2:  # layer 1 goes from the first to the second
                layer = caches[0].layers[1]
                keys, values = layer.keys.clone(), layer.values.clone()
                elsewhere.leave(caches[0], 1)
                assert layer.keys is None
                elsewhere.leave(caches[0], 1)
                held = elsewhere.hold(caches[1], 1)
                assert isinstance(held, DynamicLayer)
                assert held.get_seq_length() == 0
                held.update(keys, values)
                assert elsewhere.hold(caches[1], 1) is held
            given: Any = None
            border = 2 if number < 2 else 1
            for part, span in enumerate((Span(0, border), Span(border, 4))):
                splice.span = span
                given = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", caches[part]), given)
                caches[part] = given.cache
            assert torch.equal(given.logits, expected[number])


@pytest.mark.parametrize("page", [4096, 65536], ids=["alone", "in one range"])
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_elastic_layers(name: str, page: int) -> None:
    """With large pages the layers that run here have their places in a range that is laid out for all."""
    model, asked = deeper(name), steps(4)
    expected = in_one(model, asked)
    with installed(page), Splice(model) as splice:
        count = len(splice.layers)
        caches: dict[tuple[str, int], Any] = {}
        for step, logits in zip(asked, expected, strict=True):
            given: Any = None
            for part, span in enumerate(cuts(count, 2)):
                splice.span = span
                cache = caches.setdefault((step.request, part), KVCache(model.config))
                given = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", cache), given)
                kinds = [type(layer) for layer in cache.layers]
                assert [issubclass(kind, ElasticLayer) for kind in kinds] == [index in span for index in range(count)]
                assert {layer.get_seq_length() for layer in cache.layers} == {cache.get_seq_length()}
            assert torch.equal(given.logits, logits)
        assert kv_pages(devices.require()) > 0
        layer = cache.layers[0]
        assert isinstance(layer, Elsewhere)
        assert isinstance(elsewhere.hold(cache, 0), ElasticLayer)
        elsewhere.leave(cache, count - 1)
        assert isinstance(cache.layers[count - 1], Elsewhere)
        del cache, caches, given, layer


def test_a_cache_whose_tokens_were_not_handed_over_is_refused() -> None:
    model, step = build("llama", num_hidden_layers=4), steps(9)[0]
    after = Step("first", torch.cat([step.ids, step.ids[:, :1]], dim=1), 1)
    with Splice(model) as splice:
        whole = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", None)).cache
        splice.span = Span(0, 2)
        with pytest.raises(SpliceError, match="layer 2 of this cache holds tokens, but does not run here"):
            SpliceStage(splice).run(inputs_of(model, after, "past_key_values", whole))
        part = SpliceStage(splice).run(inputs_of(model, step, "past_key_values", None)).cache
        splice.span = Span(0, 3)
        with pytest.raises(SpliceError, match="its tokens are on another replica"):
            SpliceStage(splice).run(inputs_of(model, after, "past_key_values", part))
        static = StaticCache(config=model.config, max_cache_len=32)
        with pytest.raises(SpliceError, match="fixed size"):
            SpliceStage(splice).run(inputs_of(model, step, "past_key_values", static))


def test_transformers_tables_are_as_before() -> None:
    """No class of what is elsewhere takes the place of its stock class."""
    from transformers import cache_utils

    deeper("deepseek_v4")
    before = dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING)
    with Splice(deeper("deepseek_v4")) as splice:
        splice.span = Span(0, 2)
        cache = SpliceStage(splice).run(inputs_of(splice.model, steps(9)[0], "past_key_values", None)).cache
        assert sum(isinstance(layer, Elsewhere) for layer in cache.layers) == 2
    assert before == cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    assert not any(issubclass(type(layer), Elsewhere) for layer in DynamicCache(config=splice.model.config).layers)
