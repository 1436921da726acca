"""The sampler in a generation loop of transformers, for the requests that carry their settings. What carries none is
sampled by transformers.

Note [Not on the host yet]
    With asynchronous batching a step is launched before the tokens of the one before it are on the host. What a choice
    depends on is there all the same: the token's position and how long the answer is are known without it. Counts of
    tokens stay on the device, and a drawn token is counted at once. They are good for one position: where a preemption,
    a lost step or a fork leads to another, they are made again of the tokens that the host has. A grammar needs the
    token itself, so the forward is launched first; then the thread waits for the batch before it, and works out the
    mask while the forward runs. So only steps with grammars are not launched ahead of the device.

Note [Graphs]
    A captured graph of transformers ends with its own sampling and does nothing else when it is replayed. In a loop
    with a sampler it leaves its logits in a buffer. Steps with more rows than the buffer has, or of which prompts are
    scored, are launched without graphs.

Note [Scores of a prompt]
    The logprobs of a prompt's own tokens come with its chunks: the model is asked for the logits of all positions of a
    chunk, and only their logprobs are kept. Selection (hooks/batching) makes such chunks small and shares no blocks
    with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch
from transformers.generation.continuous_batching.utils import stream_context

from .carried import LAUNCHED, SAMPLING, SampledRequest, carried, without_graphs
from .sampler import Drawn, Draws, Logprobs, SampledRow, TokenCounts, put
from .settings import ChosenToken, Sampling


class _Scoring(NamedTuple):
    """The part of a prompt that a step scores: `targets` from the position `first` on, by logits at `rows` of the
    step's tokens."""

    request: SampledRequest
    first: int
    targets: list[int]
    rows: range


@dataclass(frozen=True, slots=True)
class _Launched:
    """What the sampler has found in a step that was launched."""

    requests: list[SampledRequest | None]
    drawn: Drawn | None
    scored: list[tuple[_Scoring, Logprobs]]

    def told(self, tokens: list[int]) -> list[ChosenToken | None]:
        """Returns the chosen tokens, None for those of transformers; puts scores where they belong. Waits for the
        device."""
        for part, logprobs in self.scored:
            assert part.request.scored is not None
            most = repeat(part.request.sampling.logprobs or 0, len(part.targets))
            part.request.scored.update(enumerate(logprobs.told(part.targets, most), part.first))
        chosen = [] if self.drawn is None else self.drawn.told(tokens[: len(self.requests)])
        return [None if request is None else token for request, token in zip(self.requests, chosen, strict=False)]


