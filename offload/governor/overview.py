"""What is known of a device's models, KV caches and pages, kept up to date, and the reclaim list that is made of it.

Note [What is prepared]
    The list has whatever `entry` offers, always. Nothing of weights is prepared: a layer's bytes go to the host when it
    is taken, and a model whose layers never are never pays. KV is copied ahead (`write_behind`) only while pages are
    short, and only so much that those that are taken first are clean, or as much as is borrowed.

Note [Locks]
    One lock, held while numbers are looked at, never while a model or cache prepares anything or the core waits for a
    layer that is being taken. `Device.taken`, `publish`, `snapshot` and `demand` are called under it: they take locks
    of the core only, which never calls Python; so is what caches answer at once (seat.Cache). Entries are made without
    it; a list made of them is published only if nobody has begun a newer one, nor `changing`, since.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ...allocator.config import Config
from ...allocator.events import Events
from ..policy.ladder import Candidate
from ..policy.ledger import Settled
from ..policy.peer import Near, lacking, leaving
from ..policy.tuning import DEFAULT, Tuning
from ..record.record import Point
from .activity import Marks, Progress
from .candidates import Held, listed, of_models, to_clean
from .clients import Clients
from .decision import Decision
from .lend import Lending
from .pages import Pages
from .published import Pool, Published
from .restore import Back, plan_restore
from .seat import LAYERS, Cache, Seat
from .situation import Situation
from .traffic import Traffic, sent


class Overview:
    """Thread-safe, but for what says that the caller holds the lock. `bandwidth`: of the link, bytes per second,
    measured; needed before a model with an SLO is added. `received`: bytes per second that go over the link
    (link.received), None where nobody can say; it is asked in the background, while anything streams. `clock`: seconds,
    by which all is decided that depends on time. `window`: seconds that a model's reserve outlasts its use. `spill`:
    may pages of the host stand in where no others are left? `events`: the device's log. `marks`: of its streams, None
    where operators are complete when they return."""

    def __init__(
        self,
        device: Pool,
        *,
        bandwidth: float | None = None,
        received: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        tuning: Tuning = DEFAULT,
        window: float = Config().reserve,
        spill: bool = False,
        events: Events | None = None,
        marks: Marks | None = None,
    ) -> None:
        self._device = device
        self._bandwidth = bandwidth
        self._peer_bandwidth: float | None = None
        self.tuning: Final = tuning
        self.clock: Final = clock
        # the same in ns, and where nothing else was said in one call of C
        self.nanoseconds: Final = time.monotonic_ns if clock is time.monotonic else lambda: round(clock() * 1e9)
        self.spill: Final = spill
        self._lock = threading.Lock()
        self.marks = marks
        self._clients = Clients(self.tuning.pages.idle, Progress(marks, clock), self.tuning.weights)
        self._lending = Lending(window, self.tuning.loans)
        self._traffic = 0.0
        self._watcher = (
            None
            if received is None
            else Traffic(received, lambda: sent(device), self.set_traffic, clock, self.tuning.traffic)
        )
        # what is looked up while nothing happens
        self._answers: dict[tuple[int, Point], Decision] = {}
        self._settled: Settled | None = None
        self._wanting = 0  # free pages when a model got fewer than it would take, in powers of two; 0: none did
        # pages
        self.pages: Final = Pages(device, self.tuning.pages)
        self._waited = False  # was anything taken since it was last looked?
        self._list = Published(device)
        self._candidates: list[Candidate] | None = None  # of the models, where nothing of them has changed
        self.events: Final = Events() if events is None else events
        self.events.naming = self._list.named

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of the link."""
        return self._bandwidth

    @bandwidth.setter
    def bandwidth(self, found: float) -> None:
        with self._lock:
            self._bandwidth = found
            self._moved(*self._clients.seats)

    @property
    def page_seconds(self) -> float | None:
        """To copy a page."""
        return None if self._bandwidth is None else self._device.page_size / self._bandwidth

    @property
    def peer_bandwidth(self) -> float | None:
        """Bytes per second between the device and its peer; None where nobody has measured, or there is none."""
        return self._peer_bandwidth

    @peer_bandwidth.setter
    def peer_bandwidth(self, found: float) -> None:
        with self._lock:
            self._peer_bandwidth = found
            self._moved()

    @property
    def peer_page_seconds(self) -> float | None:
        """To copy a page to the peer or back."""
        return None if self._peer_bandwidth is None else self._device.page_size / self._peer_bandwidth

    def set_traffic(self, rate: float) -> None:
        """Others take so many bytes per second of the link."""
        with self._lock:
            if self._bandwidth is None:
                return
            step = self._bandwidth / self.tuning.traffic.steps
            before, self._traffic = self._traffic, math.ceil(rate / step) * step
            if before != self._traffic:
                self._moved()

    @property
    def scarce(self) -> bool:
        """Have pages been short not long ago?"""
        return self.pages.scarce

    # -- what happened; the caller holds the lock

    def _moved(self, *changed: Seat) -> None:
        """What was answered, settled and listed may not hold any more, nor what is known of these."""
        for seat in changed:
            seat.costs.clear()
        self._answers.clear()
        self._settled = None
        self._candidates = None
        self._list.stale = True

    def _bury(self) -> None:
        models, caches = self._clients.bury()
        if models:
            self._moved()
        if models or caches:
            self._list.void()

    def _hear(self) -> None:
        """Takes in what the core took, and which models and caches are gone."""
        self._bury()
        taken = self._device.taken()
        for _, key, _ in taken:
            self._clients.took(*divmod(key, LAYERS))
        if taken:
            self.events.hear()
            self._waited = True
            self._clients.caches.stay()
            for seat in self._clients.seats:
                seat.grant = None
            self._moved()

    def _rest(self, now: float) -> None:
        """Who is idle, and in which order were they used?"""
        models, caches = self._clients.rested(now)
        if models:
            self._moved()
        if caches:
            self._list.stale = True

    def _look(self, now: float) -> int:
        """At the pages: how many are free, and can some go back to whoever gave theirs?"""
        self._rest(now)
        free, spare = self.pages.look(now, self._waited)
        self._waited = False
        if spare:
            self._send_home(plan_restore(self._situation(now, free), self._clients.held(now), spare))
        if self._wanting and free.bit_length() + 1 != self._wanting:
            self._wanting = 0
            self._moved()
        return free

    def _send_home(self, back: Back) -> None:
        for each in self._clients.seats:
            each.grant = back.plans.get(each.number)
        for seat, _ in self._clients.caches:
            seat.home = back.pages.get(seat.number, 0)
        if back.plans:
            self._moved()

    def _listed(self, now: Situation, held: Sequence[Held], owed: Mapping[int, int]) -> list[Candidate]:
        if self._candidates is None:
            self._candidates = list(of_models(now))
        return listed(now, self._candidates, held, owed)

    def _owed(self, now: float) -> Mapping[int, int]:
        """Pages that models have to give back to others, by number."""
        if len(self._clients.seats) < 2:
            return {}
        return self._lending.due(self._clients.uses(now), self.pages.unused, self.pages.total)

    def _situation(self, now: float, free: int) -> Situation:
        return Situation(
            self._clients.seats,
            self._clients.active(now),
            free,
            self.pages.mark,
            self._list.pages,
            self._device.page_size,
            self._bandwidth,
            self._traffic,
            self._settled,
            self._clients.floors(),
            self.peer_page_seconds,
            self._peer()[0] > 0,
        )

    def _peer(self) -> tuple[int, int]:
        """Pages of the peer that nobody has, and all of them."""
        numbers = self._device.snapshot()
        total: int = numbers["peer_budget"] // self._device.page_size
        return total - numbers["peer_pages"] + numbers["peer_free"], total

    # -- what follows; the caller does not hold the lock

    def publish_now(self) -> None:
        """All that is offered at this moment may be taken."""
        with self._lock:
            self._list.void()
        self._publish()

    def candidates(self) -> list[Candidate]:
        """All that may be taken now, in the order of taking."""
        with self._lock:
            self._hear()
            now = self.clock()
            self._rest(now)
            return self._listed(self._situation(now, 0), self._clients.held(now), self._owed(now))

    def pages_given(self) -> None:
        """Pages were freed: whoever waits for some tries again."""
        self.pages.given()

    def _publish(self) -> None:
        """The reclaim list, if it is another one now. See Note [Locks]."""
        behind = self._published()
        if behind:
            with self._lock:
                resting = self._clients.resting(self.clock())
            for cache in resting:
                cache.give_slots()
        for cache, pages in behind:
            cache.write_behind(pages)
        if behind:
            self._published()
            for cache, pages in self._leaving():
                cache.demote(pages)

    def _published(self) -> list[tuple[Cache, int]]:
        """What caches should copy to the host after that."""
        with self._lock:
            self._hear()
            if not self._list.stale:
                return []
            now = self.clock()
            self._rest(now)
            situation, held = self._situation(now, 0), self._clients.held(now)
            candidates = self._listed(situation, held, self._owed(now))
            behind = self._to_copy(situation, candidates, held, now)
            draft = self._list.draft(self._clients.of(candidates))
        if draft is not None:
            draft.fill()
            with self._lock:
                self._list.publish(draft)
        return behind

    def _to_copy(
        self, now: Situation, candidates: Sequence[Candidate], held: Sequence[Held], time: float
    ) -> list[tuple[Cache, int]]:
        """Pages of caches that are to be copied to the host now: while pages are short, and the link serves no layers.
        The caller holds the lock."""
        busy = any(seat.model.plan.copied or seat.taken for seat in now.seats if seat.number in now.active)
        if not self.pages.short:
            return []
        tuning = self.tuning.write_behind
        step = 0 if busy else max(1, tuning.step // self._device.page_size)
        borrowed = self._lending.borrowed(self._clients.uses(time)) if len(now.seats) > 1 else 0
        pages = to_clean(candidates, held, max(self.pages.total // tuning.clean, borrowed), step)
        return [(cache, pages.get(seat.number, 0)) for seat, cache in self._clients.caches]

    def _leaving(self) -> list[tuple[Cache, int]]:
        """What of caches should leave the peer for the host; see peer.py."""
        free, total = self._peer()
        if not total:
            return []
        with self._lock:
            active = self._clients.active(self.clock())
            caches = {seat.number: cache for seat, cache in self._clients.caches}
            wanted = lacking(free + sum(cache.leaving for cache in caches.values()), total, self.tuning.peer)
            near = [
                Near(number, cache.on_peer, number in active, cache.used) for number, cache in caches.items() if wanted
            ]
        return [(caches[number], pages) for number, pages in leaving(near, wanted).items()]

    def _watch(self) -> None:
        """Others' traffic matters while anything streams."""
        if self._watcher is not None:
            with self._lock:
                self._watcher.wanted(any(seat.model.plan.streamed or seat.taken for seat in self._clients.seats))
