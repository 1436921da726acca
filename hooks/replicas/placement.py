"""The address of the supervisor, and whether this process starts it: from `--join`, or torchrun's environment.

Note [Ranks of torchrun]
    Each rank is one replica; rank 0 is the supervisor, which starts its replica as a process of its own. torch's
    default process group is not used, but code that reads the variables of a rank expects one (transformers shards a
    model over WORLD_SIZE ranks). So a replica's process unsets them, and sees only its own GPU. torchrun sends SIGTERM
    to all ranks at once: only the supervisor heeds it, as the others compute requests until it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from .errors import PlacementError
from .store import LOCAL

_TORCHRUN: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL: Final = "LOCAL_RANK"
_OTHERS: Final = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
_ELASTIC: Final = "TORCHELASTIC_"
_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
_AGENT: Final = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun itself listens on MASTER_PORT
_PORTS: Final = range(2**16)


@dataclass(frozen=True, slots=True)
class Placement:
    """The supervisor's `host` and `port` (0: any free port). `hosts`: this process starts the supervisor there, else it
    joins it. `rank`, `size`: torchrun's, `local`: the rank on this machine. `agent`: the address is that of
    torchrun's own store, which has the supervisor's address."""

    host: str
    port: int
    hosts: bool
    rank: int | None = None
    size: int | None = None
    agent: bool = False
    local: int | None = None


def placement(environ: Mapping[str, str], join: str | None) -> Placement:
    """Returns the placement: from `join` ("HOST:PORT" of a supervisor) if given; else from RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT; else a supervisor for this machine alone. PlacementError where a value is malformed, or
    only some of the four are set."""
    if join is not None:
        host, port = _address(join)
        return Placement(host, port, hosts=False)
    given = [name for name in _TORCHRUN if environ.get(name)]
    if not given:
        return Placement(LOCAL, 0, hosts=True)
    if missing := [name for name in _TORCHRUN if name not in given]:
        raise PlacementError(
            f"the environment has {', '.join(given)} but not {', '.join(missing)}: torchrun sets all four. Start this "
            "process with torchrun, set what is missing, or unset the others"
        )
    rank, size = (_number(environ, name) for name in ("RANK", "WORLD_SIZE"))
    port = _number(environ, "MASTER_PORT")
    if not (0 <= rank < size and port in _PORTS):
        raise PlacementError(f"RANK={rank}, WORLD_SIZE={size}, MASTER_PORT={port}: no rank or no port is like this")
    agent = environ.get(_AGENT) == "True"
    local = _number(environ, _LOCAL) if environ.get(_LOCAL) else None
    return Placement(environ["MASTER_ADDR"], port, rank == 0, rank, size, agent, local)


def as_replica(environ: Mapping[str, str], number: int, devices: int) -> dict[str, str | None]:
    """Returns the changes to this environment for replica `number` of a machine with so many GPUs; None: unset. GPUs
    are dealt in turns, and torchrun's variables unset. See Note [Ranks of torchrun]."""
    known = (*_TORCHRUN, _LOCAL, *_OTHERS)
    changes: dict[str, str | None] = {name: None for name in environ if name in known or name.startswith(_ELASTIC)}
    if devices:
        seen = environ.get(_DEVICES, "")
        names = [each for each in seen.split(",") if each] or [str(each) for each in range(devices)]
        changes[_DEVICES] = names[number % len(names)]
    return changes


def _address(text: str) -> tuple[str, int]:
    """Returns host and port of "HOST:PORT", or "[HOST]:PORT" for IPv6. PlacementError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) in _PORTS):
        raise PlacementError(f"--join is {text!r}, which is no HOST:PORT such as node0:29400 or [fe80::1]:29400")
    return host, int(port)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise PlacementError(f"{name} is {environ[name]!r}, which is no number") from None
