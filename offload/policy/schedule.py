"""The cost of streaming: the time of one pass over a model of which some layers are copied in while it runs.

Words
    streamed    a layer whose weights are on the host and are copied into a slot before it computes (m of n layers)
    slot        device memory that streamed layers take turns in (β of them)
    gap         layers from a streamed one up to and including the next, around the circle: pass follows pass
    ratio       r = transfer time of a layer / its compute time

Note [The schedule]
    The link copies streamed layers in the order in which they compute, one at a time. A copy starts when the one before
    it is done and the layer that had its slot has computed; a streamed layer computes when the layer before it has, and
    its copy is done. `simulate` computes just that. For layers all alike, evenly spaced, the closed forms of Oneiros
    §5.2 and Select-N §4.3 say the same (tests/closed_forms.py). Times are in any unit, sizes of layers need not be
    equal.

Note [Whose slot]
    In the papers a layer takes whichever slot is free. Here its addresses lead to one slot for good, or every token
    would cost page table updates. Where the slots do not divide the streamed layers, the last of a pass and the first
    of the next share one, and the link waits for about one layer per pass.

Note [As submitted]
    The real ring (residency/ring.py) submits a copy when the layer that had the slot has computed, and the link takes
    copies as they come: where slots do not divide the layers that of the second layer of the next pass comes before
    that of the first, and the link waits for less. And what is alone in its slot is copied once and stays.
    `as_submitted` knows that; where slots divide the layers, and no slot has but one, it is the same as `simulate`.

Note [The cycle]
    When everything is done with a pass follows from when it was done with the one before by sums and maxima alone: one
    pass is a matrix over (max, +). What passes take in the long run is the largest mean of a cycle in it. To follow the
    passes until they repeat would not do: where the link is a millionth faster than compute that takes a million.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import lcm
from operator import add

Time = Fraction


def every(layers: int, interval: int) -> tuple[int, ...]:
    """Indices of the last layer of every `interval` (Select-N §4.3): ⌊n/i⌋ of them. ValueError."""
    if not 1 <= interval <= layers:
        raise ValueError(f"an interval of {interval} is not between 1 and the {layers} layers")
    return tuple(range(interval - 1, layers, interval))


def gaps(layers: int, at: Sequence[int]) -> tuple[int, ...]:
    """Layers from each streamed layer to the next one around the circle; they add up to `layers`. `at` is ascending."""
    if list(at) != sorted(set(at)) or (at and not 0 <= at[0] <= at[-1] < layers):
        raise ValueError(f"streamed layers are distinct, ascending and below {layers}, not {list(at)}")
    return tuple((after - before - 1) % layers + 1 for before, after in zip(at, [*at[1:], *at[:1]], strict=True))


def simulate(compute: Sequence[Time], transfer: Sequence[Time], at: Sequence[int], slots: Sequence[int]) -> Time:
    """Returns what each pass takes where pass follows pass. `compute`: of each layer; `transfer`: of each streamed one,
    in the order of `at`; `slots`: the slot of each of those. See Note [The schedule], Note [Whose slot], Note [The
    cycle]. ValueError where they are not as many."""
    if not at:
        return sum(compute, Time(0))
    scale, computing, copying = _whole(compute, transfer)
    copies = {layer: (copy, slot) for layer, copy, slot in zip(at, copying, slots, strict=True)}

    def one_pass(state: list[int]) -> list[int]:
        """`state`: when compute and the link are done with the last pass, and when each slot is free."""
        now, copied, *free = state
        for layer, time in enumerate(computing):
            if layer not in copies:
                now += time
                continue
            copy, slot = copies[layer]
            copied = max(copied, free[slot]) + copy
            now = free[slot] = max(now, copied) + time
        return [now, copied, *free]

    return _steady(one_pass, max(slots) + 1, sum(computing) + sum(copying)) / scale


def as_submitted(compute: Sequence[Time], transfer: Sequence[Time], at: Sequence[int], slots: Sequence[int]) -> Time:
    """Returns the time of a pass as `simulate`, in the order of submission. See Note [As submitted]."""
    turns = {slot: [layer for layer, its in zip(at, slots, strict=True) if its == slot] for slot in {*slots}}
    shared = [layers for layers in turns.values() if len(layers) > 1]
    following = {
        layer: after for layers in shared for layer, after in zip(layers, [*layers[1:], layers[0]], strict=True)
    }
    if not following:
        return sum(compute, Time(0))
    slot_of = {layer: slot for slot, layers in enumerate(shared) for layer in layers}
    times = {layer: time for layer, time in zip(at, transfer, strict=True) if layer in following}
    scale, computing, copies = _whole(compute, [*times.values()])
    copying = dict(zip(times, copies, strict=True))

    def one_pass(state: list[int]) -> list[int]:
        """`state`: when compute and the link are done, and when what each slot is to hold is there."""
        now, copied, *there = state
        for layer, time in enumerate(computing):
            if layer not in following:
                now += time
                continue
            slot = slot_of[layer]
            now = max(now, there[slot]) + time
            copied = there[slot] = max(copied, now) + copying[following[layer]]
        return [now, copied, *there]

    return _steady(one_pass, len(shared), sum(computing) + sum(copies)) / scale


def _whole(compute: Sequence[Time], transfer: Sequence[Time]) -> tuple[int, list[int], list[int]]:
    """Returns (a scale, times of computing and of copying in whole numbers of it): sums of these are fast."""
    scale = lcm(*(time.denominator for time in (*compute, *transfer)))
    return scale, [int(time * scale) for time in compute], [int(time * scale) for time in transfer]


def _steady(one_pass: Callable[[list[int]], list[int]], slots: int, longest: int) -> Time:
    """The time of a pass in the long run. `longest`: no pass takes more."""
    size = slots + 2
    never = -size * (longest + 1)  # a path through it is longer than none
    return _cycle_time([one_pass([0 if i == j else never for j in range(size)]) for i in range(size)])


def _cycle_time(steps: Sequence[Sequence[int]]) -> Fraction:
    """The largest mean of a cycle, `steps[i][j]` being the length of the step from i to j (Karp 1978)."""
    size = len(steps)
    walks = [[0] * size]  # walks[k][j]: the longest of k steps that ends at j
    for _ in range(size):
        walks.append([max(map(add, walks[-1], column)) for column in zip(*steps, strict=True)])
    last = walks.pop()
    return max(min(Fraction(end - walk[j], size - k) for k, walk in enumerate(walks)) for j, end in enumerate(last))
