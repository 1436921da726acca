"""`python -m ballonet serve`: transformers' OpenAI-compatible server, its models managed on one pool."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..allocator.config import Config, environment
from ..allocator.errors import ConfigError, ManageError
from ..allocator.units import format_size
from ..hooks.options import OPTIONS, ManageOptions
from . import arguments
from .run import add_options

if TYPE_CHECKING:
    from ..hooks.replicas.placement import Placement

_SECRET = "BALLONET_REPLICA_SECRET"
_STARTED = "BALLONET_REPLICA_STARTED"
LOCAL = ("127.0.0.1", "localhost", "::1")


def add(commands: Any) -> None:
    """Describes the command."""
    text = "serve models to OpenAI's clients, many requests and several models at once on one pool"
    parser = arguments.command(commands, "serve", _serve, text)
    parser.add_argument("models", metavar="MODEL", nargs="+", help="a name on the Hugging Face hub, or a folder")
    arguments.add_sizes(parser)
    parser.add_argument(
        "--host-budget", metavar="SIZE", help="host pages, such as 64GiB; 0: none (BALLONET_HOST_BUDGET)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=arguments.whole(1, 65535), default=8000, help="port to listen at (default: 8000)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="what clients have to send; needed unless --host is this machine"
    )
    parser.add_argument("--no-api-key", action="store_true", help="anybody may ask, also from other machines")
    parser.add_argument(
        "--waiting", metavar="N", type=arguments.count, default=1024, help="requests that may wait (default: 1024)"
    )
    parser.add_argument(
        "--grace",
        metavar="TIME",
        type=arguments.seconds,
        default=30.0,
        help="for requests to end (default: 30s)",
    )
    parser.add_argument(
        "--block-size", metavar="N", type=arguments.count, help="tokens of a block of KV (default: 256)"
    )
    parser.add_argument("--batch-tokens", metavar="N", type=arguments.count, help="new tokens of a batch at most")
    parser.add_argument(
        "--replicas",
        metavar="N",
        type=arguments.count,
        help="replicas of the one model on this machine, each with the budget, which drop layers for KV in a burst",
    )
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="where replicas of other machines join (default: this machine only)"
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help=f"serve as a replica of the server there; its secret is in {_SECRET}, of both",
    )
    arguments.add_timeline(parser)
    add_options(parser.add_argument_group("how models are managed, as by ballonet.manage()"))


def _serve(args: argparse.Namespace) -> Callable[[], None]:
    """Loads the models, and returns what serves them."""
    options = ManageOptions.of({each.name: vars(args)[each.name] for each in OPTIONS if each.name in args})
    if args.host not in LOCAL and args.api_key is None and not args.no_api_key:
        raise ConfigError(f"whoever reaches {args.host} could ask: give --api-key KEY, or --no-api-key")
    try:
        from ..hooks.server.application import Address, check_free
        from ..hooks.server.server import Server
    except ModuleNotFoundError as error:
        raise ManageError(f"serving needs {error.name}: pip install 'ballonet[serve]'") from error
    from ..allocator import runtime
    from ..allocator.install import install
    from ..offload.timeline import recorder

    where = _placed(args)
    if args.join is None:
        check_free(args.host, args.port)  # before models are loaded, which takes longer
    if args.replicas is not None or (where is not None and where.hosts):
        return _replicas(args, where)
    if args.timeline is not None:
        recorder.check(args.timeline)  # before anything takes its time
    page_size = args.page_size or _page_size(args.models, args.budget)
    install(budget=args.budget, page_size=page_size, host_budget=args.host_budget)
    if args.timeline is not None:
        recorder.until_exit(args.timeline)
    given = {"page_size": args.block_size, "max_batch_tokens": args.batch_tokens}
    if where is not None:
        return _replica(args, where, options, {name: value for name, value in given.items() if value is not None})
    address = Address(args.host, args.port, args.api_key, args.waiting, args.grace)
    batching = {name: value for name, value in given.items() if value is not None}
    return Server(args.models, runtime.require(), options, address, _say, **batching).run


def _placed(args: argparse.Namespace) -> Placement | None:
    """Where the server is that this process is a replica of, or that it starts under torchrun; None: it has none."""
    if args.join is None and (args.replicas is not None or "RANK" not in environment()):
        return None
    from ..hooks.replicas.placement import placement

    return placement(environment(), args.join)


def _replicas(args: argparse.Namespace, where: Placement | None) -> Callable[[], None]:
    """Starts the replicas of one model, and returns what serves them. `where`: what torchrun says."""
    import torch

    from ..hooks.replicas.placement import Placement, placement
    from ..hooks.replicas.serving import Fleet, ReplicaServer
    from ..hooks.server.application import Address

    if len(args.models) > 1:
        raise ConfigError("--replicas are of one model: start a server for each")
    if where is None:
        where = Placement("127.0.0.1", 0, hosts=True)
        if args.listen is not None:
            where = replace(placement({}, args.listen), hosts=True)
    if environment().get(_SECRET) is None and (where.host not in LOCAL or where.rank is not None):
        raise ConfigError(f"whoever reaches {where.host} could join: set {_SECRET}, here and for the other replicas")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = args.replicas or 1
    args.budget = _budget_of_each(args, count, devices)
    fleet = Fleet(count, _forwarded(args), where, devices, environment().get(_SECRET))
    address = Address(args.host, args.port, args.api_key, args.waiting, args.grace)
    return ReplicaServer(args.models[0], fleet, address, _say).run


def _budget_of_each(args: argparse.Namespace, count: int, devices: int) -> str | None:
    """What `--budget` is for each of so many replicas, which fit into memory with that; None: each has a GPU of its
    own, and decides. ConfigError where they do not fit."""
    import torch

    from ..allocator import defaults, ram
    from ..offload.policy.replicas.memory_fit import check_fits, share

    settings = Config.from_env().merge(budget=args.budget, host_budget=args.host_budget)
    if settings.device == "cpu" or not devices:
        room = ram.available()
        each = settings.budget or share(count, room // defaults.STANDIN_BUDGET, defaults.PAGE_SIZE["standin"])
        check_fits(count, each + (settings.host_budget or 0), [("this machine's memory", room)])
        return str(each)
    if settings.budget is None:
        if count > devices:
            raise ConfigError(f"{count} replicas share {devices} GPUs: give --budget, for each of them")
        return None
    found = [torch.cuda.get_device_properties(number).total_memory for number in range(devices)]
    check_fits(count, settings.budget, [(f"GPU {number}", room) for number, room in enumerate(found)])
    return str(settings.budget)


def _forwarded(args: argparse.Namespace) -> list[str]:
    """The arguments of this command that each replica gets."""
    found = []
    names = ("budget", "page_size", "host_budget", "block_size", "batch_tokens", *(each.name for each in OPTIONS))
    for name in names:
        value = vars(args).get(name)
        if value is not None and value is not False:
            option = f"--{name.replace('_', '-')}"
            found += [option] if value is True else [option, str(value)]
    return found


def _replica(
    args: argparse.Namespace, where: Placement, options: ManageOptions, batching: dict[str, Any]
) -> Callable[[], None]:
    """Returns what serves as a replica of the server that is at `where`."""
    from ..allocator import runtime
    from ..hooks.replicas.errors import ReplicaError
    from ..hooks.replicas.process import run

    if len(args.models) > 1:
        raise ConfigError("a replica has one model")
    name, secret = args.models[0], environment().get(_SECRET)

    def serve() -> None:
        try:
            run(name, runtime.require(), options, where, secret, _say, started=environment().get(_STARTED), **batching)
        except ReplicaError as error:
            _say(str(error))
            sys.exit(2)

    return serve


def _page_size(models: list[str], budget: str | None) -> int | None:
    """What suits the models in a budget that is given, where nobody chose a page size; None: the usual one."""
    import torch

    from ..allocator import runtime
    from ..hooks.server.page_size import chosen

    settings = Config.from_env().merge(budget=budget)
    if settings.budget is None or settings.page_size is not None:
        return None
    found = chosen(models, settings.budget, runtime.choose(settings, torch.cuda.is_available()).kind)
    if found is None:
        return None
    lost = f"rounding to pages of {format_size(found.page)} takes {format_size(found.lost)}, {found.share:.1%} of what"
    _say(f"{lost} the weights leave" + (": a larger budget would gain more" if found.share > found.most else ""))
    return found.page


def _say(line: str) -> None:
    print(f"ballonet: {line}", file=sys.stderr, flush=True)
