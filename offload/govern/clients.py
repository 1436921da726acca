"""The models and caches that a governor knows, and who of them is idle."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

from ..decide.ladder import Lot
from .caches import Caches
from .lend import Use
from .lots import Held
from .published import Client
from .seat import Cache, Governed, Seat


class Clients:
    """`pause`: seconds after which who began no iteration is idle. Not thread-safe, but for `left` and `cache_left`:
    whoever calls holds the governor's lock."""

    def __init__(self, pause: float) -> None:
        self.caches = Caches()
        self._pause = pause
        self._numbers = 0
        self._seats: dict[int, Seat] = {}  # by id of the model, in the order in which they came
        self._gone: deque[int] = deque()  # ids of models that are collected and have a seat yet
        self._gone_caches: deque[int] = deque()  # their numbers
        self._on: dict[int, Seat] = {}  # whose forward runs, by thread
        self._resting: tuple[int, ...] = ()  # idle models, in the order in which they ran
        self._unused: tuple[int, ...] = ()  # idle caches, in the order in which they were used

    @property
    def seats(self) -> tuple[Seat, ...]:
        """Of models, in the order in which they came."""
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
        self._seats[id(model)] = Seat(self._numbers, name, model, len(model.plan.streamed))

    def pop(self, model: Governed) -> Seat | None:
        """It is not any more, or was not before."""
        return self._take_out(id(model))

    def add_cache(self, cache: Cache) -> int:
        """Its number. See caches.py, Note [Whose caches]."""
        self._numbers += 1
        seat = self._on.get(threading.get_ident())
        name = cache.name if seat is None else f"{cache.name} of {seat.name}"
        self.caches.add(self._numbers, name, cache, 0 if seat is None else seat.number)
        return self._numbers

    def left(self, model: Governed) -> None:
        """It is collected."""
        if id(model) in self._seats:
            self._gone.append(id(model))

    def cache_left(self, number: int) -> None:
        """It is collected."""
        self._gone_caches.append(number)

    def bury(self) -> tuple[bool, bool]:
        """Those that are gone; were there any, models or caches?"""
        models = [self._take_out(self._gone.popleft()) for _ in range(len(self._gone))]
        caches = [self.caches.pop(self._gone_caches.popleft()) for _ in range(len(self._gone_caches))]
        return any(models), any(caches)

    def began(self, seat: Seat, now: float) -> None:
        """An iteration of it begins on this thread."""
        seat.used = now
        self._on[threading.get_ident()] = seat

    def ended(self, model: Governed, now: float) -> None:
        """Its iteration on this thread has ended, if it began."""
        seat = self.get(model)
        if seat is not None:
            seat.used = now
            if self._on.get(threading.get_ident()) is seat:
                del self._on[threading.get_ident()]

    def took(self, number: int, index: int) -> None:
        """The core took a layer of a model, or an offer of a cache."""
        self.caches.took(number, index)
        for seat in self.seats:
            if seat.number == number:
                seat.taken.add(index)

    def active(self, now: float) -> frozenset[int]:
        """The numbers of models and caches that are not idle."""
        models = {seat.number for seat in self.seats if now - seat.used < self._pause or seat.model.running}
        return frozenset(models.union(seat.number for seat, cache in self.caches if self._uses(cache, now)))

    def rested(self, now: float) -> tuple[bool, bool]:
        """Are others idle, or were they used in another order, than when this was asked last? Of models, of caches."""
        active, before = self.active(now), (self._resting, self._unused)
        idle = [seat for seat in self.seats if seat.number not in active]
        self._resting = tuple(each.number for each in sorted(idle, key=lambda each: each.used))
        unused = ((cache.used, seat.number) for seat, cache in self.caches if seat.number not in active)
        self._unused = tuple(number for _, number in sorted(unused))
        return self._resting != before[0], self._unused != before[1]

    def held(self, now: float) -> list[Held]:
        """The caches, at this moment."""
        return [
            Held(seat, seat.ask(), self._uses(cache, now), cache.used, cache.displaced, cache.kept, cache.near)
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
        """Of what is offered, by number, that of those who are idle, other than this one."""
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
                found.used += cache.held if self._uses(cache, now) else 0
        return found

    def of(self, lots: Sequence[Lot]) -> list[tuple[Client, Lot]]:
        """With whose they are."""
        clients: dict[int, Client] = {seat.number: seat for seat in self.seats}
        clients.update((seat.number, seat) for seat, _ in self.caches)
        return [(clients[lot.client], lot) for lot in lots if lot.client in clients]

    def _take_out(self, key: int) -> Seat | None:
        """Nothing refers to the model of that id any more."""
        seat = self._seats.pop(key, None)
        for thread, on in list(self._on.items()):
            if on is seat:  # its iteration ends without it, or has been interrupted
                self._on.pop(thread, None)
        return seat

    def _uses(self, cache: Cache, now: float) -> bool:
        return (now - cache.used < self._pause and not cache.kept) or cache.running
