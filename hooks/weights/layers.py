"""The decoder layers of a model, which are hooked, streamed and moved one at a time."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def decoder_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The decoder layers of `model` in order, each once; empty where its configuration names none."""
    return tuple(dict.fromkeys(layer for modules in layer_lists(model) for layer in modules))


def layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    """The ModuleLists that hold the decoder layers of `model`, in order.

    The outermost ones whose length is the configuration's `num_hidden_layers` (of the text part of a multimodal model):
    those whose children the model names in `_no_split_modules` if there are such, else all of them. If none has that
    length, as layers were added or removed, those of any length whose children are all named. A module without such a
    configuration may contain modules with one.
    """
    return _lists_of(model) or [modules for child in model.children() for modules in layer_lists(child)]


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
    """Returns the lists that are not empty and hold only modules of the named classes."""
    return [modules for modules in lists if len(modules) and all(type(child).__name__ in named for child in modules)]


def text_config(model: nn.Module) -> object:
    """The configuration of the part of `model` that writes text, None where it has none."""
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", None)
    return text(decoder=True) if callable(text) else getattr(config, "text_config", config)


def _outermost_lists(module: nn.Module, length: int | None) -> Iterable[nn.ModuleList]:
    """Returns the outermost lists of that length; None: of any length."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and length in (None, len(child)):
            yield child
        else:
            yield from _outermost_lists(child, length)
