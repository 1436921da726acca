"""The screen of `top` and `watch()`: a list of processes and devices if there are several, and one of them in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...allocator.units import format_size
from ...offload.policy.tuning import DEFAULT, Watching
from ...offload.timeline.file import COLOURS
from .processes import SeenProcess
from .wording import bar, device_of, sections_of, title_of

NOBODY: Final = "no process of yours runs ballonet, or none listens (BALLONET_CONTROL=0)"


def screen(
    seen: Sequence[SeenProcess], chosen: int, footer: str, tuning: Watching = DEFAULT.watching
) -> RenderableType:
    """Draws the whole screen. `chosen`: the place in `seen` of the process shown in full; `footer`: the last line."""
    parts: list[RenderableType] = [Text(footer, style="reverse")]
    if not seen:
        return Group(*parts, Text(NOBODY))
    if len(seen) > 1:
        parts.append(_list(seen, chosen, tuning.bar // 2))
    return Group(*parts, process(seen[chosen], tuning))


def process(seen: SeenProcess, tuning: Watching = DEFAULT.watching) -> RenderableType:
    """Draws one process in full."""
    trouble = [Text(seen.trouble, style="red")] if seen.trouble else []
    return Group(Rule(Text(title_of(seen), style="bold"), align="left"), *trouble, *_sections(seen, tuning.bar))


def as_html(drawn: RenderableType, tuning: Watching = DEFAULT.watching) -> str:
    """Returns what a terminal would show, for a notebook."""
    console = Console(record=True, file=StringIO(), width=tuning.columns, force_jupyter=False)
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _sections(seen: SeenProcess, columns: int) -> Iterator[RenderableType]:
    for section in sections_of(seen):
        if not section.rows:
            continue
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(no_wrap=True, style="bold", width=9)
        table.add_column(no_wrap=True, min_width=12)
        table.add_column(overflow="fold")
        for number, row in enumerate(section.rows):
            text = Text(row.text)
            if row.part is not None:
                colour = {**COLOURS, "host": "yellow"}.get(row.kind, "white")
                text = Text.assemble((bar(row.part, columns), colour), " ", row.text)
            table.add_row("" if number else section.title, Text(row.name), text)
        yield table


def _list(seen: Sequence[SeenProcess], chosen: int, columns: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "pid", "program", "device", "budget", "used"):
        table.add_column(name, no_wrap=True)
    for place, shown in enumerate(seen):
        now = shown.now
        used = (sum(now["pages"].values()) - now["pages"]["free"]) * now["page_size"]
        table.add_row(
            ">" if place == chosen else "",
            f"{shown.pid}",
            Text(shown.program),
            Text(device_of(shown)),
            format_size(now["budget"]),
            Text(f"{bar(used / max(1, now['budget']), columns)} {format_size(used)}"),
            style="bold" if place == chosen else "",
        )
    return table
