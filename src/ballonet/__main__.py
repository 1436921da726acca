"""The command line: `python -m ballonet run | budget | replay | info | preflight | profile | simulate | prefix-sim`.

Exit codes: 0 done, 1 failed, 2 wrong usage or bad input. Those of `run` are the program's own once it has started.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from . import __version__
from .allocator.config import Config, parse_size, parse_time
from .allocator.errors import BallonetError, ConfigError, PoolExhausted, TraceError


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        args.command(args)
    except (BallonetError, PoolExhausted) as error:
        print(f"ballonet: {str(error).removeprefix('ballonet: ')}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | TraceError) else 1
    if args.command is _prepare:
        from .hooks.programs.run import run

        options = {"prefix_cache": True} if args.prefix_cache else {}
        options |= {"prefix_dir": args.prefix_dir} if args.prefix_dir is not None else {}
        run(
            args.program, args.args, module=args.module, code=args.code, **options
        )  # outside the try: what the program raises is its own
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from .hooks.programs.run import find

    if args.module and args.code:
        args.wrong("PROGRAM is either a module (-m) or code (-c)")
    if problem := find(args.program, module=args.module, code=args.code):
        print(f"{sys.executable}: {problem}", file=sys.stderr)
        sys.exit(1 if args.module else 2)  # as Python does
    from .offload.timeline import recorder

    if args.timeline is not None:
        recorder.check(args.timeline)  # before anything takes its time
    from .allocator.install import install

    install(budget=args.budget, page_size=args.page_size)
    if args.timeline is not None:
        recorder.until_exit(args.timeline)


def _budget(args: argparse.Namespace) -> None:
    from .allocator.control import ask

    print(json.dumps(ask(args.pid, None if args.size is None else parse_size(args.size), args.timeout)))


def _replay(args: argparse.Namespace) -> None:
    from .allocator.replay import replay

    print(json.dumps(replay(args.trace, Config.from_env().merge(budget=args.budget, page_size=args.page_size))))


def _info(args: argparse.Namespace) -> None:
    if args.model is None:
        from .allocator import info

        facts, show = info.gather(Config.from_env(), __version__), info.show
    else:
        from .hooks.programs import model_info

        facts = model_info.gather(args.model, Config.from_env(), args.batch, args.tokens)
        show = model_info.show
    if args.json:
        print(json.dumps(facts))
    else:
        show(facts)


def _preflight(args: argparse.Namespace) -> None:
    from pathlib import Path

    from .allocator import findings, runtime
    from .allocator.config import cache_dir
    from .allocator.display import steps
    from .allocator.preflight import run, show

    config = Config.from_env()
    target = runtime.choose(config)
    with steps("asking", len(run.PROBES)) as tell:
        found = run.preflight(target, begun=tell)
    kept = None if args.no_save else findings.save(cache_dir(config), found["key"], found)
    if args.out is not None:
        run.write(found, Path(args.out))
    if args.json:
        print(json.dumps(found))
    else:
        show.show(found, kept)


def _profile(args: argparse.Namespace) -> None:
    from .hooks import profile
    from .hooks.programs import facts as profile_facts

    default = profile.Grid()
    grid = profile.Grid(args.batch or default.batch, args.length or default.length, args.seconds or default.seconds)
    asked = grid if args.batch or args.length or args.seconds else None
    facts = profile_facts.gather(args.model, args.budget, asked, args.ttft_slo, args.tpot_slo, force=args.force)
    if args.json:
        print(json.dumps(facts))
    else:
        profile_facts.show(facts)


def _simulate(args: argparse.Namespace) -> None:
    from .offload.policy import schedule, whatif

    try:
        at = schedule.evenly(args.layers, args.streamed) if args.at is None else args.at
        facts = whatif.facts(args.layers, args.ratio, at, args.slots)
    except ValueError as error:
        args.wrong(str(error))
    print(json.dumps(facts))


def _prefix_sim(args: argparse.Namespace) -> None:
    from .allocator.display import steps
    from .offload.policy import prefix_sim
    from .offload.record import prefix_trace
    from .offload.timeline import curve

    if args.curve is not None:
        curve.check(args.curve)  # before anything takes its time
    trace = prefix_trace.read(args.trace)
    facts = prefix_sim.facts(trace, args.blocks, args.policy)
    if args.curve is not None:
        with steps("replaying", prefix_sim.steps_of_curve(trace, args.blocks)) as tell:
            sizes, rates = prefix_sim.curve(trace, args.blocks, tell)
        curve.draw(args.curve, sizes, rates, args.blocks, facts["infinite_hit_rate"])
    print(json.dumps(facts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ballonet",
        description="Weights, activations and KV cache of Hugging Face models in one elastic pool of pages.",
    )
    parser.add_argument("--version", action="version", version=f"ballonet {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = _command(commands, "run", _prepare, "run a script or module, every model of it managed at its first use")
    _add_sizes(run)
    run.add_argument(
        "--timeline",
        metavar="FILE",
        help="draw who owned which page and every decision, written when the program ends: .html, a page that needs "
        "nothing else; .json; .trace.json or .perfetto, a trace for Chrome and Perfetto",
    )
    run.add_argument(
        "--prefix-cache",
        action="store_true",
        help="keep what generate() computed for prompts that begin with it (default: BALLONET_PREFIX_CACHE, which may "
        "be a size such as 8GiB)",
    )
    run.add_argument(
        "--prefix-dir",
        metavar="FOLDER",
        help="and keep it for later runs too, in files of this folder (default: BALLONET_PREFIX_DIR; at most "
        "BALLONET_PREFIX_DIR_LIMIT, 16GiB)",
    )
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is the name of a module")
    run.add_argument("-c", dest="code", action="store_true", help="PROGRAM is Python code")
    run.add_argument("program", metavar="PROGRAM", help="a Python script")
    rest = run.add_argument("args", metavar="ARGS", nargs=argparse.REMAINDER, help="the program's own arguments")
    rest.required = False  # so that only what is missing is asked for
    run.set_defaults(wrong=run.error)

    budget = _command(
        commands, "budget", _budget, "show or change the budget of a running process; prints one line of JSON"
    )
    budget.description = f"""{budget.description} Keys: pid, budget and page_size in bytes, pages by owner,
        host_pages, spilled. The process gives the pages back to the driver before it answers, or refuses and changes
        nothing."""
    budget.add_argument("pid", metavar="PID", type=_whole(1, 2**31 - 1), help="of a process of yours")
    budget.add_argument("size", metavar="SIZE", nargs="?", help="the new budget, such as 12GiB (default: only show)")
    budget.add_argument("--timeout", metavar="TIME", type=_time, default=60.0, help="to get pages back (default: 60s)")

    replay = _command(commands, "replay", _replay, "drive the allocator with a recorded trace; prints one line of JSON")
    _add_sizes(replay)
    replay.add_argument("trace", metavar="TRACE.csv", help="columns time_us,op,id,size,stream; ops alloc and free")

    info = _command(commands, "info", _info, "what works on this machine or of a model's KV cache, what not, and why")
    info.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a name on the hub or a type such as llama")
    info.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    info.add_argument("--batch", metavar="N", type=_count, default=1, help="sequences side by side (default: 1)")
    info.add_argument("--tokens", metavar="N", type=_count, default=4096, help="tokens of each (default: 4096)")

    preflight = _command(
        commands, "preflight", _preflight, "try what ballonet assumes of the device and its driver; a minute or two"
    )
    preflight.description = f"""{preflight.description} Whatever fails is told, and does not end the others. What
        differs is gone round where that can be: `install()` keeps to what was chosen, on this device and driver, until
        the next preflight."""
    preflight.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    preflight.add_argument("--out", metavar="FILE", help="and write it there")
    preflight.add_argument("--no-save", action="store_true", help="choose nothing: install() stays as it is")

    _add_profile(commands)
    _add_simulate(commands)
    _add_prefix_sim(commands)
    return parser


def _add_profile(commands: Any) -> None:
    text = (
        "measure what a model's iterations take and how fast the host link is, for SLOs and intervals; kept in a file"
    )
    profile = _command(commands, "profile", _profile, text)
    profile.description = f"""{profile.description} What was measured before for the same model on the same machine is
        read from its file; a change of device, driver, link or version has it measured anew."""
    profile.add_argument("model", metavar="MODEL", help="a folder or a name on the hub")
    profile.add_argument("--budget", metavar="SIZE", help="device pages, such as 24GiB (BALLONET_BUDGET)")
    profile.add_argument("--batch", metavar="N", type=_count, help="sequences side by side, at most (default: 8)")
    profile.add_argument("--length", metavar="N", type=_count, help="tokens of each, at most (default: 2048)")
    profile.add_argument("--seconds", metavar="S", type=_count, help="when to end, sizes being left out (default: 60)")
    profile.add_argument(
        "--tpot-slo", metavar="TIME", type=_time, help="show the intervals for this time per token, 80ms"
    )
    profile.add_argument("--ttft-slo", metavar="TIME", type=_time, help="and for this time to the first token")
    profile.add_argument("--force", action="store_true", help="measure everything anew")
    profile.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def _add_simulate(commands: Any) -> None:
    text = "what streaming layers from the host would cost; prints one line of JSON"
    simulate = _command(commands, "simulate", _simulate, text)
    simulate.description = f"""{simulate.description} Times are in units of what a layer computes. time_in_layers: a
        pass over all layers, once passes repeat, if a copy may use whichever slot is free; closed_form: the same by the
        formulas of Oneiros and Select-N, null where the streamed layers are not evenly spaced; stall: how much of it
        compute waits for copies; freed: layers whose memory serves something else; link_busy: the share of the time in
        which something is copied; time_with_fixed_slots: a pass if each streamed layer has one slot for good, as in
        ballonet, where addresses do not change."""
    simulate.add_argument("--layers", metavar="N", type=_whole(1, 1000), required=True, help="of the model, all alike")
    simulate.add_argument(
        "--ratio", metavar="R", type=_ratio, required=True, help="time to copy a layer over the time that it computes"
    )
    which = simulate.add_mutually_exclusive_group(required=True)
    which.add_argument("--streamed", metavar="M", type=_whole(0, 1000), help="so many layers, evenly spaced")
    which.add_argument("--at", metavar="K,K,...", type=_places, help="these layers, ascending, counted from 0")
    simulate.add_argument(
        "--slots",
        metavar="B",
        type=_whole(1, 64),
        default=2,
        help="layers that streamed ones take turns in (default: 2)",
    )
    simulate.set_defaults(wrong=simulate.error)


def _add_prefix_sim(commands: Any) -> None:
    text = "how often a prefix cache of some size has what recorded requests begin with; prints one line of JSON"
    prefix_sim = _command(commands, "prefix-sim", _prefix_sim, text)
    prefix_sim.description = f"""{prefix_sim.description} Requests come in their order; each finds a leading run of its
        blocks, and then all of them are stored. requests: how many there are; blocks: of all of them; hit_blocks: those
        that were found; hit_rate: their share; distinct_blocks: what a cache that evicts nothing stores;
        infinite_hit_rate: the share that it finds; capacity and policy: as given."""
    prefix_sim.add_argument(
        "trace", metavar="TRACE.jsonl", help="a line per request, with the keys of its blocks as hash_ids"
    )
    prefix_sim.add_argument("--blocks", metavar="N", type=_whole(1, 2**31 - 1), required=True, help="that it holds")
    prefix_sim.add_argument(
        "--policy",
        choices=("odds", "lru"),
        default="odds",
        help="what goes first: what is least likely to be asked for again, as in ballonet, or least recently used",
    )
    prefix_sim.add_argument(
        "--curve", metavar="FILE", help="draw the hit rate of both against the size: .svg or .png (needs matplotlib)"
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def _time(text: str) -> float:
    try:
        seconds = parse_time(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not seconds:
        raise argparse.ArgumentTypeError("no time is not enough")
    return seconds


def _whole(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


def _ratio(text: str) -> Fraction:
    try:
        if 0 < float(text) <= 1e6:
            return Fraction(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1000000")


def _places(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of layers such as 0,1,2,31")
    return tuple(map(int, text.split(",")))


def _command(commands: Any, name: str, command: Callable[..., None], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=command)
    return parser


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", metavar="SIZE", help="device pages, such as 24GiB (BALLONET_BUDGET)")
    parser.add_argument("--page-size", metavar="SIZE", help="bytes per page, such as 2MiB (BALLONET_PAGE_SIZE)")


if __name__ == "__main__":
    sys.exit(main())
