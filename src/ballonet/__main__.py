"""The command line: `python -m ballonet run | replay | info`.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input. Those of `run` are the program's own once it has started.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from . import __version__
from .allocator.config import Config
from .allocator.errors import BallonetError, ConfigError, PoolExhausted, TraceError


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except (BallonetError, PoolExhausted) as error:
        print(f"ballonet: {str(error).removeprefix('ballonet: ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | TraceError) else 1
    if args.command is _prepare:
        from .hooks.run import run

        run(args.program, args.args, module=args.module)  # outside the try: what the program raises is its own
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from .hooks.run import find

    if problem := find(args.program, module=args.module):
        print(f"{sys.executable}: {problem}", file=sys.stderr)
        sys.exit(1 if args.module else 2)  # as Python does
    from .allocator.install import install

    install(budget=args.budget, page_size=args.page_size)


def _replay(args: argparse.Namespace) -> None:
    from .allocator.replay import replay

    print(json.dumps(replay(args.trace, Config.from_env().merge(budget=args.budget, page_size=args.page_size))))


def _info(args: argparse.Namespace) -> None:
    from .allocator.info import gather, show

    facts = gather(Config.from_env(), __version__)
    if args.json:
        print(json.dumps(facts))
    else:
        show(facts)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ballonet",
        description="Weights, activations and KV cache of Hugging Face models in one elastic pool of pages.",
    )
    parser.add_argument("--version", action="version", version=f"ballonet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = _command(commands, "run", _prepare, "run a script or module, every model of it managed at its first use")
    _add_sizes(run)
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    run.add_argument("program", metavar="PROGRAM", help="a Python script")
    run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the program's own arguments")

    replay = _command(commands, "replay", _replay, "drive the allocator with a recorded trace; prints one line of JSON")
    _add_sizes(replay)
    replay.add_argument("trace", metavar="TRACE.csv", help="columns time_us,op,id,size,stream; ops alloc and free")

    info = _command(commands, "info", _info, "what works on this machine, what does not, and why")
    info.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    return parser


def _command(commands: Any, name: str, command: Callable[..., None], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    return parser


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", metavar="SIZE", help="device pages, such as 24GiB (BALLONET_BUDGET)")
    parser.add_argument("--page-size", metavar="SIZE", help="bytes per page, such as 2MiB (BALLONET_PAGE_SIZE)")


if __name__ == "__main__":
    sys.exit(main())
