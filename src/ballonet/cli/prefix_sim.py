"""`python -m ballonet prefix-sim`: how often a prefix cache of some size has what recorded requests begin with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from . import arguments
from .output import show_rows, tell


def add(commands: Any) -> None:
    """Describes the command."""
    text = "how often a prefix cache of some size has what recorded requests begin with"
    parser = arguments.command(commands, "prefix-sim", _prefix_sim, text)
    parser.description = f"""{parser.description} Requests come in their order; each finds a leading run of its blocks,
        and then all of them are stored. In JSON: requests: how many there are; blocks: of all of them; hit_blocks:
        those that were found; hit_rate: their share; distinct_blocks: what a cache that evicts nothing stores;
        infinite_hit_rate: the share that it finds; capacity and policy: as given."""
    parser.add_argument(
        "trace", metavar="TRACE.jsonl", help="a line per request, with the keys of its blocks as hash_ids"
    )
    parser.add_argument(
        "--blocks", metavar="N", type=arguments.whole(1, 2**31 - 1), required=True, help="that it holds"
    )
    parser.add_argument(
        "--policy",
        choices=("odds", "lru"),
        default="odds",
        help="what goes first: what is least likely to be asked for again, as in ballonet, or least recently used",
    )
    parser.add_argument(
        "--curve", metavar="FILE", help="draw the hit rate of both against the size: .svg or .png (needs matplotlib)"
    )
    arguments.add_json(parser, piped=True)


def _prefix_sim(args: argparse.Namespace) -> None:
    from ..allocator.display import steps
    from ..offload.policy import prefix_sim
    from ..offload.record import prefix_trace
    from ..offload.timeline import curve

    if args.curve is not None:
        curve.check(args.curve)  # before anything takes its time
    trace = prefix_trace.read(args.trace)
    facts = prefix_sim.facts(trace, args.blocks, args.policy)
    if args.curve is not None:
        with steps("replaying", prefix_sim.steps_of_curve(trace, args.blocks)) as told:
            sizes, rates = prefix_sim.curve(trace, args.blocks, told)
        curve.draw(args.curve, sizes, rates, args.blocks, facts["infinite_hit_rate"])
    tell(facts, lambda facts: show_rows(_rows(facts)), as_json=args.json)


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "requests", f"{facts['requests']:,}, of {facts['blocks']:,} blocks"
    yield "blocks found", f"{facts['hit_blocks']:,}, hit rate {facts['hit_rate']:.4f}"
    yield "cache", f"{facts['capacity']:,} blocks, {facts['policy']}"
    yield "without a limit", f"{facts['distinct_blocks']:,} blocks, hit rate {facts['infinite_hit_rate']:.4f}"
