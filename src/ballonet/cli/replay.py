"""`python -m ballonet replay`: how much memory a recorded trace of allocations needs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..allocator.config import Config
from ..allocator.units import format_size
from . import arguments
from .output import show_rows, tell


def add(commands: Any) -> None:
    """Describes the command."""
    parser = arguments.command(commands, "replay", _replay, "drive the allocator with a recorded trace")
    parser.description = (
        f"{parser.description} In JSON: peak_live, peak_physical (bytes), ops, ns_per_op and driver_calls."
    )
    arguments.add_sizes(parser)
    parser.add_argument("trace", metavar="TRACE.csv", help="columns time_us,op,id,size,stream; ops alloc and free")
    arguments.add_json(parser, piped=True)


def _replay(args: argparse.Namespace) -> None:
    from ..allocator.replay import replay

    facts = replay(args.trace, Config.from_env().merge(budget=args.budget, page_size=args.page_size))
    tell(facts, lambda facts: show_rows(_rows(facts)), as_json=args.json)


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    live, physical = facts["peak_live"], facts["peak_physical"]
    yield "peak of what was asked for", format_size(live)
    yield "peak of pages", format_size(physical) + (f", {physical / live:.3f} times that" if live else "")
    yield "operations", f"{facts['ops']:,}, {facts['ns_per_op']:.4g} ns each"
    yield "driver calls", f"{facts['driver_calls']:,}"
