"""`python -m ballonet plan`: will it fit, how fast, what binds, and what would help, from configurations alone."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..allocator.errors import ConfigError
from . import arguments
from .output import tell


def add(commands: Any) -> None:
    """Describes the command."""
    text = "will models fit, how fast will they be, what binds and what would help; no weights are loaded"
    parser = arguments.command(commands, "plan", _plan, text)
    parser.description = f"""{parser.description} Decisions are those of a run. Pages are those at the last token;
        the first token is that of the whole prompt, the time per token that of the last one. What `profile` has
        measured on this machine counts, else a table of devices. help(ballonet.plan) tells the keys of --json."""
    parser.add_argument("model", metavar="MODEL", nargs="+", help="a folder, a name on the hub or a type such as llama")
    parser.add_argument(
        "--context", metavar="N", type=tokens, required=True, help="tokens that each sequence holds at its end, 32k"
    )
    parser.add_argument(
        "--prompt", metavar="N", type=tokens, help="tokens of them that are given (default: all but one)"
    )
    parser.add_argument("--batch", metavar="N", type=arguments.count, default=1, help="sequences at once (default: 1)")
    arguments.add_sizes(parser)
    parser.add_argument(
        "--host-budget", metavar="SIZE", help="host pages for what leaves the device (BALLONET_HOST_BUDGET)"
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME|FILE",
        help="h100, h200, a100, l40s, l4, a10, t4, rtx4090, or JSON with memory, bandwidth, flops and link "
        "(default: this machine)",
    )
    parser.add_argument("--slo", metavar="TIME", type=arguments.seconds, help="that a token may take, such as 80ms")
    parser.add_argument(
        "--curve", metavar="FILE", help="draw the time per token against the budget: .svg or .png (needs matplotlib)"
    )
    arguments.add_json(parser)


def tokens(text: str) -> int:
    """Tokens from 1 on: `4096`, or `32k` for 32 times 1,024."""
    match = re.fullmatch(r"([0-9]+)([kKmM]?)", text)
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens such as 4096 or 32k")
    return int(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]


def _plan(args: argparse.Namespace) -> None:
    from ..hooks.plan.planner import Planner, show
    from ..offload.policy.tuning import DEFAULT
    from ..offload.timeline import picture

    if args.curve is not None:
        picture.check(args.curve)  # before anything takes its time
    planner = Planner(
        args.model,
        args.context,
        args.batch,
        args.prompt,
        args.budget,
        args.page_size,
        args.gpu,
        args.slo,
        args.host_budget,
    )
    facts = planner.facts()
    if args.curve is not None:
        points = [(size, time) for size, time in planner.curve(DEFAULT.planning.budgets) if time is not None]
        if not points:
            raise ConfigError(
                "there is no curve to draw, as nobody knows what an iteration takes here: give --gpu, or measure it "
                "with python -m ballonet profile"
            )
        title = f"{', '.join(args.model)}: {args.batch} x {args.context:,} tokens"
        picture.draw_curve(args.curve, points, title, facts["budget"], args.slo)
    tell(facts, show, as_json=args.json)
