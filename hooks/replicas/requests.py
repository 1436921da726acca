"""A request as everybody may know it: enough to compute it again from nothing, on any replica."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from ...offload.policy.request_slo import NOTHING, RequestSLO
from .plan import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt`: ids of its tokens; `new`: tokens that its answer has at most; `ends`: ids that end it; `delivered`: the
    tokens of its answer so far. `ttft`, `tpot`: its SLOs in seconds, of the time to its first token and of a step in
    which it decodes; None where it asks for none. `waited`: seconds since it came, when it was told to somebody."""

    name: str
    prompt: tuple[int, ...]
    new: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: tuple[int, ...] = ()
    delivered: tuple[int, ...] = ()
    ttft: float | None = None
    tpot: float | None = None
    waited: float = 0.0

    @property
    def ids(self) -> tuple[int, ...]:
        """All its tokens so far."""
        return self.prompt + self.delivered

    @property
    def over(self) -> bool:
        """Is its answer complete?"""
        return len(self.delivered) >= self.new or (bool(self.delivered) and self.delivered[-1] in self.ends)

    def slo(self, now: float) -> RequestSLO:
        """What it asks, by a clock that is at `now`. The first token is asked for no more once it is there."""
        if self.tpot is None and (self.ttft is None or self.delivered):
            return NOTHING
        return RequestSLO(None if self.delivered else self.ttft, self.tpot, now - self.waited)

    def with_token(self, token: int) -> Self:
        """The request after one more token of its answer."""
        return replace(self, delivered=(*self.delivered, token))


def state_of(request: Request, held: int = 0) -> RequestState:
    """transformers' state of a request `held` tokens of which have KV, fewer than it has tokens. What was delivered
    counts as prompt, as after a preemption: a request that decodes has a prompt of one token left."""
    state: Any = RequestState(
        request.name,
        list(request.ids),
        streaming=True,
        max_new_tokens=request.new - len(request.delivered),
        eos_token_id=list(request.ends) or None,
    )
    if request.delivered:
        state._true_initial_tokens = len(request.prompt)
    if held:
        state.status = RequestStatus.PREFILLING
        state.position_offset = held
        state.remaining_prefill_tokens = state.initial_tokens[held:]
    found: RequestState = state
    return found
