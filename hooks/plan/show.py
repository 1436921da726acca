"""Prints a plan for people: whether it fits, times, the limit, and changes that would help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...allocator.units import format_size, format_time

Facts = dict[str, Any]
_LIMITS = {
    "memory": "memory: it does not fit, even if all layers stream",
    "host": "host memory: what leaves the device has no room there",
    "link": "the link: tokens wait for copies from host memory",
    "compute": "compute: nothing is waited for",
    None: "not known, as nobody knows what an iteration takes",
}


def show(facts: Facts) -> None:
    """Prints the result of `planner.plan`."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    budget, least = (format_size(facts[name]) for name in ("budget", "least_budget"))
    asked = f"{facts['batch']} x {facts['context']:,} tokens in {budget} on {facts['hardware']['name']}"
    console.print(f"{', '.join(fact['model'] for fact in facts['models'])}: {asked}", markup=False)
    if facts["fits"]:
        console.print(f"[green]It fits.[/] The least budget that does is {least}.")
    else:
        console.print(
            f"[red]It does not fit.[/] The least budget that does is {least} ({facts['least_budget']} bytes)."
        )
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _rows(facts):
        table.add_row(*row)
    console.print(table)
    if facts["changes"]:
        console.print()
        console.print(_changes(facts["changes"]))


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    page, several = facts["page_size"], len(facts["models"]) > 1
    for fact in facts["models"]:
        name = f"{fact['model']}: " if several else ""
        pages, host = fact["pages"], fact["host_pages"]
        yield f"{name}weights", f"{_size(pages['weights'], page)}{_streams(fact)}{_beside(host['weights'], page)}"
        yield f"{name}KV", f"{_size(pages['kv'], page)}{_beside(host['kv'], page)}"
        yield f"{name}activations", f"{_size(pages['activations'], page)}, at most"
        if several and fact["tpot_seconds"] is not None:
            yield f"{name}per token", format_time(fact["tpot_seconds"])
    if facts["fits"] and not facts["exact"]:
        yield (
            "",
            "about: what leaves hangs on what kernels allocate inside of themselves, or on times that nobody measured",
        )
    yield "first token", _time(facts["ttft_seconds"])
    yield "per token", _time(facts["tpot_seconds"]) + _slo(facts)
    yield "limit", _LIMITS[facts["limit"]] + _of_host(facts)
    link = facts["hardware"]["link"]
    yield "times", facts["hardware"]["source"] + ("" if link is None else f", link {link / 1e9:.3g} GB/s")


def _size(pages: int, page: int) -> str:
    return f"{pages:,} pages ({format_size(pages * page)})"


def _beside(pages: int, page: int) -> str:
    return f", {format_size(pages * page)} on the host" if pages else ""


def _streams(facts: Facts) -> str:
    if not facts["layers_streamed"]:
        return f", all {facts['layers']} layers resident" if facts["layers_streamed"] == 0 else ""
    at = "" if facts["interval"] is None else f" (interval {facts['interval']})"
    return f", {facts['layers_streamed']} of {facts['layers']} layers stream{at}"


def _time(seconds: float | None) -> str:
    return "not known" if seconds is None else format_time(seconds)


def _of_host(facts: Facts) -> str:
    return f", which has {format_size(facts['host_budget'])}" if facts["limit"] == "host" else ""


def _slo(facts: Facts) -> str:
    if facts["slo"] is None:
        return ""
    kept = {True: "kept", False: "not kept", None: "not known whether it is kept"}[facts["slo_met"]]
    return f", SLO {format_time(facts['slo'])} {kept}"


def _changes(changes: list[Facts]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what would help", no_wrap=True)
    for column in ("first token", "per token", "layers that stream", "limit"):
        table.add_column(column, justify="right")
    for change in changes:
        streams = f"{change['layers_streamed']}"
        table.add_row(
            change["text"], _time(change["ttft_seconds"]), _time(change["tpot_seconds"]), streams, change["limit"] or ""
        )
    return table
