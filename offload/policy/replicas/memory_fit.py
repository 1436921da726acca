"""Whether replicas fit into the memory of one machine, before any of them starts."""

from __future__ import annotations

from collections.abc import Sequence

from ....allocator.errors import ConfigError
from ....allocator.units import format_size


def check_fits(replicas: int, nbytes: int, memory: Sequence[tuple[str, int]]) -> None:
    """Raises ConfigError where a device cannot hold its replicas of `nbytes` bytes. `memory`: (name, bytes) of each
    device, to which replicas are dealt in turns."""
    fitting = sum(room // nbytes for _, room in memory)
    for number, (name, room) in enumerate(memory):
        count = len(range(number, replicas, len(memory)))
        if count * nbytes > room:
            needed = f"{count} of {replicas} replicas" if len(memory) > 1 else f"{replicas} replicas"
            raise ConfigError(
                f"{needed} with {format_size(nbytes)} each need {format_size(count * nbytes)} of {name}, which has "
                f"{format_size(room)}: {f'--replicas {fitting} would fit, or ' if fitting else ''}give a lower --budget"
            )


def share(replicas: int, room: int, page: int) -> int:
    """Returns the default bytes of each replica, in whole pages, where all share `room`."""
    return max(page, room // replicas // page * page)
