"""`python -m ballonet simulate`: what streaming layers from the host would cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from . import arguments
from .output import show_rows, tell


def add(commands: Any) -> None:
    """Describes the command."""
    parser = arguments.command(commands, "simulate", _simulate, "what streaming layers from the host would cost")
    parser.description = f"""{parser.description} Times are in units of what a layer computes. In JSON: time_in_layers:
        a pass over all layers, once passes repeat, if a copy may use whichever slot is free; closed_form: the same by
        the formulas of Oneiros and Select-N, null where the streamed layers are not evenly spaced; stall: how much of
        it compute waits for copies; freed: layers whose memory serves something else; link_busy: the share of the time
        in which something is copied; time_with_fixed_slots: a pass if each streamed layer has one slot for good, as in
        ballonet, where addresses do not change."""
    parser.add_argument(
        "--layers", metavar="N", type=arguments.whole(1, 1000), required=True, help="of the model, all alike"
    )
    parser.add_argument(
        "--ratio",
        metavar="R",
        type=arguments.ratio,
        required=True,
        help="time to copy a layer over the time that it computes",
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--streamed", metavar="M", type=arguments.whole(0, 1000), help="so many layers, evenly spaced")
    which.add_argument("--at", metavar="K,K,...", type=arguments.places, help="these layers, ascending, counted from 0")
    parser.add_argument(
        "--slots",
        metavar="B",
        type=arguments.whole(1, 64),
        default=2,
        help="layers that streamed ones take turns in (default: 2)",
    )
    arguments.add_json(parser, piped=True)


def _simulate(args: argparse.Namespace) -> None:
    from ..offload.policy import schedule, whatif

    try:
        at = schedule.evenly(args.layers, args.streamed) if args.at is None else args.at
        facts = whatif.facts(args.layers, args.ratio, at, args.slots)
    except ValueError as error:
        args.wrong(str(error))
    tell(facts, lambda facts: show_rows(_rows(facts)), as_json=args.json)


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    formula = facts["closed_form"]
    yield "layers", f"{facts['layers']}, copied in {facts['ratio']:.6g} times what they compute"
    streamed = ", ".join(map(str, facts["streamed"])) or "none"
    yield "streamed", f"{len(facts['streamed'])} through {facts['slots']} slots: {streamed}"
    yield "layers whose memory is freed", f"{facts['freed']}"
    yield "time of a pass", f"{facts['time_in_layers']:.6g} (a layer computes in 1, all of them in {facts['layers']})"
    yield "by the formulas", "none: the layers are not evenly spaced" if formula is None else f"{formula:.6g}"
    yield "of it, waits for copies", f"{facts['stall']:.6g}"
    yield "with one slot per layer for good", f"{facts['time_with_fixed_slots']:.6g}"
    yield "link in use", f"{facts['link_busy']:.1%}"
