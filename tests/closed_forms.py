"""The time of a pass in closed form (Oneiros §5.2 and Select-N §4.3 in one model), for layers that are all alike.

Note [Two slots]
    With gaps that differ max(n, m·r) is too little for some r between them: n = 4, m = 3, r = 4/3, gaps 1, 1, 2 takes
    13/3. With β slots a copy starts when the β-th streamed layer before it has computed. So compute never waits if any
    c copies fit, β slots ahead, between the end of a streamed layer and the start of the one that is c + β - 1 gaps
    later; and the link never waits if any c copies take as long as the c - β + 1 gaps computed meanwhile, and a layer.
    Where neither is so no formula is given. Gaps that are all alike, and whole r with even gaps, always have one.

Note [Errata]
    Oneiros' Eq. 5 is looser than its Eq. 4 from five freed layers on for n = 40, not from 9, which is where Eq. 4 fails
    for r just above 3. max(n, m·r) is a lower bound where gaps differ (Note [Two slots]).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ballonet.offload.policy.schedule import Time, gaps, simulate


def evenly(layers: int, streamed: int) -> tuple[int, ...]:
    """Indices of `streamed` layers spread around the circle of `layers`: ⌊j·n/m⌋ (Oneiros §5.2). ValueError."""
    if not 0 <= streamed <= layers:
        raise ValueError(f"{streamed} of {layers} layers cannot be streamed")
    return tuple(j * layers // streamed for j in range(streamed))


def is_even(layers: int, at: Sequence[int]) -> bool:
    """Are the gaps as equal as they can be?"""
    distances = gaps(layers, at)
    return not distances or max(distances) - min(distances) <= 1


def any_slot(compute: Sequence[Time], transfer: Sequence[Time], at: Sequence[int], slots: int) -> Time:
    """Time of a pass where a copy goes to whichever slot is free first, as in the papers: slots are freed in the order
    in which they were taken, so after as many passes as there are slots all is as it was."""
    streamed = [number * len(compute) + layer for number in range(slots) for layer in at]
    taken = [copy % slots for copy in range(len(streamed))]
    return simulate([*compute] * slots, [*transfer] * slots, streamed, taken) / slots


def one_slot(layers: int, at: Sequence[int], ratio: Time) -> Time:
    """Time of a pass, in layers, with one slot: Σ max(k, r + 1) over the gaps. The slot is busy until its layer has
    computed, so a copy has what is left of the gap."""
    return sum((max(Time(gap), ratio + 1) for gap in gaps(layers, at)), Time(0)) if at else Time(layers)


def two_slots(layers: int, streamed: int, ratio: Time) -> Time:
    """Time of a pass, in layers, with two slots or more and even gaps: max(n, m·r). The link never waits. See Note [Two
    slots]."""
    return max(Time(layers), streamed * ratio)


def closed_form(layers: int, at: Sequence[int], slots: int, ratio: Time) -> Time | None:
    """The time of a pass in layers where a formula gives it: equal layers, even gaps; else None."""
    if not is_even(layers, at):
        return None
    if slots == 1:
        return one_slot(layers, at, ratio)
    return two_slots(layers, len(at), ratio) if _keeps_up(layers, at, slots, ratio) else None


def _keeps_up(layers: int, at: Sequence[int], slots: int, ratio: Time) -> bool:
    """Does the link keep up with compute? See Note [Two slots]."""
    count, time, unit, others = len(at), ratio.numerator, ratio.denominator, slots - 1
    around = gaps(layers, at) * (slots // max(1, count) + 3)
    ends = list(accumulate(around, initial=0))  # layers computed so far, at each streamed one
    turns = range(count)
    if count * ratio <= layers:
        return all(
            copies * time <= (ends[start + copies + others] - ends[start] - 1) * unit
            for start in turns
            for copies in turns
        )
    return all(
        (ends[start + passed] - ends[start] + 1) * unit <= (passed + others) * time
        for start in turns
        for passed in turns
    )
