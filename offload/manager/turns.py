"""Whose turn it is among the generation loops of a device (policy/turns.py): each says what it has to do before it
makes a batch, and is told whether it may.

Note [Who waits for a turn]
    The model of a loop that waits for its turn is idle to everybody, as its scheduler says so (`Seat.until`): its
    layers and its KV are taken before those of the model whose turn it is. What that one lacks comes back at once when
    its turn begins, as the plan was priced with all of it present, and only that moves (`Overview.present`). The same
    holds for each model with work where there is room for all of them. Copies then are no gap between tokens of others:
    those have ended, or wait. Another model that is there as a whole, and for which there is room beside, shares the
    turn.

Note [How the next one comes]
    While the last answers of a turn end, few requests are left of the model that has it. The next model comes then, as
    soon as its weights have room beside theirs, and begins as many requests as there is room for: it waits for its
    copies in a stream of its own, and the answers go on meanwhile. Of 500 requests to two models of 8B, chat in bursts,
    322 kept their SLOs with that, 285 without it (bench_tenants.py, seed 1).

Note [Bursts]
    A burst begins with one request, and while its queue is short models would share, until the first that has begun is
    suspended as turns are cheaper after all. So a model is priced with the most KV that its requests needed of late,
    which fades by half in each `TurnLengths.fades`, and for as long with its weights after its last request: where
    three models have room for two, one that comes waits for the answers that run, although the third rests. With that,
    shared turns and `present`, 473 of 500 requests of two models of 8B and one of 13B in bursts on 48 GiB kept their
    SLOs, without them 305.

Note [How many begin]
    What requests have that have begun is moved in each turn. So in turns no more begin than have room together, those
    of all models, beside those weights of the models that compute of which copies do not hide (`LoopTurns.room`).
    Without that limit 200 requests of two models waited half of the time for their KV. What has begun goes on until a
    turn ends, although its KV grows: else each request that runs would have a gap.

Note [One prompt after the other]
    Each step of a prompt is a gap for whoever decodes on the device. Where several loops computed prompts at once their
    steps would add up to one gap, and none would end sooner. So the loop whose prompt came first computes it, and the
    others decode meanwhile; one whose prompt finds no memory lets others go before it.

Note [Locks]
    The lock of this is taken before the manager's. `Seat.until` is read under the manager's lock, so it takes none.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

from ..policy.turns import SHARED, DeviceTurn, Room, TurnWork, Waiter, cheaper_in_turns, moved, next_turn
from .client import ModelClient
from .clients import ModelState
from .overview import Overview
from .reclaim import ReclaimList


class LoopWork(NamedTuple):
    """What a loop has to do: `kv`, bytes that its requests need; `runs`: how many have begun, and not ended; `since`:
    when the oldest that waits came, None where none does; `due`: until when it has to have the device for SLOs;
    `begun`: bytes of KV of those that have begun; `waits`: how many have not; `prompts`: the part of its steps that
    compute prompts; `fixed`, `answer`: as in `TurnWork`."""

    kv: int
    runs: int
    since: float | None
    due: float = math.inf
    begun: int = 0
    waits: int = 0
    prompts: float = 0.0
    fixed: float = math.inf
    answer: float = 0.0


@dataclass(slots=True, eq=False)
class Seat:
    """The place of a loop. `user`: its scheduler; `client`: returns its model, None once that is gone; `wake`: makes
    the loop ask again soon. `work`: None where it has nothing to do. `could`: when it could compute last. `until`: the
    same while it may not and has work, by which its model is idle; else None. `peak`: see Note [Bursts]. `prompt`:
    when the oldest of its requests came whose prompt is to be computed, None where none is, or none could be; `asked`:
    when it said so last."""

    number: int
    user: weakref.ref[Any]
    client: Callable[[], ModelClient | None]
    wake: Callable[[], object]
    work: LoopWork | None = None
    could: float = -math.inf
    until: float | None = None
    peak: tuple[int, float] = 0, -math.inf
    prompt: float | None = None
    asked: float = -math.inf

    def needs(self, kv: int, now: float, fades: float) -> int:
        """Bytes of KV for which it is to be priced: what it needs, or what is left of the most that it needed."""
        most, at = self.peak
        self.peak = max(kv, round(most * 0.5 ** ((now - at) / fades))), now
        return self.peak[0]

    def since(self, work: LoopWork) -> float:
        """When it began to wait for the device."""
        return self.could if work.runs or work.since is None else max(self.could, work.since)


class LoopTurns:
    """The turns of a device's loops. Thread-safe."""

    def __init__(self, known: Overview, reclaim: ReclaimList, bound: float) -> None:
        """`bound`: seconds that a request waits for the turns of other models at most."""
        self._known = known
        self._reclaim = reclaim
        self._bound = bound
        self._patience = known.tuning.turns.patience
        self._fades = known.tuning.turns.fades
        self._lock = threading.Lock()
        self._numbers = count(SHARED + 1)
        self.seats: Final[dict[int, Seat]] = {}  # of all loops
        self._turn = DeviceTurn()
        self._priced: tuple[object, ...] = ()  # what the plan was chosen for
        self._apart = False  # are turns the plan?
        self._moves = 0.0  # seconds that copies take at the beginning of a turn
        self._beside = frozenset[int]()  # models that share the turn
        self._have = frozenset[int]()  # models whose plan has all of their pages on the device
        self._fit = False  # is there room for all pages of those that have work, or had some of late?
        self._works: dict[int, TurnWork] = {}  # of each that has work, or had some of late
        self._room = Room(0, math.inf)  # for layers and KV

    def seat(self, user: object, client: Callable[[], ModelClient | None], wake: Callable[[], object]) -> Seat:
        """Makes the place of a loop, whose scheduler is `user`. It takes no turns until it joins."""
        return Seat(next(self._numbers), weakref.ref(user), client, wake)

    def join(self, seat: Seat) -> None:
        """Has a loop take turns for as long as its scheduler lives."""
        with self._lock:
            self.seats[seat.number] = seat

    def admits(self, seat: Seat) -> bool:
        """May a model that may compute begin requests?"""
        return self._turn.next in (SHARED, seat.number)

    def room(self, seat: Seat) -> float:
        """Bytes of KV that begun requests of a loop may have: while models take turns, what there is beside its weights
        and the KV of others' requests, which would have to be moved in each turn; else infinity."""
        with self._lock:
            if not self._apart or seat.number not in self._works:
                return math.inf
            works = [self._works[number] for number in (self._turn.has, *self._beside) if number in self._works]
            layers = sum(work.least(self._room.page_seconds) for work in works)
            others = sum(it.work.begun for it in self.seats.values() if it is not seat and it.work is not None)
            return (self._room.pages - layers) * self._known.device.page_size - others

    def may_step(self, seat: Seat, work: LoopWork | None) -> bool:
        """Notes what a loop has to do, None for nothing. Returns whether it may compute now."""
        if len(self.seats) < 2:  # nobody to share with
            return True
        with self._lock:
            seat.work, before = work, (self._waiting, self._have)
            self._advance(self._known.clock())
            awake = [other for other in self.seats.values() if other.until is None and other.work is not None]
            changed = (self._waiting, self._have) != before
        if changed:
            self._tell()
            for other in awake:
                if other is not seat:
                    other.wake()
        return seat.until is None

    @property
    def _waiting(self) -> tuple[int, ...]:
        """Whose turn it is, and who waits for one."""
        return self._turn.has, *(number for number, seat in self.seats.items() if seat.until is not None)

    def may_prompt(self, seat: Seat, since: float | None) -> bool:
        """May the next step of a loop compute prompts, the oldest of which came at `since`, None for none? See Note
        [One prompt after the other]."""
        now = self._known.clock()
        with self._lock:
            before, seat.prompt, seat.asked = seat.prompt, since, now
            prompts = [
                (other.prompt, other.number, other)
                for other in self.seats.values()
                if other.prompt is not None and other.until is None and other.user() is not None
                if other is seat or now - other.asked < self._bound  # else it computes nothing
            ]
            first = min(prompts, default=(0.0, 0, None))[2]
        if first is not None and first is not seat and before not in (None, since):
            first.wake()
        return first is seat

    def _tell(self) -> None:
        """Has the pages listed anew, as other models are idle now."""
        models = [seat.client() for number in self._have if (seat := self.seats.get(number)) is not None]
        with self._known.lock:
            states = [self._known.clients.get(model) for model in models if model is not None]
            self._known.present = frozenset(state.number for state in states if state is not None)
            self._known.drain_core_events()
            self._known.look(self._known.clock())
            self._known.moved()
            self._known.list.void()
        self._reclaim.publish()

    def _advance(self, now: float) -> None:
        """Ends the turn if it is time, and begins the next."""
        for number in [number for number, seat in self.seats.items() if seat.user() is None]:
            del self.seats[number]
        busy = {seat: seat.work for seat in self.seats.values() if seat.work is not None}
        for seat in busy:
            seat.could = now if seat.until is None else seat.could
        works = ((seat.number, work.runs > 0, work.since is None, work.kv.bit_length()) for seat, work in busy.items())
        late = {seat: LoopWork(0, 0, None) for seat in self.seats.values() if now - seat.could < self._fades}
        key = self._known.link.page_seconds, len(late), *works
        if key != self._priced:
            self._priced = key
            self._price(late | busy, now)
        if not self._apart:
            self._turn, self._beside = DeviceTurn(), frozenset()
        elif busy:
            waiters = [self._waiter(seat, work) for seat, work in busy.items()]
            self._beside, before = self._sharing(busy, True), self._turn
            self._turn = next_turn(now, self._turn, waiters, self._moves, self._patience, self._bound, self._beside)
            if (self._turn.has, self._turn.next) != (before.has, before.next):
                self._beside = self._sharing(busy, before.has in (SHARED, self._turn.has))
        coming = self._beside.intersection((self._turn.next,))
        self._have = (
            coming.union((self._turn.has,)) if self._apart else frozenset(it.number for it in busy if self._fit)
        )
        for seat in self.seats.values():
            waits = seat in busy and self._turn.has not in (SHARED, seat.number) and seat.number not in self._beside
            seat.until = now if waits else None

    def _waiter(self, seat: Seat, work: LoopWork) -> Waiter:
        """The model of a loop as policy/turns.py takes it."""
        answer = 0.0 if (works := self._works.get(seat.number)) is None else works.answer * works.seconds
        return Waiter(seat.number, work.runs, seat.since(work), work.due, work.waits, answer)

    def _sharing(self, busy: Mapping[Seat, LoopWork], go_on: bool) -> frozenset[int]:
        """The models with work that share the turn: there is room for each beside the one whose turn it is, and all of
        it is on the device, but for the next one, which comes while the turn ends. `go_on`: and those that compute, for
        as long as requests of theirs run."""
        turn, page = self._turn, self._known.device.page_size
        if turn.has not in self._works:
            return frozenset()
        ends, seconds = turn.next != SHARED, self._room.page_seconds
        needs = {
            seat.number: works.least(seconds) - (-work.begun // page) if ends else works.pages
            for seat, work in busy.items()
            if (works := self._works.get(seat.number)) is not None
        }
        left, whole = self._room.pages - needs.get(turn.has, 0), []
        with self._known.lock:
            self._known.drain_core_events()
            for seat in sorted(busy, key=lambda seat: (seat.until is not None, not busy[seat].runs, seat.number)):
                model, pages = seat.client(), needs.get(seat.number)
                state = None if model is None else self._known.clients.get(model)
                if state is None or seat.number == turn.has or pages is None:
                    continue
                kv = sum(cache.displaced for client, cache in self._known.clients.paged if client.model == state.number)
                away, comes = state.taken or state.model.plan.streamed or kv, seat.number == turn.next
                runs = go_on and seat.until is None and busy[seat].runs
                stays = runs or (comes and seat.number in self._beside)  # though KV of both grows
                if stays or (pages <= left and (comes or not (away or ends))):
                    whole.append(seat.number)
                    left -= pages
        return frozenset(whole)

    def _price(self, busy: Mapping[Seat, LoopWork], now: float) -> None:
        """Chooses the plan: are turns cheaper than sharing? Where the link is not measured models share."""
        known, page_seconds = self._known, self._known.link.page_seconds
        models = [
            (seat.client(), work._replace(kv=seat.needs(work.kv, now, self._fades))) for seat, work in busy.items()
        ]
        with known.lock:
            known.drain_core_events()  # else what was taken counts as free and as the model's
            states = [(None if model is None else known.clients.get(model), work) for model, work in models]
            self._works = {
                seat.number: self._work_of(state, work, now)
                for seat, (state, work) in zip(busy, states, strict=True)
                if state is not None
            }
            self._room = room = Room(self._pages(), page_seconds or math.inf)
        works = [*self._works.values()]
        margin, before = known.tuning.weights.margin, self._apart
        self._moves = moved(works, room) if works else 0.0
        self._fit = page_seconds is not None and sum(work.pages for work in works) <= room.pages
        self._apart = page_seconds is not None and cheaper_in_turns(
            works, room, self._patience, self._bound, margin, before
        )

    def _work_of(self, state: ModelState, work: LoopWork, now: float) -> TurnWork:
        """Returns what the model needs. The caller holds the manager's lock."""
        link, page, pages = self._known.link.page_seconds, self._known.device.page_size, state.model.plan.pages
        seconds, prompting = (state.costs_at(state.last[phase], link)[0].seconds for phase in ("decode", "prefill"))
        moving, slack = pages if state.auto else (), max(0.0, work.due - now)
        needs = sum(moving), max(moving, default=0), -(-work.kv // page), state.model.floor
        return TurnWork(seconds, *needs, slack, prompting, work.prompts, work.fixed, work.answer)

    def _pages(self) -> int:
        """Pages that layers which may move and KV have, or could have. The caller holds the manager's lock."""
        known = self._known
        layers = sum(
            state.model.plan.device_pages - sum(state.model.plan.pages[layer] for layer in state.taken)
            for state in known.clients.models
            if state.auto
        )
        kv = sum(cache.device_pages for _, cache in known.clients.paged)
        return max(0, known.pages.free - known.pages.mark) + layers + kv
