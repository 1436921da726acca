"""The models and caches that a governor knows, and who of them is idle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

from ..policy.ladder import Candidate
from ..policy.tuning import WeightPlans
from .activity import Activity, Progress
from .caches import Caches, CacheSeat
from .candidates import Held
from .lend import Use
from .published import Client
from .seat import Cache, Governed, Seat


class Clients:
    """`pause`: seconds after its last iteration, as the device does it (`progress`), after which a client is idle;
    `plans`: for their seats. Not thread-safe, but for `left`, `cache_left` and `ended`: whoever calls holds the
    governor's lock."""

    def __init__(self, pause: float, progress: Progress, plans: WeightPlans) -> None:
        self.caches = Caches()
        self._pause = pause
        self._plans = plans
        self._progress = progress
        self._activity: dict[int, Activity] = {}  # by number
        self._numbers = 0
        self._seats: dict[int, Seat] = {}  # by id of the model, in the order in which they came
        self._gone: deque[int] = deque()  # ids of models that are collected and have a seat yet
        self._gone_caches: deque[int] = deque()  # their numbers
        self._on: dict[int, Seat] = {}  # whose forward runs, by thread
        self._read: dict[int, set[int]] = {}  # numbers of the caches that it has used so far, by thread
        self._resting: tuple[int, ...] = ()  # idle models, in the order in which they ran
        self._unused: tuple[int, ...] = ()  # idle caches, in the order in which they were used

    @property
    def seats(self) -> tuple[Seat, ...]:
        """The seats of models, in the order in which they came."""
        return tuple(self._seats.values())

    def get(self, model: Governed) -> Seat | None:
        """None where there is no such model any more."""
        return self._seats.get(id(model))

    def __getitem__(self, model: Governed) -> Seat:
        """KeyError."""
        return self._seats[id(model)]

    def add(self, model: Governed) -> None:
        """The model is there, under a name of its own."""
        self._numbers += 1
        name = model.name
        if any(seat.name == name for seat in self.seats):
            name = f"{name} ({self._numbers})"
        self._seats[id(model)] = Seat(self._numbers, name, model, len(model.plan.streamed), self._plans)
        self._activity[self._numbers] = Activity(self._progress)

    def pop(self, model: Governed) -> Seat | None:
        """Removes the client. Idempotent."""
        return self._take_out(id(model))

    def add_cache(self, cache: Cache) -> int:
        """Adds a cache and returns its number. See caches.py, Note [Whose caches]."""
        self._numbers += 1
        seat = self._on.get(threading.get_ident())
        name = cache.name if seat is None else f"{cache.name} of {seat.name}"
        self.caches.add(self._numbers, name, cache, 0 if seat is None else seat.number)
        self._activity[self._numbers] = Activity(self._progress)
        return self._numbers

    def left(self, model: Governed) -> None:
        """Notes that a model was collected."""
        if id(model) in self._seats:
            self._gone.append(id(model))

    def cache_left(self, number: int) -> None:
        """Notes that a cache was collected."""
        self._gone_caches.append(number)

    def bury(self) -> tuple[bool, bool]:
        """Removes the clients that are gone; were there any, models or caches?"""
        if not self._gone and not self._gone_caches:
            return False, False
        models = [self._take_out(self._gone.popleft()) for _ in range(len(self._gone))]
        caches = [self.caches.pop(number) for number in self._take_gone_caches()]
        return any(models), any(caches)

    def began(self, seat: Seat, now: float) -> None:
        """An iteration of it begins on this thread."""
        seat.used = now
        self._progress.begin()
        self._activity[seat.number].began(now)
        self._on[threading.get_ident()] = seat

    def cache_began(self, number: int, now: float) -> None:
        """An iteration of it begins on this thread, within one of its model's where there is such."""
        if (activity := self._activity.get(number)) is not None:
            activity.began(now)
            if threading.get_ident() in self._on:
                self._read.setdefault(threading.get_ident(), set()).add(number)

    def ended(self, model: Governed, now: float) -> None:
        """Notes that its iteration on this thread has been launched, if it began. May be called in the middle of
        anything."""
        seat, thread = self.get(model), threading.get_ident()
        read = self._read.pop(thread, set())
        if seat is None:
            return
        end = self._progress.end()
        for number in (seat.number, *read):
            if (activity := self._activity.get(number)) is not None:
                activity.ended(now, end)
        if self._on.get(thread) is seat:
            del self._on[thread]

    def took(self, number: int, index: int) -> None:
        """The core took a layer of a model, or an offer of a cache."""
        self.caches.took(number, index)
        for seat in self.seats:
            if seat.number == number:
                seat.taken.add(index)

    def rests(self, seat: Seat, now: float) -> bool:
        """Has it been unused for the pause, whoever leases it now? `Seat.used` says from then on since when."""
        seat.used = self._activity[seat.number].last(now)
        return now - seat.used >= self._pause

    def cache_rests(self, seat: CacheSeat, cache: Cache, now: float) -> bool:
        """As `rests`."""
        activity = self._activity.get(seat.number)
        seat.used = cache.used if activity is None else max(cache.used, activity.last(now))
        return now - seat.used >= self._pause

    def cache_idle(self, seat: CacheSeat, cache: Cache, now: float) -> bool:
        """Does it rest, or is it only kept, and does nobody lease it?"""
        return (self.cache_rests(seat, cache, now) or cache.kept) and not cache.running

    def resting(self, now: float) -> list[Cache]:
        """The caches that are idle. A model whose forward has begun is about to use the one that it used last."""
        idle = [(seat, cache) for seat, cache in self.caches if self.cache_idle(seat, cache, now)]
        if not idle:
            return []
        running, next_used = {seat.number for seat in tuple(self._on.values())}, dict[int, CacheSeat]()
        for seat, _ in self.caches:
            if seat.model in running and seat.used >= next_used.get(seat.model, seat).used:
                next_used[seat.model] = seat
        return [cache for seat, cache in idle if next_used.get(seat.model) is not seat]

    def active(self, now: float) -> frozenset[int]:
        """The numbers of models and caches that are not idle."""
        models = {seat.number for seat in self.seats if not self.rests(seat, now) or seat.model.running}
        return frozenset(
            models.union(seat.number for seat, cache in self.caches if not self.cache_idle(seat, cache, now))
        )

    def rested(self, now: float) -> tuple[bool, bool]:
        """Are others idle, or were they used in another order, than when this was asked last? Of models, of caches."""
        active, before = self.active(now), (self._resting, self._unused)
        idle = [seat for seat in self.seats if seat.number not in active]
        self._resting = tuple(each.number for each in sorted(idle, key=lambda each: each.used))
        unused = ((seat.used, seat.number) for seat, _ in self.caches if seat.number not in active)
        self._unused = tuple(number for _, number in sorted(unused))
        return self._resting != before[0], self._unused != before[1]

    def held(self, now: float) -> list[Held]:
        """The caches, at this moment."""
        return [
            Held(
                seat,
                seat.ask(),
                not self.cache_idle(seat, cache, now),
                seat.used,
                cache.displaced,
                cache.kept,
                cache.near,
            )
            for seat, cache in self.caches
        ]

    def floors(self) -> dict[int, int]:
        """Device pages that the weights of models keep for their floors: what is missing in full pages of KV."""
        floors = {seat.number: seat.model.floor for seat in self.seats if seat.model.floor}
        for seat, _ in self.caches:
            if seat.model in floors:
                floors[seat.model] -= sum(offer.pages for offer in seat.ask())
        return floors

    def idle_pages(self, offered: Mapping[int, int], now: float, but: int) -> int:
        """Pages that are offered by those who are idle, other than this one. `offered`: by number."""
        there = {seat.number for seat in self.seats}.union(seat.number for seat, _ in self.caches)
        idle = there - self.active(now) - {but}
        return sum(pages for number, pages in offered.items() if number in idle)

    def claim(self, number: int, seat: Seat) -> None:
        """The cache is this model's, if it is no other's."""
        cache = self.caches.get(number)
        if cache is not None and not any(cache.model == each.number for each in self.seats):
            cache.model = seat.number

    def whose(self, number: int) -> Seat | None:
        """The model of a cache that is used on this thread; None of nobody."""
        cache, seat = self.caches.get(number), self._on.get(threading.get_ident())
        if seat is not None:
            self.claim(number, seat)
        return next((each for each in self.seats if cache is not None and each.number == cache.model), None)

    def uses(self, now: float) -> list[Use]:
        """What each model's caches have, in the order in which the models came."""
        return [self.use(seat, now) for seat in self.seats]

    def use(self, seat: Seat, now: float) -> Use:
        """What this one's have."""
        floor = max(0, seat.model.floor - seat.model.plan.device_pages) if seat.model.floor else 0
        found = Use(seat.number, seat.name, seat.model.priority, floor)
        for each, cache in self.caches:
            if each.model == seat.number:
                found.held += cache.here
                found.block = max(found.block, cache.block)
                found.used += 0 if self.cache_idle(each, cache, now) else cache.held
        return found

    def of(self, candidates: Sequence[Candidate]) -> list[tuple[Client, Candidate]]:
        """With whose they are."""
        clients: dict[int, Client] = {seat.number: seat for seat in self.seats}
        clients.update((seat.number, seat) for seat, _ in self.caches)
        return [(clients[candidate.client], candidate) for candidate in candidates if candidate.client in clients]

    def _take_out(self, key: int) -> Seat | None:
        """Nothing refers to the model of that id any more."""
        seat = self._seats.pop(key, None)
        if seat is not None:
            self._activity.pop(seat.number, None)
        for thread, on in list(self._on.items()):
            if on is seat:  # its iteration ends without it, or has been interrupted
                self._on.pop(thread, None)
        return seat

    def _take_gone_caches(self) -> list[int]:
        gone = [self._gone_caches.popleft() for _ in range(len(self._gone_caches))]
        for number in gone:
            self._activity.pop(number, None)
        return gone
