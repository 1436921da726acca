"""`python -m ballonet whatif`: recorded requests under a clock that a cost model moves, with the scheduler as it is."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..allocator.config import parse_host_budget, parse_size
from ..allocator.errors import ManageError
from . import arguments


def add(commands: Any) -> None:
    """Describes the command."""
    text = "what recorded requests would meet on a machine: time simulated, pages real"
    parser = arguments.command(commands, "whatif", _whatif, text)
    parser.description = f"""{parser.description} The requests go through the scheduler, the admission and the cache of
        `serve`, with pages of the stand-in; a step takes what a cost model says, and nothing is computed. Prints a line
        of JSON for each policy, with the keys of `load`, and policy, steps, kv_bytes (at the most). `stock` is
        transformers' own cache and scheduler; `full` and `fast` are the values of --batches."""
    parser.add_argument("trace", metavar="TRACE", type=Path, help="a file of requests, as for `load`")
    parser.add_argument("--model", required=True, help="a folder or a name: its configuration, no weights")
    parser.add_argument(
        "--policy", default="stock,full,fast", metavar="P,P,...", help="of these (default: %(default)s)"
    )
    parser.add_argument(
        "--costs",
        metavar="FILE",
        type=Path,
        help="what steps take, as JSON; where there is no such file the model is measured, and it is written",
    )
    parser.add_argument("--budget", required=True, metavar="SIZE", help="device memory, weights included")
    parser.add_argument("--host-budget", default="1GiB", metavar="SIZE", help="host memory (default: %(default)s)")
    parser.add_argument("--page-size", default="2MiB", metavar="SIZE", help="of a page (default: %(default)s)")
    parser.add_argument("--block-size", metavar="N", type=arguments.count, help="tokens of a block of KV")
    parser.add_argument("--batch-tokens", metavar="N", type=arguments.count, help="new tokens of a batch at most")
    arguments.add_requests(parser)


def _whatif(args: argparse.Namespace) -> None:
    from transformers import AutoConfig

    from ..hooks.server import whatif
    from ..hooks.server.arrivals import lengthened, read

    policies = [each.strip() for each in args.policy.split(",")]
    if unknown := sorted(set(policies) - set(whatif.POLICIES)):
        args.wrong(f"no policy {', '.join(unknown)}: there are {', '.join(whatif.POLICIES)}")
    sizes = {name: parse_size(vars(args)[name], name) for name in ("budget", "page_size")}
    sizes["host_budget"] = parse_host_budget(args.host_budget)
    arrivals = read(args.trace, limit=args.limit, rate=float(args.rate), scale=float(args.scale))
    arrivals = lengthened(arrivals, float(args.lengths))
    given = {"page_size": args.block_size, "max_batch_tokens": args.batch_tokens}
    batching = {name: value for name, value in given.items() if value is not None}
    try:
        config = AutoConfig.from_pretrained(args.model)
    except (OSError, ValueError) as error:
        raise ManageError(f"{args.model} has no configuration that transformers can read: {error}") from None
    if args.costs is not None and args.costs.exists():
        costs = whatif.costs_of(args.costs)
    else:
        _say(f"measuring {args.model}")
        costs, wrong = whatif.measured(args.model, arrivals, batching=batching, **sizes)
        _say(f"a step takes {asdict(costs)} seconds; half of those measured are within {wrong:.1%} of that")
        if args.costs is not None:
            args.costs.write_text(json.dumps(asdict(costs)) + "\n")
    machine = whatif.Machine(weights=whatif.weights_of(config), costs=costs, **sizes)
    if machine.weights >= machine.budget:
        raise ManageError(f"the weights have {machine.weights} bytes, and the budget is {machine.budget}: give more")

    def note(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {len(arrivals)} requests", end="", file=sys.stderr)

    for policy in policies:
        config = AutoConfig.from_pretrained(args.model)
        slos = args.ttft_slo, args.tpot_slo
        found = whatif.run(arrivals, config, machine, policy, batching, slos, note)
        print(json.dumps(found), flush=True)


def _say(line: str) -> None:
    print(f"ballonet: {line}", file=sys.stderr, flush=True)
