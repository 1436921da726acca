"""The governor of each device that models are managed on.

Note [The link of a model that runs]
    Where pages run out for the first time nobody has measured the link yet, and who may give what depends on it. That
    is made up for before an iteration, once more is free than the next tokens need, and outside of captures, whose work
    must not wait for copies; until then decisions say that they assume.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from ...allocator import devices, looks
from ...allocator._native import Device
from ...allocator.devices import Runtime
from ...allocator.errors import DriverError
from ...allocator.interrupts import if_free
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


_unless_said = Composition()  # of a runtime that was not composed itself, and of what has no runtime
_measuring = threading.Lock()


def compose_with(composition: Composition, device: Device | None = None) -> Composition:
    """The governor of the device, for None of every one that is not composed itself, is made with this from now on, and
    the one that is there is forgotten: no model is managed. Returns what it was made with before."""
    global _unless_said
    before = composed_with(device)
    if device is None:
        _unless_said = composition
    else:
        devices.holding(device).parts.put(composition)
    for each in devices.every():
        if device in (None, each.device):
            each.parts.drop(Governor)
    return before


def composed_with(device: Device | None = None) -> Composition:
    """Returns what the governor of the device is made with; for None what one is that is not composed itself."""
    return (None if device is None else devices.holding(device).parts.get(Composition)) or _unless_said


def of(device: Device) -> Governor:
    """Returns the governor of the device, made where there is none yet."""
    found = devices.holding(device)
    return found.parts.of(Governor, partial(_made, found))


def _made(found: Runtime) -> Governor:
    device, composition = found.device, composed_with(found.device)
    governor = Governor(
        device,
        received=_received(device),
        clock=composition.clock,
        waits=composition.waits,
        tuning=composition.tuning,
        events=found.events,
        window=found.settings.reserve,
        spill=found.settings.spill is True,
        marks=None if device.kind == "standin" else marks_of(device),
    )
    found.preparing = governor.ladder.preparing
    looks.publish(found, "kv", _away)
    return governor


def known(found: Runtime) -> Governor | None:
    """Returns the governor of a runtime, None where nothing was managed on it."""
    return found.parts.get(Governor)


def _away(found: Runtime) -> dict[str, int]:
    """For those who watch: pages of KV of all caches of the device that lie on the host or a peer."""
    governor = known(found)
    return {"displaced": 0 if governor is None else governor.displaced}


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
