"""The decoder layers of a model: what is hooked, streamed and moved one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder layers of `model` in order, each once; empty where it says nothing of having any.

    They are the children of the outermost ModuleLists as long as the configuration's `num_hidden_layers` (of its text
    part in a multimodal model): those whose children the model names in `_no_split_modules` where there are such,
    else all of them. A module that has no such configuration may contain modules that do.
    """
    layers = _layers_of(model) or [layer for child in model.children() for layer in decoder_layers(child)]
    return tuple(dict.fromkeys(layers))


def _layers_of(model: nn.Module) -> list[nn.Module]:
    length = getattr(text_config(model), "num_hidden_layers", None)
    if not isinstance(length, int) or length < 1:
        return []
    candidates = list(_outermost_lists(model, length))
    named = set(getattr(model, "_no_split_modules", None) or ())
    chosen = [each for each in candidates if all(type(child).__name__ in named for child in each)] or candidates
    return [layer for each in chosen for layer in each]


def text_config(model: nn.Module) -> object:
    """The configuration of the part of `model` that writes text, None where it has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text(decoder=True) if callable(text) else getattr(config, "text_config", config)


def _outermost_lists(module: nn.Module, length: int) -> Iterable[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) == length:
            yield child
        else:
            yield from _outermost_lists(child, length)
