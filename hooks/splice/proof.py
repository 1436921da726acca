"""The proof, at first use, that a model's layers can run in parts: every layer alone, against the whole model.

Note [What is proven]
    A tiny prompt of two rows, one of them padded, and a decode step after it, with another request in between, are
    computed by the whole model, and by as many stages as it has layers, each with its own cache. Only the tensors that
    travel cross the boundaries. The logits must be bit-identical: kernels and inputs are the same, so a difference
    means that a tensor did not travel, or a length was wrong. It takes about as long as three tiny forwards. The result
    is kept for each class of models and configuration, as it does not depend on the weights' values.

    In transformers 5.23 it refuses recurrent_gemma, which keeps its recurrent state in its modules, where only one
    request's state fits; and rwkv, whose own decode step mixes the rows of a batch.

    Seven others pass for which hidden states and input lengths alone would not be enough. gemma3n and gemma4: the
    tensors that their layers share travel (forms.py). cpmant: 32 tokens of its own come before a prompt, so that
    lengths follow the growth of the running layers (elsewhere.py), and each of its forwards reads all tokens.
    longcat_flash: each decoder layer uses two layers of a cache, which is noticed (`elsewhere.marks`). minimax: only
    its forward makes its kind of cache, which grows by a layer at a time; so a stage returns the cache that its model
    made. mamba, falcon_mamba: stand-ins of layers with a state report that there is one; their own forward cannot take
    several tokens behind others together with a mask of all.
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
from .forms import Hidden, LayerForm, Logits, forms_of, record, same_bits
from .splice import Splice, SpliceStage

_PROMPT: Final = ((3, 4, 5, 6, 7), (0, 0, 3, 8, 9))  # tokens that every vocabulary has; 0 is a pad
_NEXT: Final = ((4,), (5,))
_OTHER: Final = ((8, 5, 3),)  # another request, computed between the prompt and the step
_NO_MEMORY: Final = (torch.OutOfMemoryError, PoolExhausted, DriverError)  # errors that do not depend on the model
_REFUSED: Final = (
    "{name} cannot be split between replicas: {reason}. Parts of it would write other tokens than the whole, so each "
    "replica has to hold all of its layers"
)

_known: dict[tuple[type, int, str], tuple[LayerForm, ...] | str] = {}  # forms, or why there are none


def proven(splice: Splice) -> tuple[LayerForm, ...]:
    """Returns the forms of the model's layers, with which they are proven to run in parts. SpliceError where they
    cannot."""
    model = splice.model
    if model.training:
        raise SpliceError(f"{type(model).__name__} is in training mode: call eval() before its layers run in parts")
    with plain_attention(model):
        settings = settings_of(getattr(model, "config", None))
        key = type(model), len(splice.layers), json.dumps(settings, sort_keys=True, default=str)
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
        seen, first = record(model, splice.layers, prompt)
        step = _step(model, prompt, first.cache)
        second = Logits(model(**step, **{name: first.cache}))
        forms = forms_of(model, splice.layers, prompt, seen)
    except _NO_MEMORY:
        raise
    except Exception as error:  # any error: the model's forward may not take such tokens and masks
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
    """Returns the logits of stages of one layer each; replaces their `caches`."""
    given: Hidden | None = None
    for layer in range(len(caches)):
        splice.install(Span(layer, layer + 1), forms)
        more = {} if caches[layer] is None else {splice.cache_name: caches[layer]}
        try:
            found = SpliceStage(splice).run({**inputs, **more}, given)
        except _NO_MEMORY:
            raise
        except Exception as error:  # any error: the model's forward lacks tensors that did not travel
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
        f"the logits of {what} differ in parts by up to {difference:.3g}, as something that its layers need is neither "
        "in their calls nor in the cache that they are given (in modules, for one, where each request overwrites it)"
    )


def _prompt(model: nn.Module, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the inputs of a forward over these tokens."""
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    return {"input_ids": ids, "use_cache": True} | ({"attention_mask": (ids != 0).long()} if masked else {})


def _step(model: Any, prompt: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Returns the inputs of a decode step after the prompt: a token, or all for a model that reads them anew."""
    before = prompt["input_ids"]
    ids = torch.cat([before, torch.tensor(_NEXT, device=before.device)], dim=1)
    found = {"input_ids": ids if reads_all_tokens(model, ids, cache) else ids[:, -1:], "use_cache": True}
    return found | ({"attention_mask": (ids != 0).long()} if "attention_mask" in prompt else {})
