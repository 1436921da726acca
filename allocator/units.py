"""Output for people: bytes and times, a small table in a notebook, a progress bar in a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import ROUND_CEILING, Context
from html import escape
from typing import Final

_FOUR_DIGITS: Final = Context(prec=4, rounding=ROUND_CEILING)


def format_size(nbytes: int, gap: str = "") -> str:
    """Returns bytes in the largest binary unit, to two digits: `'24GiB'`, `'1.46GiB'`, `'512B'`. `gap`: before the
    unit, a space where it is read and not copied into a setting."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + gap + unit
    return f"{nbytes}{gap}B"


def format_time(seconds: float) -> str:
    """Returns a time in ms, or in s from ten on, to four digits and never less than it is: `'5.813 ms'`, `'90 s'`."""
    scale, unit = (1, "s") if seconds >= 10 else (1e3, "ms")
    number = _FOUR_DIGITS.create_decimal_from_float(seconds * scale * (1 - 1e-12))  # 70 ms are 70.00000000000001
    return f"{number.normalize():f} {unit}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table as HTML. Numbers are set on the right, with their thousands apart; cells may not hold HTML of
    their own."""
    head = "".join(f'<th style="text-align: {_side(name == columns[0])}">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<table><caption style="text-align: left; font-weight: bold">{escape(title)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where that is a terminal, removed at the end. Yields a function to call with bytes as
    they arrive; `total`: all of them."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


@contextmanager
def steps(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar as `progress`, for `total` steps. Yields a function to call with the name of each step, before
    it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    numbers = MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[step]}")
    columns = TextColumn("{task.description}"), BarColumn(), *numbers
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, completed=-1, step="", visible=False)
        yield lambda step: bar.update(task, advance=1, step=step, visible=True)


def _cell(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return f'<td style="text-align: {_side(not text[:1].isdigit())}">{escape(text)}</td>'


def _side(left: bool) -> str:
    return "left" if left else "right"
