"""Recorded requests as keys of their blocks: JSON lines with `hash_ids`, as Mooncake publishes them."""

from __future__ import annotations

import json
from pathlib import Path

from ...allocator.errors import TraceError


def read(path: str | Path) -> list[list[int]]:
    """Reads the keys of each request, in the order of the file; empty lines and other fields are skipped. The key of a
    block stands for the block and all before it. TraceError names the line."""
    try:
        with open(path, "rb") as file:
            requests = [_keys(str(path), number, line) for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise TraceError(str(path), 0, f"cannot be read: {error.strerror}") from error
    if not requests:
        raise TraceError(str(path), 0, "has no requests")
    return requests


def _keys(path: str, number: int, line: bytes) -> list[int]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(path, number, f"not JSON in UTF-8: {error}") from error
    keys = request.get("hash_ids") if isinstance(request, dict) else None
    if not isinstance(keys, list) or not all(type(key) is int for key in keys):
        raise TraceError(path, number, 'not an object with "hash_ids", a list of whole numbers')
    return keys
