"""The forward of one microbatch on one stage: its inputs, and the layers of the span.

Note [One set of inputs]
    transformers allocates input tensors for the largest batch once. A stage needs one set, although several
    microbatches are in flight in the group: it computes them one after the other on one stream, which also orders the
    writes to the next inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from .group_settings import GroupSettings
from .microbatch_plan import Chunk
from .span_cache import SpanCache, config_of
from .stage_times import StageTimes

States = tuple[torch.Tensor, ...]  # passed between two layers, hidden states [1, tokens, width] first


class RunsLayers(Protocol):
    """Runs some layers of a model."""

    def __call__(self, layers: range, given: States | None, inputs: dict[str, Any]) -> States:
        """Runs these layers with the model's own forward. `inputs`: the forward's keyword arguments; `given`: the
        states before the first of these layers, None before the model's first. Returns the states after the last of
        them, or the logits [1, tokens, vocabulary] after the model's last."""


class SpanRunner:
    """Computes microbatches of `cache.layers`."""

    def __init__(
        self, model: Any, runs: RunsLayers, cache: SpanCache, settings: GroupSettings, times: StageTimes | None = None
    ) -> None:
        """`times`: measures the microbatches."""
        config = model.config.get_text_config()
        keeps = getattr(model, "_supports_logits_to_keep", None)
        self._keeps = keeps is not None and keeps()
        self._runs = runs
        self._cache = cache
        self._processors = settings.processors
        self._times = times
        self.last = cache.layers.stop == config.num_hidden_layers
        self._inputs = ContinuousBatchingIOs(
            cache, config_of(config, cache.layers), settings.batching, model.device, model.dtype, settings.processors
        )

    @torch.no_grad()
    def run(self, chunks: Sequence[Chunk], states: Sequence[RequestState], given: States | None) -> States:
        """Computes chunks, whose requests have their blocks. `states`: of the requests, advanced by their chunks;
        `given`: the states from the stage before. Returns the states for the next stage, or on the last stage the
        logits [sampling chunks, vocabulary]. torch.OutOfMemoryError."""
        began = None if self._times is None else self._times.begin()
        found = self._run(chunks, states, given)
        if self._times is not None and began is not None:
            self._times.end(began, chunks, len(self._cache.layers))
        return found

    def _run(self, chunks: Sequence[Chunk], states: Sequence[RequestState], given: States | None) -> States:
        batch = [_scheduled(chunk, state) for chunk, state in zip(chunks, states, strict=True)]
        fast = all(len(chunk.ids) == 1 and chunk.before < self._cache.max_decode_fast_path_length for chunk in chunks)
        new, read = sum(len(chunk.ids) for chunk in chunks), sum(chunk.before for chunk in chunks)
        self._inputs.prepare_batch_tensors(batch, self._processors, fast, new, read, use_padding=False)
        inputs: dict[str, Any] = dict(self._inputs.get_model_kwargs())
        sampled = sum(chunk.samples for chunk in chunks)
        indices = inputs["logits_indices"][:sampled]
        if self.last and self._keeps:
            inputs["logits_to_keep"] = indices
        found = self._runs(self._cache.layers, given, inputs)
        if not self.last:
            return found
        (logits,) = found
        return (logits[0] if self._keeps else logits[0, indices],)


def _scheduled(chunk: Chunk, state: RequestState) -> FutureRequestState:
    assert state.position_offset == chunk.before, f"{chunk.request} has {state.position_offset} tokens"
    state.tokens_to_process = list(chunk.ids)
    return FutureRequestState(state, chunk.samples, {}, len(chunk.ids))
