"""Bytes of KV by tier, from one look at a process (allocator/looks.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def kv_tiers(look: Mapping[str, Any]) -> dict[str, int]:
    """Returns bytes on the `device`, the `peer` and the `host`, in whole pages, and on `disk`: all files in the folders
    of its models, of other processes too. A shared folder counts once."""
    page = look["page_size"]
    peer = (look["peer_pages"] - look["peer_free"]) * page
    away = look.get("kv", {}).get("displaced", 0) * page
    stores = [model["prefixes"] for model in look.get("models", ())]
    folders = dict(store["files"] for store in stores if store is not None and store["files"] is not None)
    return {
        "device": look["pages"]["kv"] * page,
        "peer": peer,
        "host": max(0, away - peer),
        "disk": sum(folders.values()),
    }
