"""The simulated machine, the models on it, which compute nothing, their requests, and their generation loops on a
virtual clock: transformers' own, one step at a time, each of which takes the time of a cost model, and beside its
compute seconds by what has happened to the model's pages.

Note [Scale]
    Pages are real memory of this machine, which usually has less than the simulated one. So one byte here stands for
    `scale` bytes there: the budget, pages, weights, and KV and activations of a token are all so much smaller, their
    numbers the same, and the link takes the same time for each. Time is not scaled. The tables and indices of a batch
    do not shrink, so the admission counts `scale` times too much for them, about 0.1 % of a budget.

Note [What is charged]
    For streamed layers a step waits as long as the schedule predicts for repeated passes (offload/policy/schedule.py).
    A step also waits for everything moved since the last one, of any model: KV to the host and back, and its own layers
    that were away before it and are not now. On a GPU a part of that hides behind compute of the same step; here none
    does. Copies go one after the other. While the step of one model waits for them those of other models compute, as on
    a GPU, where each loop has a stream of its own. Bytes that are read in place cross the link in each step, and
    nothing hides that, nor does anybody else compute meanwhile: layers without a slot, KV of the batch on the host.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...allocator._native import Device
from ...allocator.errors import ManageError, PoolExhausted
from ...allocator.units import format_size
from ...offload.policy.plan import Costs
from ...offload.policy.step_costs import NOTHING, Parts, RequestSLO, Step
from ...offload.policy.tuning import DEFAULT
from ...offload.record.record import Point, Record
from ..batching.cache import ElasticPagedCache
from ..batching.pages import SectorClient
from ..batching.scheduler import ElasticScheduler
from ..batching.turns import PlaceInTurns
from ..forward.lease import GroupLease
from ..managed import Managed, pace_of, residency_of
from ..profile import Grid
from ..server.arrivals import RecordedArrival
from ..server.load import Answered
from ..streaming.model_residency import ModelResidency
from ..weights.model_parts import bytes_of_weights

Decision = tuple[float, str, tuple[tuple[str, int], ...]]  # time, model, (request, new tokens) of the step


@dataclass(frozen=True, slots=True)
class Machine:
    """The simulated machine. Bytes: `budget` of the device, `host_budget`, `page_size`; `link`: bytes per second
    between host and device. `scale`: see Note [Scale]. ManageError where the page cannot be scaled."""

    budget: int
    host_budget: int
    page_size: int
    link: float
    scale: int = 1

    def __post_init__(self) -> None:
        """Raises ManageError where the page cannot be scaled."""
        if self.scale < 1 or self.page_size % (self.scale * 4096):
            raise ManageError(
                f"a page of {format_size(self.page_size)} cannot be {self.scale} times smaller here: it has to be a "
                "multiple of 4096 bytes then; give a larger page or a smaller scale"
            )

    @property
    def here(self) -> Machine:
        """The scaled machine, in bytes of this one."""
        pages = self.budget // self.page_size, self.host_budget // self.page_size
        page = self.page_size // self.scale
        return Machine(pages[0] * page, pages[1] * page, page, self.link / self.scale)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A model: its configuration, the costs of its steps on the simulated machine, and its requests."""

    name: str
    config: Any
    costs: Parts
    arrivals: Sequence[RecordedArrival]

    def record(self, machine: Machine, grid: Grid) -> Record:
        """Returns the record that a measurement of the model's iterations would make."""
        seconds = {}
        for batch, length in grid.sizes():
            seconds[Point("decode", batch, length)] = self.costs.seconds(Step(batch, batch * (length + 1)))
            seconds[Point("prefill", batch, length)] = self.costs.seconds(Step(batch * length, batch * length))
        return Record({}, machine.link, seconds)


@dataclass(frozen=True, slots=True)
class MachineSizes:
    """Bytes of a model's weights: of each decoder layer, and of the rest."""

    layers: tuple[int, ...]
    rest: int

    @classmethod
    def of(cls, config: Any) -> MachineSizes:
        """Returns the sizes of a model with this configuration, in its own dtype."""
        return cls(*bytes_of_weights(config))

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return sum(self.layers) + self.rest


def costs_of(path: Path) -> Parts:
    """Returns the cost model in a JSON file: seconds of `fixed`, `row`, `key`, `pair`. ManageError where it is none."""
    try:
        parts = Parts(**json.loads(path.read_text()))
        if not all(isinstance(seconds, int | float) and seconds >= 0 for seconds in asdict(parts).values()):
            raise ValueError("a part is not a number of seconds")
        if parts.fixed + parts.row + parts.key + parts.pair <= 0:
            raise ValueError("all parts are 0, so that no time would pass")
    except (OSError, ValueError, TypeError) as error:
        raise ManageError(f"{path} is no cost model of fixed, row, key and pair: {error}") from None
    return parts


