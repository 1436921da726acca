"""Bytes and times written for people."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context
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
