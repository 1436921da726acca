"""The governor of each device that models are managed on.

Note [The link of a model that runs]
    Where pages run out for the first time nobody has measured the link yet, and who may give what depends on it. That
    is made up for before an iteration, once more is free than the next tokens need, and outside of captures, whose work
    must not wait for copies; until then decisions say that they assume.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ...allocator import looks, runtime
from ...allocator._native import Device
from ...allocator.errors import DriverError
from ...allocator.interrupts import if_free
from ...allocator.runtime import Runtime
from ...offload.governor.governor import Governor
from ...offload.policy.tuning import DEFAULT, Tuning
from ...offload.record import link
from .marks import marks_of, relaxed
from .references import THIS, Interpreter


class Composition(NamedTuple):
    """What a governor, and the models it governs, are made with. `clock`: seconds, by which all is decided that
    depends on time; `waits`: the same, by which one thread waits no longer for another."""

    tuning: Tuning = DEFAULT
    clock: Callable[[], float] = time.monotonic
    interpreter: Interpreter = THIS
    waits: Callable[[], float] = time.monotonic


_composition = Composition()
_governors: weakref.WeakKeyDictionary[Runtime, Governor] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_measuring = threading.Lock()


def compose_with(composition: Composition) -> Composition:
    """Governors are made with this from now on, and those that are there are forgotten: no model is managed. Returns
    what they were made with before."""
    global _composition
    with _lock:
        before, _composition = _composition, composition
        _governors.clear()
        return before


def composed_with() -> Composition:
    """Returns what governors are made with."""
    return _composition


def of(device: Device) -> Governor:
    """Returns the governor of the device, made where there is none yet."""
    with _lock:
        found = runtime.holding(device)
        governor = _governors.get(found)
        if governor is not None:
            return governor
        governor = Governor(
            device,
            received=_received(device),
            clock=_composition.clock,
            waits=_composition.waits,
            tuning=_composition.tuning,
            events=found.events,
            window=found.settings.reserve,
            spill=found.settings.spill is True,
            marks=None if device.kind == "standin" else marks_of(device),
        )
        _governors[found] = governor
        found.preparing = governor.ladder.preparing
        return governor


def known(found: Runtime) -> Governor | None:
    """Returns the governor of a runtime, None where nothing was managed on it."""
    return _governors.get(found)


def _away(found: Runtime) -> dict[str, int]:
    """For those who watch: pages of KV of all caches of the device that lie on the host or a peer."""
    governor = _governors.get(found)
    return {"displaced": 0 if governor is None else governor.displaced}


looks.publish("kv", _away)


def yield_pages(device: Device, governor: Governor) -> None:
    """For a thread between two layers: gives what others request of it. DriverError."""
    if device.yield_pages():
        governor.pages.given()


def measure_link(device: Device, governor: Governor, leave: int = 0) -> None:
    """The governor knows how fast the link is, if that can be found out now with `leave` device pages free. Does
    nothing while another thread finds out."""

    def measure() -> None:
        if governor.link.bandwidth is None:
            with relaxed(device), suppress(DriverError):  # of a driver that says it has host pages and gives none
                if (found := link.measure(device, leave=leave, tuning=governor.tuning.link)) is not None:
                    governor.link.bandwidth = found
        if governor.link.peer_bandwidth is None and device.peer is not None:
            with relaxed(device), suppress(DriverError):
                if (found := link.measure(device, leave=leave, place="peer", tuning=governor.tuning.link)) is not None:
                    governor.link.peer_bandwidth = found

    if_free(_measuring, measure)


def _received(device: Device) -> Callable[[], int | None] | None:
    """Bytes per second that come over the link of a GPU."""
    if device.kind != "cuda":
        return None
    from .key import uuid_of

    return partial(link.received, uuid_of(device))
