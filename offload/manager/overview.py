"""The manager's state: a device's models, other clients, pages and links, kept up to date.

`Duplicates` are layers that other replicas of a model hold as well, which could be dropped (KunServe §4.1).

Note [A request, and a plan]
    To drop layers takes the consent of the controller of the replicas: it knows who else holds them, and whether that
    would help at all. So no duplicated layer is on the list that the core takes from. Where pages are taken for which
    each pass waits from then on, how many is noted here; that is posted as a request, once no lock is held, and frees
    nothing by itself. The controller's decision comes later, as a plan
    (hooks/replicas/held_layers.py).

Note [Locks]
    One lock, held while numbers are read, never while a client prepares anything or the core waits for a layer that is
    being taken. `Device.taken`, `publish`, `snapshot`, `page_request` are called under it: they take locks of the core
    only, which never calls Python; so is what clients answer at once (client.py). Entries are made without it; a list
    made of them is published only if no newer one was begun, and no model changed, since.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ...allocator.events import Events
from ..policy.coordinator import RunningShares
from ..policy.lending import Lending
from ..policy.price import horizon_after
from ..policy.reclaim_order import Candidate, PageSource
from ..policy.tuning import Tuning
from ..record.record import Point
from .activity import Progress
from .candidates import listed, of_models
from .client import KEYS_PER_CLIENT, ModelClient
from .clients import Clients, ClientState, Held, ModelState, Validity, Version
from .decision import Situation, StreamDecision
from .device_view import DevicePages, DeviceView, HostLink, Published, Surroundings


class Duplicates:
    """Registered droppers of duplicated layers, and pages still requested. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[tuple[Callable[[int], object], Callable[[], int]]] = []
        self._lacking = 0

    def register(self, wanted: Callable[[int], object], pages: Callable[[], int]) -> Callable[[], None]:
        """Registers a dropper. `wanted(pages)` is called with requests, on any thread, and returns at once; `pages()`:
        device pages that a drop would free at most. Returns a function that ends the registration."""
        entry = wanted, pages
        with self._lock:
            self._known.append(entry)

        def withdraw() -> None:
            with self._lock:
                if entry in self._known:
                    self._known.remove(entry)

        return withdraw

    @property
    def pages(self) -> int:
        """Device pages that drops would free at most."""
        with self._lock:
            known = tuple(self._known)
        return sum(pages() for _, pages in known)

    @property
    def known(self) -> bool:
        """Is any dropper registered?"""
        return bool(self._known)

    def note_shortage(self, pages: int) -> None:
        """Notes that so many pages were not found without making passes longer. Callers may hold a lock: `post` comes
        later."""
        if pages > 0 and self._known:
            with self._lock:
                self._lacking += pages

    def post(self) -> None:
        """Requests the pages noted as short, if any. The caller holds no lock of the manager's."""
        if not self._lacking:
            return
        with self._lock:
            pages, self._lacking, known = self._lacking, 0, tuple(self._known)
        for wanted, _ in known if pages else ():
            wanted(pages)

    def request_drop(self, pages: int) -> None:
        """Requests so many pages at once."""
        self.note_shortage(pages)
        self.post()


