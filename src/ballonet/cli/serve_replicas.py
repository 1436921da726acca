"""`ballonet serve` with replicas: `--replicas` and `--join`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..allocator.config import Config, environment
from ..allocator.errors import ConfigError, ManageError
from ..hooks.options import OPTIONS, ManageOptions

if TYPE_CHECKING:
    from ..hooks.server.application import Address
    from ..offload.policy.replicas.chunk_cost import ChunkCost

SECRET: Final = "BALLONET_REPLICA_SECRET"
STARTED: Final = "BALLONET_REPLICA_STARTED"
LOCAL: Final = ("127.0.0.1", "localhost", "::1")


class Placement(NamedTuple):
    """The supervisor's `host` and `port` (0: any free port). `hosts`: this process starts it, else it joins it."""

    host: str
    port: int
    hosts: bool


def placed(args: argparse.Namespace, options: ManageOptions) -> Placement | None:
    """Where the server is that this process is a replica of, or that it starts; None: neither. ConfigError."""
    if args.join is None and args.replicas is None:
        return None
    if len(args.models) > 1:
        raise ConfigError("replicas are of one model: start a server for each")
    if options.prefix_cache or options.prefix_dir is not None:
        raise ConfigError(
            "replicas share no prefixes between requests, as each stage of a group would forget other blocks: leave "
            "prefix_cache and prefix_dir out, or serve without replicas"
        )
    if args.join is not None:
        placement = Placement(*_address("--join", args.join), hosts=False)
    elif args.listen is not None:
        placement = Placement(*_address("--listen", args.listen), hosts=True)
    else:
        placement = Placement(LOCAL[0], 0, hosts=True)
    if environment().get(SECRET) is None and not (placement.hosts and placement.host in LOCAL):
        raise ConfigError(f"whoever reaches {placement.host} could join: set {SECRET}, here and for the other replicas")
    return placement


def _address(option: str, text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT", or "[HOST]:PORT" for IPv6. ConfigError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"{option} is {text!r}, which is no HOST:PORT such as node0:29400 or [fe80::1]:29400")
    return host, int(port)


def server(
    args: argparse.Namespace, where: Placement, address: Address, say: Callable[[str], None]
) -> Callable[[], None]:
    """Starts the replicas of one model on this machine, and returns what serves them."""
    try:
        from ..hooks.replicas.replica_server import Fleet, ReplicaServer
    except ModuleNotFoundError as error:
        raise ManageError(f"replicas need {error.name}: pip install 'ballonet[replicas]'") from error
    from ..offload.policy.tuning import DEFAULT

    here, devices = int(args.replicas), _devices()
    if here:
        args.budget = _budget_of_each(args, here, devices)
    cost = _cost(args.costs)
    fleet = Fleet(here, _forwarded(args), where.host, where.port, devices, environment().get(SECRET), cost)
    tuning = DEFAULT.replicas if args.silent is None else replace(DEFAULT.replicas, silent=args.silent)
    started = ReplicaServer(args.models[0], fleet, address, say, tuning=tuning, log=args.log, timeline=args.timeline)
    if args.costs is not None and cost is None and started.cost is not None:
        args.costs.write_text(json.dumps(asdict(started.cost)) + "\n")
    return started.run


def replica(
    args: argparse.Namespace,
    where: Placement,
    options: ManageOptions,
    batching: dict[str, Any],
    say: Callable[[str], None],
) -> Callable[[], None]:
    """Returns what serves as a replica of the server that is at `where`."""
    from ..allocator import devices
    from ..hooks.replicas.errors import ReplicaError
    from ..hooks.replicas.process import run

    name, secret, cost = args.models[0], environment().get(SECRET), _cost(args.costs)
    faults, attach = Config.from_env().replica_faults, None
    if faults is not None:
        from ..testing.replica_faults import attach_faults

        attach = partial(attach_faults, faults)

    def serve() -> None:
        told = environment().get(STARTED)
        try:
            run(
                name,
                devices.require(),
                options,
                *where[:2],
                secret,
                say,
                started=told,
                cost=cost,
                attach=attach,
                **batching,
            )
        except ReplicaError as error:
            say(str(error))
            sys.exit(2)

    return serve


def _budget_of_each(args: argparse.Namespace, count: int, devices: int) -> str | None:
    """What `--budget` is for each of so many replicas, which fit into memory with that; None: each has a GPU of its
    own, and decides. ConfigError where they do not fit."""
    import torch

    from ..allocator import defaults, ram
    from ..offload.policy.replicas.memory_fit import check_fits, share

    settings = Config.from_env().merge(budget=args.budget, host_budget=args.host_budget)
    if settings.device == "cpu" or not devices:
        room = ram.available()
        nbytes = settings.budget or share(count, room // defaults.STANDIN_BUDGET, defaults.PAGE_SIZE["standin"])
        check_fits(count, nbytes + (settings.host_budget or 0), [("this machine's memory", room)])
        return str(nbytes)
    if settings.budget is None:
        if count > devices:
            raise ConfigError(f"{count} replicas share {devices} GPUs: give --budget, for each of them")
        return None
    memory = [torch.cuda.get_device_properties(number).total_memory for number in range(devices)]
    check_fits(count, settings.budget, [(f"GPU {number}", room) for number, room in enumerate(memory)])
    return str(settings.budget)


def _cost(path: Path | None) -> ChunkCost | None:
    """What chunks take, by a file; None where there is none. ManageError where it says something else; ConfigError
    where there can be no such file."""
    if path is None:
        return None
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"--costs is {path}, which is in no folder: make the folder first")
        return None
    from ..hooks.whatif.replicas.costs import read_costs

    return read_costs(path)[0]


def _devices() -> int:
    """GPUs that this process sees. Counted without a context: one would fix which they are."""
    import torch

    return torch.cuda.device_count()


def _forwarded(args: argparse.Namespace) -> list[str]:
    """The arguments of this command that each replica gets."""
    arguments = []
    names = ("budget", "page_size", "host_budget", "block_size", "batch_tokens", *(entry.name for entry in OPTIONS))
    for name in names:
        value = vars(args).get(name)
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            arguments += [option] if value is True else [option, str(value)]
    return arguments
