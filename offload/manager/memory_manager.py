"""The manager of a device: asked before each iteration what a model streams in it, it knows all models and KV caches
of the device and the link (overview.py), and tells the native core what may be taken until somebody asks again
(Select-N §4.5, Oneiros §5.5). In which order is the reclaim order's (reclaim_order.py).

Note [Who asks when]
    A model asks `before` each outermost forward, on the thread that runs it, and arranges what it is told within
    `changing`. Nothing else changes what a model streams, but for the core, which takes layers from the published list
    when pages run out; the manager hears of that the next time anyone asks. While nothing has happened an answer is
    looked up: by phase and by powers of two of batch and length, as in the performance record.
    A KV cache says when it offers something else (`client_changed`), and while pages of it are on the host it asks in
    each iteration how many it may bring back (`restorable_pages`).

Note [Events]
    Decisions are made on events. Each event that may change one gives the manager another `version`: a client comes,
    goes, changes or is only kept; a plan, a time or the link changes; the list of what may be taken is out of date.
    What the core does by itself shows in its own numbers: pages taken, free, requested, the budget. And after each
    decision it is worked out when time alone may change it (`Overview.settle`): somebody becomes idle, a shortage ends,
    a reserve is due, pages may be free for what is away. While pages are short that is at once.
    So a forward compares the version, the time, and the core's numbers; where they are those of the last decision it is
    told the same (`Overview.repeated`), and a decode step like the one before does not even ask
    (hooks/streaming/steps_alike.py, Note [Steps like the last]), nor does its cache (kv_tier.py).
    An event on another thread while this one compares counts from the next iteration on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

from ...allocator._native import Range
from ...allocator.config import Config
from ...allocator.interrupts import Finalizer, Guarded, if_free
from ..policy.coordinator import Refusal
from ..policy.plan import fewest
from ..policy.rental import kv_returns
from ..policy.tuning import DEFAULT, Tuning
from ..record.record import Point
from .client import ModelClient, PageClient
from .clients import ModelState as ModelState  # a part of the face
from .decision import Lendable, StreamDecision, admit, decide, faster
from .device_view import DeviceView
from .device_view import Surroundings as Surroundings  # a part of the face
from .overview import Overview
from .reclaim import ModelChange, ReclaimList, ReclaimSources, Repayment
from .turns import LoopTurns

_LONGEST: Final = 1024  # iterations, at most, between two looks for a faster plan; see `WeightPlans.look`. Chosen


class Standing(NamedTuple):
    """How a device stands. `idle`: pages that idle clients would give; `away`: pages on the host, for want of room,
    that those in use read; `active`: is anyone in use?"""

    idle: int
    away: int
    active: bool


class MemoryManager:
    """Thread-safe."""

    def __init__(
        self,
        device: DeviceView,
        around: Surroundings,
        *,
        tuning: Tuning = DEFAULT,
        window: float = Config().reserve,
        turn: float = Config().turn,
        spill: bool = False,
    ) -> None:
        """`window`: seconds that a model's reserve outlasts its use; `turn`: that a request waits for other models'
        turns. `spill`: may pages of the host stand in where no
        others are left?"""
        known, clock = Overview(device, around, tuning, window), around.clock
        self.tuning: Final = tuning
        self.clock: Final = clock
        self.waits: Final = around.waits
        # the same in ns, and where nothing else was said in one call of C
        self.nanoseconds: Final = time.monotonic_ns if clock is time.monotonic else lambda: round(clock() * 1e9)
        self.spill: Final = spill
        self.marks: Final = around.marks
        self.events: Final = known.events
        self.pages: Final = known.pages
        self.link: Final = known.link
        self.reclaim: Final = ReclaimList(known)
        self.repayment: Final = Repayment(known, self.reclaim)
        self.sources: Final = ReclaimSources(known, self.reclaim)
        self.turns: Final = LoopTurns(known, self.reclaim, turn)
        self.duplicates: Final = known.duplicates
        self.version: Final = known.version
        self.clients: Final = known.clients
        self.lock: Final = known.lock
        self._known = known

    # -- models

    def admit(self, model: ModelClient, available: int) -> Refusal | None:
        """Before a model with an SLO is added: None, or why it cannot be kept and what would do, beside all models that
        are there, should they all decode. `available`: device pages for its layers; `model.plan`: with every layer
        resident. What nobody measured is not judged. ValueError where no bandwidth is known."""
        if self.link.bandwidth is None:
            raise ValueError("an SLO needs the measured bandwidth of the link")
        with self._known.lock:
            return admit(self._known.situation(self.clock(), available), model, available)

    def add(self, model: ModelClient) -> None:
        """The model is there, arranged as its plan says. ValueError where it has an SLO and no bandwidth is known."""
        if self.link.bandwidth is None and (model.tpot_slo is not None or model.ttft_slo is not None):
            raise ValueError("an SLO needs the measured bandwidth of the link")
        with self._known.lock:
            self._known.clients.add(model)
            self._known.moved()
        self.reclaim.publish()
        self._known.watch()

    def remove(self, model: ModelClient) -> None:
        """Removes a client: nothing of it is or will be taken once this returns. Idempotent."""
        with self._known.lock:
            state = self._known.clients.pop(id(model))
            if state is None:
                return
            self._known.moved()
            self._known.list.void()
        self._known.device.withdraw(state.keys())
        self.reclaim.publish()
        self._known.watch()

    def collected(self, model: ModelClient) -> None:
        """As `remove`, for a finalizer, which may run in the middle of anything, even here: whoever holds the lock may
        be this thread. Then it is removed the next time anyone asks. Its ranges are closed meanwhile, and the core
        takes nothing of those."""
        self._known.clients.left(model)
        if if_free(self._known.lock, self._known.drop_dead):
            self.reclaim.publish()
            self._known.watch()

    def before(self, model: ModelClient, point: Point) -> StreamDecision:
        """Called by whoever has the turn of the model, before an iteration. What differs from `model.plan` is to be
        arranged within `changing`. KeyError."""
        with self._known.lock:
            again = self._known.repeated(model, point, self.clock())
        return self._decide(model, point.corner) if again is None else again

    def _decide(self, model: ModelClient, point: Point) -> StreamDecision:
        with self._known.lock:
            state = self._known.clients.of_model(model)
            now = self.clock()
            self._known.drain_core_events()
            self._arrive(state, point, now)
            free = self._known.look(now)
            self.repayment.spare(now)
            self._compare(state, point, now, free)
            decision, offered = self._decided(state, point, now, free), self._known.list.pages
            version = self._known.version.number
            stale = self._known.list.stale
            tended = [cache for _, cache in self._known.clients.paged] if self.pages.short and not stale else []
            resting = self._known.clients.idleness.resting(now) if self.pages.short and not stale else []
        if stale:
            self.reclaim.publish()
            self._known.watch()
            kept = decision.refusal is None and state.slo(point.phase) < math.inf
            if kept and self._known.list.pages is not offered:
                with self._known.lock:  # it was promised what others do not offer any more
                    self._known.moved()
                    decision = self._decided(state, point, now, self._known.look(now))
                    version = self._known.version.number
        for cache in resting:
            cache.give_slots()
        for cache in tended:
            cache.write_behind(0)
        if tended and self._known.list.stale:
            self.reclaim.publish()
        self.duplicates.post()
        with self._known.lock:
            self._known.settle(version)
        return decision

    def after(self, model: ModelClient) -> None:
        """The iteration has been launched, or failed: the model is in use until the device has done it."""
        self._known.clients.running.ended(self._known.clients.get(model), self.clock())

    def changing(self, model: ModelClient) -> Guarded[frozenset[int]]:
        """Within it nothing of the model is taken, and it may change: its plan, its ranges. Hands over the layers that
        were taken since its plan was arranged; where no exception leaves it, `model.plan` has them. KeyError."""
        return Guarded(ModelChange(self._known, self.reclaim, model))

    def lending(self, model: ModelClient, pages: int) -> Lendable:
        """What the layers of the model could give, and what their copies would be if they gave so many pages."""
        with self._known.lock:
            state = self._known.clients.get(model)
            if state is None:
                return Lendable(0, 0, 0)
            plan = model.plan
            if not pages and not plan.streamed:  # what each step of a loop asks
                return Lendable(self._known.list.pages.get(state.number, 0), 0, 0)
            costs, _ = state.costs_at(state.point or state.last["decode"], self.link.page_seconds)
            then = fewest(plan.pages, plan.device_pages - pages, costs.ratio, slots=state.tuning.slots)
            return Lendable(
                self._known.list.pages.get(state.number, 0),
                plan.copied_pages,
                sum(plan.pages) if then is None else then.copied_pages,
            )

    def changed(self, model: ModelClient) -> None:
        """What `seconds` or `entry` say is different now. Any thread may say so."""
        with self._known.lock:
            state = self._known.clients.get(model)
            if state is None:
                return
            self._known.moved(state)
            self._known.list.void()
        self.reclaim.publish()

    # -- page clients

    def add_client(self, client: PageClient, model: ModelClient | None = None) -> int:
        """Adds a page client until it is collected, and returns its number. `model`: whose it is; None: where that is
        not known yet. Called on the thread that uses it first; see clients.py, Note [Whose pages]."""
        with self._known.lock:
            number = self._known.clients.add_paged(client)
            if model is not None and (state := self._known.clients.get(model)) is not None:
                self._known.clients.claim(number, state)
        Finalizer(client, partial(self.remove_client, number))
        return number

    def remove_client(self, number: int) -> None:
        """Removes a page client. May be called in the middle of anything, as `collected`."""
        self._known.clients.client_left(number)
        if_free(self._known.lock, self._known.drop_dead)

    def client_changed(self, number: int) -> None:
        """Notes that a client offers something else now, or is only kept from now on, or no more. On any thread."""
        with self._known.lock:
            self._known.clients.idleness.changed()
            self._known.drain_core_events()
            self._known.look(self.clock())
            self._known.list.void()
        self.reclaim.publish()

    def ranges(self) -> list[tuple[str, list[tuple[str, Range]]]]:
        """What each cache that is alive is called, and the ranges that its pages lie in, with what is in each."""
        with self._known.lock:
            caches = [(state.name, cache) for state, cache in self._known.clients.paged]
        return [(name, cache.ranges) for name, cache in caches]

    def copies_changed(self) -> None:
        """Pages of a cache are about to be copied to the host, or have been: what is listed now is not published. Said
        within `PageClient.write_behind`, after which whoever asked for that publishes."""
        with self._known.lock:
            self._known.list.void()

    def caches_of(self, model: ModelClient) -> list[tuple[int, PageClient]]:
        """The page clients of the model, with their numbers."""
        with self._known.lock:
            state = self._known.clients.get(model)
            mine = -1 if state is None else state.number
            return [(client.number, cache) for client, cache in self._known.clients.paged if client.model == mine]

    def retreat(self, caches: Iterable[tuple[int, PageClient]]) -> None:
        """Moves the pages of these clients, with their numbers, to the host, but for those that a thread uses.
        PoolExhausted where the host has too few; DriverError."""
        for number, cache in caches:
            cache.retreat()
            self.client_changed(number)

    def taken_of(self, number: int) -> frozenset[int]:
        """The indices that the core took since this was asked last: the cache does not offer them any more. Asked by
        the thread that is about to use it, between two iterations."""
        with self._known.lock:
            self._known.drain_core_events()
            state = self._known.clients.numbered(number)
            cache = None if state is None else state.client()
            if state is None or cache is None:
                return frozenset()
            now = self.clock()
            if self._known.clients.idleness.woke(state, now):
                state.woke(now)
            self._known.clients.running.client_began(state, now)
            taken, state.taken = frozenset(state.taken), set()
            return taken

    def restorable_pages(self, number: int, leaving: int = 0) -> int:
        """Pages that the cache may bring back from the host now, on the thread that is about to use it, between two
        iterations: once those before have read what is away for as long as that takes. What nobody uses has made room
        for them. See rental.py. `leaving`: free pages that the iteration itself is about to take. DriverError."""
        with self._known.lock:
            state = self._known.clients.numbered(number)
            cache = None if state is None else state.client()
            if state is None or cache is None:
                return 0
            self._known.drain_core_events()
            now = self.clock()
            spare = max(0, self._known.look(now) - max(self.pages.mark, leaving))
            idle = self._known.clients.idleness.idle_pages(self._known.list.pages, now, number) + cache.resting
            page_seconds = self.link.page_seconds or self._known.device.page_size / self.tuning.kv_reads.link
            state.notice(away := cache.displaced)
            pages = min(state.returning, away, spare)
            price = self.tuning.prices.returns * page_seconds
            pages = max(pages, kv_returns(state.waited, state.copied, away, spare, idle, price))
            if state.model in self._known.present:  # the plan is priced with all of it here
                pages = min(away, spare + idle)
            if pages:
                self._known.returned(state)
                state.waited = state.copied = 0.0
            elif away:
                state.reads(cache, page_seconds)
        if pages > spare:
            self.sources.make_room(pages - spare)
        self.reclaim.publish()
        return pages

    def standing(self) -> Standing:
        """How the device stands, for whoever shares its budget with other processes."""
        with self._known.lock:
            now, clients = self.clock(), self._known.clients
            active = clients.idleness.active(now)
            layers = sum(
                sum(state.model.plan.pages) - state.model.plan.device_pages
                for state in clients.models
                if state.number in active
            )
            kv = sum(cache.read_displaced for state, cache in clients.paged if state.number in active)
            return Standing(clients.idleness.idle_pages(self._known.list.pages, now, -1), layers + kv, bool(active))

    @property
    def displaced(self) -> int:
        """Pages of KV, of all caches, whose bytes are on the host or a peer."""
        with self._known.lock:
            return sum(cache.displaced for _, cache in self._known.clients.paged)

    # -- what happened; the caller holds the lock

    def _decided(self, state: ModelState, point: Point, now: float, free: int) -> StreamDecision:
        """Looks the decision up, or decides."""
        decision = self._known.answers.get((state.number, point))
        if decision is None:
            situation = self._known.situation(now, free)
            decision = decide(situation, state, point)
            self._known.settled = situation.settled
            if situation.short:
                self._known.want(now, free)
            self._known.answers[state.number, point] = replace(decision, notice=None)
        return decision

    def _arrive(self, state: ModelState, point: Point, now: float) -> None:
        if self._known.clients.idleness.woke(state, now):
            state.woke(now)
            self._known.moved()
        self._known.clients.running.began(state, now)
        if state.point != point:
            state.turn_to(point)
            self._known.moved()

    def _compare(self, state: ModelState, point: Point, now: float, free: int) -> None:
        """Now and then, of a model that streams: is there a faster plan?"""
        state.streams = bool(state.model.plan.streamed)
        if not state.streams:
            return
        state.passes[point.phase] += 1
        if state.passes.total() >= state.due:
            before, state.faster = state.faster, faster(self._known.situation(now, free), state)
            state.passes.clear()
            state.due = min(2 * state.due, _LONGEST)
            if state.faster != before:
                self._known.moved()
