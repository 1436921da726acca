"""What is shown of processes, in a terminal, as text and in a notebook by `ballonet.watch()`: facts as rows of text,
what they mean in a sentence, and the screen, a list of processes and devices if there are several, and one in full.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from io import StringIO
from typing import Any, Final, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ...allocator.errors import BallonetError
from ...allocator.units import format_size, format_time
from ...offload.timeline.file import COLOURS
from .processes import PERIOD, Look, SeenProcess, WatchedProcesses, copy_rates, kv_tiers, whose

NOBODY: Final = "no process of yours runs ballonet, or none listens (BALLONET_CONTROL=0)"


_OWNERS: Final = {"kv": "KV", "pending_free": "pending free", "not_allocated": "not allocated"}

# Columns of a bar (half of a terminal), beside one (counted: the longest names and sizes), on a pipe and in a notebook
# (what mails and logs keep whole; a wide terminal). Chosen.
_BAR: Final = 40
_TEXT: Final = 56
_NARROW: Final = 96
_WIDE: Final = 120


class Row(NamedTuple):
    """A row of text. `part`: how full its bar is, of 1; None for no bar. `kind`: of the bar, for its colour."""

    name: str
    text: str
    part: float | None = None
    kind: str = ""


class Section(NamedTuple):
    """Rows under a title."""

    title: str
    rows: list[Row]


def title_of(seen: SeenProcess) -> str:
    """Names the process, its device and its budget."""
    parts = [f"process {seen.pid}", seen.program, device_of(seen), f"budget {format_size(seen.now['budget'])}"]
    return " · ".join(filter(None, parts))


def device_of(seen: SeenProcess) -> str:
    """Names the device, with its number where the process has several."""
    device = seen.now["device"]
    if device["kind"] == "cuda":
        return f"GPU {device['ordinal']}"
    return f"CPU (host stand-in {seen.number})" if seen.one_of_several else "CPU (host stand-in)"


def sections_of(seen: SeenProcess, *, verbose: bool = True) -> list[Section]:
    """Returns all sections of a process; not `verbose`: without rows of nothing, and without decisions."""
    now = seen.now
    sections = [
        Section("pages", list(_owners(now))),
        Section("copies", list(_copies(seen.before, now))),
        Section("KV", list(_kv(now))),
        Section("models", [Row(model["name"], _model(model, now["page_size"])) for model in now.get("models", ())]),
        Section("decisions", [Row(*decision(event, now)) for event in reversed(seen.decisions)]),
    ]
    if verbose:
        return sections
    return [Section(title, [row for row in rows if row.text and row.part != 0]) for title, rows in sections[:-1]]


def conclusion(seen: SeenProcess) -> str:
    """Says in a sentence where layers and KV of the process lie, and how much of its budget is free."""
    if seen.trouble:
        return f"{seen.trouble}: all this is what it said last"
    now = seen.now
    parts = [_lies(model) for model in now.get("models", ())] or ["no model is managed"]
    tiers = kv_tiers(now)
    parts += [f"{format_size(tiers[tier])} of KV on the {tier}" for tier in ("peer", "host") if tiers[tier]]
    free = (_not_allocated(now) + now["pages"]["free"]) * now["page_size"]
    return f"{'; '.join(parts)}; {format_size(free)} of {format_size(now['budget'])} free"


def _lies(model: Mapping[str, Any]) -> str:
    count = len(model["streamed"])
    if not count:
        return f"{model['name']}: all {model['layers']} layers on the device"
    return f"{model['name']}: {count} of {model['layers']} layers come from host memory for each token"


def decision(event: Mapping[str, Any], now: Look) -> tuple[str, str]:
    """Words an event as (when, what and why)."""
    age = format_age((now["when"] - event["when"]) / 1e9)
    what = f"{event['pages']:,} page{'s' * (event['pages'] != 1)} ({format_size(event['pages'] * now['page_size'])})"
    owner = f" of {event['what']}" if event["what"] else ""
    asked = f", for {event['by']}" if event["by"] else ""
    took = "" if event["measured"] is None else f", took {format_time(event['measured'])}"
    expected = "" if event["predicted"] is None else f", expected {format_time(event['predicted'])}"
    return f"{age} ago", f"{event['source']}, {event['verb']}: {what}{owner}{asked}{took}{expected}"


def format_age(seconds: float) -> str:
    """Formats seconds in whole units: "3 s", "5 min", "2 h"."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def bar(part: float, columns: int) -> str:
    """Draws a bar for a part of 1 on so many columns; any part above 0 has one block at least."""
    full = min(columns, round(part * columns))
    full = 1 if part > 0 and not full else full
    return "█" * full + "░" * (columns - full)


