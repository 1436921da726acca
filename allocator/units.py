"""Bytes written for people."""

from __future__ import annotations


def format_size(nbytes: int) -> str:
    """The largest binary unit, to two digits: `'24GiB'`, `'1.46GiB'`, `'512B'`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + unit
    return f"{nbytes}B"
