"""Commands that say what is so: `info` and `preflight` of this machine, `profile` of a model on it, `replay` of a
recorded trace of allocations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from ..allocator.config import Config
from ..allocator.units import format_size
from . import arguments
from .arguments import show_rows, tell


def add_info(commands: Any) -> None:
    """Describes the command."""
    text = "what works on this machine or of a model's KV cache, what not, and why"
    parser = arguments.command(commands, "info", _info, text)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a name on the hub or a type such as llama")
    parser.add_argument(
        "--batch", metavar="N", type=arguments.count, default=1, help="sequences side by side (default: 1)"
    )
    parser.add_argument(
        "--tokens", metavar="N", type=arguments.count, default=4096, help="tokens of each (default: 4096)"
    )
    arguments.add_json(parser)


def _info(args: argparse.Namespace) -> None:
    if args.model is None:
        from ..allocator import info

        tell(info.gather(Config.from_env(), __version__), info.show, as_json=args.json)
    else:
        from ..hooks.programs import model_info

        facts = model_info.gather(args.model, Config.from_env(), args.batch, args.tokens)
        tell(facts, model_info.show, as_json=args.json)


def add_preflight(commands: Any) -> None:
    """Describes the command."""
    text = "try what ballonet assumes of the device and its driver; a minute or two"
    parser = arguments.command(commands, "preflight", _preflight, text)
    parser.description = f"""{parser.description} Whatever fails is told, and does not end the others. What differs is
        gone round where that can be: `install()` keeps to what was chosen, on this device and driver, until the next
        preflight."""
    parser.add_argument("--out", metavar="FILE", help="and write it there")
    parser.add_argument("--no-save", action="store_true", help="choose nothing: install() stays as it is")
    arguments.add_json(parser)


def _preflight(args: argparse.Namespace) -> None:
    from ..allocator import device_choice, findings
    from ..allocator.config import cache_dir
    from ..allocator.preflight import run
    from ..allocator.trusted import TrustedFolder
    from ..allocator.units import steps

    config = Config.from_env()
    target = device_choice.choose(config)
    if not args.no_save:
        TrustedFolder(cache_dir(config))  # before anything takes its time
    with steps("asking", len(run.PROBES)) as told:
        result = run.preflight(target, begun=told)
    kept = None if args.no_save else findings.save(cache_dir(config), result["key"], result)
    if args.out is not None:
        run.write(result, Path(args.out))
    tell(result, lambda report: run.show(report, kept), as_json=args.json)


def add_profile(commands: Any) -> None:
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


def add_replay(commands: Any) -> None:
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
    tell(facts, lambda facts: show_rows(_replay_rows(facts)), as_json=args.json)


def _replay_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    live, physical = facts["peak_live"], facts["peak_physical"]
    yield "peak of what was asked for", format_size(live)
    yield "peak of pages", format_size(physical) + (f", {physical / live:.3f} times that" if live else "")
    yield "operations", f"{facts['ops']:,}, {facts['ns_per_op']:.4g} ns each"
    yield "driver calls", f"{facts['driver_calls']:,}"
