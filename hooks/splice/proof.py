"""The proof, at first use, that a model's layers can run in parts: every layer alone, against the whole model.

Note [What is proven]
    A tiny prompt of two rows, one of them padded, and a decode step behind it: computed by the whole model, and by as
    many stages as it has layers, each with a cache of its own. Every boundary is crossed by what travels, and by nothing
    else. The logits must be the same bits: the kernels are the same, and their inputs are, so that any difference is
    something that did not travel, or a length that was wrong. It costs about two tokens' forwards and is kept for each
    class of models and configuration, as nothing in it depends on the weights.

    Found so, and refused with the reason that is given here and no list: rwkv's decode step where its states ... 
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from ...allocator.errors import SpliceError
from ...offload.policy.replicas.groups import Span
from ..compat import settings_of
from .forms import LayerForm
from .learn import learn
from .results import Hidden, Logits
from .splice import Splice, Stage
from .trees import same_bits

_PROMPT: Final = ((3, 4, 5, 6, 7), (0, 0, 3, 8, 9))  # tokens that every vocabulary has; the first two of a row are pads
_NEXT: Final = ((4,), (5,))
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
    model, name = splice.model, splice.cache_name
    prompt, step = _inputs(model)
    forms, output = learn(model, splice.layers, prompt, name)
    first = Logits(output, output.get(name))
    second = model(**step, **{name: first.cache})
    caches: list[Any] = [None] * len(splice.layers)
    for what, inputs, whole in (("a prompt", prompt, first.logits), ("a decode step", step, second["logits"])):
        found = _in_parts(splice, forms, inputs, caches, what)
        if not same_bits(found, whole):
            raise SpliceError(_difference(found, whole, what))
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
        f"the logits of {what} differ in parts by up to {difference:.3g}, as something that its layers need of those "
        "before them is neither in their calls nor in the cache"
    )


def _inputs(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """The prompt and the decode step."""
    device = next(model.parameters()).device
    ids, following = torch.tensor(_PROMPT, device=device), torch.tensor(_NEXT, device=device)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    takes: Callable[[str], bool] = inspect.signature(model.forward).parameters.__contains__
    prompt: dict[str, Any] = {"input_ids": ids, "use_cache": True}
    step: dict[str, Any] = {"input_ids": following, "use_cache": True}
    if takes("attention_mask"):
        prompt["attention_mask"] = mask
        step["attention_mask"] = torch.cat([mask, torch.ones_like(following)], dim=1)
    return prompt, step