def dealt(
    arrivals: Sequence[RecordedArrival], models: int, turn: float | None = None, seed: int | None = None
) -> list[list[RecordedArrival]]:
    """Returns the requests of each of so many models, dealt one by one; or, with `turn`, all requests of `turn` seconds
    to one model, then to the next. `seed`: whose is each is drawn, instead of the next model's."""
    queues: list[list[RecordedArrival]] = [[] for _ in range(models)]
    for number, arrival in enumerate(arrivals):
        deal = number if turn is None else int(arrival.at / turn)
        queues[(deal if seed is None else random.Random(f"{seed} {deal}").randrange(models)) % models].append(arrival)
    return queues


def smaller(config: Any, scale: int) -> Any:
    """Scales a text configuration in place, so that KV and activations are `scale` times smaller, and returns it.
    ManageError where heads cannot be scaled."""
    text = config.get_text_config()
    if scale > 1:
        head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        if head % scale or text.hidden_size % scale:
            raise ManageError(f"heads of {head} elements cannot be {scale} times smaller: give a scale that divides it")
        text.head_dim, text.hidden_size = head // scale, text.hidden_size // scale
    return text


def checked(tenants: Sequence[Tenant], machine: Machine) -> None:
    """Raises ManageError where there is no request, or a model does not fit even alone."""
    for tenant in tenants:
        weights = MachineSizes.of(tenant.config).total
        if weights >= machine.budget:
            raise ManageError(
                f"the weights of {tenant.name} have {format_size(weights)}, and the budget is "
                f"{format_size(machine.budget)}: give more"
            )
    if not any(tenant.arrivals for tenant in tenants):
        raise ManageError("there are no requests")


class Clock:
    """A virtual clock: `now`, in seconds, is set by the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class CopyQueue:
    """The link, over which copies go one after the other. `stall`: seconds for which the step that was begun last waits
    for streamed layers; `moved`: the same for all else that was moved since the one before."""

    def __init__(self, clock: Clock) -> None:
        self.stall = self.moved = 0.0
        self._clock = clock
        self._until = 0.0  # when those that were begun have ended

    def take_copies(self) -> float:
        """Begins the copies of a step. Returns when they have ended."""
        if seconds := self.stall + self.moved:
            self._until = max(self._until, self._clock.now) + seconds
            self.stall = self.moved = 0.0
            return self._until
        return self._clock.now


class VirtualModel(PreTrainedModel, GenerationMixin):
    """A causal language model whose next token is always 0. `step`: called in each forward."""

    _supports_flash_attn = _supports_sdpa = True
    main_input_name = "input_ids"
    step: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def of(cls, tenant: Tenant, machine: Machine, weights: bool = True) -> VirtualModel:
        """Returns a model with the layers and heads of the tenant's. `weights`: as large as the tenant's, all 0; else
        next to none. Without attention masks, as the costs include pairs. ManageError."""
        sizes = MachineSizes.of(tenant.config) if weights else MachineSizes((), 0)
        text = smaller(copy.deepcopy(tenant.config), machine.scale)
        text.vocab_size = 1
        text._attn_implementation = "eager"
        dtype = text.dtype or torch.float32
        model = cls(text, [_elements(layer, machine.scale, dtype) for layer in (*sizes.layers, sizes.rest)], dtype)
        text._attn_implementation_internal = "paged|flash_attention_2"  # whose batches have no masks; none is called
        model.generation_config = GenerationConfig()
        return model

    def __init__(self, config: Any, layers: list[int], dtype: torch.dtype) -> None:
        """`layers`: elements of the weights of each, and then of the rest."""
        super().__init__(config)
        *sizes, rest = layers
        self.layers = nn.ModuleList(_Layer(elements, dtype) for elements in sizes)
        self.rest = _weight(rest, dtype)

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Calls `step`, and returns logits [1, tokens, 1] of 0."""
        self.step()
        return _Output(torch.zeros(1, input_ids.shape[1], 1))


