"""Models of one device that have work: do they share it, each present in part, or does each have it for a turn, present
as a whole (spatial and temporal sharing, Oneiros §5.2)? And whose turn is it? Numbers in, decisions out.

Note [Two plans, one price]
    What either plan loses, as a part of the time, follows from `waits`: what a pass of each model waits for pages for
    which there is no room. A pass of `seconds` hides copies of as many pages as cross the link in it, but for those of
    the slot: T = max(n T_c, m T_T), with Oneiros' cap (§5.3) where it begins to wait; one that computes prompts takes
    longer than one of tokens alone, and hides more. While models share the device
    each of them passes once in a round, and together they lack what all of them need beyond the room. In turns each
    waits for what it lacks alone, and once in a turn for what the others had in its place: only that moves. Another
    plan has to save a part of the time (`WeightPlans.margin`). Where everything fits neither plan loses anything, and
    models share.

Note [Who waits while models share]
    Instead of waiting for pages in each pass, requests may wait for others to end. Then all weights stay, the copies of
    some hide, and of the requests only the part runs for whose KV there is room: for as many tokens there are more
    passes, each of which takes its `fixed` seconds once more. The cheaper of both counts.

Note [How long a turn is]
    Where turns become the cheaper plan while requests of several models run, these end first, as at the end of a turn.
    While nobody waits a turn goes on, and whoever has work alone has the turn. Models that are present beside the one
    whose turn it is share it, and it ends for them too. Once another has waited for `patience` times what moves at its
    turn, or for less where none of their requests waits (`_RESTS`), these begin no more, and the turn ends with the
    last that runs. Meanwhile that other one, the next, comes as soon as there is room for it, and begins (`beside`):
    what it lacks is copied while others compute. The last few are suspended where many more wait (`_FEW`) and answers
    are long (`_SOON`): 13 GiB of weights stayed for an answer of 400 tokens while 46 requests waited. A turn ends in
    any case after `bound`, divided among those who wait, since when they did, and the bound after it began to end: so
    nobody waits for longer than the bound and what moves in each turn, however many models there are and however long
    answers. SLOs of requests that wait end it earlier (`due`), but no turn is shorter than what moves at its beginning
    takes: half of the time at least is work. Next is who has waited longest, or whose SLO it is that ends the turn,
    unless somebody has waited for the bound. The shorter turns have to be, the more is lost in them: models with
    strict SLOs share the device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

SHARED: Final = 0  # the number of no model
_FEW: Final = 4  # requests wait for each that is suspended. Chosen: with 6 a third more of chat in bursts came late
_SOON: Final = 1 / 24  # of the bound: answers that take no longer end first. Else 46 of 500 short ones had gaps
_RESTS: Final = 4.0  # times what moves: a turn is not worth less, though none of its requests waits. Chosen


@dataclass(frozen=True, slots=True)
class TurnWork:
    """What a model with work needs. `seconds`: of a pass with every page present; `weights`: pages that can leave the
    device, and of these the `slot` through which they stream; `kv`: pages for its requests; `floor`: pages that it
    keeps; `slack`: seconds that SLOs let it wait for the device; `prompts`: the part of its passes that compute
    prompts, and take `prompting` seconds; `fixed`: seconds of a pass whatever is in it, infinity where that is not
    known; `answer`: tokens of an answer, on average."""

    seconds: float
    weights: int
    slot: int
    kv: int
    floor: int = 0
    slack: float = math.inf
    prompting: float = 0.0
    prompts: float = 0.0
    fixed: float = math.inf
    answer: float = 0.0

    @property
    def usual(self) -> float:
        """Seconds of a pass, on average."""
        return self.seconds + self.prompts * (self.prompting - self.seconds)

    @property
    def pages(self) -> int:
        """All pages with which nothing is waited for."""
        return self.weights + self.kv

    def least(self, page_seconds: float) -> float:
        """Pages of its layers with which a pass waits for none, as copies of the others hide behind it."""
        return self.weights - max(0.0, min(self.weights, self.seconds / page_seconds) - self.slot)


@dataclass(frozen=True, slots=True)
class Waiter:
    """A model with work. `runs`: requests that have begun, and not ended; `waits`: those that have not begun; `since`:
    when it began to wait for the device; `due`: until when it has to have it for SLOs; `answer`: seconds of one, on
    average."""

    number: int
    runs: int
    since: float
    due: float = math.inf
    waits: int = 0
    answer: float = 0.0


@dataclass(frozen=True, slots=True)
class Room:
    """`pages` for layers and KV, and `page_seconds` to copy one."""

    pages: int
    page_seconds: float


@dataclass(frozen=True, slots=True)
class DeviceTurn:
    """Which model has the device since when, SHARED: all. `next`: whose turn it is once what runs has ended, SHARED:
    the turn goes on; `ends`: since when that is so."""

    has: int = SHARED
    began: float = -math.inf
    next: int = SHARED
    ends: float = math.inf


def waits(works: Sequence[TurnWork], room: Room) -> float:
    """Seconds that one pass of each model waits for pages. See Note [Two plans, one price]."""
    short = sum(work.pages for work in works) - room.pages
    if short <= 0:
        return 0.0

    def exposed(passes: Iterable[float]) -> float:
        """Pages that are waited for in passes of so many seconds, one of each model."""
        copied = (min(work.weights, its / room.page_seconds) for work, its in zip(works, passes, strict=True))
        return max(0.0, short - sum(max(0.0, pages - work.slot) for work, pages in zip(works, copied, strict=True)))

    prompts = sum(work.prompts for work in works) / len(works)
    tokens, prompting = exposed(work.seconds for work in works), exposed(work.prompting for work in works)
    return ((1 - prompts) * tokens + prompts * prompting) * room.page_seconds


def queued(works: Sequence[TurnWork], room: Room) -> float:
    """Seconds that are lost in one pass of each model where only as many requests run as there is room for. See Note
    [Who waits while models share]."""
    left = room.pages - sum(work.least(room.page_seconds) for work in works)
    if left <= 0:
        return math.inf
    more = max(0.0, sum(work.kv for work in works) / left - 1)
    return more * sum(work.fixed for work in works) if more else 0.0


def moved(works: Sequence[TurnWork], room: Room) -> float:
    """Seconds that copies take at the beginning of a turn: of what others had in the place of the model's pages."""
    short = sum(work.pages for work in works) - room.pages
    return max(0, min(short, max(work.pages for work in works))) * room.page_seconds


