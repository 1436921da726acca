"""The command line: `python -m ballonet COMMAND`, of which `--help` has a list.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input. Those of `run` are the program's own once it has started.
"""

from __future__ import annotations

import argparse
import os
import sys

from . import __version__
from .allocator.config import change_environment
from .allocator.errors import BallonetError, ConfigError, PoolExhausted, TraceError
from .cli import measure, plan, processes, run, serve


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    args = _parser().parse_args(argv)
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
        prog="python -m ballonet",
        description="Weights, activations and KV cache of Hugging Face models in one elastic pool of pages.",
        epilog="""What a command found is a table for people, and with --json one line of JSON. budget and replay
            print JSON, too, where stdout is not a terminal; load and whatif nothing else. serve --json prints a line
            once it is ready. run has no --json: what it prints is its program's own.""",
    )
    parser.add_argument("--version", action="version", version=f"ballonet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        *(run.add_run, serve.add_serve, serve.add_load, plan.add_whatif, processes.add_top, processes.add_budget),
        *(measure.add_replay, measure.add_info, measure.add_preflight, plan.add_plan, measure.add_profile),
    ):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
