"""`python -m ballonet top`: all processes of this user that run ballonet, live."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from ..offload.policy.tuning import DEFAULT
from . import arguments

if TYPE_CHECKING:
    from rich.console import Console

    from ..hooks.watch.processes import WatchedProcesses


def add(commands: Any) -> None:
    """Describes the command."""
    text = "watch all processes of yours that run ballonet, live"
    parser = arguments.command(commands, "top", _top, text)
    parser.description = f"""{parser.description} Who owns the pages, copies per second, layers that stream, KV by tier
        and the last decisions. Keys: b changes the budget of a process, q quits. Where there is no terminal, a line of
        text for each process and look."""
    parser.add_argument("pid", metavar="PID", nargs="?", type=arguments.whole(1, 2**31 - 1), help="only this process")
    parser.add_argument("--once", action="store_true", help="look once; with --every twice, for rates")
    parser.add_argument(
        "--every", metavar="TIME", type=arguments.seconds, help=f"between looks (default: {DEFAULT.watching.period:g}s)"
    )
    arguments.add_json(parser)


def _top(args: argparse.Namespace) -> None:
    from rich.console import Console

    from ..hooks.watch import terminal
    from ..hooks.watch.processes import WatchedProcesses

    tuning = DEFAULT.watching
    period = args.every or tuning.period
    processes = WatchedProcesses(args.pid)
    processes.look()
    console = Console(highlight=False, markup=False)
    try:
        if args.once:
            if args.every is not None:
                time.sleep(period)
                processes.look()
            _show(processes, console, as_json=args.json)
        elif not args.json and terminal.usable(console):
            terminal.Top(processes, console, period, tuning).run()
        else:
            while not processes.ended:
                _show(processes, console, as_json=args.json, plain=True)
                time.sleep(period)
                processes.look()
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read has had enough; nothing more is to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(processes: WatchedProcesses, console: Console, *, as_json: bool, plain: bool = False) -> None:
    """Prints one look: as a line of JSON, as plain lines, or as a terminal shows it."""
    from ..hooks.watch.processes import plain_look
    from ..hooks.watch.view import NOBODY, lines_of, process

    seen = processes.seen
    if as_json:
        looks = [
            plain_look(shown.now, shown.before) | {"program": shown.program, "trouble": shown.trouble} for shown in seen
        ]
        print(json.dumps({"processes": looks}), flush=True)
    elif plain or not console.is_terminal:
        print("\n".join([line for shown in seen for line in lines_of(shown)] or [NOBODY]), flush=True)
    else:
        for watched in seen:
            console.print(process(watched))
        if not seen:
            console.print(NOBODY)
