"""Rates from the counters of two looks at a process: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Look = Mapping[str, Any]


def copy_rates(before: Look | None, after: Look) -> dict[str, float]:
    """Returns bytes per second between the looks, by direction; empty where no time is between them, or a counter fell,
    as the device was started anew."""
    if before is None or after["when"] <= before["when"]:
        return {}
    seconds = (after["when"] - before["when"]) / 1e9
    grown = {way: nbytes - before["copied"].get(way, 0) for way, nbytes in after["copied"].items()}
    return {way: nbytes / seconds for way, nbytes in grown.items()} if min(grown.values(), default=0) >= 0 else {}


def plain_look(look: Look, before: Look | None) -> dict[str, Any]:
    """Returns a look for scripts, with its `rates` in bytes per second and without the cursor."""
    return {key: value for key, value in look.items() if key != "cursor"} | {"rates": copy_rates(before, look)}
