"""`python -m ballonet budget`: the budget of a running process, shown or changed from outside."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..allocator.config import parse_size
from ..allocator.units import format_size
from . import arguments
from .output import show_rows, tell


def add(commands: Any) -> None:
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
    parser.add_argument(
        "--timeout", metavar="TIME", type=arguments.seconds, default=60.0, help="to get pages back (default: 60s)"
    )
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
    tell(ask(args.pid, size, args.timeout), lambda facts: show_rows(_rows(facts)), as_json=args.json)


def _show_shared(facts: list[dict[str, Any]]) -> None:
    for device in facts:
        show_rows(_shared(device))


def _shared(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "device", facts["device"]
    yield "shared", f"{format_size(facts['total'] or 0)}, {format_size(facts['free'])} of it free"
    for part in facts["parts"]:
        used = "it does not answer" if part["used"] is None else f"uses {format_size(part['used'])}"
        yield f"process {part['pid']}", f"{format_size(part['part'])}, {used}, keeps {format_size(part['floor'])}"


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    page = facts["page_size"]

    def pages(count: int) -> str:
        return f"{count:,} pages ({format_size(count * page)})"

    yield "process", f"{facts['pid']}"
    yield "budget", f"{format_size(facts['budget'])} in pages of {format_size(page)}"
    for owner, count in facts["pages"].items():
        yield owner, pages(count)
    yield "on the host", f"{pages(facts['host_pages'])}, {pages(facts['spilled'])} of them spilled"
    if facts["peer"]:
        yield f"on the {facts['peer']}", f"{pages(facts['peer_pages'])} of {format_size(facts['peer_budget'])}"
