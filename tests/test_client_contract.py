"""The contract of clients (offload/manager/client.py), on all that implement it: layers of a model, a KV cache in use,
a cached prefix, a kept state, the sectors of requests that are batched. What may be taken is offered; it is taken from
nobody who uses it; what was taken is read as before; what broke in the middle is as if it had not begun; and a client
that is gone leaves nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import pytest
import torch
from torch.utils.dlpack import from_dlpack
from transformers.cache_utils import DynamicLayer

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Device, Group, Range, Transfer
from ballonet.hooks.batching.pages import RESERVED, SectorPages
from ballonet.hooks.device import managers
from ballonet.hooks.forward.lease import GroupLease
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.hooks.prefix.snapshot import StatePages
from ballonet.offload.manager import clients, device_view, memory_manager, overview, reclaim
from ballonet.offload.manager.client import KEYS_PER_CLIENT, Offer, PageClient
from ballonet.offload.residency.backing import Backing
from ballonet.offload.residency.mover import Mover

from .faulting import at_each_call, at_each_line
from .kv.pressure import STEPS, kv_ranges, poison, tiers
from .models import build, prompts
from .pool import take_out
from .test_kv import tokens
from .tuned import Tuned

PAGE = 4096
BUDGET = 1024 * PAGE
INPUTS = prompts(batch=1, longest=9)


class Case(Protocol):
    """A client with something in it that may be taken."""

    @property
    def number(self) -> int:
        """What the manager calls the client."""

    @property
    def group(self) -> Any:
        """What who uses it leases."""

    def check(self) -> None:
        """All of it is what it was, as its user reads it."""


class LayersOfAModel:
    def __init__(self, device: Device) -> None:
        self.model = build("llama", num_hidden_layers=4)
        with torch.no_grad():
            self.expected = self.model(**INPUTS, use_cache=False).logits
        self.managed = ballonet.manage(self.model)
        self.group = self.managed._weights.group
        self.check()

    @property
    def number(self) -> int:
        known = managers.of(devices.require())._known.clients
        return known.of_model(self.managed._residency).number

    def check(self) -> None:
        with torch.no_grad():
            assert torch.equal(self.model(**INPUTS, use_cache=False).logits, self.expected)


class CacheInUse:
    def __init__(self, device: Device) -> None:
        self.ranges = CacheRanges(layers=1, expected=200)
        self.pairs = [(ElasticLayer(self.ranges), DynamicLayer()) for _ in range(2)]
        for seed, pair in enumerate(self.pairs):
            for cache in pair:
                cache.update(*tokens(100, seed))
        self.tier = tiers(kv_ranges(elastic for elastic, _ in self.pairs))[0]
        self.group = self.tier.client._group
        self.number = self.tier.number

    def check(self) -> None:
        for elastic, stock in self.pairs:
            assert torch.equal(elastic.keys, stock.keys)
            assert torch.equal(elastic.values, stock.values)


class CachedPrefix(CacheInUse):
    def __init__(self, device: Device) -> None:
        super().__init__(device)
        for elastic, _ in self.pairs:
            elastic.kv_range.keep(True)
        self.tier.client.only_cached = True

    def check(self) -> None:
        for elastic, stock in self.pairs:
            keys, values = elastic.kv_range.part(elastic._place, 0, 100)
            assert torch.equal(keys, stock.keys)
            assert torch.equal(values, stock.values)


class KeptState:
    def __init__(self, device: Device) -> None:
        self.expected = [torch.randn(3, 5, 100), torch.randint(9, (7,)), torch.randn(2000).to(torch.bfloat16)]
        self.pages = StatePages(device, managers.of(device), self.expected)
        self.group = self.pages._group
        self.number = self.pages.number

    def check(self) -> None:
        with self.pages.read() as states:
            assert all(map(torch.equal, states, self.expected))


class SectorsOfRequests:
    """Some that a step reads, and some of requests that wait."""

    SECTOR = 3000  # bytes: neighbours share a page

    def __init__(self, device: Device) -> None:
        self.group = device.group()
        self.pages = SectorPages(device, self.group, 40, self.SECTOR, "a model")
        self.pages.take(range(RESERVED, 30))
        self.number = self.pages.client.number
        self.bytes = from_dlpack(self.pages.window())[RESERVED * self.SECTOR : 30 * self.SECTOR]
        self.expected = torch.randint(256, self.bytes.shape, dtype=torch.uint8)
        self.pages.client.begins({piece for sector in range(20) for piece in self.pages.pieces(sector)})
        with GroupLease(self.group):
            self.pages.client.uses()
            self.bytes.copy_(self.expected)

    def check(self) -> None:
        with GroupLease(self.group):
            self.pages.client.uses()
            assert torch.equal(self.bytes, self.expected)


class OptimizerState(PageClient):
    """A tensor that is used once in a while, as a class of tensors that ballonet does not know would be: all that it
    takes to be a client (client.py, Note [A new class of tensors]). Read and written in place where it is away."""

    def __init__(self, device: Device) -> None:
        self.manager = managers.of(device)
        self.name = "optimizer state"
        self.used = self.manager.clock()
        self.group = device.group()
        self._range = device.reserve(9 * PAGE, "kv", self.group)
        self._range.map(0, 9)
        self._mover = Mover(device, self._range, Backing(device, self.group, self._range, "kv"), threading.Lock())
        self._transfer = Transfer(device)
        self.number = self.manager.add_client(self)
        self.expected = torch.arange(9 * PAGE // 4, dtype=torch.float32)
        with self.use() as value:
            value.copy_(self.expected)

    @property
    def running(self) -> bool:
        return self.group.leases > 0

    @property
    def pages(self) -> int:
        return self._range.pieces

    @property
    def device_pages(self) -> int:
        self._mover.look(0, self.pages)
        return self.pages - self._mover.away

    @property
    def displaced(self) -> int:
        return self._mover.away

    @property
    def ranges(self) -> list[tuple[str, Range]]:
        return [("moments of all weights", self._range)]

    def offers(self) -> list[Offer]:
        runs = [run for dirty in self._takable() for run in dirty]
        return [Offer(0, sum(end - first for first, end in runs), False, divisible=True)] if runs else []

    def entry(self, index: int) -> tuple[Group, list[Any]] | None:
        backing = self._mover.backing.pages
        runs = [run for runs in self._takable() for run in runs]
        parts: list[Any] = [(self._range, first, end - first, backing, first, []) for first, end in runs]
        return (self.group, parts) if parts else None

    @contextmanager
    def use(self) -> Iterator[torch.Tensor]:
        """The tensor, to be read and written."""
        self.used = self.manager.clock()
        with GroupLease(self.group):
            if self.manager.taken_of(self.number):
                self._mover.look(0, self.pages)
            if self.displaced and (pages := self.manager.restorable_pages(self.number)):
                self._mover.own(pages, self.pages)
                self._mover.fetch(self._transfer, 0, 0)
            self._mover.arrive(0)
            self._range.note_use(0, True)
            yield from_dlpack(self._range.tensor(0, (self._range.nbytes // 4,), (1,), 2, 32))
        self.manager.client_changed(self.number)

    def check(self) -> None:
        with self.use() as value:
            assert torch.equal(value, self.expected)
            value += 1
        self.expected += 1

    def _takable(self) -> tuple[Any, Any]:
        self._mover.look(0, self.pages)
        return self._mover.takable(0, self.pages)


CASES: dict[str, Callable[[Device], Case]] = {
    "layers of a model": LayersOfAModel,
    "KV cache in use": CacheInUse,
    "cached prefix": CachedPrefix,
    "kept state": KeptState,
    "sectors of requests": SectorsOfRequests,
    "a class that nobody knows": OptimizerState,
}


@pytest.fixture
def device(tuned: Tuned) -> Iterator[Device]:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges
    ballonet.install(BUDGET, page_size=PAGE, host_budget=BUDGET, device="cpu")
    yield devices.require()
    gc.collect()
    devices.require().check()
    take_out()


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, device: Device) -> Iterator[list[Case]]:
    """In a list, so that a test can drop the last reference."""
    held = [CASES[request.param](device)]
    yield held
    end(held)


def end(held: list[Case]) -> None:
    for client in held:
        client.check()
        if isinstance(client, LayersOfAModel):
            client.managed.release()
    held.clear()


def offered(device: Device, case: Case) -> list[int]:
    """The keys of what it offers now, published."""
    known = managers.of(device)
    known.reclaim.publish_now()
    mine = [candidate.index for candidate in known.reclaim.candidates() if candidate.client == case.number]
    return [case.number * KEYS_PER_CLIENT + index for index in mine]


def take(device: Device, case: Case) -> int:
    """Takes all that it offers, and leaves other bytes in every free page. How many pages."""
    taken = device.take(offered(device, case))
    poison(device)
    return taken


@contextmanager
def used_elsewhere(case: Case) -> Iterator[None]:
    """Another thread leases it."""
    begun, done = threading.Event(), threading.Event()

    def use() -> None:
        with GroupLease(case.group):
            begun.set()
            done.wait(600)

    thread = threading.Thread(target=use)
    thread.start()
    begun.wait(600)
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_pages_that_were_taken_are_read_as_before(device: Device, case: list[Case]) -> None:
    free = device.available
    assert take(device, case[0]) > 0
    device.reap(wait=True)
    assert device.available > free
    case[0].check()


def test_pages_of_requests_that_run_are_offered_after_those_that_rest(device: Device) -> None:
    case = SectorsOfRequests(device)
    client = case.pages.client
    resting, running = client.resting, client.device_pages - client.resting
    assert min(resting, running) > 0
    assert [device.take([key]) for key in offered(device, case)] == [resting, running]
    assert client.device_pages == 0
    case.check()


def test_an_entry_is_of_its_own_pages_and_names_what_is_there(device: Device, case: list[Case]) -> None:
    known = managers.of(device)
    mine = [offer for offer in known.reclaim.candidates() if offer.client == case[0].number]
    for (state, candidate), offer in zip(known._known.clients.of(mine), mine, strict=True):
        entry = state.entry(candidate.index)
        assert entry is not None
        group, parts = entry
        assert group.leases == case[0].group.leases
        assert sum(part[2] for part in parts) >= offer.pages > 0
    assert known._known.clients.of([]) == []


def test_pages_that_another_thread_uses_are_not_taken(device: Device, case: list[Case]) -> None:
    keys = offered(device, case[0])
    with used_elsewhere(case[0]):
        assert device.take(keys) == 0
    assert take(device, case[0]) > 0


def test_taken_piece_by_piece(device: Device, case: list[Case]) -> None:
    taken = 0
    for _ in range(200):
        if not (now := device.take(offered(device, case[0])[:1], 1)):
            break
        taken += now
        poison(device)
        case[0].check()
    assert taken > 0


def test_a_driver_that_fails_in_the_middle(device: Device, case: list[Case]) -> None:
    make = type(case[0])
    end(case)

    @contextmanager
    def begin() -> Iterator[list[int]]:
        case.append(make(device))
        device.trim()
        yield offered(device, case[0])
        end(case)

    for _ in at_each_call(begin, device.take, most=3):
        poison(device)
        case[0].check()
        device.check()


def test_kv_of_requests_that_could_not_be_copied_back_is_right_where_it_is(device: Device) -> None:
    held: list[Case] = []

    @contextmanager
    def begin() -> Iterator[SectorsOfRequests]:
        case = SectorsOfRequests(device)
        held.append(case)
        assert take(device, case) > 0
        device.reap(wait=True)
        yield case
        poison(device)
        end(held)

    def restore(case: SectorsOfRequests) -> None:
        client = case.pages.client
        assert client.restore(client.away(range(client.pages))) > 0

    for case, _ in at_each_call(begin, restore, most=3):
        case.check()
        device.check()


def test_ctrl_c_while_the_list_is_made(device: Device, case: list[Case]) -> None:
    parts = (memory_manager, overview, clients, device_view, reclaim, *STEPS)
    for _ in at_each_line(nullcontext, lambda _: offered(device, case[0]), *parts, most=30, least=14):
        assert not managers.of(device)._known.lock.locked()
    assert take(device, case[0]) > 0


def test_client_that_is_gone_leaves_nothing_behind(device: Device, case: list[Case]) -> None:
    assert take(device, case[0]) > 0
    owner = "weights" if isinstance(case[0], LayersOfAModel) else "kv"
    number = case[0].number
    known = managers.of(device)
    case.clear()
    gc.collect()
    assert number not in [candidate.client for candidate in known.reclaim.candidates()]
    assert number not in [
        model.number for model in (*known._known.clients.models, *known._known.clients._paged.values())
    ]
    device.reap(wait=True)
    numbers = device.snapshot()
    assert numbers["pages"][owner] == 0
    assert numbers["host_pages"] == numbers["host_free"]
