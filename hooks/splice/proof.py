"""The proof, at first use, that a model's layers can run in parts: every layer alone, against the whole model.

Note [What is proven]
    A tiny prompt of two rows, one of them padded, and a decode step behind it, between which another request runs:
    computed by the whole model, and by as many stages as it has layers, each with a cache of its own. Every boundary is
    crossed by what travels, and by nothing else. The logits must be the same bits: the kernels are the same, and so are
    their inputs, so that any difference is something that did not travel, or a length that was wrong. It takes about as
    long as three tiny forwards. What it finds is kept for each class of models and configuration, as nothing in it
    depends on what the weights are.

    Of transformers 5.23 it refuses recurrent_gemma, which keeps its recurrent state in its modules, where there is only
    the state of one request; and rwkv, whose own decode step mixes the rows of a batch.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from ...allocator.errors import DriverError, PoolExhausted, SpliceError
from ...offload.policy.replicas.groups import Span
from ..compat import plain_attention, reads_all_tokens, settings_of
from .forms import LayerForm
from .learn import forms_of, record
from .results import Hidden, Logits
from .splice import Splice, Stage
from .trees import same_bits

_PAD: Final = 0
_PROMPT: Final = ((3, 4, 5, 6, 7), (_PAD, _PAD, 3, 8, 9))  # tokens that every vocabulary has
_NEXT: Final = 4
_OTHER: Final = ((8, 5, 3),)  # another request, whose tokens come between those of the first
_NO_MEMORY: Final = (torch.OutOfMemoryError, PoolExhausted, DriverError)  # which say nothing of the model
_REFUSED: Final = (
    "{name} cannot be split between replicas: {reason}. Replicas of it would write other tokens than one alone, so each "
    "has to hold all of its layers"
)

_known: dict[tuple[type, str], tuple[LayerForm, ...] | str] = {}  # forms, or why there are none


def proven(splice: Splice) -> tuple[LayerForm, ...]:
    """The forms of the layers of its model, which are enough to run them in parts. SpliceError where nothing is."""
    model = splice.model
    if model.training:
        raise SpliceError(f"{type(model).__name__} is in training mode: call eval() before its layers run in parts")
    with plain_attention(model):
        settings = settings_of(getattr(model, "config", None))
        key = type(model), json.dumps(settings, sort_keys=True, default=str)
        if key not in _known:
            try:
                _known[key] = _prove(splice)
            except SpliceError as error:
                _known[key] = str(error)
            finally:
                splice.install(splice.whole, ())
    found = _known[key]
    if isinstance(found, str):
        raise SpliceError(_REFUSED.format(name=type(model).__name__, reason=found))
    return found


@torch.no_grad()
def _prove(splice: Splice) -> tuple[LayerForm, ...]:
    model, name, stages = splice.model, splice.cache_name, len(splice.layers)
    prompt = _prompt(model, _PROMPT)
    try:
        seen, first = record(model, splice.layers, prompt, name)
        step = _step(model, prompt, first.cache)
        second = Logits(model(**step, **{name: first.cache}))
        forms = forms_of(model, splice.layers, prompt, name, seen)
    except _NO_MEMORY:
        raise
    except Exception as error:  # whatever its forward says of tokens and masks that it cannot take
        reason = (
            f"its own forward cannot run two rows, one of them padded, and decode ({type(error).__name__}: {error})"
        )
        raise error if isinstance(error, SpliceError) else SpliceError(reason) from error
    caches: list[Any] = [None] * stages
    for what, inputs, whole in (("a prompt", prompt, first.logits), ("a decode step", step, second.logits)):
        if whole.shape[0] != len(_PROMPT) or (what == "a decode step" and whole.shape[1] != 1):
            raise SpliceError(f"its own logits of {what} of {len(_PROMPT)} rows have the shape {tuple(whole.shape)}")
        found = _in_parts(splice, forms, inputs, caches, what)
        if not same_bits(found, whole):
            raise SpliceError(_difference(found, whole, what))
        _in_parts(splice, forms, _prompt(model, _OTHER), [None] * stages, "another request")
    return forms


def _in_parts(
    splice: Splice, forms: tuple[LayerForm, ...], inputs: Mapping[str, Any], caches: list[Any], what: str
) -> torch.Tensor:
    """The logits of stages of one layer each, whose caches are given and replaced."""
    given: Hidden | None = None
    for layer in range(len(caches)):
        splice.install(Span(layer, layer + 1), forms)
        more = {} if caches[layer] is None else {splice.cache_name: caches[layer]}
        try:
            found = Stage(splice).run({**inputs, **more}, given)
        except _NO_MEMORY:
            raise
        except Exception as error:  # whatever its forward does with what it is not given
            reason = f"layer {layer} alone fails in {what} ({type(error).__name__}: {error})"
            raise SpliceError(reason) from error
        caches[layer] = found.cache
        if isinstance(found, Logits):
            return found.logits
        given = found
    raise AssertionError("the last stage returns logits")


def _difference(found: torch.Tensor, whole: torch.Tensor, what: str) -> str:
    if found.shape != whole.shape:
        return f"the logits of {what} have the shape {tuple(found.shape)} in parts, and {tuple(whole.shape)} in one"
    difference = (found.float() - whole.float()).abs().nan_to_num(nan=float("inf")).max().item()
    return (
        f"the logits of {what} differ in parts by up to {difference:.3g}, as something that its layers need is neither in "
        "their calls nor in the cache that they are given (in modules, for one, where each request overwrites it)"
    )


def _prompt(model: nn.Module, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The inputs of a forward over these tokens."""
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    return {"input_ids": ids, "use_cache": True} | ({"attention_mask": (ids != _PAD).long()} if masked else {})


def _step(model: Any, prompt: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """The inputs of a decode step behind the prompt: a token, or for a model that reads it anew all of them."""
    ids = torch.cat([prompt["input_ids"], torch.full_like(prompt["input_ids"][:, :1], _NEXT)], dim=1)
    found = {"input_ids": ids if reads_all_tokens(model, ids, cache) else ids[:, -1:], "use_cache": True}
    return found | ({"attention_mask": (ids != _PAD).long()} if "attention_mask" in prompt else {})