class _Layer(nn.Module):
    def __init__(self, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(elements, dtype)

    def forward(self) -> None:
        """Computes nothing."""


class _Output:
    """A model output with the attributes that transformers reads."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


def _weight(elements: int, dtype: torch.dtype) -> nn.Parameter:
    """Returns a square weight, as activations are estimated from the widest weight."""
    side = max(1, math.isqrt(elements))
    return nn.Parameter(torch.zeros(-(-elements // side), side, dtype=dtype), requires_grad=False)


def _elements(nbytes: int, scale: int, dtype: torch.dtype) -> int:
    return max(1, nbytes // (scale * dtype.itemsize))


class VirtualLoop:
    """A generation loop. `answers`: of its requests so far; `looks`: attempts in a row in which no step could run."""

    def __init__(
        self,
        tenant: Tenant,
        model: VirtualModel,
        clock: Clock,
        batching: dict[str, Any],
        asks: RequestSLO = NOTHING,
        turns: bool = True,
    ) -> None:
        """`batching`: arguments of ContinuousBatchingConfig; `asks`: the SLO of each request; `turns`: does it take
        turns with other loops? Raises as the cache."""
        self.tenant = tenant
        self.model = model
        self.answers: list[Answered] = []
        self.steps = self.looks = 0
        self.ready_at = 0.0  # when to try again to prepare a step, or when all is there for the one that was begun
        self.owed: float | None = None  # seconds for which the step that was begun has the device; None: none was
        self.link = CopyQueue(clock)  # over which the copies come that its steps wait for
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
        scheduler = self.processor.scheduler
        if isinstance(scheduler, ElasticScheduler) and not turns:
            scheduler.place = PlaceInTurns(scheduler.cache, scheduler.slos, False)
        if isinstance(scheduler, ElasticScheduler):
            scheduler.place.wake = self._wake

    def _wake(self) -> None:
        if self.owed is None:
            self.ready_at = self._clock.now

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
        scheduler = self.processor.scheduler
        waits = isinstance(scheduler, ElasticScheduler) and scheduler.place.waits
        self.looks = 0 if prepared or waits else self.looks + 1
        if not prepared:
            self.ready_at = self._clock.now + DEFAULT.serving.look
        return prepared

    def begin(self) -> Decision:
        """Begins the prepared step: decides what it computes and moves, which takes no time yet."""
        chosen = tuple((entry.state.request_id, entry.query_length) for entry in self.batch)
        decided = self._clock.now, self.tenant.name, chosen
        self.processor._generation_step(self.model)
        self.owed = self._clock.now - decided[0] - self.link.stall
        self._clock.now = decided[0]
        self.ready_at = self.link.take_copies()
        return decided

    def end(self) -> None:
        """Computes the step that was begun."""
        assert self.owed is not None
        self._clock.now += self.owed
        self.owed = None
        self.processor.update_batch()
        if not self.busy:
            self.processor.prepare_next_batch()  # as the loop does: its scheduler knows then that nothing is left
        self.steps += 1

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

    size = arrival.block_tokens
    tokens = [block * size % 2**30 + n for block in arrival.blocks for n in range(size)][: arrival.prompt]
    own = 2**30 + number * 2**15 % 2**30
    tokens += [own + n % 2**15 for n in range(arrival.prompt - len(tokens))]
    return RequestState(name, tokens, streaming=True, max_new_tokens=max(1, arrival.new), eos_token_id=-1)


class Charges:
    """The charges of all models of one device, and their link. `moved`, `stalls`: seconds so far of copies, and of
    waits for streamed layers and reads in place."""

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
        self.link = CopyQueue(clock)
        self._away: dict[int, frozenset[int]] = {}  # layers, by model, before its next step
        self.begin()

    def begin(self) -> None:
        """Starts counting copies: earlier ones cost nothing."""
        self._copied = self._total()

    def note_away(self, handle: Managed) -> None:
        """Notes which layers of a model are away, before a batch is chosen: whatever of them its next step has on the
        device comes over the link before it, whoever took it."""
        residency = residency_of(handle)
        self._away[id(residency)] = residency.arrangement.away

    def step(self, loop: VirtualLoop, handle: Managed) -> None:
        """Computes a step of a loop: allocates its activations, and advances the clock. torch.OutOfMemoryError."""
        cache: ElasticPagedCache = loop.processor.cache
        residency = residency_of(handle)
        for layer in residency.arrangement.coming:  # the others are charged without being run
            loop.model.layers[layer]()
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
        plan = residency.plan
        stall = Costs(plan.pages, seconds, self._page).expected(plan) - seconds
        away = client.read_displaced + residency.arrangement.read_in_place
        back = sum(plan.pages[layer] for layer in self._away[id(residency)] - residency.arrangement.away)
        copied, self._copied = self._copied, self._total()
        moved = (self._copied - copied) / self._link + back * self._page
        self.link.stall += stall
        self.link.moved += moved
        self.moved += moved
        self.stalls += stall + away * self._page / self._in_place
        return stall + away * self._page / self._in_place

    def _total(self) -> int:
        """Returns the bytes copied so far, without weights to the device: streamed layers are in the stalls, and
        restored ones are counted by `_waits`."""
        copied = self._device.snapshot()["copied"]
        return sum(nbytes for what, nbytes in copied.items() if what != "weights_h2d")
