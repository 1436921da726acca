"""A plain way to run some layers of a model with its own forward, for tests of what is above it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class _Left(Exception):
    def __init__(self, states: torch.Tensor) -> None:
        self.states = states


class Spliced:
    """Calls layers [a, b) of a model; the others pass their input through."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers = next(
            each
            for each in model.modules()
            if isinstance(each, nn.ModuleList) and len(each) == model.config.num_hidden_layers
        )

    def __call__(self, layers: range, given: torch.Tensor | None, inputs: dict[str, Any]) -> torch.Tensor:
        undo = []
        for number, layer in enumerate(self.layers):
            undo.append((layer, vars(layer).get("forward")))
            layer.forward = self._in_place_of(layer.forward, number, layers, given)
        try:
            found: torch.Tensor = self._model(**inputs).logits
        except _Left as left:
            return left.states
        finally:
            for layer, forward in undo:
                del layer.forward
                if forward is not None:
                    layer.forward = forward
        return found

    def _in_place_of(self, forward: Any, number: int, layers: range, given: torch.Tensor | None) -> Any:
        last = number == layers.stop - 1 and number < len(self.layers) - 1

        def call(states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if number not in layers:
                return states
            if number == layers.start and given is not None:
                states = given
            found = forward(states, *args, **kwargs)
            if last:
                raise _Left(found[0] if isinstance(found, tuple) else found)
            return found

        return call