class Overview:
    """The state that decisions read and change under `lock`. Not thread-safe."""

    def __init__(
        self,
        device: DeviceView,
        around: Surroundings,
        tuning: Tuning,
        window: float,
    ) -> None:
        """The parameters are those of MemoryManager."""
        self.device: Final = device
        self.tuning: Final = tuning
        self.clock: Final = around.clock
        self.lock: Final = threading.Lock()
        self.version: Final = Version()
        progress = Progress(around.marks, around.clock)
        self.clients: Final = Clients(tuning.pages.idle, progress, tuning.weights, self.version)
        self.lending: Final = Lending(window)
        self.link: Final = HostLink(device, self.lock, lambda: self.moved(*self.clients.models), around)
        # answers that are repeated while nothing changes
        self.answers: dict[tuple[int, Point], StreamDecision] = {}
        self.settled: RunningShares | None = None
        self.present = frozenset[int]()  # models that are to be present as a whole (turns.py)
        # (free pages, in marks, when a model got fewer than it would take; when that is looked at again)
        self.wanting: tuple[int, float] | None = None
        self.horizon = tuning.prices.horizon  # see price.py, Note [The price]
        # pages
        self.pages: Final = DevicePages(device, tuning.pages, around.waits)
        self.list: Final = Published(device, self.version)
        self.events: Final = Events() if around.events is None else around.events
        self.events.naming = self.list.named
        self.duplicates: Final = Duplicates()
        self._refused: int | None = None  # pages so far that operators could not have
        self._candidates: list[Candidate] | None = None  # of the models; None once a model has changed

    # -- what happened; the caller holds the lock

    def moved(self, *changed: ModelState) -> None:
        """Drops answers, shares and lists, which may not hold any more, and the costs of the `changed` models."""
        for state in changed:
            state.costs.clear()
        self.answers.clear()
        self.settled = None
        self._candidates = None
        self.list.outdate()

    def models_changed(self) -> None:
        """Drops the candidates of models, which may not hold any more."""
        self._candidates = None

    def drop_dead(self) -> None:
        models, caches = self.clients.drop_dead()
        if models:
            self.moved()
        if models or caches:
            self.list.void()

    def drain_core_events(self) -> None:
        """Applies what the core took since the last call, and removes models and caches that are gone."""
        if self.clients.gone:
            self.drop_dead()
        if taken := self.device.taken():
            self._apply_taken(taken)

    def _apply_taken(self, taken: Sequence[tuple[int, int, int]]) -> None:
        now = self.clock()
        for _, key, pages in taken:
            self.clients.took(*divmod(key, KEYS_PER_CLIENT), now)
            if self.list.is_exposed(key):
                self.duplicates.note_shortage(pages)
        self.events.hear()
        self.moved()

    def returned(self, state: ClientState) -> None:
        """Notes that pages of the client have come back."""
        if state.left is not None:
            self.horizon = horizon_after(self.horizon, self.clock() - state.left, self.tuning.prices)
        state.left, state.returning = None, 0

    def repeated(self, model: ModelClient, point: Point, now: float) -> StreamDecision | None:
        """Returns the model's last decision at the beginning of an iteration, where all that it depends on is
        unchanged; else None, with nothing noted. See memory_manager.py, Note [Events]. KeyError."""
        state = self.clients.by_model[id(model)]
        last, (phase, batch, length) = state.point, point
        if (
            last is None
            or last.phase != phase  # these three as `Point.counts_for`
            or not last.batch < 2 * batch <= 2 * last.batch
            or not last.length < 2 * length <= 2 * last.length
            or (validity := self.version.validity) is None
            or validity.version != self.version.number
            or now >= validity.until
            or validity.seen != (self.device.available, self.device.budget)
            or self.device.page_request
            or (self.clients.idleness.scheduled and not self.clients.idleness.is_calm(now))
        ):
            return None
        if taken := self.device.taken():
            self._apply_taken(taken)
            return None
        decision = self.answers.get((state.number, last))
        if decision is None or (state.streams and not state.passed(phase)):
            return None
        self.clients.running.began(state, now)
        return decision

    def settle(self, version: int) -> None:
        """Notes under what a decision holds that was made at this `version`: until an event, or the time at which
        somebody becomes idle, a shortage of pages ends, reserves are due, or pages may be free for what is away."""
        due = self.lending.due_at if self.clients.several else math.inf
        wanting = math.inf if self.wanting is None else self.wanting[1]
        until = min(self.clients.idleness.calm_until, self.pages.quiet_until, due, wanting)
        holds = version == self.version.number and until > -math.inf and not self.list.stale
        self.version.validity = Validity(version, until, self.pages.seen) if holds else None

    def update_idle(self, now: float) -> None:
        """Updates which clients are idle, and in which order they were used."""
        models, caches = self.clients.idleness.rested(now)
        if models:
            self.moved()
        if caches:
            self.list.outdate()

    def look(self, now: float) -> int:
        """Reads how many pages are free, and returns it."""
        self.update_idle(now)
        if self.duplicates.known:
            self._note_refusals()
        free = self.pages.look(now)
        if self.wanting is not None and (free // self.pages.mark != self.wanting[0] or now >= self.wanting[1]):
            self.wanting = None
            self.moved()
        return free

    def want(self, now: float, free: int) -> None:
        """Notes that a model got fewer pages than it would take."""
        self.wanting = free // self.pages.mark, now + self.tuning.pages.idle

    def _note_refusals(self) -> None:
        """Notes the pages that operators could not have although the core went down the whole reclaim order."""
        self.events.hear()
        refused = self.events.counts().get(PageSource.REFUSE.label, {}).get("reclaim")
        pages = 0 if refused is None else refused.pages
        if self._refused is not None:
            self.duplicates.note_shortage(pages - self._refused)
        self._refused = pages

    def listed(self, now: float) -> tuple[list[Candidate], Situation, list[Held]]:
        """Returns all that may be taken now, in the order of taking, and what that follows from."""
        self.update_idle(now)
        situation, held = self.situation(now, 0), self.clients.held(now)
        if self._candidates is None:
            self._candidates = list(of_models(situation))
        return listed(situation, self._candidates, held, self.owed(now)), situation, held

    def owed(self, now: float) -> Mapping[int, int]:
        """Pages that models have to give back to others, by number."""
        if not self.clients.several:
            return {}
        return self.lending.due(self.clients.uses(now), self.pages.unused, self.pages.total)

    def watch(self) -> None:
        """Watches others' traffic while anything streams. The caller does not hold the lock."""
        with self.lock:
            self.link.watch(any(state.model.plan.streamed or state.taken for state in self.clients.models))

    def situation(self, now: float, free: int) -> Situation:
        return Situation(
            self.clients.models,
            self.clients.idleness.active(now),
            free,
            self.pages.mark,
            self.list.pages,
            self.device.page_size,
            self.link.bandwidth,
            self.link.traffic,
            self.settled,
            self.clients.floors(),
            self.link.peer_page_seconds if self.peer()[0] > 0 else None,
            self.present,
            self.tuning,
            self.horizon,
            now,
        )

    def peer(self) -> tuple[int, int]:
        """Returns (free pages of the peer, all its pages)."""
        numbers = self.device.snapshot()
        total: int = numbers["peer_budget"] // self.device.page_size
        return total - numbers["peer_pages"] + numbers["peer_free"], total
