"""The time of an iteration: between points that were measured, or by the device's data sheet.

Note [Between the points]
    A record says what was measured at powers of two of batch and length, and judges SLOs by the next larger point. A
    prediction may be wrong to both sides, so it is interpolated: times are nearly powers of batch and length over a
    factor of two, that is, straight lines in logarithms. Beyond what was measured the parts of a step count that grow
    in different ways (step_costs.py), fitted to all points, and brought to the nearest point that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from ..step_costs import Step, fitted
from ..tuning import DEFAULT, Planning
from .hardware import Hardware

Size = tuple[int, int]  # sequences, tokens of each


def interpolated(phase: str, measured: Mapping[Size, float], batch: int, length: int) -> float | None:
    """Returns the seconds of an iteration with so many sequences and tokens, by those of its phase that were
    `measured`; None without any. See Note [Between the points]."""
    if not measured:
        return None
    inside = [_around({size[axis] for size in measured}, value) for axis, value in enumerate((batch, length))]
    if all(corner in measured for corner in product(*inside)):
        return math.exp(_bilinear(measured, inside, (batch, length)))
    return _beyond(phase, measured, batch, length)


def _around(points: Iterable[int], value: int) -> tuple[int, int]:
    """Returns the points on either side of a value, twice the same where it is one; 0 where there is none."""
    return max((at for at in points if at <= value), default=0), min((at for at in points if at >= value), default=0)


def _bilinear(measured: Mapping[Size, float], inside: Sequence[tuple[int, int]], size: Size) -> float:
    parts = [
        0.0 if low == high else math.log(value / low) / math.log(high / low)
        for (low, high), value in zip(inside, size, strict=True)
    ]
    (b0, b1), (n0, n1) = inside
    rows = [math.log(measured[b, n0]) * (1 - parts[1]) + math.log(measured[b, n1]) * parts[1] for b in (b0, b1)]
    return rows[0] * (1 - parts[0]) + rows[1] * parts[0]


def _beyond(phase: str, measured: Mapping[Size, float], batch: int, length: int) -> float:
    nearest = min(sorted(measured), key=lambda at: abs(math.log(at[0] / batch)) + abs(math.log(at[1] / length)))
    parts = fitted([(Step.in_rows(phase, *size), seconds) for size, seconds in measured.items()])
    if parts is None:
        return measured[nearest]
    asked, known = Step.in_rows(phase, batch, length), Step.in_rows(phase, *nearest)
    return measured[nearest] * parts.seconds(asked) / parts.seconds(known)


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """The work of a forward. `flops`: floating point operations; `read`: bytes of weights and KV that it reads;
    `calls`: operators that it submits; `itemsize`: bytes of an element."""

    flops: float
    read: float
    calls: int
    itemsize: int

    def reading(self, less: int) -> ForwardWork:
        """Returns the work with so many bytes less to read, as far as they are read."""
        return replace(self, read=max(0.0, self.read - less))


def by_device(work: ForwardWork, device: Hardware, tuning: Planning = DEFAULT.planning) -> float:
    """Returns the seconds of a forward on a device that was not measured: the longest of computing, reading its memory
    and submitting operators one by one (the roofline of Williams et al., 2009, with a floor)."""
    return max(
        work.flops / (device.flops_of(work.itemsize) * tuning.compute),
        work.read / (device.bandwidth * tuning.memory),
        work.calls * tuning.call,
    )
