"""The generation loop of one model on a virtual clock, transformers' own, one step at a time; and the seconds of a
managed model's step beside its compute, from what has happened to its pages.

Note [What is charged]
    For streamed layers a step waits as long as the schedule predicts for repeated passes (offload/policy/schedule.py).
    Bytes that are read in place cross the link in each step, and nothing hides that: layers without a slot, KV of the
    batch on the host. A step also waits for everything moved since the last one, of any model: layers and KV to the
    host and back. On a GPU a part of that hides behind compute; here none does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...allocator._native import Device
from ...allocator.errors import PoolExhausted
from ...offload.policy.interval import Costs
from ...offload.policy.request_slo import NOTHING, RequestSLO
from ...offload.policy.step_costs import Step
from ...offload.policy.tuning import DEFAULT
from ..batching.cache import ElasticPagedCache
from ..batching.client import SectorClient
from ..batching.scheduler import ElasticScheduler
from ..forward.lease import GroupLease
from ..managed import Managed, pace_of, residency_of
from ..server.load import BLOCK, Answered, RecordedArrival
from ..streaming.model_residency import ModelResidency
from .machine import Clock, Machine, Tenant, VirtualModel

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


class Charges:
    """The charges of all models of one device. `moved`, `stalls`: seconds so far of copies, and of reads."""

    def __init__(self, device: Device, machine: Machine, clock: Clock, in_place: float) -> None:
        """`machine`: scaled, `Machine.here`; `in_place`: fraction of the link's bandwidth that reads in
        place reach."""
        self.moved = 0.0
        self.stalls = 0.0  # of streamed layers, and of reads in place
        self._device = device
        self._page = machine.page_size / machine.link
        self._link = machine.link
        self._in_place = in_place
        self._clock = clock
        self._copied = 0
        self._streamed: dict[int, frozenset[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Starts counting copies: earlier ones cost nothing."""
        self._copied = self._total()

    def step(self, loop: VirtualLoop, handle: Managed) -> None:
        """Computes a step of a loop: allocates its activations, and advances the clock. torch.OutOfMemoryError."""
        cache: ElasticPagedCache = loop.processor.cache
        residency = residency_of(handle)
        self._device.synchronize()  # all copies have ended: otherwise the figures depended on this machine's speed
        with GroupLease(cache.group):
            cache.pages.client.uses()
            nbytes = sum(cache.sizes.of(new, held) for new, held in loop.sequences)
            try:
                block = self._device.allocate(nbytes)
            except PoolExhausted as error:
                raise torch.OutOfMemoryError(f"no room for activations: {error}") from error
            try:
                seconds = loop.seconds
                self._clock.now += seconds
                with pace_of(handle).waiting():
                    self._clock.now += self._waits(cache.pages.client, residency, seconds)
            finally:
                self._device.deallocate(block)

    def _waits(self, client: SectorClient, residency: ModelResidency, seconds: float) -> float:
        plan, before = residency.plan, self._streamed.get(id(residency), frozenset())
        stall = Costs(plan.pages, seconds, self._page).expected(plan) - seconds
        away = client.read_displaced + residency.arrangement.read_in_place
        self._streamed[id(residency)] = frozenset(plan.streamed)
        back = sum(plan.pages[layer] for layer in before.difference(plan.streamed))
        copied, self._copied = self._copied, self._total()
        moved = (self._copied - copied) / self._link + back * self._page
        self.stalls += stall + away * self._page / self._in_place
        self.moved += moved
        return stall + away * self._page / self._in_place + moved

    def _total(self) -> int:
        """Returns the bytes copied so far, without weights to the device: streamed layers are in the stalls, and
        restored ones are counted by `_waits`."""
        copied = self._device.snapshot()["copied"]
        return sum(nbytes for what, nbytes in copied.items() if what != "weights_h2d")
