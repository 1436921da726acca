"""Commands that say what is so: `info` and `preflight` of this machine, `profile` of a model on it, `replay` of a
recorded trace of allocations.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..allocator.config import Config
from ..allocator.units import format_size
from . import arguments
from .arguments import tell


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
    arguments.add_verbose(parser, "all that was checked")
    arguments.add_json(parser)


def _info(args: argparse.Namespace) -> None:
    if args.model is None:
        from ..allocator import info

        facts = info.gather(Config.from_env(), __version__)
        tell(facts, lambda facts: info.show(facts, verbose=args.verbose), as_json=args.json)
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
    arguments.add_verbose(parser, "each fact by its name")
    arguments.add_json(parser)


def _preflight(args: argparse.Namespace) -> None:
    from ..allocator import device_choice, findings
    from ..allocator.config import cache_dir
    from ..allocator.preflight import report, run
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
    tell(result, lambda result: report.show(result, kept, verbose=args.verbose), as_json=args.json)


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
    arguments.add_verbose(parser, "how long layers take to copy, and each size that was left out")
    arguments.add_json(parser)


def _profile(args: argparse.Namespace) -> None:
    from ..hooks import profile
    from ..hooks.programs import facts

    default = profile.Grid()
    grid = profile.Grid(args.batch or default.batch, args.length or default.length, args.seconds or default.seconds)
    asked = grid if args.batch or args.length or args.seconds else None
    gathered = facts.gather(args.model, args.budget, asked, args.ttft_slo, args.tpot_slo, force=args.force)
    tell(
        gathered,
        lambda gathered: facts.show(gathered, _outlook(args, gathered), verbose=args.verbose),
        as_json=args.json,
    )


def _outlook(args: argparse.Namespace, gathered: dict[str, Any]) -> str:
    """What the measurement means for the longest sequence that it has, and the answer behind it."""
    from ..allocator import devices
    from ..hooks.plan.planner import outlook

    longest = max(point["length"] for point in gathered["points"])
    return outlook(args.model, longest + 1, devices.require().snapshot()["budget"], gathered["page_size"])


def add_replay(commands: Any) -> None:
    """Describes the command."""
    text = "how much memory recorded allocations need, with torch's own allocator and with ballonet"
    parser = arguments.command(commands, "replay", _replay, text)
    parser.description = f"""{parser.description} Without a GPU, or where the trace is larger, pages take no memory.
        Figures of torch's allocator are its own, on a GPU, or those of the recorded program. In JSON: ops, older (of
        them, from before the recording), device, peak_live (what the trace allocates at once), page_size, budget,
        needed (bytes), fits, many_calls (larger pages take fewer), and allocators: name, source, peak, driver_calls
        and ns_per_op of each."""
    arguments.add_sizes(parser)
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a memory snapshot (torch.cuda.memory._dump_snapshot), a page of PyTorch's memory viewer, or CSV with "
        "time_us,op,id,size,stream and the ops alloc and free",
    )
    parser.add_argument("--picture", metavar="FILE", help="draw the memory of each: .svg or .png (needs matplotlib)")
    arguments.add_json(parser, piped=True)


def _replay(args: argparse.Namespace) -> None:
    from ..allocator.replay import replay

    if args.picture is not None:
        from ..offload.timeline import file

        file.check_picture(args.picture)  # before anything takes its time
    done = replay(args.trace, Config.from_env().merge(budget=args.budget, page_size=args.page_size))
    if args.picture is not None:
        series: dict[str, Sequence[int]] = {run.name: run.series for run in done.runs if run.series}
        file.draw_memory(args.picture, len(done.trace.ops), done.live, series)
    tell(done.facts(), _show_replay, as_json=args.json)


def _show_replay(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("at most", "times", "driver calls", "each op"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("figures", overflow="fold")
    ops, live = facts["ops"], facts["peak_live"]
    table.add_row("allocated", format_size(live), "", "", "", "the trace itself")
    for run in facts["allocators"]:
        table.add_row(*_allocator_row(run, live, ops))
    older = f", the first {facts['older']:,} of them of blocks from before the recording" if facts["older"] else ""
    console.print(f"{ops:,} operations{older}")
    console.print(table)
    for line in _conclusion(facts):
        console.print(line, soft_wrap=True)


def _allocator_row(run: dict[str, Any], live: int, ops: int) -> tuple[str, ...]:
    if run["peak"] is None:
        return run["name"], "", "", "", "", run["source"]
    calls = "" if run["driver_calls"] is None else f"{run['driver_calls']:,} ({run['driver_calls'] / max(1, ops):.2g})"
    spent = "" if run["ns_per_op"] is None else f"{run['ns_per_op'] / 1e3:.3g} us"
    return run["name"], format_size(run["peak"]), f"{run['peak'] / max(1, live):.3f}", calls, spent, run["source"]


def _conclusion(facts: dict[str, Any]) -> Iterator[str]:
    needed, page = format_size(facts["needed"]), format_size(facts["page_size"])
    if facts["fits"]:
        fits = "" if facts["budget"] is None else f", and fits into a budget of {format_size(facts['budget'])}"
        yield f"With ballonet it needs {needed} in pages of {page}{fits}."
    else:
        yield (
            f"It does not fit into {format_size(facts['budget'])}: with ballonet it needs {needed} in pages of {page} "
            f"(--budget {facts['needed']}), of which {format_size(facts['peak_live'])} are allocated at once."
        )
    for run in facts["allocators"]:
        if run["name"] != "ballonet" and run["peak"] is not None:
            less = run["peak"] - facts["needed"]
            yield f"That is {format_size(abs(less))} {'less' if less >= 0 else 'more'} than {run['name']} had."
    if facts["many_calls"]:
        yield f"Larger pages take fewer calls of the driver: --page-size {format_size(4 * facts['page_size'])}."
