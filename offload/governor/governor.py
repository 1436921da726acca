"""The governor of a device: asked before each iteration what a model streams in it, it knows all models and KV caches
of the device and the link (overview.py), and tells the native core what may be taken until somebody asks again
(Select-N §4.5, Oneiros §5.5). In which order is the ladder's (ladder.py).

Note [Who asks when]
    A model asks `before` each outermost forward, on the thread that runs it, and arranges what it is told within
    `changing`. Nothing else changes what a model streams, but for the core, which takes layers from the published list
    when pages run out; the governor hears of that the next time anyone asks. While nothing has happened an answer is
    looked up: by phase and by powers of two of batch and length, as in the performance record.
    A KV cache says when it offers something else (`cache_changed`), and while pages of it are on the host it asks in
    each iteration how many it may bring back (`restorable_pages`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from ...allocator.interrupts import Guarded, guarded, if_free
from ..policy.ladder import Rung
from ..policy.ledger import Refusal
from ..policy.plan import Plan
from ..policy.remap import cap
from ..record.record import Point
from .decision import Decision, decide, faster
from .exchange import Exchange
from .kv_read_plan import Streamed
from .restore import plan_restore, restored_on_use
from .seat import LAYERS, Cache, Governed, Seat, rounded
from .sharing import admit


class _Change:
    """What happens within `changing`: `seat`, None until it is found, keeps it meanwhile."""

    def __init__(self, governor: Governor, model: Governed) -> None:
        self.model = model
        self.seat: Seat | None = None
        self.before = model.plan
        self.promised: Plan | None = None
        self.taken: frozenset[int] = frozenset()
        self.began = governor.clock()
        self._governor = governor

    def begin(self) -> frozenset[int]:
        return self._governor._begin(self)

    def end(self, failed: bool) -> None:
        self._governor._end(self, not failed)


class Governor(Exchange):
    """Thread-safe. See Overview for its arguments."""

    # -- models

    def admit(self, model: Governed, available: int) -> Refusal | None:
        """Before a model with an SLO is added: None, or why it cannot be kept and what would do, beside all models that
        are there, should they all decode. `available`: device pages for its layers; `model.plan`: with every layer
        resident. What nobody measured is not judged. ValueError where no bandwidth is known."""
        if self._bandwidth is None:
            raise ValueError("an SLO needs the measured bandwidth of the link")
        with self._lock:
            return admit(self._situation(self.clock(), available), model, available)

    def add(self, model: Governed) -> None:
        """The model is there, arranged as its plan says. ValueError where it has an SLO and no bandwidth is known."""
        if self._bandwidth is None and (model.tpot_slo is not None or model.ttft_slo is not None):
            raise ValueError("an SLO needs the measured bandwidth of the link")
        with self._lock:
            self._clients.add(model)
            self._moved()
        self._publish()
        self._watch()

    def remove(self, model: Governed) -> None:
        """Removes a client: nothing of it is or will be taken once this returns. Idempotent."""
        with self._lock:
            seat = self._clients.pop(model)
            if seat is None:
                return
            self._moved()
            self._list.void()
        self._device.withdraw(seat.keys())
        self._publish()
        self._watch()

    def collected(self, model: Governed) -> None:
        """As `remove`, for a finalizer, which may run in the middle of anything, even here: whoever holds the lock may
        be this thread. Then it is removed the next time anyone asks. Its ranges are closed meanwhile, and the core
        takes nothing of those."""
        self._clients.left(model)
        if if_free(self._lock, self._bury):
            self._publish()
            self._watch()

    def before(self, model: Governed, point: Point) -> Decision:
        """Called by whoever has the turn of the model, before an iteration. What differs from `model.plan` is to be
        arranged within `changing`. KeyError."""
        point = rounded(point)
        with self._lock:
            seat = self._clients[model]
            now = self.clock()
            self._hear()
            self._arrive(seat, point, now)
            free = self._look(now)
            self._spare(now)
            self._compare(seat, point, now, free)
            decision = self._answers.get((seat.number, point))
            if decision is None:
                situation = self._situation(now, free)
                decision = decide(situation, seat, point)
                seat.waking &= point.phase != "decode" or decision.plan != seat.model.plan
                self._settled = situation.settled
                self._wanting = free.bit_length() + 1 if situation.short else self._wanting
                self._answers[seat.number, point] = replace(decision, notice=None)
            stale = self._list.stale
            tended = [cache for _, cache in self._clients.caches] if self.pages.short and not stale else []
            resting = self._clients.resting(now) if self.pages.short and not stale else []
        if stale:
            self._publish()
            self._watch()
        for cache in resting:
            cache.give_slots()
        for cache in tended:
            cache.write_behind(0)
        if tended and self._list.stale:
            self._publish()
        return decision

    def after(self, model: Governed) -> None:
        """The iteration has been launched, or failed: the model is in use until the device has done it."""
        self._clients.ended(model, self.clock())

    def changing(self, model: Governed) -> Guarded[frozenset[int]]:
        """Within it nothing of the model is taken, and it may change: its plan, its ranges. Hands over the layers that
        were taken since its plan was arranged; where no exception leaves it, `model.plan` has them. KeyError."""
        return Guarded(_Change(self, model))

    def _begin(self, change: _Change) -> frozenset[int]:
        with self._lock:
            seat = change.seat = self._clients[change.model]
            change.before, change.promised = change.model.plan, seat.faster
            seat.held.add(change)
            self._candidates = None
            self._list.void()
        self._device.withdraw(seat.keys())
        with self._lock:
            self._hear()
            change.taken = frozenset(seat.taken)
        return change.taken

    def _end(self, change: _Change, arranged: bool) -> None:
        seat, before = change.seat, change.before
        if seat is None:
            return
        with self._lock:
            try:
                if arranged and change in seat.held:
                    seat.taken -= change.taken
                    seat.waking &= seat.point is None or seat.point.phase != "decode"
                    seat.arranged(before, change.promised)
                    taken = sum(map(before.pages.__getitem__, change.taken))
                    self._say(seat, before.device_pages - taken, change.began)
            finally:
                seat.held.discard(change)
                seat.grant = seat.faster = None
                seat.passes.clear()
                self._moved(seat)
                self._list.void()
        if arranged:
            self._publish()
            self._watch()

    def changed(self, model: Governed) -> None:
        """What `seconds` or `entry` say is different now. Any thread may say so."""
        with self._lock:
            seat = self._clients.get(model)
            if seat is None:
                return
            self._moved(seat)
            self._list.void()
        self._publish()

    # -- KV caches

    def add_cache(self, cache: Cache) -> int:
        """Adds a cache and returns its number. Called on the thread that uses it first; see caches.py, Note [Whose
        caches]."""
        with self._lock:
            return self._clients.add_cache(cache)

    def remove_cache(self, number: int) -> None:
        """Removes a cache. May be called in the middle of anything, as `collected`."""
        self._clients.cache_left(number)
        if_free(self._lock, self._bury)

    def cache_changed(self, number: int) -> None:
        """Notes that a cache offers something else now. On any thread."""
        with self._lock:
            self._hear()
            self._look(self.clock())
            self._list.void()
        self._publish()

    def copies_changed(self) -> None:
        """Pages of a cache are about to be copied to the host, or have been: what is listed now is not published. Said
        within `Cache.write_behind`, after which whoever asked for that publishes."""
        with self._lock:
            self._list.void()

    def caches_of(self, model: Governed) -> tuple[Streamed, ...]:
        """How each KV cache of the model reads what of it lies on the host."""
        with self._lock:
            seat = self._clients.get(model)
            caches = [cache for each, cache in self._clients.caches if seat is not None and each.model == seat.number]
            return tuple(cache.streamed for cache in caches)

    def taken_of(self, number: int) -> frozenset[int]:
        """The indices that the core took since this was asked last: the cache does not offer them any more. Asked by
        the thread that is about to use it, between two iterations."""
        with self._lock:
            self._hear()
            seat = self._clients.caches.get(number)
            cache = None if seat is None else seat.cache()
            if seat is None or cache is None:
                return frozenset()
            now = self.clock()
            seat.waking = self._clients.cache_rests(seat, cache, now)
            self._clients.cache_began(number, now)
            taken, seat.taken = frozenset(seat.taken), set()
            return taken

    def restorable_pages(self, number: int) -> int:
        """Pages that the cache may bring back from the host now, on the thread that is about to use it, between two
        iterations: as many as were free for long enough, or where it was idle, as are free or idle clients have."""
        with self._lock:
            seat = self._clients.caches.get(number)
            cache = None if seat is None else seat.cache()
            if seat is None or cache is None:
                return 0
            self._hear()
            now = self.clock()
            spare = max(0, self._look(now) - self.pages.mark)
            if seat.waking:
                pages = restored_on_use(cache.displaced, spare, self._clients.idle_pages(self._list.pages, now, number))
            else:
                pages = min(seat.home, cache.displaced, spare)
            seat.home = 0
            if pages:
                self.pages.went_back()
        self._publish()
        return pages

    # -- the ladder; see levers.py

    def pull(self, rung: Rung, pages: int) -> int:
        """Takes so many device pages of a rung of the list, those first that are first, as far as this thread may; how
        many. DriverError."""
        self.publish_now()
        keys, left = [], pages
        for candidate in self.candidates():
            if left > 0 and candidate.rung is rung:
                keys.append(candidate.client * LAYERS + candidate.index)
                left -= candidate.pages
        return self._device.take(keys, pages) if keys else 0

    def preparing(self) -> Guarded[Callable[[], int]]:
        """Publishes the reclaim list anew on a thread of its own, for a budget that the list before refused. Hands out
        what tells whether that is still going on. No lock is taken on this thread: it may be in a signal's handler."""

        def begin() -> Callable[[], int]:
            publishing = threading.Thread(target=self.publish_now, name="ballonet-prepare", daemon=True)
            publishing.start()

            return lambda: int(publishing.is_alive())

        return guarded(begin, lambda failed: None)

    def make_room(self, pages: int, last: Rung) -> None:
        """Has so many device pages given by the rungs of the list up to the last, or as many as they have.
        DriverError."""
        self.publish_now()
        for candidate in self.candidates():
            if pages > 0 and candidate.rung <= last:
                pages -= self._device.take([candidate.client * LAYERS + candidate.index])

    def revert(self, rung: Rung, pages: int) -> int:
        """Up to so many free pages go back to those who gave of this rung, without a dwell; how many will."""
        kv = rung in (Rung.PREFIX, Rung.LEND, Rung.IDLE_KV, Rung.RUNNING_KV)
        with self._lock:
            self._hear()
            now = self.clock()
            free = self._look(now)
            situation, held = self._situation(now, free), self._clients.held(now)
            back = plan_restore(situation, held if kv else [], min(pages, situation.spare), models=not kv)
            self._send_home(back)
            seats = {seat.number: seat for seat in situation.seats}
            plans = sum(
                plan.device_pages - situation.standing(seats[each]).device_pages for each, plan in back.plans.items()
            )
            return plans + sum(back.pages.values())

    def wait_for_pages(self, timeout: float) -> bool:
        """Waits until others may have given pages, `timeout` seconds at most, and gives meanwhile what others demand of
        this thread. False where nothing has happened."""
        return self.pages.wait(timeout)

    # -- what happened; the caller holds the lock

    def _arrive(self, seat: Seat, point: Point, now: float) -> None:
        if self._clients.rests(seat, now):
            seat.waking = True
            self._moved()
        self._clients.began(seat, now)
        if seat.point != point:
            seat.point = seat.last[point.phase] = point
            self._moved()

    def _say(self, seat: Seat, before: int, began: float) -> None:
        """An event where the device pages of its layers are others than they were."""
        plan = seat.model.plan
        more = plan.device_pages - before
        if more:
            costs, measured = seat.at(seat.point or seat.last["decode"], self.page_seconds)
            rung = Rung.HIDDEN_WEIGHTS if len(plan.streamed) <= cap(costs) else Rung.STALLING_WEIGHTS
            predicted = max(0, more) * costs.page_seconds if measured else None
            took = self.clock() - began
            verb = "revert" if more > 0 else "pull"
            if more > 0:
                self.pages.went_back()
            self.events.decided(rung.label, verb, abs(more), what=seat.name, predicted=predicted, measured=took)

    def _compare(self, seat: Seat, point: Point, now: float, free: int) -> None:
        """Now and then, of a model that streams: is there a faster plan?"""
        if not seat.model.plan.streamed:
            return
        seat.passes[point.phase] += 1
        if seat.passes.total() >= seat.due:
            before, seat.faster = seat.faster, faster(self._situation(now, free), seat)
            seat.passes.clear()
            seat.due = min(2 * seat.due, self.tuning.weights.longest)
            if seat.faster != before:
                self._moved()
