"""What can be known of a model's pieces from its configuration: forwards are recorded without values.

Note [Without values]
    On the meta device the same operators are dispatched as on a GPU, but whatever reads a value gets an arbitrary one,
    and no tensor lies on the CPU by mistake. So what is refused here is refused there, as a rule; what is recorded here
    may still be refused at its first capture, or differ by a bit at its proof.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, Final

import torch

from ..compat import cache_name, prepared_caches, without_values
from ..weights.model_parts import decoder_layers
from .patches import recording
from .recipe import Recipe, difference
from .recorder import ForwardRecorder, RecordedLayers
from .runner import GROWS, deciding_by_length, modules_with_cache, weights_by_address

_PROMPT: Final = 5  # tokens, before those that are recorded


def foreseen(model_class: type, config: Any) -> tuple[str, str]:
    """Returns the way in which such a model is likely to decode on a GPU, "fine", "coarse" or "eager", empty where only
    its first call will tell, and why not in a finer one, or why it is not known."""
    if getattr(config, "is_encoder_decoder", False):
        return "eager", "its decoder reads the encoder's keys past the cache"
    reasons: list[str] = []
    try:
        for way in ("fine", "coarse"):
            if not (why := _refusal(model_class, config, fine=way == "fine")):
                return way, "; ".join(reasons)
            reasons.append(f"{way}: {why}")
    except Exception as error:  # any error: the model's own code runs without values
        return "", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return "eager", "; ".join(reasons)


def _refusal(model_class: type, config: Any, fine: bool) -> str:
    """Returns why two decode steps cannot be cut so; empty where they can."""
    with torch.device("meta"), torch.no_grad(), without_values():
        model: Any = model_class(copy.deepcopy(config)).eval().to(torch.bfloat16)  # which kernels of experts want
        name, cache = cache_name(model), prepared_caches(model, _PROMPT + 2)[0]
        takes = inspect.signature(model.forward).parameters

        def given(new: int, length: int) -> dict[str, Any]:
            arguments = {"input_ids": torch.zeros((1, new), dtype=torch.int64), name: cache, "use_cache": True}
            if "attention_mask" in takes:
                arguments["attention_mask"] = torch.ones((1, length), dtype=torch.int64)
            if "position_ids" in takes:
                arguments["position_ids"] = torch.arange(length - new, length)[None]
            return arguments

        _, inner = modules_with_cache(model, lambda: model(**given(_PROMPT, _PROMPT)))
        if not fine and not inner:
            return "no module of it is given the cache"
        whole = [*(() if fine else inner), *deciding_by_length(model)]
        recipes: list[Recipe] = []
        for length in (_PROMPT + 1, _PROMPT + 2):
            step = given(1, length)
            recorder = ForwardRecorder(weights_by_address(model), torch.device("meta"), step, cache, GROWS)
            layers = RecordedLayers(recorder, decoder_layers(model), whole, lambda layer: False)
            with recording(recorder, model, layers, fine):
                output = model(**step)
            if (recipe := recorder.recipe(output)) is None:
                return recorder.refusal
            recipes.append(recipe)
        return difference(*recipes)
