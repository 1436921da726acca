"""What a process reports to its watchers: one reading of a device, its log, and published sources.

Note [A look costs next to nothing]
    No numbers are kept for watchers: a look reads what is there. It takes the core's locks for one snapshot and calls
    each source once, on the answering thread, never on a forward thread. While it runs it holds Python's lock, which a
    decode step may wait for; so a source reads attributes, and asks no device of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from . import devices
from .defaults import LOOK_EVENTS
from .devices import Runtime

Source = Callable[[Runtime], Any]  # returns plain values about that device, ready for JSON

READ: Final = (
    *("page_size", "budget", "created", "pages", "host_pages", "host_free", "host_budget", "spilled", "copied"),
    *("peer", "peer_budget", "peer_pages", "peer_free", "reclaimed", "driver_ns"),
)

# the keys of every look, beside those of published sources
KEYS: Final = ("pid", "when", "device", "devices", *READ, "counts", "events", "cursor")


class _Sources(dict[str, Source]):
    """The published sources of one runtime, by name."""


def publish(runtime: Runtime, name: str, source: Source) -> None:
    """Publishes `source`: each look at the runtime calls it, for the value under this name. The last one of a name
    counts."""
    runtime.parts.of(_Sources, _Sources)[name] = source


def look(since: int | None = None, number: int | None = None) -> dict[str, Any]:
    """Returns the report, ready for JSON, of the runtime of that number, or where none is given of the first.
    NotInstalled.

    Keys: `pid`; `when` (ns of CLOCK_MONOTONIC); `device` {kind, ordinal, number}; `devices`: the numbers of all
    runtimes of this process; those of `READ`, as `Device.snapshot` has them; `counts` of decisions, by source and verb
    {events, pages, seconds}; `events`: the decisions after the cursor `since`, the last ones at most, oldest first;
    `cursor`: the next one; and one for each source that was published.
    """
    runtime = devices.of(number)
    runtime.events.hear()
    snapshot: Mapping[str, Any] = runtime.device.snapshot()
    heard = runtime.events.since(since or 0)
    counts = runtime.events.counts()
    sources = runtime.parts.get(_Sources) or _Sources()
    return {
        "pid": os.getpid(),
        "when": time.monotonic_ns(),
        "device": {"kind": runtime.device.kind, "ordinal": runtime.device.ordinal, "number": runtime.number},
        "devices": [holder.number for holder in devices.every()],
        **{key: snapshot[key] for key in READ},
        "counts": {
            source: {verb: count._asdict() for verb, count in verbs.items()} for source, verbs in counts.items()
        },
        "events": [event.to_dict() for event in heard.events[-LOOK_EVENTS:]],
        "cursor": heard.cursor,
        **{name: source(runtime) for name, source in tuple(sources.items())},
    }
