"""A request with its answer so far: enough to compute it anew on any replica."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from ...offload.policy.request_slo import NOTHING, RequestSLO
from .microbatch_plan import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `prompt`: token ids; `new`: tokens of the answer at most; `ends`: ids that end it; `delivered`: tokens
    of the answer so far. `ttft`, `tpot`: SLOs in seconds, for the first token and for a decoding step; None: no SLO.
    `waited`: seconds since it arrived, at the time of sending."""

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
        """The ids of all tokens so far."""
        return self.prompt + self.delivered

    @property
    def over(self) -> bool:
        """Whether the answer is complete."""
        return len(self.delivered) >= self.new or (bool(self.delivered) and self.delivered[-1] in self.ends)

    def slo(self, now: float) -> RequestSLO:
        """Returns the SLO of the request, with its arrival on a clock that is at `now`; without a TTFT once the first
        token is there."""
        if self.tpot is None and (self.ttft is None or self.delivered):
            return NOTHING
        return RequestSLO(None if self.delivered else self.ttft, self.tpot, now - self.waited)

    def with_token(self, token: int) -> Self:
        """Returns the request with one more token of its answer."""
        return replace(self, delivered=(*self.delivered, token))


def state_of(request: Request, held: int = 0) -> RequestState:
    """Returns transformers' state of a request, of which the first `held` tokens have KV, fewer than all. Delivered
    tokens count as prompt, as after a preemption: a decoding request has a prompt of one token left."""
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