def longest(works: Sequence[TurnWork], moves: float, patience: float, bound: float) -> float:
    """Seconds that a turn takes if all of these models have work until its end."""
    slack = min(work.slack for work in works)
    return max(moves, min(patience * moves, bound / (len(works) - 1), slack))


def lost_shared(works: Sequence[TurnWork], room: Room) -> float:
    """The part of the time that is lost while the models share the device."""
    lost = waits(works, room)
    lost = min(lost, queued(works, room)) if lost else 0.0
    return lost / (lost + sum(work.usual for work in works))


def lost_in_turns(works: Sequence[TurnWork], room: Room, patience: float, bound: float) -> float:
    """The part of the time that is lost while each model has the device for a turn."""
    floors, moves = sum(work.floor for work in works), moved(works, room)
    turn = longest(works, moves, patience, bound)
    alone = [
        lost_shared([work], Room(room.pages - floors + work.floor, room.page_seconds)) * (turn - moves)
        for work in works
    ]
    return (moves + sum(alone) / len(works)) / turn if turn else 0.0


def cheaper_in_turns(
    works: Sequence[TurnWork], room: Room, patience: float, bound: float, margin: float, now: bool
) -> bool:
    """Are turns the cheaper plan? `now`: they are the present one; the other has to save the part `margin`."""
    if len(works) < 2:
        return False
    saved = lost_shared(works, room) - lost_in_turns(works, room, patience, bound)
    return saved > (-margin if now else margin) and waits(works, room) > 0


def next_turn(
    now: float,
    turn: DeviceTurn,
    waiters: Sequence[Waiter],
    moves: float,
    patience: float,
    bound: float,
    beside: Collection[int] = (),
) -> DeviceTurn:
    """Returns whose turn is next. `moves`: seconds at the beginning of a turn; `beside`: models that share it, as they
    are present. See Note [How long a turn is]."""
    busy = {waiter.number for waiter in waiters}
    others = [waiter for waiter in waiters if waiter.number != turn.has and waiter.number not in beside]
    comes = turn.next in busy and turn.next in beside  # it computes by now
    ending = [it for it in waiters if it.number in {turn.has, *beside} - {turn.next}]
    begun, ends = sum(it.runs for it in ending), max((it.answer for it in ending), default=0.0)
    runs = begun > 0 and (ends <= _SOON * bound or _FEW * begun >= sum(it.waits for it in waiters))
    if comes and (turn.has not in busy or not runs or now - turn.ends >= bound):
        return DeviceTurn(turn.next, now)
    if turn.has not in busy:  # at first who runs, then who has waited longest
        first = min(waiters, key=lambda it: (turn.has == SHARED and not it.runs, it.since, it.number))
        run = [it.number for it in waiters if it.runs and it is not first]
        if run and turn.has == SHARED:
            return DeviceTurn(run[0], now, first.number, now)
        return DeviceTurn(first.number, now)
    if not others:
        return turn if comes else DeviceTurn(turn.has, turn.began)
    first = min(others, key=lambda it: (it.since, it.number))
    hurried = min(others, key=lambda it: (it.due, it.since, it.number))
    waited = now - max(first.since, turn.began)
    if now - turn.began >= moves:
        if now - first.since < bound and now >= hurried.due:
            return DeviceTurn(hurried.number, now)
        if now - first.since >= bound or waited >= bound / len(others):
            return DeviceTurn(first.number, now)
    if comes:
        return turn
    rests = turn.next != SHARED or not any(it.waits for it in ending)
    if waited < (_RESTS if rests else patience) * moves:
        return DeviceTurn(turn.has, turn.began)
    if runs:
        return DeviceTurn(turn.has, turn.began, first.number, min(turn.ends, now))
    return DeviceTurn(first.number, now)
