"""The decoder layers of a model: what is hooked, streamed and moved one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder layers of `model` in order, each once; empty where it says nothing of having any."""
    return tuple(dict.fromkeys(layer for each in layer_lists(model) for layer in each))


def layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The ModuleLists that hold the decoder layers of `model`, in order.

    They are the outermost ones as long as the configuration's `num_hidden_layers` (of its text part in a multimodal
    model): those whose children the model names in `_no_split_modules` where there are such, else all of them. Where
    none is as long, layers were added or taken out since: then those of any length whose children are all named. A
    module that has no such configuration may contain modules that do.
    """
    return _lists_of(model) or [each for child in model.children() for each in layer_lists(child)]


def runners(model: nn.Module) -> dict[nn.Module, bool]:
    """The modules inside of `model` whose forwards run decoder layers, the outermost first: do they run all of them?
    Some are called by themselves, as an encoder is by `generate()`."""
    lists = set(layer_lists(model))
    inside = [name.split(".")[:-1] for name, module in model.named_modules() if module in lists]
    paths = dict.fromkeys(tuple(names[:end]) for names in inside for end in range(1, len(names) + 1))
    return {
        model.get_submodule(".".join(path)): all(tuple(names[: len(path)]) == path for names in inside)
        for path in paths
    }


def _lists_of(model: nn.Module) -> list[nn.ModuleList]:
    length = getattr(text_config(model), "num_hidden_layers", None)
    if not isinstance(length, int) or length < 1:
        return []
    named = set(getattr(model, "_no_split_modules", None) or ())
    candidates = list(_outermost_lists(model, length))
    return _only_of(candidates, named) or candidates or _only_of(_outermost_lists(model, None), named)


def _only_of(lists: Iterable[nn.ModuleList], named: set[str]) -> list[nn.ModuleList]:
    """Returns the modules that hold something, and nothing but modules of the classes that are named."""
    return [each for each in lists if len(each) and all(type(child).__name__ in named for child in each)]


def text_config(model: nn.Module) -> object:
    """The configuration of the part of `model` that writes text, None where it has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text(decoder=True) if callable(text) else getattr(config, "text_config", config)


def _outermost_lists(module: nn.Module, length: int | None) -> Iterable[nn.ModuleList]:
    """Outermost among those of that length; None: of any."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and length in (None, len(child)):
            yield child
        else:
            yield from _outermost_lists(child, length)
