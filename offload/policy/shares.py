"""Divides a budget among the processes that share it. Pure.

Note [Who gives]
    A part is a permission to have pages. A process that is short gets what is free, then what others have no use for:
    those with the lowest priority give first, of equals those whose next pages are missed least (price.py), and then
    those with the most. If that is too little, what they use is
    shared: each keeps its floor, and where it has use for it half of an equal share; the rest goes to the highest
    priority first, and evenly among equals. A process that has more than that gives the difference, in its own order.

Note [No ping-pong]
    What comes out depends on what each has use for and not on what it has, so once all have it nothing moves. A part
    that was raised counts as used for a while (`Sharing.dwell`), whatever is free in it between two steps; and nothing
    that is in use moves for less than 1/`Sharing.margin` of the total, but to one with less than half of an equal
    share: one that asks for little would get nothing as long as others are busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Sharer:
    """A process, in bytes. `used`: in use; `wanted`: that it could use, more than `part` where it is short; `floor`:
    that it keeps in any case; `rested`: seconds since its part was raised; `prices`: of what it would give next, what
    costs least first, (bytes, seconds that each of these loses in each second), as far as it says so."""

    part: int
    used: int
    wanted: int = 0
    floor: int = 0
    priority: int = 0
    rested: float = math.inf
    prices: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sharing:
    """The tuning of processes that share one budget (also hooks/device/shared.py). All chosen."""

    # Seconds that a part which was raised counts as used, and that what a step has lacked counts as lacking: longer
    # than a step of any model here.
    dwell: float = 2.0
    lacking: float = 2.0
    # 1/16 of the total: less is not worth to displace what others use, and so much more than it lacks is what a process
    # takes of what is free, so that it asks seldom.
    margin: int = 16
    # Seconds after which a ledger that seems unchanged is read nonetheless: a file that replaces another may look like
    # it. A look that reads takes 0.11 ms of a core, one that does not 0.017 (measured).
    reread: float = 5.0
    # Seconds that an allocation waits for pages of other processes, at most: those copy layers to the host meanwhile.
    patience: float = 2.0
    # Seconds that another process may take for an answer, and that it is not asked again where it took longer.
    answer: float = 0.5
    silent: float = 10.0


SHARING = Sharing()


def shares(total: int, members: Sequence[Sharer], tuning: Sharing = SHARING) -> tuple[int, ...]:
    """Returns the parts that the members should have now, together no more than the total, or than they have where that
    cannot be. Those that want no more are never raised. See Note [Who gives]."""
    free = total - sum(member.part for member in members)
    if free < 0:  # what is free in a part is free at once
        members = [replace(member, rested=math.inf) for member in members]
    claims = [_claim(member, tuning) for member in members]
    fair = _fair(total, members, claims)
    lacking = [
        max(0, due - member.part) if member.wanted > member.part and free >= 0 else 0
        for member, due in zip(members, fair, strict=True)
    ]
    parts = [member.part for member in members]
    wanted = max(0, sum(lacking) - free)
    idle = _given(parts, wanted, members, claims)
    _subtract(parts, idle)
    if free >= 0 and max(lacking, default=0) <= total // tuning.margin:
        half = _half(total, members)
        wanted = (
            sum(max(0, min(less, half - member.part)) for less, member in zip(lacking, members, strict=True)) - free
        )
    _subtract(parts, _given(parts, wanted - sum(idle), members, fair))
    caps = [part + more for part, more in zip(parts, lacking, strict=True)]
    return tuple(_poured(max(0, total - sum(parts)), parts, caps))


def _claim(member: Sharer, tuning: Sharing) -> int:
    kept = member.part if member.rested < tuning.dwell else min(member.used, member.part)
    return max(member.floor, kept, member.wanted)


def _fair(total: int, members: Sequence[Sharer], claims: Sequence[int]) -> list[int]:
    """Returns what each gets of its claim."""
    granted = _poured(
        total, [0] * len(members), [min(c, member.floor) for c, member in zip(claims, members, strict=True)]
    )
    half = _half(total, members)
    granted = _poured(total - sum(granted), granted, [min(claim, half) for claim in claims])
    for priority in sorted({member.priority for member in members}, reverse=True):
        caps = [claim if member.priority == priority else 0 for claim, member in zip(claims, members, strict=True)]
        granted = _poured(total - sum(granted), granted, caps)
    return granted


def _half(total: int, members: Sequence[Sharer]) -> int:
    """Returns half of an equal share."""
    return total // max(1, 2 * len(members))


def _poured(room: int, levels: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Returns `levels` raised by `room` in all, the lowest first, none above its cap."""

    def filled(height: int) -> list[int]:
        return [max(level, min(cap, height)) for level, cap in zip(levels, caps, strict=True)]

    low, high = 0, max(caps, default=0)
    while low < high:
        height = (low + high + 1) // 2
        low, high = (height, high) if sum(filled(height)) <= sum(levels) + room else (low, height - 1)
    return filled(low)


def _given(parts: Sequence[int], wanted: int, members: Sequence[Sharer], keeps: Sequence[int]) -> list[int]:
    """Returns what each gives of `wanted`, keeping at least its `keeps`."""
    gives, left = [0] * len(parts), max(0, wanted)
    spare = [max(0, part - keep) for part, keep in zip(parts, keeps, strict=True)]
    steps = [
        (member.priority, price, -spare[at], at, nbytes)
        for at, member in enumerate(members)
        for nbytes, price in (*member.prices, (spare[at], math.inf))
    ]
    for *_, at, nbytes in sorted(steps):
        given = min(left, nbytes, spare[at] - gives[at])
        gives[at], left = gives[at] + given, left - given
    return gives


def _subtract(parts: list[int], given: Sequence[int]) -> None:
    parts[:] = [part - less for part, less in zip(parts, given, strict=True)]
