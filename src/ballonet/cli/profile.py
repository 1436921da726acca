"""`python -m ballonet profile`: what a model's iterations take, and how fast the host link is."""

from __future__ import annotations

import argparse
from typing import Any

from . import arguments
from .output import tell


def add(commands: Any) -> None:
    """Describes the command."""
    text = (
        "measure what a model's iterations take and how fast the host link is, for SLOs and intervals; kept in a file"
    )
    parser = arguments.command(commands, "profile", _profile, text)
    parser.description = f"""{parser.description} What was measured before for the same model on the same machine is
        read from its file; a change of device, driver, link or version has it measured anew."""
    parser.add_argument("model", metavar="MODEL", help="a folder or a name on the hub")
    parser.add_argument("--budget", metavar="SIZE", help="device pages, such as 24GiB (BALLONET_BUDGET)")
    parser.add_argument(
        "--batch", metavar="N", type=arguments.count, help="sequences side by side, at most (default: 8)"
    )
    parser.add_argument("--length", metavar="N", type=arguments.count, help="tokens of each, at most (default: 2048)")
    parser.add_argument(
        "--seconds", metavar="S", type=arguments.count, help="when to end, sizes being left out (default: 60)"
    )
    parser.add_argument(
        "--tpot-slo", metavar="TIME", type=arguments.seconds, help="show the intervals for this time per token, 80ms"
    )
    parser.add_argument(
        "--ttft-slo", metavar="TIME", type=arguments.seconds, help="and for this time to the first token"
    )
    parser.add_argument("--force", action="store_true", help="measure everything anew")
    arguments.add_json(parser)


def _profile(args: argparse.Namespace) -> None:
    from ..hooks import profile
    from ..hooks.programs import facts

    default = profile.Grid()
    grid = profile.Grid(args.batch or default.batch, args.length or default.length, args.seconds or default.seconds)
    asked = grid if args.batch or args.length or args.seconds else None
    gathered = facts.gather(args.model, args.budget, asked, args.ttft_slo, args.tpot_slo, force=args.force)
    tell(gathered, facts.show, as_json=args.json)
