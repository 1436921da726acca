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

import ballonet
from ballonet import SpliceError
from ballonet.hooks.splice import splice as splicing
from ballonet.hooks.splice.forms import record
from ballonet.hooks.splice.splice import Splice
from ballonet.hooks.weights.model_parts import decoder_layers
from ballonet.offload.policy.replicas.groups import Span

from ..models import build, prompts
from ..portrait import Portrait
from .parts import NAMES, Whole, cuts, deeper, in_one, in_parts, steps, through

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
        splice.run(INPUTS)
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
        whole = splice.run(INPUTS)
        splice.span = Span(0, 2)
        with pytest.raises(SpliceError, match="given what layer -1 sends, or nothing"):
            splice.run(INPUTS, ())
        with pytest.raises(SpliceError, match="output_hidden_states"):
            splice.run({**INPUTS, "output_hidden_states": True})
        with pytest.raises(SpliceError, match=r"only layers \[0, 2\)"):
            model(**INPUTS)
        sent = splice.run(INPUTS)
        assert len(sent) == 1
        splice.span = Span(2, 4)
        with pytest.raises(SpliceError, match="are given what layer 1 sends"):
            splice.run(INPUTS)
        with pytest.raises(SpliceError, match=r"only layers \[2, 4\)"):
            model(**INPUTS)
        with pytest.raises(SpliceError, match="all stages of a forward are called with the same tokens"):
            splice.run(INPUTS, (sent[0][:, 1:],))
        with pytest.raises(SpliceError, match="is given 2 tensors"):
            splice.run(INPUTS, sent * 2)
        (logits,) = splice.run(INPUTS, sent)
        assert torch.equal(logits, whole[0])
        assert not logits.requires_grad


def test_a_span_does_not_change_in_a_forward(model: Any) -> None:
    with Splice(model) as splice:
        splice.span = Span(0, 2)

        def change(*_: object) -> None:
            splice.span = Span(0, 1)

        handle = model.model.layers[1].register_forward_hook(change)
        with pytest.raises(SpliceError, match="a forward runs"):
            splice.run(INPUTS)
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
                    splice.run(INPUTS, given)
                break
            given = splice.run(INPUTS, given)
        handle.remove()
        with pytest.raises(SpliceError, match="only layers"):
            model(**INPUTS)
        splice.span = splice.whole
        assert all(map(torch.equal, in_one(model, asked), expected))
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
            whole = Whole(model)
            logits[name] = []
            for step in asked[name]:
                whole.run(step)
                logits[name].append(through(splices, step, whole.before))

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
