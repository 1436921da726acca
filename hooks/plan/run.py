"""Simulates recorded requests with this library's scheduler, cache and real pages, on a virtual clock that a cost model
advances.

Note [What is real]
    Requests go through transformers' own loop, and ballonet's scheduler, admission, preemption, cache and governor.
    Weights, KV and activations have pages of the stand-in driver, which are taken, moved to the host and restored as
    usual. But no layer computes: a step takes the seconds of `Parts` for its new tokens and those that it reads
    (step_costs.py), and those of charges.py for its copies, and each answer has as many tokens as were recorded. One
    step is computed at a time; models take turns.

Note [Exactly again]
    Two runs take the same decisions. So there are no background threads (`Device.stop_background`), copies have ended
    before a batch is chosen, memory of Python and transformers is not in the pool, and all decisions by time use the
    virtual clock.

Note [Peers]
    For comparison the same requests go through transformers' own cache and scheduler. Stock transformers sizes the
    cache, for the budget less the weights: an even part of the budget for each model (`split`), or all of it, with one
    model at a time on the device (`swap`). The present model gets no new requests once another's oldest has waited long
    enough; when its last one has ended the other's weights are copied.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ...allocator import devices, install
from ...allocator.errors import ManageError
from ...allocator.units import format_size
from ...offload.policy.step_costs import NOTHING, RequestSLO
from ...offload.policy.tuning import DEFAULT
from ..device import governors
from ..manage import managed
from ..profile import Grid
from ..server.load import summary
from .charges import Charges
from .loops import Decision, VirtualLoop
from .machine import Machine, MachineSizes, Tenant, checked
from .policies import ElasticPolicy, StockPolicy, named
from .virtual_model import Clock, VirtualModel

SLOs = tuple[float | None, float | None]


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
    tenants the figures of each in `models`; `scale`. `policy`: see policies.py; `batching`: arguments of
    ContinuousBatchingConfig; `slos`: TTFT and TPOT in seconds, for the goodput, and as SLOs of each request if `ask`;
    `note`: called with the number of requests that have ended; `log`: gets each step. ManageError, ConfigError,
    torch.OutOfMemoryError."""
    chosen = named(policy, len(tenants))
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
        if not loop.busy or loop.ready_at > self._clock.now:
            return False
        self._clients.wait_returned()
        if prepared := loop.prepare():
            self._log.append(loop.run())
        loop.take_answers(self._count_ended)
        return prepared

    def _count_ended(self) -> None:
        self._done += 1
        self._note(self._done)


class _Swapping(_Clients):
    """Models of which one at a time is on the device. See Note [Peers]."""

    def __init__(self, loops: Sequence[VirtualLoop], clock: Clock, seconds: Sequence[float], patience: float) -> None:
        """`seconds`: to copy the weights of each model; `patience`: a waiting request is late after so many times the
        seconds of its model."""
        super().__init__(loops)
        self._clock = clock
        self._seconds = dict(zip(loops, seconds, strict=True))
        self._patience = patience
        self._there = loops[0]
        self._swaps = 0

    def take_in(self) -> None:
        others = {loop: loop.next_at for loop in self.loops if loop is not self._there}
        waiting = {loop: at for loop, at in others.items() if at is not None and at <= self._clock.now}
        if not waiting:
            self._there.take_in()
            return
        loop = min(waiting, key=lambda it: waiting[it])
        late = self._clock.now - waiting[loop] >= self._patience * self._seconds[loop]
        if not late:
            self._there.take_in()
        if not self._there.busy:
            self._there, self._swaps = loop, self._swaps + 1
            self._clock.now += self._seconds[loop]
            loop.take_in()

    def figures(self, machine: Machine) -> dict[str, Any]:
        moved = sum(self._seconds.values()) / len(self._seconds) * self._swaps
        return {**super().figures(machine), "swaps": self._swaps, "moved": moved}


class _Governed(_Clients):
    """The loops of models that ballonet manages."""

    def __init__(self, loops: Sequence[VirtualLoop], charges: Charges) -> None:
        super().__init__(loops)
        self._charges = charges
        self._most = 0

    def wait_returned(self) -> None:
        """Waits for copies and retired pages before a batch is chosen. See Note [Exactly again]."""
        device = devices.require()
        self._most = max(self._most, sum(loop.processor.cache.pages.nbytes for loop in self.loops))
        device.synchronize()
        device.reap(wait=True)

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
        composed = governors.composed_with(device)._replace(clock=clock, tuning=tuning)
        undo.callback(governors.compose_with, governors.compose_with(composed, device), device)
        device.stop_background()
        undo.enter_context(install.stock())
        grid = Grid(*tuning.serving.measured)
        charges = Charges(device, here, clock, tuning.kv_reads.in_place)
        loops = []
        for tenant in tenants:
            model = VirtualModel.of(tenant, machine)
            handle = managed(model, policy.options, record=tenant.record(here, grid))
            undo.callback(handle.release)
            loop = VirtualLoop(tenant, model, clock, batching, asks)
            undo.callback(loop.close)
            model.step = partial(charges.step, loop, handle)
            loops.append(loop)
        device.synchronize()
        charges.begin()
        with torch.no_grad():
            yield _Governed(loops, charges)


@contextmanager
def _stock(
    tenants: Sequence[Tenant], machine: Machine, policy: StockPolicy, clock: Clock, batching: dict[str, Any]
) -> Iterator[_Clients]:
    budget = machine.budget // (len(tenants) if policy.shared else 1)
    weights = [MachineSizes.of(tenant.config).total for tenant in tenants]
    loops: list[VirtualLoop] = []
    try:
        for tenant, nbytes in zip(tenants, weights, strict=True):
            model = VirtualModel.of(tenant, machine, weights=False)
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
            seconds = [nbytes / machine.link for nbytes in weights]
            yield _Swapping(loops, clock, seconds, DEFAULT.serving.swaps)
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
