"""The facts of a process as rows of text: the same in a terminal, on plain lines and in a notebook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...allocator.units import format_size, format_time
from .processes import SeenProcess
from .rates import copy_rates
from .tiers import kv_tiers

Look = Mapping[str, Any]


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


def sections_of(seen: SeenProcess) -> list[Section]:
    """Returns all sections of a process."""
    now = seen.now
    return [
        Section("pages", list(_owners(now))),
        Section("copies", list(_copies(seen.before, now))),
        Section("KV", list(_kv(now))),
        Section("models", [Row(model["name"], _model(model, now["page_size"])) for model in now.get("models", ())]),
        Section("decisions", [Row(*decision(event, now)) for event in reversed(seen.decisions)]),
    ]


def decision(event: Mapping[str, Any], now: Look) -> tuple[str, str]:
    """Words an event as (when, what and why)."""
    age = format_age((now["when"] - event["when"]) / 1e9)
    what = f"{event['pages']:,} pages ({format_size(event['pages'] * now['page_size'])})"
    whose = f" of {event['what']}" if event["what"] else ""
    asked = f", for {event['by']}" if event["by"] else ""
    took = "" if event["measured"] is None else f", took {format_time(event['measured'])}"
    expected = "" if event["predicted"] is None else f", expected {format_time(event['predicted'])}"
    return f"{age} ago", f"{event['lever']}, {event['verb']}: {what}{whose}{asked}{took}{expected}"


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
    pages = {**now["pages"], "not made": max(0, budget // page - now["created"])}
    for owner in ("weights", "kv", "activations", "retiring", "free", "not made"):
        count = pages[owner]
        yield Row(owner, f"{format_size(count * page)}, {count:,} pages", count * page / max(1, budget), owner)
    if (share := now.get("shared")) is not None:
        text = f"{format_size(share['part'])} of {format_size(share['total'])}, with other processes"
        yield Row("shared", text, share["part"] / max(1, share["total"]), "free")
    host, most = (now["host_pages"] - now["host_free"]) * page, now["host_budget"]
    if host:
        spilled = f", {format_size(now['spilled'] * page)} of it spilled" if now["spilled"] else ""
        yield Row("on the host", f"{format_size(host)} of {format_size(most)}{spilled}", host / max(1, most), "host")


def _copies(before: Look | None, now: Look) -> Iterator[Row]:
    rates = copy_rates(before, now)
    for way, nbytes in now["copied"].items():
        if nbytes:
            yield Row(way, f"{format_size(round(rates.get(way, 0.0)))}/s, {format_size(nbytes)} so far")
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
        which = f"interval {model['interval']}" if model["interval"] else ", ".join(map(str, streamed))
        layers = f"{model['layers']} layers, {count} of them stream ({which})"
    seconds, slo = model["seconds"].get("decode"), model["slo"]["decode"]
    token = "" if seconds is None else f"; a token {format_time(seconds)}"
    asked = "" if slo is None else f", SLO {format_time(slo)}"
    why = f"; {model['why']}" if model["why"] else ""
    return f"{layers}; weights {format_size(model['pages'] * page)}{token}{asked}{why}"
