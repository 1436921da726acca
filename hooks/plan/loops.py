"""The generation loop of one model on a virtual clock: transformers' own, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...offload.policy.step_costs import NOTHING, RequestSLO, Step
from ...offload.policy.tuning import DEFAULT
from ..batching.scheduler import ElasticScheduler
from ..server.arrivals import BLOCK, RecordedArrival
from ..server.load import Answered
from .machine import Tenant
from .virtual_model import Clock, VirtualModel

Decision = tuple[float, str, tuple[tuple[str, int], ...]]  # time, model, (request, new tokens) of the step


class VirtualLoop:
    """A generation loop. `answers`: of its requests so far; `looks`: attempts in a row in which no step could run."""

    def __init__(
        self, tenant: Tenant, model: VirtualModel, clock: Clock, batching: dict[str, Any], asks: RequestSLO = NOTHING
    ) -> None:
        """`batching`: arguments of ContinuousBatchingConfig; `asks`: the SLO of each request. Raises as the cache."""
        self.tenant = tenant
        self.model = model
        self.answers: list[Answered] = []
        self.steps = self.looks = 0
        self.ready_at = 0.0  # when to try again to prepare a step
        self._clock = clock
        self._asks = asks
        self._waiting = list(reversed(tenant.arrivals))
        self._by_name: dict[str, Answered] = {}
        self._manager: Any = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(max_queue_size=0, use_cuda_graph=False, **batching),
        )
        self.processor: Any = self._manager._create_batch_processor()
        self._manager.batch_processor = self.processor

    def close(self) -> None:
        """Frees the cache."""
        self.processor = self._manager.batch_processor = None
        del self.model.step

    @property
    def next_at(self) -> float | None:
        """Time at which the next request arrives; None where all have."""
        return self._waiting[-1].at if self._waiting else None

    @property
    def busy(self) -> bool:
        """Whether the loop has requests."""
        return self.processor.has_pending_requests() or not self._manager.input_queue.empty()

    @property
    def batch(self) -> list[Any]:
        """The requests of the prepared step."""
        requests: list[Any] = self.processor.inputs_and_outputs.requests_in_batch
        return requests

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """(new tokens, tokens with KV) of each request of the prepared step."""
        return [(entry.query_length, entry.state.current_len() - entry.query_length) for entry in self.batch]

    @property
    def seconds(self) -> float:
        """Seconds of compute of the prepared step."""
        return self.tenant.costs.seconds(Step.of(self.sequences))

    def take_in(self) -> None:
        """Adds the requests that have arrived by now."""
        while self._waiting and self._waiting[-1].at <= self._clock.now:
            arrival = self._waiting.pop()
            number = len(self.answers)
            name = f"{self.tenant.name}:{number}"
            self.answers.append(Answered(arrival.at))
            self._by_name[name] = self.answers[-1]
            if isinstance(self.processor.scheduler, ElasticScheduler) and self._asks != NOTHING:
                slo = RequestSLO(self._asks.ttft, self._asks.tpot, arrival.at)
                self.processor.scheduler.slos.note(name, slo)
            self._manager.input_queue.put(_state(name, arrival, number))

    def prepare(self) -> bool:
        """Prepares a step. Returns whether there is one. Fails all requests where none could ever run, as transformers'
        loop does."""
        stuck = self.looks > DEFAULT.serving.lonely * 10
        try:
            if stuck:
                raise RuntimeError("no memory for those that wait, although nothing runs")
            prepared = bool(self.processor.prepare_next_batch())
        except RuntimeError as error:
            self.processor.fail_all_requests(error)
            prepared = False
        self.looks = 0 if prepared else self.looks + 1
        if not prepared:
            self.ready_at = self._clock.now + DEFAULT.serving.look
        return prepared

    def run(self) -> Decision:
        """Computes the prepared step."""
        chosen = tuple((entry.state.request_id, entry.query_length) for entry in self.batch)
        decided = self._clock.now, self.tenant.name, chosen
        self.processor._generation_step(self.model)
        self.processor.update_batch()
        self.steps += 1
        return decided

    def take_answers(self, note: Callable[[], None]) -> None:
        """Takes in new tokens and errors of requests. `note`: called for each request that has ended."""
        queue = self._manager.output_router.output_queue
        while not queue.empty():
            output = queue.get_nowait()
            answer = self._by_name[output.request_id]
            if output.error is not None:
                answer.error, answer.ended = output.error, self._clock.now
            else:
                fresh = len(output.generated_tokens) - answer.tokens
                answer.times += [self._clock.now] * fresh
                answer.tokens += fresh
                answer.ended = self._clock.now
            if output.is_finished():
                note()


def _state(name: str, arrival: RecordedArrival, number: int) -> Any:
    from transformers.generation.continuous_batching.requests import RequestState

    tokens = [block * BLOCK % 2**30 + n for block in arrival.blocks for n in range(BLOCK)][: arrival.prompt]
    own = 2**30 + number * 2**15 % 2**30
    tokens += [own + n % 2**15 for n in range(arrival.prompt - len(tokens))]
    return RequestState(name, tokens, streaming=True, max_new_tokens=max(1, arrival.new), eos_token_id=-1)
