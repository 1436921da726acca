"""The manager of each device that models are managed on, and what gives pages back before an allocation for tokens or
weights fails: graphs that nobody uses, and stores of prefixes.

Note [The link of a model that runs]
    When pages run out for the first time the link may not be measured yet, and decisions depend on it. It is measured
    before a later iteration, once more is free than the next tokens need, and outside of captures, whose work must not
    wait for copies; until then decisions say that they assume a bandwidth.

Note [Who is asked]
    What allocates in the middle of an operator asks no store: it gets the pages of prefixes that the core may take.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

from ...allocator import devices, looks
from ...allocator._native import Device
from ...allocator.devices import Runtime
from ...allocator.errors import DriverError
from ...allocator.interrupts import if_free
from ...offload.manager.memory_manager import MemoryManager, Surroundings
from ...offload.policy.tuning import DEFAULT, Tuning
from ...offload.record import link
from .references import THIS, Interpreter
from .streams import marks_of, relaxed


class Composition(NamedTuple):
    """The parts of which a manager, and what it governs, are made. `clock`: seconds, for decisions that depend on
    time; `waits`: seconds, for timeouts of one thread that waits for another."""

    tuning: Tuning = DEFAULT
    clock: Callable[[], float] = time.monotonic
    interpreter: Interpreter = THIS
    waits: Callable[[], float] = time.monotonic


_unless_said = Composition()  # for runtimes without a composition of their own, and for what has no runtime
_measuring = threading.Lock()


def compose_with(composition: Composition, device: Device | None = None) -> Composition:
    """Makes later managers of the device, for None of every device without a composition of its own, of these parts,
    and forgets the present one; no model is managed. Returns the composition before."""
    global _unless_said
    before = composed_with(device)
    if device is None:
        _unless_said = composition
    else:
        devices.holding(device).parts.put(composition)
    for runtime in devices.every():
        if device in (None, runtime.device):
            runtime.parts.drop(MemoryManager)
    return before


def composed_with(device: Device | None = None) -> Composition:
    """Returns the composition of the device; for None that of devices without one of their own."""
    return (None if device is None else devices.holding(device).parts.get(Composition)) or _unless_said


def of(device: Device) -> MemoryManager:
    """Returns the manager of the device; makes it where there is none yet."""
    runtime = devices.holding(device)
    return runtime.parts.of(MemoryManager, partial(_made, runtime))


def _made(runtime: Runtime) -> MemoryManager:
    device, composition = runtime.device, composed_with(runtime.device)
    manager = MemoryManager(
        device,
        Surroundings(
            received=_received(device),
            clock=composition.clock,
            waits=composition.waits,
            events=runtime.events,
            marks=None if device.kind == "standin" else marks_of(device),
        ),
        tuning=composition.tuning,
        window=runtime.settings.reserve,
        turn=runtime.settings.turn,
        spill=runtime.settings.spill is True,
    )
    runtime.preparing = manager.sources.preparing
    looks.publish(runtime, "kv", _away)
    return manager


def known(runtime: Runtime) -> MemoryManager | None:
    """Returns the manager of a runtime, None where nothing was managed on it."""
    return runtime.parts.get(MemoryManager)


def _away(runtime: Runtime) -> dict[str, int]:
    """Returns, for metrics, the pages of all KV caches of the device that lie on the host or a peer."""
    manager = known(runtime)
    return {"displaced": 0 if manager is None else manager.displaced}


def yield_pages(device: Device, manager: MemoryManager) -> None:
    """Gives the pages that other threads request of this one, between two layers. DriverError."""
    if device.yield_pages():
        manager.pages.given()


def measure_link(device: Device, manager: MemoryManager, leave: int = 0) -> None:
    """Measures the bandwidth of the link for the manager, if that can be done now with `leave` device pages free. Does
    nothing while another thread measures it."""

    def measure() -> None:
        if manager.link.bandwidth is None:
            with relaxed(device), suppress(DriverError):  # a driver may say it has host pages and give none
                if (speed := link.measure(device, leave=leave)) is not None:
                    manager.link.bandwidth = speed
        if manager.link.peer_bandwidth is None and device.peer is not None:
            with relaxed(device), suppress(DriverError):
                if (speed := link.measure(device, leave=leave, place="peer")) is not None:
                    manager.link.peer_bandwidth = speed

    if_free(_measuring, measure)


def _received(device: Device) -> Callable[[], int | None] | None:
    """Returns the function that reads the bytes per second received over a GPU's link."""
    if device.kind != "cuda":
        return None
    from .key import uuid_of

    return partial(link.received, uuid_of(device))


class Giver(Protocol):
    """A store of prefixes, or the graphs of a model."""

    @property
    def priority(self) -> int:
        """The priority of its model: those with the lowest give first."""

    def give_up(self, pages: int) -> int:
        """Gives back about so many pages of its device that are not in use; returns how many."""


class _Givers:
    """The givers of one device, in the order in which they came."""

    def __init__(self) -> None:
        self.numbers = count()
        self.graphs = weakref.WeakValueDictionary[int, Giver]()
        self.stores = weakref.WeakValueDictionary[int, Giver]()


def add_giver(device: Device, giver: Giver, graphs: bool = False) -> None:
    """Adds a store of prefixes, or the `graphs` of a model, until it is collected."""
    givers = _givers_of(device)
    (givers.graphs if graphs else givers.stores)[next(givers.numbers)] = giver


def give_up(device: Device, pages: int) -> int:
    """Gives back so many device pages of graphs and cached prefixes, or as many as there are; returns how many. Graphs
    go first, then those of the model with the lowest priority, of equals those that came first."""
    givers, gone = _givers_of(device), 0
    for kind in (givers.graphs, givers.stores):
        for giver in sorted(kind.values(), key=lambda giver: giver.priority):
            if gone < pages:
                gone += giver.give_up(pages - gone)
    return gone


def give_up_graphs(device: Device) -> None:
    """Gives back the pages of all graphs that nobody uses."""
    for giver in list(_givers_of(device).graphs.values()):
        giver.give_up(device.budget // device.page_size)


def _givers_of(device: Device) -> _Givers:
    return devices.holding(device).parts.of(_Givers, _Givers)