def _owners(now: Look) -> Iterator[Row]:
    page, budget = now["page_size"], now["budget"]
    pages = {**now["pages"], "not_allocated": _not_allocated(now)}
    for owner in ("weights", "kv", "activations", "pending_free", "free", "not_allocated"):
        count = pages[owner]
        yield Row(
            _OWNERS.get(owner, owner),
            f"{format_size(count * page)}, {count:,} pages",
            count * page / max(1, budget),
            owner,
        )
    if (share := now.get("shared")) is not None:
        text = f"{format_size(share['part'])} of {format_size(share['total'])}, with other processes"
        yield Row("shared", text, share["part"] / max(1, share["total"]), "free")
    host, most = (now["host_pages"] - now["host_free"]) * page, now["host_budget"]
    if host:
        spilled = f", {format_size(now['spilled'] * page)} of it spilled" if now["spilled"] else ""
        yield Row("on the host", f"{format_size(host)} of {format_size(most)}{spilled}", host / max(1, most), "host")


def _not_allocated(now: Look) -> int:
    return max(0, int(now["budget"]) // int(now["page_size"]) - int(now["created"]))


def _copies(before: Look | None, now: Look) -> Iterator[Row]:
    rates = copy_rates(before, now)
    for way, nbytes in now["copied"].items():
        if nbytes:
            what, to = way.split("_")
            name = f"{_OWNERS.get(what, what)} to the {'device' if to == 'h2d' else 'host'}"
            yield Row(name, f"{format_size(round(rates.get(way, 0.0)))}/s, {format_size(nbytes)} so far")
    if not any(now["copied"].values()):
        yield Row("none", "")


def _kv(now: Look) -> Iterator[Row]:
    tiers = kv_tiers(now)
    most = max(1, *tiers.values())
    for tier, nbytes in tiers.items():
        yield Row(tier, format_size(nbytes), nbytes / most, "kv")
    for model in now.get("models", ()):
        if (store := model["prefixes"]) is not None and store["counts"]["prompts"]:
            part = f"{store['hit_rate']:.0%} of {store['counts']['prompts']:,} tokens of prompts"
            yield Row("found again", f"{part} of {model['name']}")


def _model(model: Mapping[str, Any], page: int) -> str:
    streamed, count = model["streamed"], len(model["streamed"])
    layers = f"{model['layers']} layers, none of them streams"
    if count:
        alone = streamed if count < 3 or streamed[-1] - streamed[0] >= count else [f"{streamed[0]} to {streamed[-1]}"]
        which = f"interval {model['interval']}" if model["interval"] else ", ".join(map(str, alone))
        layers = f"{model['layers']} layers, {count} of them stream ({which})"
    seconds, slo = model["seconds"].get("decode"), model["slo"]["decode"]
    token = "" if seconds is None else f"; a token took {format_time(seconds)}"
    asked = "" if slo is None else f", SLO {format_time(slo)}"
    why = f"; {model['why']}" if model["why"] else ""
    return f"{layers}; weights {format_size(model['pages'] * page)}{token}{asked}{why}"


def lines_of(seen: SeenProcess, *, verbose: bool = False) -> Iterator[str]:
    """Yields the line of one look, and where it is `verbose` one for each new decision."""
    yield f"process {seen.pid} · {conclusion(seen)}"
    if verbose and not seen.trouble:
        for event in seen.decisions if seen.before is None else seen.now["events"]:
            device = seen.number if seen.one_of_several else None
            yield " · ".join([whose(seen.pid, device), *decision(event, seen.now)])


def screen(seen: Sequence[SeenProcess], chosen: int, footer: str, width: int = _BAR) -> RenderableType:
    """Draws the whole screen. `chosen`: the place in `seen` of the process shown in full; `footer`: the last line;
    `width`: of bars."""
    parts: list[RenderableType] = [Text(footer, style="reverse")]
    if not seen:
        return Group(*parts, Text(NOBODY))
    if len(seen) > 1:
        parts.append(_list(seen, chosen, width // 2))
    return Group(*parts, process(seen[chosen], width))


def process(seen: SeenProcess, width: int = _BAR, *, verbose: bool = True) -> RenderableType:
    """Draws one process, in full where it is `verbose`. Its last line is the conclusion."""
    title = Rule(Text(title_of(seen), style="bold"), align="left")
    last = Text(conclusion(seen), style="red" if seen.trouble else "bold")
    return Group(title, *_sections(sections_of(seen, verbose=verbose), width), last)


def fitted(columns: int) -> int:
    """Returns the width of bars that leave room for their text on so many columns."""
    return max(_BAR // 4, min(_BAR, columns - _TEXT))


def as_text(seen: Sequence[SeenProcess], *, verbose: bool = False) -> str:
    """Returns what a narrow terminal would show, for a pipe or `print`."""
    if not seen:
        return NOBODY
    console = Console(record=True, file=StringIO(), width=_NARROW, force_jupyter=False, color_system=None)
    console.print(*(process(watched, fitted(_NARROW), verbose=verbose) for watched in seen), sep="")
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def as_html(drawn: RenderableType) -> str:
    """Returns what a terminal would show, for a notebook."""
    console = Console(record=True, file=StringIO(), width=_WIDE, force_jupyter=False)
    console.print(drawn)
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _sections(sections: Sequence[Section], columns: int) -> Iterator[RenderableType]:
    for section in sections:
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


class Watched:
    """The result of `watch()`: a notebook shows it as `top` does, `print` as text, each time by a new look. `stop()`
    ends live updates. `live`: does it change by itself?"""

    def __init__(self, processes: WatchedProcesses, period: float, widget: Any = None) -> None:
        """`widget`: an ipywidgets.HTML to keep up to date, or None."""
        self._processes = processes
        self._period = period
        self._widget = widget
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if widget is not None:
            widget.value = self._html()
            self._thread = threading.Thread(target=self._run, name="ballonet-watch", daemon=True)
            self._thread.start()

    @property
    def live(self) -> bool:
        """Does it change by itself?"""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Stops live updates. Idempotent."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._period) and not self._processes.ended:
            try:
                self._processes.look()
                self._widget.value = self._html()
            except BallonetError as error:
                self._widget.value = f"<p>{escape(str(error))}</p>"
                return

    def _html(self) -> str:
        return as_html(Group(*map(process, self._processes.seen))) if self._processes.seen else f"<p>{NOBODY}</p>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """Renders the widget, or a table of this moment, for a notebook."""
        if self._widget is not None:
            bundle: dict[str, Any] = self._widget._repr_mimebundle_()
            return bundle
        self._processes.look()
        return {"text/html": self._html(), "text/plain": str(self)}

    def __str__(self) -> str:
        return as_text(self._processes.seen)


def watch(pid: int | None = None, every: float = PERIOD) -> Watched:
    """Shows pages by owner, copies per second, streamed layers, KV by tier and the last decisions, of this process
    first and then of all others of this user that run ballonet, or of one.

    `pid`: of that one; `every`: seconds between looks. With ipywidgets it is live until `stop()`; without, a table of
    the moment in which it is shown. NoSuchProcess, NotPermitted, NotReachable for a `pid` that cannot be looked at.
    """
    processes = WatchedProcesses(pid)
    processes.look()
    try:
        widgets = import_module("ipywidgets")
    except ModuleNotFoundError:
        return Watched(processes, every)
    return Watched(processes, every, widgets.HTML())
