"""Simulates recorded requests with this library's scheduler, cache and real pages, on a virtual clock that a cost model
advances; the policies that are compared; and the costs of a model's steps, as measured on this machine.

Note [What is real]
    Requests go through transformers' own loop, and ballonet's scheduler, admission, preemption, cache and manager.
    Weights, KV and activations have pages of the stand-in driver, which are taken, moved to the host and restored as
    usual. But no layer computes: a step takes the seconds of `Parts` for its new tokens and those that it reads
    (step_costs.py), and those of machine.py for its copies, and each answer has as many tokens as were recorded. One
    step is computed at a time; models take turns.

Note [Exactly again]
    Two runs take the same decisions. So there are no background threads (`Device.stop_background`), copies have ended
    before a batch is chosen, memory of Python and transformers is not in the pool, and all decisions by time use the
    virtual clock.

Note [Peers]
    For comparison the same requests go through transformers' own cache and scheduler. Stock transformers sizes the
    cache, for the budget less the weights: an even part of the budget for each model (`split`), the same and as many
    bytes on the host as cross the link while the shortest step computes, so that nothing waits for them (`pie`), or all
    of it, with one model at a time that computes (`swap`). Weights of the others then stay where the present model's KV
    has not come yet, and only what is missing is copied. It gets no new requests once another has waited long enough,
    and the other's turn begins when its last one has ended; a request that takes longer is suspended, and its KV
    copied to the host and back. `recompute` and `unlimited` have ballonet's scheduler: without pages on the host, so
    that requests that are preempted are computed again, and each model knows of no other, as with stock's; and with
    memory for everything, which is the least that any policy could take.
"""

from __future__ import annotations

import gc
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Any, Final, Literal

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ...allocator import devices, install
from ...allocator.errors import ManageError
from ...allocator.units import format_size
from ...offload.policy.step_costs import NOTHING, Parts, RequestSLO
from ...offload.policy.tuning import DEFAULT, Tuning
from ..batching import patches
from ..batching.scheduler import ElasticScheduler
from ..compat import longest_sequence
from ..device import managers
from ..loading import load_or_draw
from ..manage import manage, managed
from ..managed import Managed
from ..options import ManageOptions
from ..profile import Grid
from ..server.arrivals import RecordedArrival
from ..server.load import summary
from .machine import Charges, Clock, Decision, Machine, MachineSizes, Tenant, VirtualLoop, VirtualModel, checked

