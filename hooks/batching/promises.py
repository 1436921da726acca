"""What requests of a loop were promised: the SLO of each, whether it can be kept, what it asks of the next step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...allocator.errors import SLOError
from ...offload.policy.request_slo import NOTHING, RequestSLO, refused, tightest

if TYPE_CHECKING:
    from .cache import ElasticPagedCache


Required = tuple[float | None, float | None, bool]


class Promises:
    """SLOs by request. The server notes them on any thread; the loop asks."""

    def __init__(self, cache: ElasticPagedCache, clock: Callable[[], float]) -> None:
        """`clock`: seconds, as the governor has them."""
        self._cache = cache
        self._clock = clock
        self._slos: dict[str, RequestSLO] = {}
        self._required: Required = (None, None, False)  # what the governor was told last

    def __len__(self) -> int:
        return len(self._slos)

    def __contains__(self, request: str) -> bool:
        return request in self._slos

    def note(self, request: str, slo: RequestSLO, *, unless: bool = False) -> None:
        """Notes what a request asks, or that it asks nothing; `unless`: only where nothing is noted of it."""
        if slo == NOTHING:
            self._slos.pop(request, None)
        elif unless:
            self._slos.setdefault(request, slo)
        else:
            self._slos[request] = slo

    def asked(self, request: str) -> RequestSLO:
        """What the request asks."""
        return self._slos.get(request, NOTHING)

    def impossible(self, request: str, prompt: int, new: int) -> SLOError | None:
        """Says why a request that waits cannot have what it asks; None where it can. On any thread."""
        slo, batch = self.asked(request), self._cache.max_batch_tokens
        found = refused(self._cache.model.costs.parts, slo, prompt, new, batch, self._clock())
        return None if found is None else SLOError(f"request {request}: {found}", found.possible, None)

    def require(self, scheduled: Sequence[Any], others: bool) -> None:
        """Tells the governor what the batch asks, and whether `others` wait for its end. Of the time to a first token
        what is left, in steps of a third."""
        if self._slos or self._required != (None, None, False):
            slos, now = [self.asked(state.request_id) for state in scheduled], self._clock()
            prompts = [slo for state, slo in zip(scheduled, slos, strict=True) if not state.generated_tokens]
            left = min((max(1e-3, each.arrived + each.ttft - now) for each in prompts if each.ttft), default=None)
            ttft = None if left is None else 10 ** (math.floor(math.log10(left) * 8) / 8)
            self._required = tightest(slos).tpot, ttft, others
            self._cache.model.require(*self._required)

    def limits(self, scheduled: Sequence[Any], known: Sequence[Any]) -> tuple[float, float]:
        """Seconds that the step may take for those of it that decode, and the moment until which the next first token
        has to be there, of all requests that are `known`; infinity where nothing is asked."""
        if not self._slos:
            return math.inf, math.inf
        decoding = tightest(self.asked(state.request_id) for state in scheduled if state.generated_tokens).tpot
        asked = [self.asked(state.request_id) for state in known if not state.generated_tokens]
        due = min((slo.arrived + slo.ttft for slo in asked if slo.ttft is not None), default=math.inf)
        return math.inf if decoding is None else decoding, due
