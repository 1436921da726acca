"""The SLOs of a loop's requests: whether each can be kept, and what they ask of the next step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...allocator.errors import SLOError
from ...offload.policy.request_slo import NOTHING, RequestSLO, refused, tightest

if TYPE_CHECKING:
    from .cache import ElasticPagedCache


Required = tuple[float | None, float | None, bool]


class RequestSLOs:
    """SLOs by request. The server notes them on any thread; the loop reads them."""

    def __init__(self, cache: ElasticPagedCache, clock: Callable[[], float]) -> None:
        """`clock`: the governor's, in seconds."""
        self._cache = cache
        self._clock = clock
        self._slos: dict[str, RequestSLO] = {}
        self._required: Required = (None, None, False)  # the last call of `require`

    def __len__(self) -> int:
        return len(self._slos)

    def __contains__(self, request: str) -> bool:
        return request in self._slos

    def note(self, request: str, slo: RequestSLO, *, unless: bool = False) -> None:
        """Notes the SLO of a request, which may be NOTHING; `unless`: only where none is noted."""
        if slo == NOTHING:
            self._slos.pop(request, None)
        elif unless:
            self._slos.setdefault(request, slo)
        else:
            self._slos[request] = slo

    def asked(self, request: str) -> RequestSLO:
        """Returns the SLO of the request."""
        return self._slos.get(request, NOTHING)

    def impossible(self, request: str, prompt: int, new: int) -> SLOError | None:
        """Returns why the SLO of a waiting request cannot be kept; None where it can. On any thread."""
        slo, batch = self.asked(request), self._cache.max_batch_tokens
        found = refused(self._cache.model.costs.parts, slo, prompt, new, batch, self._clock())
        return None if found is None else SLOError(f"request {request}: {found}", found.possible, None)

    def require(self, scheduled: Sequence[Any], others: bool) -> None:
        """Tells the governor the SLOs of the batch, and whether `others` wait for its end. The time to a first token is
        what is left of it, in steps of a third."""
        if self._slos or self._required != (None, None, False):
            slos, now = [self.asked(state.request_id) for state in scheduled], self._clock()
            prompts = [slo for state, slo in zip(scheduled, slos, strict=True) if not state.generated_tokens]
            left = min((max(1e-3, each.arrived + each.ttft - now) for each in prompts if each.ttft), default=None)
            ttft = None if left is None else 10 ** (math.floor(math.log10(left) * 8) / 8)
            self._required = tightest(slos).tpot, ttft, others
            self._cache.model.require(*self._required)

    def limits(self, scheduled: Sequence[Any], known: Sequence[Any]) -> tuple[float, float]:
        """Returns (seconds that the step may take for its decoding requests, the earliest deadline of a first token
        among the `known` requests), infinity where there is no SLO."""
        if not self._slos:
            return math.inf, math.inf
        decoding = tightest(self.asked(state.request_id) for state in scheduled if state.generated_tokens).tpot
        asked = [self.asked(state.request_id) for state in known if not state.generated_tokens]
        due = min((slo.arrived + slo.ttft for slo in asked if slo.ttft is not None), default=math.inf)
        return math.inf if decoding is None else decoding, due
