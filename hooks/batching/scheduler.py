"""Which requests are in the next batch: transformers' order, and eLLM's admission (offload/policy/admission.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import FIFOScheduler, PrefillFirstScheduler, Scheduler

from ...allocator.errors import ManageError, RequestTooLarge
from ...offload.policy.admission import Demand, Memory, admit, can_ever_run
from ...offload.policy.step_costs import Step
from ...offload.policy.tuning import DEFAULT, Serving
from ..measure.point import packed
from .cache import ElasticPagedCache


class ElasticScheduler(Scheduler):
    """A scheduler with which a request takes part only where there is room for all that it needs in this step: on the
    device, or for the KV of its prompt on the host. The order is that of the other class that it is made of."""

    cache: ElasticPagedCache

    def __init__(
        self,
        cache: ElasticPagedCache,
        safety_margin: float | None,
        max_requests_per_batch: int,
        memory: Callable[[], Memory],
        tuning: Serving = DEFAULT.serving,
    ) -> None:
        """As Scheduler, but that the reserve of the admission stands for the margin. `memory`: what there is for KV and
        activations at this moment."""
        self._memory = memory
        self._tuning = tuning
        self._passed: dict[str, int] = {}
        self._caution = 0  # bytes that stay free beside the reserve
        self._step: tuple[Step, float] | None = None  # the last batch, and when it was begun
        self._next = Step(0, 0)  # the batch that is computed next
        self._in_row = 0  # steps of prompts alone since requests that decode had one
        super().__init__(cache, 0.0, max_requests_per_batch)

    def reset(self) -> None:
        """No request has been passed over."""
        super().reset()
        self._passed = {}

    def add_waiting_request(self, state: Any) -> None:
        """As Scheduler's; RequestTooLarge, for the one request, where it can never run, and ManageError where it has no
        tokens, which would end the loop."""
        if not state.initial_tokens:
            raise ManageError(f"request {state.request_id} has no tokens")
        refused = self.refusal(state.request_id, len(state.initial_tokens), state.max_new_tokens or 0)
        if refused is not None:
            raise refused
        super().add_waiting_request(state)

    def refusal(self, request: str, prompt: int, new: int) -> RequestTooLarge | None:
        """Says why a request of so many tokens, and so many new ones, can never run; None where it can. On any
        thread."""
        staging = self.cache.sizes.of(min(prompt, self.cache.max_batch_tokens), prompt + new)
        needed, now = self.cache.bytes_of(prompt + new) + staging, self._memory()
        most = replace(now, elsewhere=now.elsewhere + self.cache.pages.nbytes)
        if can_ever_run(needed, staging, most) and prompt + new <= self.cache.max_tokens_read:
            return None
        return RequestTooLarge(request, needed, most.total - most.reserve, most.host)

    def _process_candidates(
        self, candidates: list[Any], token_budget: int, *args: Any
    ) -> tuple[list[Any], bool, bool, int, int]:
        self.cache.pool.try_to_free_sectors()
        looked, left = [], token_budget
        for state in self._worth(candidates):
            if left <= 0:
                break
            looked.append((state, min(self._tokens(state), left)))
            left -= looked[-1][1]
        found = admit([self.demand(*each) for each in looked], self._now(), self._tuning)
        lacking = [self.demand(*each) for each in looked if each[0].request_id not in found.where]
        if lacking and self.cache.evict_oldest(sum(each.kv + each.activations for each in lacking)):
            found = admit([self.demand(*each) for each in looked], self._now(), self._tuning)
        self._passed = {name: self._passed.get(name, 0) + 1 for name in found.passed}
        self.cache.on_host = frozenset(name for name, where in found.where.items() if where == "host")
        for chosen in self._steps([each for each in looked if each[0].request_id in found.where]):
            tokens = min(token_budget, sum(tokens for _, tokens in chosen))
            states = [state for state, _ in chosen]
            scheduled, failed, fast, new, read = super()._process_candidates(states, tokens, *args)
            if scheduled:
                break
        self.cache.begins(each.state.request_id for each in scheduled)
        sequences = [(each.query_length, each.state.current_len()) for each in scheduled]
        self.cache.point, self._next = packed(sequences), Step.of(sequences)
        refused = [each for each in looked if each[0].request_id not in found.where]
        self.starved_requests += [each for each in refused if each[0].request_id in self.active_requests]
        return scheduled, failed or bool(refused), fast, new, read

    def begins(self, found: bool) -> None:
        """A batch is about to be computed; where there is none the loop waits."""
        now, costs = self.cache.pages.client.governor.clock(), self.cache.costs
        if costs is not None and self._step is not None:
            costs.observe(self._step[0], now - self._step[1])
        self._step = (self._next, now) if found else None

    def _worth(self, candidates: list[Any]) -> list[Any]:
        """Returns the candidates without those that wait and would make steps slower."""
        costs, running = self.cache.costs, len(self.active_requests)
        if costs is None or not candidates:
            return candidates
        length = sum(state.current_len() + self._tokens(state) for state in candidates) / len(candidates)
        if not costs.slower(len(candidates), length):
            return candidates
        room = max(0, (costs.largest(length) or 0) - running) or not running
        worth = []
        for state in candidates:
            waits = state.request_id not in self.active_requests
            if not waits or room:
                worth.append(state)
                room -= waits
        return worth

    def _steps(self, admitted: list[tuple[Any, int]]) -> list[list[tuple[Any, int]]]:
        """One step of all that are admitted; or, where prompts are faster in one of their own, two, of which the second
        counts where the first is none: prompts first, which make the batch larger, but only so many times."""
        decoding = [each for each in admitted if each[0].status == RequestStatus.DECODING]
        prompts = [each for each in admitted if each[0].status != RequestStatus.DECODING]
        parts = [Step.of((tokens, state.current_len()) for state, tokens in part) for part in (decoding, prompts)]
        if not decoding or not prompts or self.cache.costs is None or not self.cache.costs.apart(*parts):
            return [admitted]
        self._in_row = (self._in_row + 1) % (self._tuning.prompts + 1)
        return [prompts, decoding] if self._in_row else [decoding, prompts]

    def wait_again(self, state: Any) -> None:
        """A request that has run before waits for its turn."""
        super().add_waiting_request(state)

    def lacked(self) -> None:
        """A step found no memory in the middle, although it was admitted: from now on more stays free."""
        self._caution += max(self._caution, self._memory().reserve)
        self._step = None  # what it took says nothing

    def dares(self) -> bool:
        """Nothing runs as too much stays free: no more than the reserve does from now on. False where it does so."""
        before, self._caution = self._caution, 0
        return before > 0

    def room(self) -> int:
        """Bytes that requests may have beyond what they have."""
        now = self._now()
        return now.total - now.reserve

    def demand(self, state: Any, tokens: int) -> Demand:
        """What a request needs for so many more tokens."""
        sizes, kept = self.cache.sizes, state.is_cpu_offloaded  # see preemption.py, Note [Preempted]
        return Demand(
            state.request_id,
            self.cache.bytes_needed(state, tokens) + (self.cache.on_host_bytes(state.request_id) if kept else 0),
            sizes.of(tokens, state.current_len()),
            staging=sizes.staging(tokens),
            decoding=kept or state.status == RequestStatus.DECODING,
            passed=self._passed.get(state.request_id, 0),
        )

    def _now(self) -> Memory:
        now = self._memory()
        return replace(now, reserve=now.reserve + self._caution)

    def _tokens(self, state: Any) -> int:
        decoding = state.status == RequestStatus.DECODING
        return len(state.tokens_to_process if decoding else state.remaining_prefill_tokens)


class ElasticFIFO(ElasticScheduler, FIFOScheduler):
    """Requests that decode first, then prompts in the order in which they came."""


class ElasticPrefillFirst(ElasticScheduler, PrefillFirstScheduler):
    """Prompts that have begun first."""
