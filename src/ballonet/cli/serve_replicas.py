"""`ballonet serve` with replicas: `--replicas` and `--ray`."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..allocator.config import API_KEY, Config, environment
from ..allocator.errors import ConfigError, ManageError
from ..hooks.options import OPTIONS, ManageOptions
from .arguments import say

if TYPE_CHECKING:
    from ..hooks.replicas.process import Attach
    from ..hooks.replicas.replica_server import ServedFleet
    from ..hooks.replicas.supervisor import Fleet
    from ..hooks.server.anteroom import Anteroom
    from ..hooks.server.application import Address
    from ..offload.policy.replicas.pipeline import ChunkCost
    from ..offload.policy.replicas.tuning import ReplicaTuning

LOCAL: Final = ("127.0.0.1", "localhost", "::1")
_OFF: Final = "off"
_FORWARDED: Final = ("BALLONET_", "HF_", "OMP_", "TRANSFORMERS_")  # variables for actors, which have Ray's else


def is_replicated(args: argparse.Namespace, options: ManageOptions) -> bool:
    """Whether the model is served by replicas. ConfigError where it cannot be."""
    if args.replicas is None and args.ray in (None, _OFF):
        return False
    if len(args.models) > 1:
        raise ConfigError("replicas are of one model: start a server for each")
    if options.prefix_cache or options.prefix_dir is not None:
        raise ConfigError(
            "replicas share no prefixes between requests, as each stage of a group would forget other blocks: leave "
            "prefix_cache and prefix_dir out, or serve without replicas"
        )
    return True


def server(args: argparse.Namespace, address: Address, tell: Callable[[str], None]) -> Callable[[Anteroom], None]:
    """Starts the replicas of one model, or finds those of a Ray, and returns what serves them. `tell`: is called with
    each line for people; replicas print theirs."""
    try:
        from ..hooks.replicas.process import ReplicaOptions
        from ..hooks.replicas.replica_server import LocalFleet, ReplicaServer
        from ..hooks.replicas.supervisor import Fleet
    except ModuleNotFoundError as error:
        raise ManageError(f"replicas need {error.name}: pip install 'ballonet[replicas]'") from error
    from ..offload.policy.replicas.tuning import ReplicaTuning

    has_ray = importlib.util.find_spec("ray") is not None
    if args.ray not in (None, _OFF) and not has_ray:
        raise ManageError("--ray needs ray: pip install 'ballonet[replicas]'")
    on_ray = has_ray and args.ray != _OFF
    devices = 0 if Config.from_env().device == "cpu" else _devices()
    cost, fleet = _cost(args.costs), None
    tuning = ReplicaTuning() if args.silent is None else ReplicaTuning(silent=args.silent)
    tuning = replace(tuning, start_wait=0.0) if on_ray else tuning  # Ray starts lost replicas again at once
    if args.replicas is not None:
        budget = args.budget if args.ray not in (None, _OFF) else _budget_of_each(args, args.replicas, devices)
        options = ReplicaOptions(
            model=args.models[0],
            budget=budget,
            page_size=args.page_size,
            host_budget=args.host_budget,
            manage={option.name: vars(args)[option.name] for option in OPTIONS if option.name in args},
            batching=_given(page_size=args.block_size, max_batch_tokens=args.batch_tokens),
            environment={k: v for k, v in environment().items() if k.startswith(_FORWARDED) and k != API_KEY},
            attach=faults_of,
            say=say,
            tuning=tuning,
        )
        fleet = Fleet(args.replicas, options, devices, cost=cost, log=args.log, timeline=args.timeline)
    served: ServedFleet
    if on_ray:
        served = _on_ray(args, fleet, devices, tell, tuning)
    else:
        assert fleet is not None
        served = LocalFleet(fleet, tell)
    found = ReplicaServer(args.models[0], served, address, tell)
    if args.costs is not None and cost is None and served.cost is not None:
        args.costs.write_text(json.dumps(asdict(served.cost)) + "\n")
    return found.run


def _on_ray(
    args: argparse.Namespace, fleet: Fleet | None, devices: int, say: Callable[[str], None], tuning: ReplicaTuning
) -> ServedFleet:
    """Returns the fleet of a Ray, which is started here where no address is given."""
    from ..hooks.replicas.ray_node import RayNode

    node = RayNode(args.ray, args.replicas or 0, devices, tuning.joining)
    from ..hooks.replicas.on_ray import RayFleet  # only now: importing Ray reads what the node has set

    return RayFleet(args.models[0], fleet, node, say, tuning)


def faults_of(settings: Config) -> Attach | None:
    """Returns what attaches the faults of a test to a replica; None where there are none."""
    if settings.replica_faults is None:
        return None
    from ..testing.replica_faults import attach_faults

    return partial(attach_faults, settings.replica_faults)


def _given(**values: int | None) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def _budget_of_each(args: argparse.Namespace, count: int, devices: int) -> str | None:
    """What `--budget` is for each of so many replicas, which fit into memory with that; None: each has a GPU of its
    own, and decides. ConfigError where they do not fit."""
    import torch

    from ..allocator import defaults, ram
    from ..offload.policy.replicas.processes import check_fits, share

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
    from ..hooks.virtual_replicas.costs import read_costs

    return read_costs(path)[0]


def _devices() -> int:
    """GPUs that this process sees. Counted without a context: one would fix which they are."""
    import torch

    return torch.cuda.device_count()
