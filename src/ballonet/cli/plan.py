"""Commands about runs before they are: `plan`, will it fit, how fast, what binds, and what would help, from
configurations alone; `whatif`, recorded requests under a clock that a cost model moves, with the scheduler as it is.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..allocator.config import parse_host_budget, parse_size
from ..allocator.errors import BallonetError, ConfigError, ManageError, PoolExhausted
from . import arguments
from .arguments import estimating, noting, say, tell


def add_plan(commands: Any) -> None:
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
    from ..offload.timeline import file

    if args.curve is not None:
        file.check_picture(args.curve)  # before anything takes its time
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
        points = [(size, time) for size, time in planner.curve(40) if time is not None]
        if not points:
            raise ConfigError(
                "there is no curve to draw, as nobody knows what an iteration takes here: give --gpu, or measure it "
                "with ballonet profile"
            )
        title = f"{', '.join(args.model)}: {args.batch} x {args.context:,} tokens"
        file.draw_curve(args.curve, points, title, facts["budget"], args.slo)
    tell(facts, show, as_json=args.json)


def add_whatif(commands: Any) -> None:
    """Describes the command."""
    text = "what recorded requests would meet on a machine: time simulated, pages real"
    parser = arguments.command(commands, "whatif", _whatif, text)
    parser.description = f"""{parser.description} The requests go through the scheduler, the admission, the cache and
        the manager of `serve`, with pages of the stand-in; a step takes what a cost model says, and nothing is
        computed. Prints a line of JSON for each policy, with the keys of `load`, and policy, steps, kv_bytes (at the
        most), stalled and moved (seconds that steps waited), swaps, and models, where there are several; a policy that
        does not fit has policy and error alone. Exits with 1 where no policy answers a request. Policies: stock, split
        (of several models, each with an even part of the budget), pie (the same, and KV on the host as far as that
        hides) and swap (one of them at a time computes) are transformers' own cache and scheduler; fast is ballonet;
        unlimited is ballonet with memory for everything; full is --batches full, and the others are fast with a part
        switched off: recompute (nothing goes to the host), no-turns, no-return, no-once (prices without the way there
        and back), one-slot, two-slots, weights-fixed, activations-apart, no-buffer, fixed-buffer. With --replicas
        several replicas of one model are simulated instead, without pages;
        policies, by what is done when their KV memory is full: queue, recompute, swap, migrate, drop. Then a line has
        policy, replicas, drops, restores, bytes_moved and bubble (waiting in pipelines), and --costs FILE may also have
        alpha, beta and gamma of chunks, or a list of batches to which they are fitted (chunks: pairs of tokens before
        and new ones; seconds). --faults FILE has a line for each fault, such as {{"at": 2.5, "fault": "killed",
        "member": 1}}, at seconds after the first request; faults: killed, hung (seconds: then it goes on), link
        (other), refused (the next epoch; why: PAGES or HOST_MEMORY), file (of its weights has changed), damaged (KV),
        left (request), joined, supervisor, shutdown."""
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, nargs="+", help="a file of requests, as for `load`, or one for each model"
    )
    parser.add_argument(
        "--model", required=True, action="append", help="a folder or a name; its configuration is enough; repeat it"
    )
    parser.add_argument(
        "--turns", metavar="TIME", type=arguments.seconds, help="requests go to one model for so long, then to the next"
    )
    parser.add_argument(
        "--policy",
        metavar="P,P,...",
        help="of those above (default: stock,full,fast or split,swap,fast; with --replicas all of its own)",
    )
    parser.add_argument(
        "--costs",
        metavar="FILE",
        type=Path,
        action="append",
        help="what steps take, as JSON, of each model or of all; where there is no such file the model is measured "
        "on this machine, with random weights if it has none, and it is written",
    )
    parser.add_argument("--budget", required=True, metavar="SIZE", help="device memory, weights included")
    parser.add_argument("--host-budget", default="1GiB", metavar="SIZE", help="host memory (default: %(default)s)")
    parser.add_argument("--page-size", default="2MiB", metavar="SIZE", help="of a page (default: %(default)s)")
    parser.add_argument("--link", default="25GB", metavar="SIZE", help="bytes per second to the host (%(default)s)")
    parser.add_argument(
        "--replicas", metavar="N", type=arguments.count, help="replicas that drop parameters, or do not"
    )
    parser.add_argument(
        "--network",
        default="25GB",
        metavar="SIZE",
        help="bytes per second that a replica sends to others (%(default)s)",
    )
    parser.add_argument(
        "--shrink", metavar="N", type=arguments.count, default=1, help="a byte here stands for N of that machine"
    )
    parser.add_argument("--block-size", metavar="N", type=arguments.count, help="tokens of a block of KV")
    parser.add_argument("--batch-tokens", metavar="N", type=arguments.count, help="new tokens of a batch at most")
    arguments.add_requests(parser)
    parser.add_argument(
        "--faults", metavar="FILE", type=Path, help="of --replicas with policy drop: what goes wrong, as JSON lines"
    )
    parser.add_argument(
        "--log", metavar="FILE", type=Path, help="of the same: what the controller is told and answers, JSON lines"
    )
    parser.add_argument("--ask", action="store_true", help="each request asks for the SLOs, too")
    arguments.add_only_json(parser)


def _whatif(args: argparse.Namespace) -> None:
    if args.replicas is None and (args.faults is not None or args.log is not None):
        args.wrong("--faults and --log are of --replicas")
    (_pages if args.replicas is None else _replicas)(args)


def _replicas(args: argparse.Namespace) -> None:
    """Several replicas of one model, by policy."""
    try:
        from ..hooks.replicas.recording import DecisionFile
        from ..hooks.virtual_replicas.faults import check_faults, read_faults
        from ..hooks.virtual_replicas.fleet import Shape, VirtualFleet
        from ..hooks.virtual_replicas.run import POLICIES, checked, run
    except ModuleNotFoundError as error:
        raise ManageError(f"replicas need {error.name}: pip install 'ballonet[replicas]'") from error

    if len(args.model) > 1 or len(args.trace) > 1 or args.ask or args.turns is not None or args.shrink > 1:
        args.wrong("--replicas takes one model and one trace, and no --turns, --ask and --shrink")
    only_drop = args.faults is not None or args.log is not None
    every = ["drop"] if only_drop else list(POLICIES)
    policies = [policy.strip() for policy in args.policy.split(",")] if args.policy else every
    checked(policies)
    if only_drop and policies != ["drop"]:
        args.wrong("--faults and --log are of one policy, drop: the others have no controller")
    faults = () if args.faults is None else read_faults(args.faults)
    (arrivals,) = _arrivals(args, 1)
    check_faults(faults, args.replicas, len(arrivals))
    given = {"block": args.block_size, "batch": args.batch_tokens}
    fleet = VirtualFleet(
        Shape.of(_config(args.model[0])),
        args.replicas,
        parse_size(args.budget, "budget"),
        parse_size(args.page_size, "page_size"),
        parse_host_budget(args.host_budget),
        parse_size(args.link, "link"),
        parse_size(args.network, "network"),
        **{name: value for name, value in given.items() if value is not None},
    )
    cost = _chunk_cost(args, arrivals)
    slos = (args.ttft_slo, args.tpot_slo)
    file = None if args.log is None else DecisionFile(args.log, say)
    log: Callable[[Any], object] = _ignore if file is None else file
    try:
        _print_policies(
            policies, lambda policy: run(fleet, cost, arrivals, policy, slos, noting(len(arrivals)), log, faults)
        )
    finally:
        if file is not None:
            file.close()


def _ignore(entry: object) -> None:
    """Without --log."""


def _chunk_cost(args: argparse.Namespace, arrivals: Any) -> Any:
    """What chunks take: from its file, or made of what was measured."""
    from ..hooks.virtual_replicas.costs import of_parts, read_costs

    path = None if args.costs is None else args.costs[0]
    if path is None or not path.exists():
        return of_parts(_costs(args, 0, arrivals, {}))
    cost, fitted = read_costs(path)
    if fitted is not None:
        say(f"fitted {asdict(cost)}; batches that were held out differ by {fitted.error:.1%} on average")
    return cost


def _pages(args: argparse.Namespace) -> None:
    """One device and its pages, by policy."""
    from ..hooks.plan.machine import Machine, Tenant, checked
    from ..hooks.plan.run import default, named, run

    models: list[str] = args.model
    policies = [text.strip() for text in args.policy.split(",")] if args.policy else list(default(len(models)))
    for choice in policies:
        named(choice, len(models))
    if len(args.trace) not in (1, len(models)) or len(args.costs or [None]) not in (1, len(models)):
        args.wrong(f"give one trace and one file of costs, or one for each of the {len(models)} models")
    if args.turns is not None and (len(models) == 1 or len(args.trace) > 1):
        args.wrong("--turns deals one trace out to several models")
    if args.ask and args.ttft_slo is None and args.tpot_slo is None:
        args.wrong("--ask needs --ttft-slo or --tpot-slo")
    sizes = {name: parse_size(vars(args)[name], name) for name in ("budget", "page_size")}
    sizes["host_budget"] = parse_host_budget(args.host_budget)
    machine = Machine(**sizes, link=parse_size(args.link, "link"), scale=args.shrink)
    given = {"page_size": args.block_size, "max_batch_tokens": args.batch_tokens}
    batching = {name: value for name, value in given.items() if value is not None}
    dealt = _arrivals(args, len(models))
    costs = [_costs(args, n, dealt[n], batching) for n in range(len(models))]
    named_apart = [name if models.count(name) == 1 else f"{name} ({n + 1})" for n, name in enumerate(models)]
    tenants = [Tenant(*parts) for parts in zip(named_apart, map(_config, models), costs, dealt, strict=True)]
    checked(tenants, machine)
    note = noting(sum(map(len, dealt)))
    slos = (args.ttft_slo, args.tpot_slo)
    _print_policies(policies, lambda policy: run(tenants, machine, policy, batching, slos, args.ask, note))


def _print_policies(policies: list[str], run: Callable[[str], dict[str, Any]]) -> None:
    """Prints what each policy would do, or why it does not fit. ManageError where no request was answered by any."""
    import torch

    answered = False
    for policy in policies:
        try:
            row = run(policy)
        except (BallonetError, PoolExhausted, torch.OutOfMemoryError) as error:
            row = {"policy": policy, "error": str(error).removeprefix("ballonet: ")}
        answered |= row.get("failed", 0) < row.get("requests", 0)
        print(json.dumps(row), flush=True)
    if not answered:
        raise ManageError(f"no request is answered by {', '.join(policies)}: see the lines above")


def _arrivals(args: argparse.Namespace, models: int) -> list[Any]:
    """The requests of each model."""
    from ..hooks.plan.machine import dealt
    from ..hooks.server.arrivals import lengthened

    traces = [lengthened(arguments.recorded(args, path), float(args.lengths)) for path in args.trace]
    return traces if len(traces) == models else dealt(traces[0], models, args.turns)


def _config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ManageError(f"{name} has no configuration that transformers can read: {error}") from None


def _costs(args: argparse.Namespace, number: int, arrivals: Any, batching: Any) -> Any:
    """What steps of a model take: from its file, or measured on this machine and written there."""
    from ..hooks.loading import has_weights
    from ..hooks.plan.machine import costs_of
    from ..hooks.plan.run import measure_steps

    name = args.model[number]
    _config(name)
    path = None if args.costs is None else args.costs[min(number, len(args.costs) - 1)]
    if path is not None and path.exists():
        return costs_of(path)
    say(f"measuring {name} on this machine" + ("" if has_weights(name) else ", with random weights, as it has none"))
    costs, wrong = measure_steps(name, arrivals, batching, estimating(f"measuring {name}"))
    say(f"a step takes {asdict(costs)} seconds; half of those measured are within {wrong:.1%} of that")
    if path is not None:
        path.write_text(json.dumps(asdict(costs)) + "\n")
    return costs
