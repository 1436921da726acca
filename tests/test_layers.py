"""Finding the decoder layers of a model, and which of them a tensor belongs to."""

from __future__ import annotations

import torch
from torch import nn

from ballonet.hooks.weights.model_parts import decoder_layers, members, survey


class Shell(nn.Module):
    """A model with a configuration of its own making."""

    def __init__(self, lists: dict[str, nn.ModuleList], length: int, named: list[str] | None = None) -> None:
        super().__init__()
        for name, layers in lists.items():
            self.add_module(name, layers)
        self.config = type("Config", (), {"num_hidden_layers": length})()
        self._no_split_modules = named


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(1, 1) for _ in range(count)])


def test_decoder_layers_of_unusual_models() -> None:
    layers, others = linears(3), nn.ModuleList([nn.ReLU() for _ in range(3)])
    assert decoder_layers(Shell({"layers": layers, "others": others}, 3, ["Linear"])) == tuple(layers)
    assert decoder_layers(Shell({"layers": layers, "others": others}, 3)) == (*layers, *others)
    assert decoder_layers(Shell({"layers": layers}, 4)) == ()
    nested = nn.ModuleList([nn.ModuleDict({"experts": linears(3)}) for _ in range(3)])
    assert decoder_layers(Shell({"layers": nested}, 3)) == tuple(nested)
    same = nn.ModuleList([nn.Linear(1, 1)] * 3)
    assert decoder_layers(Shell({"layers": same}, 3)) == (same[0],)
    assert decoder_layers(nn.Linear(1, 1)) == ()


def test_a_tensor_of_two_layers_is_of_none() -> None:
    layers = nn.ModuleList([nn.Linear(600, 600, bias=False) for _ in range(3)])
    layers[2].weight = layers[0].weight
    model = Shell({"layers": layers}, 3)
    model.also = layers[1]  # reached around the layers, but still nothing but layer 1
    surveyed = survey(members(model, decoder_layers(model)), torch.device("cpu"))
    assert [span.layer for span in surveyed.spans] == [None, 1]
    model.first = nn.Sequential(nn.Linear(600, 600, bias=False))
    model.first[0].weight = layers[1].weight
    surveyed = survey(members(model, decoder_layers(model)), torch.device("cpu"))
    assert {span.layer for span in surveyed.spans} == {None}