class LoopSampler:
    """Chooses tokens in one generation loop."""

    def __init__(self, runner: Any) -> None:
        """`runner`: the loop's ModelRunner, with an ElasticPagedCache."""
        self._cache = runner.cache
        self._device: torch.device = runner.cache.device
        self._logits: torch.Tensor | None = None  # of the step that is launched: its rows, then those of scores
        self._rows = 0  # of the step, without those of scores
        self._buffer: torch.Tensor | None = None
        self._replays = False  # does a graph leave the logits in the buffer?
        if any(runner.cb_config.cuda_graph_booleans):
            self._buffer = torch.empty((self._cache.logit_rows, self._cache.vocabulary), device=self._device)

    @classmethod
    def attach(cls, processor: Any) -> None:
        """Has the requests of a ContinuousBatchProcessor that carry a SampledRequest sampled so."""
        processor.model_runner.sampler = cls(processor.model_runner)
        processor.logit_processor.supported_keys[SAMPLING] = SampledRequest

    def keep(self, scores: torch.Tensor) -> torch.Tensor:
        """Keeps the logits of a step, [1, rows, vocabulary], and returns those of which transformers samples."""
        self._logits = scores[0]
        if self._replays and self._buffer is not None:
            self._buffer[: scores.shape[1]].copy_(scores[0])
        return scores[:, : self._rows]

    def launch(self, stock: Callable[..., None], runner: Any, model: Any, batch_data: dict[str, Any]) -> None:
        """Launches a step and chooses its tokens."""
        inputs, indices = runner.inputs_and_outputs, batch_data["logits_indices"]
        batch, before = _batches(inputs)
        states = [future.state for future in batch.requests_in_batch if future.has_new_token]
        requests, scoring = [carried(state) for state in states], [*_scoring(batch)]
        self._rows, draws = len(indices), None
        with stream_context(inputs.compute_stream):
            if any(requests):
                draws = Draws([self._row(state, before) for state in states], self._device, self._cache.logit_rows)
            if scoring:
                more = [row for part in scoring for row in part.rows]
                batch_data = {
                    **batch_data,
                    "logits_indices": torch.cat([indices, put(more, indices.dtype, self._device)]),
                }
        room = 0 if scoring or self._buffer is None else len(self._buffer)
        with without_graphs(runner, varlen=self._rows > room, decode=self._rows > room):
            graphs = runner.use_cuda_graph_decode if inputs.use_block_table else runner.use_cuda_graph_varlen
            self._replays, self._logits = graphs, None
            stock(runner, model, batch_data)
        logits, self._logits = self._buffer if self._replays else self._logits, None
        if logits is None or not (draws or scoring):
            return
        with stream_context(inputs.compute_stream):
            scored = [*self._scored(scoring, logits[self._rows :])]
            drawn = None if draws is None else draws(logits[: len(states)])
            if drawn is not None:
                self._write(drawn.tokens, states, inputs.get_cb_kwargs()[-1])
        setattr(batch, LAUNCHED, _Launched(requests, drawn, scored))

    def _write(self, tokens: torch.Tensor, states: list[Any], output_ids: torch.Tensor) -> None:
        """Puts the chosen tokens in the place of transformers', and counts them."""
        ours = [(row, state, request) for row, state in enumerate(states) if (request := carried(state)) is not None]
        rows = put([row for row, *_ in ours], torch.int64, self._device)
        output_ids[0, rows] = tokens[rows].to(output_ids.dtype)
        for row, state, request in ours:
            if request.counts is not None:
                request.counts.add(tokens[row : row + 1])
                request.counted = state.position_offset + 1

    def _row(self, state: Any, before: Any) -> SampledRow:
        """Returns the row of a request. `before`: the batch in flight, as transformers' pair of host and device."""
        request, position = carried(state), state.position_offset
        if request is None:
            return SampledRow(Sampling(), 0)
        prompt = state._true_initial_tokens or len(state.initial_tokens)
        if TokenCounts.needed(request.sampling) and request.counted != position:
            tokens = _tokens(state, before)
            request.counts = TokenCounts(tokens[:prompt], tokens[prompt:], self._cache.vocabulary, self._device)
        allowed = None
        if (grammar := request.grammar) is not None:

            def allowed() -> torch.Tensor:
                return grammar.allowed(_tokens(state, before)[prompt:])

        ends = tuple(end for end in state._eos_token_ids if end < self._cache.vocabulary)
        return SampledRow(request.sampling, position, position - prompt, ends, request.counts, allowed)

    def _scored(self, scoring: list[_Scoring], logits: torch.Tensor) -> Iterator[tuple[_Scoring, Logprobs]]:
        done = 0
        for part in scoring:
            rows = logits[done : done + len(part.targets)]
            targets = put(part.targets, torch.int64, self._device)
            yield part, Logprobs.of(rows.log_softmax(-1), targets, part.request.sampling.logprobs or 0)
            done += len(part.targets)


def _batches(inputs: Any) -> tuple[Any, Any]:
    """Returns the batch that is launched, and the pair of the one before it, which may be in flight."""
    pairs = getattr(inputs, "io_pairs", None)
    return (inputs, None) if pairs is None else (pairs[inputs.current_pair].host_io, pairs[1 - inputs.current_pair])


def _tokens(state: Any, before: Any) -> list[int]:
    """Returns all tokens of a request so far; waits for that of the batch in flight, if it is there."""
    tokens: list[int] = state.initial_tokens + state.generated_tokens
    if len(tokens) < state.position_offset:
        before.d2h_over.synchronize()
        new = [future.state.request_id for future in before.host_io.requests_in_batch if future.has_new_token]
        tokens.append(int(before.host_io.output_ids[0, new.index(state.request_id)]))
    return tokens


def _scoring(batch: Any) -> Iterator[_Scoring]:
    done = 0
    for future in batch.requests_in_batch:
        request, count = carried(future.state), future.query_length
        if request is not None and request.scored is not None:
            first = future.state.position_offset - count + 1
            if targets := future.state.initial_tokens[first : first + count]:
                yield _Scoring(request, first, targets, range(done, done + len(targets)))
        done += count
