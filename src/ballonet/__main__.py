"""The command line: `ballonet COMMAND`; without a command it lists them, by what one wants to do.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input. Those of `run` are the program's own once it has started.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from typing import Any, Final

from . import __version__
from .allocator.config import change_environment
from .allocator.errors import BallonetError, ConfigError, PoolExhausted, TraceError
from .cli import measure, plan, processes, run, serve

GOALS: Final = {  # what one wants to do -> the commands for that
    "run models": (run.add_run, serve.add_serve),
    "know beforehand": (plan.add_plan, plan.add_whatif),
    "look at what runs, and change it": (
        processes.add_top,
        processes.add_budget,
        processes.add_sleep,
        processes.add_wake,
    ),
    "try this machine": (measure.add_info, measure.add_preflight, measure.add_profile),
    "replay what was recorded": (serve.add_load, measure.add_replay),
}


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    if folders := vars(args).get("trust_folder"):
        change_environment({"BALLONET_TRUST_FOLDER": os.pathsep.join(map(os.path.abspath, folders))})
    try:
        program = args.command(args)
    except (BallonetError, PoolExhausted) as error:
        print(f"ballonet: {str(error).removeprefix('ballonet: ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | TraceError) else 1
    if program is not None:
        program()  # outside the try: what the program of `run` raises is its own
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ballonet",
        usage="ballonet [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_wrapped(
            """`ballonet COMMAND --help` has all options of one. What a command found is a table for people, and with
            --json one line of JSON. budget and replay print JSON, too, where stdout is not a terminal; load and whatif
            nothing else. serve --json prints a line once it is ready. run has no --json: what it prints is its
            program's own."""
        ),
    )
    parser.add_argument("--version", action="version", version=f"ballonet {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(prog="ballonet", metavar="COMMAND", help=argparse.SUPPRESS)
    listed = [line for goal, adders in GOALS.items() for line in (f"\n{goal}", *_added(commands, adders))]
    about = "Weights, activations and KV cache of Hugging Face models in one elastic pool of pages."
    parser.description = "\n".join([_wrapped(about), *listed])
    return parser


def _wrapped(text: str, first: str = "", others: str = "") -> str:
    """Breaks a text into lines of a terminal of 80 columns, which begin so."""
    return textwrap.fill(" ".join(text.split()), 79, initial_indent=first, subsequent_indent=others)


def _added(commands: Any, adders: tuple[Any, ...]) -> list[str]:
    """Describes some commands to argparse. Returns the lines of the list that name them."""
    before, lines = {*commands.choices}, list[str]()
    for add in adders:
        add(commands)
    for name in [name for name in commands.choices if name not in before]:
        about = commands.choices[name].get_default("about")
        lines.append(_wrapped(about, f"  {name:<11}", " " * 13))
    return lines


if __name__ == "__main__":
    sys.exit(main())