SLOs = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class StockPolicy:
    """transformers' own cache and scheduler. `shared`: each model has an even part of the budget; else one model at a
    time computes, and has all of it. `hidden`: the cache goes on on the host, as far as reading it hides."""

    what: str
    shared: bool
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class ElasticPolicy:
    """ballonet. `changes`: tuning values that differ from the defaults, by part. `budgets`: so many times the memory of
    the device; `host`: may pages go to the host? `turns`: do models take turns, and one prompt after the other?"""

    what: str
    batches: Literal["full", "fast"] = "fast"
    interval: Literal["auto"] | None = "auto"
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    budgets: int = 1
    host: bool = True
    turns: bool = True

    @property
    def options(self) -> ManageOptions:
        """The options that models are managed with."""
        return ManageOptions(batches=self.batches, interval=self.interval)

    def machine(self, machine: Machine) -> Machine:
        """Returns the machine that the policy has in place of this one."""
        host = machine.host_budget if self.host else 0
        return replace(machine, budget=machine.budget * self.budgets, host_budget=host)

    def tuning(self, machine: Machine) -> Tuning:
        """Returns the tuning. Values in bytes of a model's tensors are scaled like them. `exposed` is 0: on the
        simulated machine copies hide behind compute."""
        weights = replace(DEFAULT.weights, large=DEFAULT.weights.large // machine.scale)
        small = replace(DEFAULT, weights=weights, serving=replace(DEFAULT.serving, exposed=0.0))
        changed = {part: replace(getattr(small, part), **values) for part, values in self.changes.items()}
        return replace(small, **changed)


Policy = StockPolicy | ElasticPolicy
POLICIES: Final[Mapping[str, Policy]] = {
    "stock": StockPolicy("transformers' own cache and scheduler, of one model", shared=True),
    "split": StockPolicy("the same, and each model has an even part of the budget", shared=True),
    "swap": StockPolicy(
        "the same, with one model at a time that computes; what it lacks of its weights is copied when it changes",
        False,
    ),
    "pie": StockPolicy("split, and more of each cache on the host, as far as reading it hides", True, hidden=True),
    "recompute": ElasticPolicy(
        "weights stay, and requests for which there is no room are computed again",
        interval=None,
        changes={"serving": {"most": 0.0}},
        host=False,
        turns=False,
    ),
    "unlimited": ElasticPolicy("ballonet, with memory for everything", budgets=8),
    "full": ElasticPolicy("ballonet, with as many requests in a step as there is room for", batches="full"),
    "fast": ElasticPolicy("ballonet"),
    "no-turns": ElasticPolicy("models share the device, each in part", changes={"turns": {"patience": 0.0}}),
    "no-once": ElasticPolicy(
        "prices without the way there and back",
        changes={"prices": dict.fromkeys(("horizon", "shortest", "longest"), 1e12)},
    ),
    "one-slot": ElasticPolicy("streamed layers share one slot: alpha + 1", changes={"weights": {"slots": (1,)}}),
    "two-slots": ElasticPolicy("streamed layers share two slots: alpha + 2", changes={"weights": {"slots": (2,)}}),
    "no-return": ElasticPolicy("what has left does not come back", changes={"prices": {"returns": math.inf}}),
    "weights-fixed": ElasticPolicy("weights give no pages", interval=None),
    "activations-apart": ElasticPolicy(
        "nor do activations, and KV none to them", interval=None, changes={"serving": {"activations_give": False}}
    ),
    "no-buffer": ElasticPolicy("no KV of prompts goes to the host", changes={"serving": {"most": 0.0}}),
    "fixed-buffer": ElasticPolicy(
        "the buffer on the host stays as large as it is (no Algorithm 2)",
        changes={"serving": {"violations": DEFAULT.serving.window + 1}},
    ),
}


def named(name: str, models: int) -> Policy:
    """Returns the policy of that name, for so many models. ManageError where there is none."""
    if name not in POLICIES:
        raise ManageError(f"no policy {name!r}: there are {', '.join(POLICIES)}")
    if name == "stock" and models > 1:
        raise ManageError(f"stock serves one model, and there are {models}: give split or swap")
    return POLICIES[name]


def default(models: int) -> tuple[str, ...]:
    """Returns the names of the policies that are compared by default."""
    return ("stock", "full", "fast") if models == 1 else ("split", "swap", "fast")


def measure_steps(
    name: str,
    arrivals: Sequence[RecordedArrival],
    batching: dict[str, Any],
    note: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Parts, float]:
    """Loads a model, on this machine and with the memory that it has, answers a few requests like `arrivals` in batches
    as large as memory allows, and returns (costs of steps, median relative error). A model without weights gets random
    ones. `note`: called now and then with tokens that have been computed, and all of them. ManageError where too few
    steps ran; the errors of `load_or_draw`."""
    install.install()
    try:
        model: Any = load_or_draw(name, batches="full")
        handle = manage(model)
        try:
            why = _answer(model, arrivals, batching, note)
            batched = patches.batched(model)
            parts, error = (None, None) if batched is None else (batched.costs.parts, batched.costs.error)
        finally:
            handle.release()
    finally:
        install.restore()
    if parts is None or error is None:
        raise ManageError(
            f"{name}: too few steps ran to say what they take{f' ({why})' if why else ''}: give this machine more "
            "memory for it (BALLONET_BUDGET), or --costs FILE"
        )
    return parts, error


def _answer(
    model: Any, arrivals: Sequence[RecordedArrival], batching: dict[str, Any], note: Callable[[int, int], None]
) -> str:
    """Answers requests of random tokens, like those given and as long as the model and the memory can do. Returns why
    the last one that failed did so. ManageError where not one token can be answered."""
    tuning, draw, why = DEFAULT.serving, random.Random(0), ""
    highest = model.config.get_text_config().vocab_size
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    longest = longest_sequence(model.config) or tuning.prompt + tuning.answer
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=ContinuousBatchingConfig(**batching)
    ) as manager:
        scheduler: ElasticScheduler = manager.batch_processor.scheduler
        left: dict[str, int] = {}
        for arrival in islice(cycle(arrivals), tuning.sample):
            new = draw.randint(2, max(2, min(tuning.answer, longest // 2)))
            prompt = max(1, min(arrival.prompt, tuning.prompt, longest - new))
            while (refusal := scheduler.memory.refusal("a request", prompt, new)) is not None:
                if prompt == 1:
                    raise refusal
                prompt //= 2
            tokens = [draw.randrange(highest) for _ in range(prompt)]
            left[manager.add_request(tokens, max_new_tokens=new)] = prompt + new
        total = sum(left.values())
        while left and manager.is_running():
            if (result := manager.get_result(timeout=1)) is not None:
                left.pop(result.request_id, None)
                why = result.error or why
            running = sum(state.current_len() for state in list(scheduler.active_requests.values()))
            note(min(total, total - sum(left.values()) + running), total)
    return why


def run(
    tenants: Sequence[Tenant],
    machine: Machine,
    policy: str,
    batching: dict[str, Any],
    slos: SLOs = (None, None),
    ask: bool = False,
    note: Callable[[int], None] = lambda done: None,
    log: list[Decision] | None = None,
) -> dict[str, Any]:
    """Returns the figures of `load`, and `policy`; `steps`; `kv_bytes`: at most (0 for stock, whose cache is fixed);
    `stalled`, `moved`: seconds in which steps waited for reads from the host, and for moves; `swaps`; with several
    tenants the figures of each in `models`; `scale`. `policy`: one of `POLICIES`; `batching`: arguments of
    ContinuousBatchingConfig; `slos`: TTFT and TPOT in seconds, for the goodput, and as SLOs of each request if `ask`;
    `note`: called with the number of requests that have ended; `log`: gets each step. ManageError, ConfigError,
    torch.OutOfMemoryError."""
    chosen = named(policy, len(tenants))
    if isinstance(chosen, ElasticPolicy):
        machine = chosen.machine(machine)
    checked(tenants, machine)
    clock = Clock()
    asks = RequestSLO(*slos) if ask else NOTHING
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        if isinstance(chosen, StockPolicy):
            clients: _Clients = stack.enter_context(_stock(tenants, machine, chosen, clock, batching))
        else:
            clients = stack.enter_context(_elastic(tenants, machine, chosen, clock, batching, asks))
        _Run(clients, clock, note, [] if log is None else log).to_the_end()
        answers = [answer for loop in clients.loops for answer in loop.answers]
        figures = {"policy": policy, **summary(answers, *slos), **clients.figures(machine)}
        if len(tenants) > 1:
            figures["models"] = [{"model": it.tenant.name, **summary(it.answers, *slos)} for it in clients.loops]
        return {**figures, "scale": machine.scale, "time": "simulated", "pages": "real"}


@contextmanager
def _quiet() -> Iterator[None]:
    """A context in which transformers does not log failed requests: a log would keep references to their caches."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Clients:
    """The loops, and the actions between two steps."""

    def __init__(self, loops: Sequence[VirtualLoop]) -> None:
        self.loops = loops

    def take_in(self) -> None:
        """Adds the requests that have arrived to their loops."""
        for loop in self.loops:
            loop.take_in()

    def may_run(self, loop: VirtualLoop) -> bool:
        """Whether the loop may compute now."""
        return True

    def wait_returned(self) -> None:
        """Called before a batch is chosen."""

    def figures(self, machine: Machine) -> dict[str, Any]:
        """Returns figures of the simulation, see `run`."""
        steps = sum(loop.steps for loop in self.loops)
        return {"steps": steps, "kv_bytes": 0, "stalled": 0.0, "moved": 0.0, "swaps": 0}


class _Run:
    """Runs all loops until all requests have ended."""

    def __init__(self, clients: _Clients, clock: Clock, note: Callable[[int], None], log: list[Decision]) -> None:
        self._clients = clients
        self._clock = clock
        self._note = note
        self._log = log
        self._done = 0

    def to_the_end(self) -> None:
        loops, first = list(self._clients.loops), 0
        while any(loop.busy or loop.next_at is not None for loop in loops):
            self._clients.take_in()
            for n in range(len(loops)):
                loop = loops[(first + n) % len(loops)]
                if self._stepped(loop):
                    first = (first + n + 1) % len(loops)
                    break
            else:
                moments = [loop.ready_at if loop.busy else loop.next_at for loop in loops]
                ahead = [moment for moment in moments if moment is not None and moment > self._clock.now]
                self._clock.now = min(ahead, default=self._clock.now + DEFAULT.serving.look)

    def _stepped(self, loop: VirtualLoop) -> bool:
        if not self._clients.may_run(loop) or not loop.busy or loop.ready_at > self._clock.now:
            return False
        if loop.owed is None:
            self._clients.wait_returned()
            if loop.prepare():
                self._log.append(loop.begin())
        computes = loop.owed is not None and loop.ready_at <= self._clock.now
        if computes:
            loop.end()
        loop.take_answers(self._count_ended)
        return computes

    def _count_ended(self) -> None:
        self._done += 1
        self._note(self._done)


class _Swapping(_Clients):
    """Models of which one at a time computes. See Note [Peers]."""

    def __init__(self, loops: Sequence[VirtualLoop], clock: Clock, weights: Sequence[int], machine: Machine) -> None:
        """`weights`: bytes of each model's."""
        super().__init__(loops)
        self._clock = clock
        self._weights = dict(zip(loops, weights, strict=True))
        self._scale = machine.scale
        self._link = machine.link
        self._there = loops[0]
        self._here = dict(self._weights)  # bytes of each model's weights on the device, the last to compute last
        self._suspended: dict[VirtualLoop, float] = {}  # with requests that have begun; since when
        self._swaps = 0
        self._moved = 0.0
        self.wait_returned()

    def may_run(self, loop: VirtualLoop) -> bool:
        return loop is self._there

    def wait_returned(self) -> None:
        """Displaces weights of the others for the present model's KV: first of the one that has computed last."""
        room = int(self._there.processor.cache.compute_free_capacity(relative=False)) * self._scale
        others = [loop for loop in self._here if loop is not self._there]
        lacking = sum(self._here[loop] for loop in others) - room
        for loop in reversed(others):
            taken = max(0, min(lacking, self._here[loop]))
            self._here[loop] -= taken
            lacking -= taken

    def take_in(self) -> None:
        waiting = {loop: since for loop in self.loops if (since := self._waits_since(loop)) is not None}
        if not waiting:
            self._there.take_in()
            return
        loop, tuning = min(waiting, key=lambda it: waiting[it]), DEFAULT.serving
        waited, patience = self._clock.now - waiting[loop], tuning.swaps * self._seconds(loop)
        if waited <= patience:
            self._there.take_in()
        if not self._there.busy or waited >= max(patience, tuning.turn):
            self._change_to(loop)

    def _waits_since(self, loop: VirtualLoop) -> float | None:
        """Returns since when a model has waited that does not compute; None: it does not wait."""
        if loop is self._there:
            return None
        moments = [moment for moment in (loop.next_at, self._suspended.get(loop)) if moment is not None]
        return min((moment for moment in moments if moment <= self._clock.now), default=None)

    def _seconds(self, loop: VirtualLoop) -> float:
        """Returns what copies take until this model can compute: KV of those that are suspended, and its weights."""
        kv = sum(self._kv(it) for it in (loop, self._there))
        return (self._weights[loop] - self._here[loop] + kv) / self._link

    def _kv(self, loop: VirtualLoop) -> int:
        """Returns the bytes of KV of a loop's requests."""
        cache = loop.processor.cache
        whole: int = cache.num_sectors * cache.bytes_per_sector
        return (whole - int(cache.compute_free_capacity(relative=False))) * self._scale

    def _change_to(self, loop: VirtualLoop) -> None:
        seconds = self._seconds(loop)
        if self._there.busy:
            self._suspended[self._there] = self._clock.now
        self._suspended.pop(loop, None)
        self._here.pop(loop)
        self._here[loop] = self._weights[loop]
        self._there = loop
        self._swaps += 1
        self._moved += seconds
        self._clock.now += seconds
        loop.take_in()

    def figures(self, machine: Machine) -> dict[str, Any]:
        return {**super().figures(machine), "swaps": self._swaps, "moved": self._moved}


class _Governed(_Clients):
    """The loops of models that ballonet manages."""

    def __init__(self, loops: Sequence[VirtualLoop], handles: Sequence[Managed], charges: Charges) -> None:
        super().__init__(loops)
        self._handles = handles
        self._charges = charges
        self._most = 0

    def wait_returned(self) -> None:
        """Waits for copies and retired pages before a batch is chosen. See Note [Exactly again]."""
        device = devices.require()
        self._most = max(self._most, sum(loop.processor.cache.pages.nbytes for loop in self.loops))
        device.synchronize()
        device.reap(wait=True)
        for handle in self._handles:
            self._charges.note_away(handle)

    def figures(self, machine: Machine) -> dict[str, Any]:
        charged = {"stalled": self._charges.stalls, "moved": self._charges.moved}
        return {**super().figures(machine), "kv_bytes": self._most * machine.scale, **charged}


@contextmanager
def _elastic(
    tenants: Sequence[Tenant],
    machine: Machine,
    policy: ElasticPolicy,
    clock: Clock,
    batching: dict[str, Any],
    asks: RequestSLO,
) -> Iterator[_Clients]:
    here, tuning = machine.here, policy.tuning(machine)
    with ExitStack() as undo:
        install.install(here.budget, page_size=here.page_size, host_budget=here.host_budget, device="cpu")
        undo.callback(install.restore)
        undo.callback(gc.collect)  # errors of requests refer to frames, and those to caches
        device = devices.require()
        composed = managers.composed_with(device)._replace(clock=clock, tuning=tuning)
        undo.callback(managers.compose_with, managers.compose_with(composed, device), device)
        device.stop_background()
        undo.enter_context(install.stock())
        grid = Grid(*tuning.serving.measured)
        charges = Charges(device, here, clock, tuning.kv_reads.in_place)
        loops, handles = list[VirtualLoop](), list[Managed]()
        for tenant in tenants:
            model = VirtualModel.of(tenant, machine)
            handle = managed(model, policy.options, record=tenant.record(here, grid))
            undo.callback(handle.release)
            loop = VirtualLoop(tenant, model, clock, batching, asks, policy.turns)
            undo.callback(loop.close)
            model.step = partial(charges.step, loop, handle)
            loop.link = charges.link
            loops.append(loop)
            handles.append(handle)
        device.synchronize()
        charges.begin()
        with torch.no_grad():
            yield _Governed(loops, handles, charges)


@contextmanager
def _stock(
    tenants: Sequence[Tenant], machine: Machine, policy: StockPolicy, clock: Clock, batching: dict[str, Any]
) -> Iterator[_Clients]:
    part = machine.budget // (len(tenants) if policy.shared else 1)
    weights = [MachineSizes.of(tenant.config).total for tenant in tenants]
    loops: list[VirtualLoop] = []
    try:
        for tenant, nbytes in zip(tenants, weights, strict=True):
            model = VirtualModel.of(tenant, machine, weights=False)
            hidden = min(machine.host_budget // len(tenants), int(tenant.costs.fixed * machine.link))
            budget = part + hidden * policy.hidden
            try:
                with _reported_memory(budget // machine.scale, nbytes // machine.scale):
                    loop = VirtualLoop(tenant, model, clock, batching)
            except (MemoryError, ValueError) as error:
                raise ManageError(
                    f"{tenant.name} has no room for a cache beside weights of {format_size(nbytes)} in "
                    f"{format_size(budget)}: {error}"
                ) from None
            model.step = partial(_compute, loop, clock)
            loops.append(loop)
        if policy.shared:
            yield _Clients(loops)
        else:
            yield _Swapping(loops, clock, weights, machine)
    finally:
        for loop in loops:
            loop.close()


def _compute(loop: VirtualLoop, clock: Clock) -> None:
    clock.now += loop.seconds


@contextmanager
def _reported_memory(budget: int, weights: int) -> Iterator[None]:
    """A context in which stock transformers sees `budget` bytes of memory, of which the weights take `weights`."""
    from transformers.generation.continuous_batching import cache

    names, name = vars(cache), "get_device_and_memory_breakdown"
    memory = torch.device("cpu"), budget, weights, weights
    before, names[name] = names[name], lambda: memory
    try:
        yield
    finally:
        names[name] = before
