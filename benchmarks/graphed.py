"""A model that decodes with its resident layers in CUDA graphs: those between two streamed layers in one.

Everything stays as the library has it: the graphs are behind the layers' own `forward`, the streamed layers run between
them through their hooks, and the cache is transformers' `StaticCache`, whose addresses do not change. On a CPU, where
there are no graphs, the same layers are run as they are.

Note [The first two steps]
    The first step runs every layer as it is, so that what kernels load and make on first use is there. In the second
    each run of layers is captured and then replayed at once: a capture computes nothing. A graph reads its inputs where
    they were at the capture, so each step copies them there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Self

import torch
from transformers import PreTrainedModel, StaticCache

from ballonet.hooks.compat import cache_name


class GraphedDecode:
    """Decodes from a cache of random keys and values. A context manager: within it the layers' `forward` are others."""

    def __init__(self, model: PreTrainedModel, streamed: Collection[int], batch: int, held: int, room: int) -> None:
        """`streamed`: the layers that are left as they are; `held`: tokens in the cache; `room`: for so many more."""
        self._model = model
        self._cuda = model.device.type == "cuda"
        config = model.config
        cache = StaticCache(config=config, max_cache_len=held + room)
        self._given = {cache_name(model): cache}
        head = config.hidden_size // config.num_attention_heads
        with torch.no_grad():
            shape = (batch, config.num_key_value_heads, held, head)
            states = torch.randn(shape, dtype=model.dtype, device=model.device)
            for layer in range(config.num_hidden_layers):
                cache.update(states, states, layer)
        self._token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        layers = model.get_submodule("model.layers")
        runs: list[list[Any]] = [[]]
        for index, layer in enumerate(layers.children()):
            if index in streamed:
                runs.append([])
            else:
                runs[-1].append(layer)
        self.runs = [_Run(run, self._cuda) for run in runs if run]

    def step(self) -> torch.Tensor:
        """One more token of each sequence, int64[batch, 1]. The host does not wait for it."""
        with torch.no_grad():
            logits = self._model(self._token, use_cache=True, **self._given).logits
        self._token = logits[:, -1].argmax(-1, keepdim=True)
        return self._token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for run in self.runs:
            run.undo()


class _Run:
    """Consecutive layers as one graph: the first of them replays it, the others hand on what they get."""

    def __init__(self, layers: list[Any], cuda: bool) -> None:
        self._layers = layers
        self._forwards: list[Callable[..., torch.Tensor]] = [layer.forward for layer in layers]
        self._cuda = cuda
        self._warm = False
        self._graph: Any = None
        self._states: torch.Tensor | None = None
        self._others: dict[str, Any] = {}
        self._result: torch.Tensor | None = None
        layers[0].forward = self._first
        for layer in layers[1:]:
            layer.forward = _hand_on

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def undo(self) -> None:
        for layer in self._layers:
            del layer.forward

    def _first(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        if not self._cuda or not self._warm:
            self._warm = True
            return self._compute(hidden_states, others)
        if self._graph is None:
            self._states = hidden_states.clone()
            self._others = {name: _placed(value) for name, value in others.items()}
            graph: Any = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._result = self._compute(self._states, self._others)
            self._graph = graph
        assert self._states is not None
        assert self._result is not None
        self._states.copy_(hidden_states)
        for name, value in others.items():
            _refill(self._others[name], value)
        self._graph.replay()
        return self._result

    def _compute(self, states: torch.Tensor, others: dict[str, Any]) -> torch.Tensor:
        for forward in self._forwards:
            states = forward(states, **others)
        return states


def _hand_on(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    return hidden_states


def _placed(value: Any) -> Any:
    """A copy of the tensors in it, at addresses that stay."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(map(_placed, value)) if isinstance(value, tuple) else value


def _refill(placed: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        placed.copy_(value)
    elif isinstance(value, tuple):
        for each, new in zip(placed, value, strict=True):
            _refill(each, new)
