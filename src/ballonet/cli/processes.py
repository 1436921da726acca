"""Commands about running processes: `top` shows all of this user that run ballonet, live, `budget` shows or changes the
budget of one, `sleep` and `wake` have its models leave the device and come back.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..allocator.config import parse_size
from ..allocator.units import format_size
from . import arguments
from .arguments import show_rows, tell

if TYPE_CHECKING:
    from rich.console import Console

    from ..hooks.watch.processes import WatchedProcesses


def add_budget(commands: Any) -> None:
    """Describes the command."""
    parser = arguments.command(commands, "budget", _budget, "show or change the budget of a running process")
    parser.description = f"""{parser.description} In JSON: pid, budget and page_size in bytes, pages by owner,
        host_pages, spilled. The process gives the pages back to the driver before it answers, or refuses and changes
        nothing."""
    parser.add_argument(
        "pid", metavar="PID", nargs="?", type=arguments.whole(1, 2**31 - 1), help="of a process of yours"
    )
    parser.add_argument("size", metavar="SIZE", nargs="?", help="the new budget, such as 12GiB (default: only show)")
    parser.add_argument(
        "--shared",
        metavar="SIZE",
        nargs="?",
        const="",
        help="instead of a process: the budget that your processes share, or a new one (default: only show)",
    )
    parser.add_argument("--device", metavar="NAME", help="of the shared budget, where there are several: as shown")
    _add_timeout(parser, "to get pages back")
    arguments.add_json(parser, piped=True)


def _budget(args: argparse.Namespace) -> None:
    from ..allocator.control import ask

    if (args.pid is None) == (args.shared is None):
        args.wrong("give the PID of a process, or --shared")
    if args.shared is not None:
        from ..hooks.device.shared_total import change_total

        total = parse_size(args.shared, "the shared budget") if args.shared else None
        tell(change_total(args.device, total, args.timeout), _show_shared, as_json=args.json)
        return
    size = None if args.size is None else parse_size(args.size)
    tell(ask(args.pid, size, args.timeout), lambda facts: show_rows(_budget_rows(facts)), as_json=args.json)


def add_sleep(commands: Any) -> None:
    """Describes the command."""
    parser = arguments.command(commands, "sleep", _sleep, "have models of a running process leave the device")
    parser.description = f"""{parser.description} Weights, caches and all else go to the host, until the model is used
        again or `ballonet wake`. Nothing is lost. Refused, and nothing changes, where the host has too little room or
        requests do not end. In JSON: as of `budget`, afterwards."""
    _add_named(parser)
    parser.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="1: all to the host; 2: what the weights' file has is read from there again, the rest to the host "
        "(default: 1)",
    )
    _add_timeout(parser, "for requests that run")


def _sleep(args: argparse.Namespace) -> None:
    _act(args, "sleep", model=args.model, level=args.level, timeout=args.timeout)


def add_wake(commands: Any) -> None:
    """Describes the command."""
    parser = arguments.command(commands, "wake", _wake, "bring models of a running process back to the device")
    _add_named(parser)
    _add_timeout(parser, "for others to give pages")


def _wake(args: argparse.Namespace) -> None:
    _act(args, "wake", model=args.model)


def _act(args: argparse.Namespace, name: str, **given: Any) -> None:
    from ..allocator.control import ask_to_act

    facts = ask_to_act(args.pid, name, given, args.timeout)
    tell(facts, lambda facts: show_rows(_budget_rows(facts)), as_json=args.json)


def _add_named(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", metavar="PID", type=arguments.whole(1, 2**31 - 1), help="of a process of yours")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="by its name in `ballonet top` (default: all)")
    arguments.add_json(parser, piped=True)


def _add_timeout(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--timeout", metavar="TIME", type=arguments.seconds, default=60.0, help=f"{what} (default: 60s)"
    )


def _show_shared(facts: list[dict[str, Any]]) -> None:
    for device in facts:
        show_rows(_shared_rows(device))


def _shared_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "device", facts["device"]
    yield "shared", f"{format_size(facts['total'] or 0)}, {format_size(facts['free'])} of it free"
    for part in facts["parts"]:
        used = "it does not answer" if part["used"] is None else f"uses {format_size(part['used'])}"
        yield f"process {part['pid']}", f"{format_size(part['part'])}, {used}, keeps {format_size(part['floor'])}"


def _budget_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    page = facts["page_size"]

    def pages(count: int) -> str:
        return f"{count:,} pages ({format_size(count * page)})"

    yield "process", f"{facts['pid']}"
    yield "budget", f"{format_size(facts['budget'])} in pages of {format_size(page)}"
    for owner, count in facts["pages"].items():
        yield owner.replace("_", " "), pages(count)
    yield "on the host", f"{pages(facts['host_pages'])}, {pages(facts['spilled'])} of them spilled"
    if facts["peer"]:
        yield f"on the {facts['peer']}", f"{pages(facts['peer_pages'])} of {format_size(facts['peer_budget'])}"


def add_top(commands: Any) -> None:
    """Describes the command."""
    text = "watch all processes of yours that run ballonet, live"
    parser = arguments.command(commands, "top", _top, text)
    parser.description = f"""{parser.description} Who owns the pages, copies per second, layers that stream, KV by tier
        and the last decisions. Keys: b changes the budget of a process, q quits. Where there is no terminal, a line of
        text for each process and look; with --once what matters of each."""
    parser.add_argument("pid", metavar="PID", nargs="?", type=arguments.whole(1, 2**31 - 1), help="only this process")
    parser.add_argument("--once", action="store_true", help="look once; with --every twice, for rates")
    parser.add_argument("--every", metavar="TIME", type=arguments.seconds, help="between looks (default: 1s)")
    arguments.add_verbose(parser, "empty places and the last decisions")
    arguments.add_json(parser)


def _top(args: argparse.Namespace) -> None:
    from rich.console import Console

    from ..hooks.watch import terminal
    from ..hooks.watch.processes import PERIOD, WatchedProcesses

    period = args.every or PERIOD
    processes = WatchedProcesses(args.pid)
    processes.look()
    console = Console(highlight=False, markup=False)
    try:
        if args.once:
            if args.every is not None:
                time.sleep(period)
                processes.look()
            _show_look(processes, console, args)
        elif not args.json and terminal.usable(console):
            terminal.Top(processes, console, period).run()
        else:
            while not processes.ended:
                _show_look(processes, console, args)
                time.sleep(period)
                processes.look()
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # whoever read has had enough; nothing more is to be flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_look(processes: WatchedProcesses, console: Console, args: argparse.Namespace) -> None:
    """Prints one look: as a line of JSON, as a terminal or a page shows it, or one of many as plain lines."""
    from ..hooks.watch.processes import plain_look
    from ..hooks.watch.view import NOBODY, as_text, fitted, lines_of, process

    seen, verbose = processes.seen, args.verbose
    if args.json:
        looks = [
            plain_look(shown.now, shown.before) | {"program": shown.program, "trouble": shown.trouble} for shown in seen
        ]
        print(json.dumps({"processes": looks}), flush=True)
    elif not args.once:
        print("\n".join([line for shown in seen for line in lines_of(shown, verbose=verbose)] or [NOBODY]), flush=True)
    elif not console.is_terminal:
        print(as_text(seen, verbose=verbose), flush=True)
    else:
        for shown in seen:
            console.print(process(shown, fitted(console.width), verbose=verbose))
        if not seen:
            console.print(NOBODY)
