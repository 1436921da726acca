"""A device and models that are made up, for the manager: pages are counted, and taken as the core takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from ballonet.allocator._native import Range
from ballonet.offload.manager.client import KEYS_PER_CLIENT, OUTSIDE_LAYERS, Offer, PageClient
from ballonet.offload.manager.decision import StreamDecision
from ballonet.offload.manager.memory_manager import MemoryManager, Surroundings
from ballonet.offload.policy.plan import Costs, Plan
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Point

from .tuned import Clock

PAGE = 1000  # bytes
LINK = 10**6  # bytes per second: a page in a millisecond
EQUAL = (5,) * 8
STAYING = replace(DEFAULT, prices=replace(DEFAULT.prices, returns=math.inf))  # what is away stays away


def part(index: int) -> tuple[Any, ...]:
    """As of an entry for `Device.publish`, of a layer or an offer; it goes to no backing."""
    return None, index, 1, None, 0, []


class FakeDevice:
    """`budget` in pages. `kv`: pages that caches have. The list is taken from as the core does it, see S1 in the
    stub: in order, of those whose model no other thread runs."""

    page_size = PAGE
    page_request = 0

    def __init__(self, pages: int) -> None:
        self.budget = pages * PAGE
        self.kv = 0
        self.models: list[FakeModel] = []
        self.caches: list[FakeCache] = []
        self.listed: list[Any] = []
        self.published = 0
        self.trace: list[tuple[str, int]] = []

        self.copied = 0
        self.peer = 0  # pages of the peer
        self._taken: list[tuple[int, int, int]] = []

    @property
    def free(self) -> int:
        return self.budget // PAGE - self._kv - sum(model.device_pages for model in self.models)

    @property
    def available(self) -> int:
        return max(0, self.free)

    @property
    def _kv(self) -> int:
        return self.kv + sum(cache.device_pages for cache in self.caches)

    def snapshot(self) -> dict[str, Any]:
        used = {
            "weights": sum(model.device_pages for model in self.models),
            "activations": 0,
            "kv": self._kv,
            "pending_free": 0,
        }
        return {
            "pages": {"free": self.free, **used},
            "copied": {"weights_h2d": self.copied, "weights_d2h": 99},
            "heap": {"cached": 0},
            "peer_budget": self.peer * PAGE,
            "peer_pages": self.peer,
            "peer_free": self.peer - sum(cache.peer_pages for cache in self.caches),
        }

    def publish(self, entries: list[Any], limits: dict[int, int]) -> None:
        assert not limits, "of what is taken piece by piece"
        for key, client, parts in entries:
            assert parts == [part(key % KEYS_PER_CLIENT)], "whose layer is it?"
            assert isinstance(client, FakeCache) or not client.changes, "it is being changed"
            assert isinstance(client, FakeCache) or key % KEYS_PER_CLIENT not in client.plan.streamed, "it streams"
        self.listed = list(entries)
        self.published += 1

    def taken(self) -> list[tuple[int, int, int]]:
        pages, self._taken = self._taken, []
        return pages

    def take(self, keys: list[int], pages: int | None = None) -> int:
        """As the core does it when asked for certain entries."""
        before = self.free
        for entry in [entry for entry in self.listed if entry[0] in keys]:
            self._take(entry)
        return self.free - before

    def withdraw(self, keys: list[int]) -> None:
        self.listed = [entry for entry in self.listed if entry[0] not in keys]

    def yield_pages(self) -> int:
        return 0

    def want(self, pages: int, asking: FakeModel | FakeCache | None = None) -> bool:
        """Makes so many pages free if it can: what the core does before it gives up."""
        there = [
            offer for offer in self.listed if not isinstance(offer[1], FakeCache) or offer[1].entry(offer[2][0][1])
        ]
        free = [offer for offer in there if not offer[1].running or offer[1] is asking]
        if self.free + sum(map(_gives, free)) < pages:
            return False
        while self.free < pages:
            self._take(free.pop(0))
        return True

    def _take(self, entry: Any) -> None:
        self.listed.remove(entry)
        key, client, ((_, index, *_),) = entry
        before, gives = self.free, _gives(entry)
        client.take(index)
        assert self.free == before + gives > before
        self._taken.append((0, key, gives))
        self.trace.append((client.name, index))

    def grow(self, pages: int, asking: FakeModel | None = None) -> bool:
        """The caches get so many pages more, or none."""
        if not self.want(pages, asking):
            return False
        self.kv += pages
        return True


class FakeModel:
    """Eight layers of five pages as a rule: a millisecond to copy a page, so that four layers hide behind a decode step
    of 20 ms and six behind a prefill of 30 ms."""

    def __init__(
        self,
        device: FakeDevice,
        name: str,
        pages: Sequence[int] = EQUAL,
        *,
        plan: Plan | None = None,
        interval: int | Literal["auto"] | None = "auto",
        tpot: float | None = None,
        ttft: float | None = None,
        priority: int = 0,
        floor: int = 0,
        decode: float | None = 0.02,
        prefill: float | None = 0.03,
        outside: int = 0,
    ) -> None:
        self.device = device
        self.name = name
        self.plan = Plan(tuple(pages)) if plan is None else plan
        self.interval = interval
        self.tpot_slo, self.ttft_slo = tpot, ttft
        self.others_wait = False
        self.waited, self.copied = 0.0, 0.0
        self.priority = priority
        self.floor = floor
        self.running = False
        self.times = {"decode": decode, "prefill": prefill}
        self.gone: set[int] = set()  # layers that were taken
        self.rest = outside
        self.lacking = 0  # pages of those outside of layers that were taken
        self.changes = 0
        self.changes_made = 0
        self.asked = 0
        self.entries: Callable[[int], bool] = lambda layer: True
        self.decisions: list[StreamDecision] = []
        self.wanted: float | None = None
        self.timings = self
        self.entering = 0.0
        self.loaded = 0  # pages that came back from the host
        device.models.append(self)

    @property
    def device_pages(self) -> int:
        """Device pages of its weights and slots."""
        return self.plan.device_pages + self.rest - sum(self.plan.pages[layer] for layer in self.gone)

    def take(self, layer: int) -> None:
        """The core takes it."""
        if layer == OUTSIDE_LAYERS:
            assert not self.running, "it needs them"
            self.lacking, self.rest = self.rest, 0
            return
        assert layer not in self.gone, "it has no pages any more"
        self.gone.add(layer)

    def slo(self, phase: str) -> float:
        """Seconds."""
        limit = self.tpot_slo if phase == "decode" else self.ttft_slo
        return math.inf if limit is None else limit

    def seconds(self, point: Point) -> float | None:
        self.asked += 1
        return self.times[point.phase]

    def typical(self, point: Point) -> float | None:
        return self.times[point.phase]

    def wanted_until(self) -> float | None:
        return self.wanted

    def entry(self, layer: int) -> tuple[Any, list[Any]] | None:
        """Answers for a layer that streams, too: a draft that another thread fills may be out of date, and is not
        published then."""
        return (self, [part(layer)]) if self.entries(layer) else None

    def outside(self) -> int:
        return self.rest

    def give_up(self, pages: int) -> int:
        return 0

    def arrange(self, manager: MemoryManager, plan: Plan) -> None:
        """As a managed model does it. Pages that it needs beyond those that it has are taken if need be."""
        with manager.changing(self) as taken:
            self.changes += 1
            self.changes_made += plan != self.plan
            assert taken == self.gone
            before = self.device_pages - self.rest
            resident = {*range(len(plan.pages))} - {*self.plan.streamed} - self.gone
            if plan.device_pages > before:
                assert self.device.want(plan.device_pages - before, self), "the pages that it was promised"
            self.loaded += sum(plan.pages[k] for k in range(len(plan.pages)) if k not in {*plan.streamed, *resident})
            self.plan, self.gone = plan, set()
            self.waited = self.copied = 0.0
            assert self.device.free >= 0
            self.changes -= 1

    def step(
        self,
        manager: MemoryManager,
        phase: Literal["decode", "prefill"] = "decode",
        batch: int = 1,
        length: int = 8,
        kv: int = 0,
    ) -> StreamDecision:
        """An iteration, with which the cache grows. MemoryError where there are no pages for that."""
        self.running = True
        if self.decisions and (self.waited >= self.decisions[-1].rent or self.copied >= self.decisions[-1].toll):
            manager.changed(self)
        try:
            decision = manager.before(self, Point(phase, batch, length))
            if self.lacking:
                manager.sources.make_room(self.lacking - self.device.free, running=True)
                if self.device.free >= self.lacking:  # else it is read on the host
                    self.lacking, self.rest = 0, self.lacking
                decision = manager.before(self, Point(phase, batch, length))
            if decision.plan != self.plan or self.gone:
                self.arrange(manager, decision.plan)
            self.decisions.append(decision)
            seconds, page = self.times[phase], PAGE / LINK
            if seconds is not None:
                self.waited += Costs(self.plan.pages, seconds, page).expected(self.plan) - seconds
            self.copied += self.plan.copied_pages * page
            if kv > 0 and not self.device.grow(kv, self):
                raise MemoryError
            self.device.kv += min(kv, 0)
            return decision
        finally:
            manager.after(self)
            self.running = False


def _gives(entry: Any) -> int:
    _, client, ((_, index, *_),) = entry
    if isinstance(client, FakeCache):
        return 1
    return int(client.rest if index == OUTSIDE_LAYERS else client.plan.pages[index])


def a_manager(
    pages: int, *models: dict[str, Any], **options: Any
) -> tuple[FakeDevice, MemoryManager, Clock, list[FakeModel]]:
    """A device of so many pages, and models named a, b, c."""
    device, clock = FakeDevice(pages), Clock()
    around = {name: options.pop(name) for name in ("bandwidth", "received", "events", "marks") if name in options}
    manager = MemoryManager(device, Surroundings(clock=clock, **{"bandwidth": LINK, **around}), **options)
    them = [FakeModel(device, model.pop("name", "abcdef"[n]), **model) for n, model in enumerate(models)]
    for client in them:
        manager.add(client)
    return device, manager, clock, them


def trace(device: FakeDevice) -> list[str]:
    return [name for name, _ in device.trace]


def keys(device: FakeDevice) -> list[tuple[str, int]]:
    return [(model.name, layer) for _, model, ((_, layer, *_),) in device.listed]


class FakeCache(PageClient):
    """A KV cache of full pages, each an offer, the oldest tokens first; those in `away` lie on the host."""

    running = False
    pages = peer_pages = leaving_peer = 0

    def __init__(
        self,
        device: FakeDevice,
        manager: MemoryManager,
        clock: Clock,
        name: str = "cache",
        model: FakeModel | None = None,
    ) -> None:
        self.device = device
        self.manager = manager
        self.clock = clock
        self.name = name
        self.used = -math.inf
        self.gave_buffers = 0
        self.away: set[int] = set()
        self.clean: set[int] = set()
        self.at_rest: set[int] = set()
        self.asked_to_copy: list[int] = []
        self.moved = 0  # pages that went or came back
        self.demoted: list[int] = []
        self.number = manager.add_client(self, model)
        device.caches.append(self)

    @property
    def device_pages(self) -> int:
        return self.pages - len(self.away)

    @property
    def displaced(self) -> int:
        return len(self.away)

    @property
    def ranges(self) -> list[tuple[str, Range]]:
        return []

    def offers(self) -> list[Offer]:
        here = [page for page in range(self.pages) if page not in self.away]
        kept = self.clean if self.only_cached else ()
        idle = {page: PageSource.PREFIX if page in kept else PageSource.IDLE_KV for page in here}
        return [Offer(page, 1, page in self.clean, resting=page in self.at_rest, idle=idle[page]) for page in here]

    def entry(self, index: int) -> tuple[Any, list[Any]] | None:
        return (self, [part(index)]) if index < self.pages and index not in self.away else None

    def demote(self, pages: int) -> None:
        self.demoted.append(pages)
        self.peer_pages -= pages

    def give_slots(self) -> None:
        self.gave_buffers += 1

    def write_behind(self, pages: int) -> None:
        self.asked_to_copy.append(pages)
        dirty = [page for page in range(self.pages) if page not in self.clean]
        if pages:
            self.clean |= {*dirty[:pages]}
            self.manager.client_changed(self.number)

    def take(self, index: int) -> None:
        """The core takes it."""
        assert index not in self.away
        self.away.add(index)
        self.moved += 1

    def step(self, pages: int = 0) -> None:
        """An iteration with so many new pages, read in place where they are away. MemoryError."""
        self.running = True
        try:
            assert self.manager.taken_of(self.number) >= set()
            restored = self.manager.restorable_pages(self.number) if self.away else 0
            if restored:
                assert self.device.want(restored, self), "the pages that it was promised"
                back = sorted(self.away, reverse=True)[:restored]
                self.away.difference_update(back)
                self.moved += restored
            if not self.device.want(pages, self):
                self.manager.reclaim.publish_now()
                if not self.device.want(pages, self):
                    raise MemoryError
            self.pages += pages
            self.used = self.clock.now
            if pages or restored:
                self.manager.client_changed(self.number)
        finally:
            self.running = False

    def drop(self, pages: int) -> None:
        """The last so many, of which none is away first."""
        for _ in range(min(pages, self.pages)):
            self.pages -= 1
            self.away.discard(self.pages)
            self.clean.discard(self.pages)
        self.manager.client_changed(self.number)
