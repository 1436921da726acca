"""The page size for a server's models, from their configurations (offload/policy/layout.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...allocator.config import Config
from ...allocator.device_choice import GRANULARITY, choose, page_size
from ...allocator.units import format_size
from ...offload.policy.layout import Rounding, fitting
from ...offload.policy.tuning import DEFAULT
from ..weights.layers import decoder_layers


def chosen(names: Sequence[str], budget: int, kind: Literal["cuda", "standin"]) -> Rounding | None:
    """Returns the page size for models with these names or folders; None where one cannot be built without values."""
    usual, tuning = page_size(Config(), kind), DEFAULT.serving
    try:
        ranges = [nbytes for name in names for nbytes in _ranges(name)]
    except Exception:  # any error: loading the model will report it
        return None
    return fitting(ranges, len(names), budget, usual, max(GRANULARITY[kind], tuning.smallest_page))


def suitable(names: Sequence[str], budget: int | str | None, say: Callable[[str], object]) -> int | None:
    """Returns the page size that suits these models in a budget that is given, where nobody chose one; None: the usual
    one. `say`: prints a line about what is lost. ConfigError."""
    settings = Config.from_env().merge(budget=budget)
    if settings.budget is None or settings.page_size is not None:
        return None
    found = chosen(names, settings.budget, choose(settings, torch.cuda.is_available()).kind)
    if found is None:
        return None
    lost = f"rounding to pages of {format_size(found.page)} takes {format_size(found.lost)}, {found.share:.1%} of what"
    say(f"{lost} the weights leave" + (": a larger budget would gain more" if found.share > found.most else ""))
    return found.page


def _ranges(name: str) -> list[int]:
    """Returns the bytes of weights of each decoder layer, and of those outside of layers."""
    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    layers = [sum(weight.nbytes for weight in layer.parameters()) for layer in decoder_layers(model)]
    return [*layers, sum(weight.nbytes for weight in model.parameters()) - sum(layers)]
