"""What recorded requests would meet: the scheduler, the cache and the pages of this library, and a clock that only a
cost model moves. Time is simulated, pages are real.

Note [What is real]
    Requests go through transformers' own loop, ballonet's scheduler, admission, preemption, cache and governor.
    Weights, KV and activations have pages of the stand-in, which are taken, moved to the host and restored as they
    would be. But no layer computes: a step takes what `Parts` says of its new tokens and of those that it reads
    (step_costs.py), and what charges.py says of its copies, and each answer has as many tokens as were recorded. One
    step is computed at a time, of each model that has one in turn.

Note [Exactly again]
    Two runs take the same decisions. So no thread works behind them (`Device.stop_background`), copies have arrived
    before a batch is chosen, what Python and transformers allocate is not in the pool, and whatever is decided by time
    asks the clock.

Note [Peers]
    For comparison the same requests go through transformers' own cache and scheduler, whose cache is as large as stock
    makes it in what the weights leave of the budget: of an even part for each model (`split`), or of all, with one
    model at a time on the device (`swap`). That one gets no new requests once another's oldest has waited long enough;
    when its last one has ended the other's weights are copied.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ...allocator import install, runtime
from ...allocator.errors import ManageError
from ...allocator.units import format_size
from ...offload.policy.request_slo import NOTHING, RequestSLO
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
    """Returns the figures of `load`, and `policy`; `steps`; `kv_bytes`, at the most (0 of stock's, which are fixed);
    `stalled` and `moved`: seconds that steps waited for what they read from the host, and for what changed its place;
    `swaps`; where there are several tenants the figures of each in `models`; `scale`. `policy`: see policies.py;
    `batching`: what ContinuousBatchingConfig takes; `slos`: seconds to the first token, and of one, for the goodput,
    and that each request asks where `ask`; `note`: is called with the number of requests that have ended; `log`: is
    given what was computed, step by step. ManageError, ConfigError, torch.OutOfMemoryError."""
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
        found = {"policy": policy, **summary(answers, *slos), **clients.figures(machine)}
        if len(tenants) > 1:
            found["models"] = [{"model": it.tenant.name, **summary(it.answers, *slos)} for it in clients.loops]
        return {**found, "scale": machine.scale, "time": "simulated", "pages": "real"}


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it transformers logs no request that fails: those are counted. A log of them would keep their caches."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


class _Clients:
    """The loops, and what happens to them between two steps."""

    def __init__(self, loops: Sequence[VirtualLoop]) -> None:
        self.loops = loops

    def take_in(self) -> None:
        """Requests that have come are in their loops."""
        for loop in self.loops:
            loop.take_in()

    def wait_returned(self) -> None:
        """A batch is about to be chosen."""

    def figures(self, machine: Machine) -> dict[str, Any]:
        """See `run`."""
        steps = sum(loop.steps for loop in self.loops)
        return {"steps": steps, "kv_bytes": 0, "stalled": 0.0, "moved": 0.0, "swaps": 0}


class _Run:
    """All loops, until all requests have ended."""

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
                ahead = [each for each in moments if each is not None and each > self._clock.now]
                self._clock.now = min(ahead, default=self._clock.now + DEFAULT.serving.look)

    def _stepped(self, loop: VirtualLoop) -> bool:
        if not loop.busy or loop.ready_at > self._clock.now:
            return False
        self._clients.wait_returned()
        if found := loop.prepare():
            self._log.append(loop.run())
        loop.hear(self._heard)
        return found

    def _heard(self) -> None:
        self._done += 1
        self._note(self._done)


class _Swapping(_Clients):
    """One model is there at a time. See Note [Peers]."""

    def __init__(self, loops: Sequence[VirtualLoop], clock: Clock, seconds: Sequence[float], patience: float) -> None:
        """`seconds`: that the weights of each take; `patience`: times that, until others' requests matter."""
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
        loop = min(waiting, key=lambda each: waiting[each])
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
    """Models that ballonet manages."""

    def __init__(self, loops: Sequence[VirtualLoop], charges: Charges) -> None:
        super().__init__(loops)
        self._charges = charges
        self._most = 0

    def wait_returned(self) -> None:
        """See Note [Exactly again]."""
        device = runtime.require()
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
        device = runtime.require()
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
                with _told(budget // machine.scale, nbytes // machine.scale):
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
def _told(budget: int, weights: int) -> Iterator[None]:
    """Stock is told that the budget is all there is, and that the weights lie in it."""
    from transformers.generation.continuous_batching import cache

    names, name = vars(cache), "get_device_and_memory_breakdown"
    found = torch.device("cpu"), budget, weights, weights
    before, names[name] = names[name], lambda: found
    try:
        yield
    finally:
        names[name] = before
