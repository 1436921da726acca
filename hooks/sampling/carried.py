"""What requests of a generation loop carry to be sampled by ballonet, and what stands for methods of transformers there
(hooks/batching/patches.py). It needs none of the sampler's packages: it is in all loops of managed models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from .grammar import Matcher
    from .sampler import TokenCounts
    from .settings import ChosenToken, Sampling

SAMPLING: Final = "sampling"  # the argument of a request, among `logit_processor_kwargs`
SAMPLER: Final = "sampler"  # of a ModelRunner: its LoopSampler (loop.py), if it has one
LAUNCHED: Final = "launched"  # of a ContinuousBatchingIOs: what a sampler has found in the batch


@dataclass(slots=True)
class SampledRequest:
    """What a request carries: its settings, and what its next choice depends on. `scored`: logprobs of its prompt's
    tokens by position, None where they are not asked for. A copy, of a fork or of a request that is computed again,
    begins without counts. `counted`: the position for which `counts` are."""

    sampling: Sampling
    grammar: Matcher | None = None
    scored: dict[int, ChosenToken] | None = None
    counts: TokenCounts | None = field(default=None, repr=False)
    counted: int = -1

    def __deepcopy__(self, _: dict[int, Any]) -> SampledRequest:
        grammar = None if self.grammar is None else self.grammar.copy()
        return SampledRequest(self.sampling, grammar, self.scored)


def carried(state: Any) -> SampledRequest | None:
    """Returns what a RequestState carries."""
    request: SampledRequest | None = state.logit_processor_kwargs.get(SAMPLING)
    return request


def is_scored(state: Any) -> bool:
    """Are the logprobs of a request's own prompt asked for? Then all of it is computed."""
    request = state.logit_processor_kwargs.get(SAMPLING)  # `carried` without its call, as each step asks
    return request is not None and request.scored is not None


@contextmanager
def without_graphs(runner: Any, *, varlen: bool, decode: bool = False) -> Iterator[None]:
    """A `with` block in which a ModelRunner replays and captures no graphs of these kinds."""
    before = runner.use_cuda_graph_varlen, runner.use_cuda_graph_decode
    runner.use_cuda_graph_varlen, runner.use_cuda_graph_decode = before[0] and not varlen, before[1] and not decode
    try:
        yield
    finally:
        runner.use_cuda_graph_varlen, runner.use_cuda_graph_decode = before


def keep_logits(runner: Any, scores: torch.Tensor, output_ids: torch.Tensor, *, stock: Callable[..., None]) -> None:
    """Stands for `_sample`, where a compiler breaks its graph."""
    sampler = vars(runner).get(SAMPLER)
    stock(runner, scores if sampler is None else sampler.keep(scores), output_ids)


def tell_tokens(batch: Any, *, stock: Callable[..., Any]) -> Any:
    """Stands for `prepare_batch_update`: a ChosenToken takes the place of each logprob, for requests that carry their
    settings."""
    requests, tokens, logprobs = stock(batch)
    launched = vars(batch).pop(LAUNCHED, None)
    return requests, tokens, logprobs if launched is None else launched.told(tokens)
