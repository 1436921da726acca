"""The simulation of `python -m ballonet simulate`: the cost of a placement of streamed layers, all layers being
alike."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .schedule import closed_form, simulate


def facts(layers: int, ratio: Fraction, at: Sequence[int], slots: int) -> dict[str, Any]:
    """Returns plain values, ready for JSON; times in units of what a layer computes, of a pass once passes repeat.
    ValueError.

    Keys: time_in_layers, if a copy may use whichever slot is free; closed_form, the same by the formulas, None where
    the gaps are not even; stall, the part of the time in which compute waits for copies; layers, ratio, streamed and
    slots, as given; freed, the layers whose memory serves something else; link_busy, the share of the time in which
    something is copied; time_with_fixed_slots, if each streamed layer has one slot for good.
    """
    compute, transfer = [Fraction(1)] * layers, [ratio] * len(at)
    free = simulate(compute, transfer, at, slots)
    fixed = simulate(compute, transfer, at, [j % slots for j in range(len(at))])
    formula = closed_form(layers, at, slots, ratio)
    return {
        "time_in_layers": _plain(free.time),
        "closed_form": None if formula is None else _plain(formula),
        "stall": _plain(free.stall),
        "layers": layers,
        "ratio": _plain(ratio),
        "streamed": list(at),
        "slots": slots,
        "freed": max(0, len(at) - slots),
        "link_busy": _plain(free.link / free.time),
        "time_with_fixed_slots": _plain(fixed.time),
    }


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
