"""How a command says what it found: as one line of JSON, or as a table for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any


def tell(facts: Any, show: Callable[[Any], object], *, as_json: bool) -> None:
    """Prints plain values: as one line of JSON, or with `show`."""
    if as_json:
        print(json.dumps(facts))
    else:
        show(facts)


def say(line: str) -> None:
    """Tells people on stderr how far it is."""
    print(f"ballonet: {line}", file=sys.stderr, flush=True)


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
