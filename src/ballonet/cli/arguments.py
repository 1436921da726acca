"""What the commands' arguments may look like, the arguments that several commands have, and how a command says what it
found: as one line of JSON, or as a table for people.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

from ..allocator.config import parse_time
from ..allocator.errors import ConfigError


def command(commands: Any, name: str, act: Callable[..., object], text: str) -> argparse.ArgumentParser:
    """Adds a command that `text` describes. `act` is called with its arguments; see `__main__.main`."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(command=act, wrong=parser.error, about=text)
    return parser


def add_json(parser: argparse.ArgumentParser, *, piped: bool = False) -> None:
    """Adds `--json`. `piped`: it is also meant where stdout is not a terminal."""
    parser.add_argument(
        "--json",
        action="store_true",
        default=piped and not (sys.stdout and sys.stdout.isatty()),
        help="one JSON object instead of tables" + (" (always where stdout is not a terminal)" if piped else ""),
    )


def add_verbose(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds `--verbose`, with which people are shown `what`, too."""
    parser.add_argument("--verbose", action="store_true", help=f"show {what}, too")


def add_only_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json` to a command that prints nothing else, so that every command takes it."""
    parser.add_argument("--json", action="store_true", help="lines of JSON, which this command always prints")


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds `--budget` and `--page-size`."""
    parser.add_argument(
        "--budget", metavar="SIZE", help="device pages, such as 24GiB (default: most of what is free; BALLONET_BUDGET)"
    )
    parser.add_argument(
        "--page-size",
        metavar="SIZE",
        help="bytes per page, such as 2MiB (default: 8MiB on a GPU, less for small models; BALLONET_PAGE_SIZE)",
    )


def add_timeline(parser: argparse.ArgumentParser) -> None:
    """Adds `--timeline`."""
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="write who owned which page, every decision, and requests that were served, when the program ends: .json, "
        "a trace to open at ui.perfetto.dev; .png, a picture (needs matplotlib; default: none)",
    )


def add_requests(parser: argparse.ArgumentParser) -> None:
    """Adds which requests of a trace are replayed, and the SLOs that their goodput is counted by."""
    parser.add_argument("--limit", metavar="N", type=count, help="only so many requests")
    parser.add_argument("--scale", metavar="X", type=ratio, default=1, help="X times as fast as recorded")
    parser.add_argument("--lengths", metavar="X", type=ratio, default=1, help="X times as many tokens")
    parser.add_argument("--rate", metavar="X", type=ratio, help="a second, in a trace without times (default: 1)")
    parser.add_argument("--time-unit", choices=["s", "ms", "us"], help="of its times, where they are numbers")
    parser.add_argument("--block-tokens", metavar="N", type=count, help="tokens of its blocks of prompts (hash_ids)")
    parser.add_argument("--tokenizer", metavar="MODEL", help="counts the tokens of a trace of texts")
    parser.add_argument("--ttft-slo", metavar="TIME", type=seconds, help="for the goodput, such as 500ms")
    parser.add_argument("--tpot-slo", metavar="TIME", type=seconds, help="the same of a token, such as 50ms")


def recorded(args: argparse.Namespace, path: Path) -> list[Any]:
    """Reads the requests of a trace that `add_requests` describes. TraceError."""
    from ..hooks.server.arrivals import UNITS, TraceOptions, read

    unit = None if args.time_unit is None else UNITS[args.time_unit]
    options = TraceOptions(
        None if args.rate is None else float(args.rate), unit, args.block_tokens, _counter(args.tokenizer)
    )
    return read(path, options, limit=args.limit, scale=float(args.scale))


def _counter(model: str | None) -> Callable[[str], int] | None:
    if model is None:
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def count(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def seconds(text: str) -> float:
    """A time above 0, as in `parse_time`."""
    try:
        time_ = parse_time(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not time_:
        raise argparse.ArgumentTypeError("no time is not enough")
    return time_


def whole(least: int, most: int) -> Callable[[str], int]:
    """Returns the parser of whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
        return int(text)

    return number


def ratio(text: str) -> Fraction:
    """An exact number above 0 and up to a million."""
    try:
        if 0 < float(text) <= 1e6:
            return Fraction(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and up to 1000000")


def tell(facts: Any, show: Callable[[Any], object], *, as_json: bool) -> None:
    """Prints plain values: as one line of JSON, or with `show`."""
    if as_json:
        print(json.dumps(facts))
    else:
        show(facts)


def say(line: str) -> None:
    """Tells people on stderr how far it is."""
    print(f"ballonet: {line}", file=sys.stderr, flush=True)


def noting(requests: int) -> Callable[[int], None]:
    """Returns what shows on stderr, if that is a terminal, how many of so many requests have ended."""

    def note(done: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {requests} requests", end="\n" if done == requests else "", file=sys.stderr)

    return note


def estimating(what: str) -> Callable[[int, int], None]:
    """Returns what says on stderr, each few seconds, how much of a whole is done and about how long the rest takes."""
    began: float | None = None
    told = 0.0

    def note(done: int, whole: int) -> None:
        nonlocal began, told
        now = time.monotonic()
        if began is None:
            began = told = now
        elif done and now - told >= 5.0:  # chosen
            told = now
            say(f"{what}: {done / whole:.0%}, about {(now - began) * (whole - done) / done:.0f} s left")

    return note


def show_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Prints (what, value) as a table of two columns."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
