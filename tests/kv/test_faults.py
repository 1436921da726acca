"""A driver call fails, or Ctrl-C comes, in the middle of anything that is done to a cache: no token is lost, no page.

Each layer is beside a stock one, and is afterwards what that is, or was before one of the steps. A step whose driver
call failed can be done again; what was interrupted need not be whole, but all that is done to the cache then is right.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from ballonet.allocator._native import Device
from ballonet.hooks.kv import layer as kv_layer
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.residency import kv_slots
from ballonet.offload.residency.pieces import PieceState
from ballonet.testing.movable import MovableKV

from ..caches import kv_pages
from ..faulting import at_each_call, at_each_line
from ..test_kv import tokens
from ..tuned import Tuned
from .pressure import STEPS, hog, kv_ranges, poison, press, started, tiers

PAGE = 4096  # which 14 tokens fill
MODULES = (kv_layer, *STEPS, kv_read_plan, kv_slots)


class Cache:
    """Layers that have so many tokens, each with a stock one and what that is after each step."""

    def __init__(self, device: Device, *counts: int, **options: Any) -> None:
        self.device = device
        self.ranges = CacheRanges(layers=len(counts), **options)
        self.elastic: list[Any] = [ElasticLayer(self.ranges) for _ in counts]
        self.stock: list[Any] = [DynamicLayer() for _ in counts]
        self.seed = 0
        self.written = False
        self.append(*(min(count, 1) for count in counts))  # with so few layers share a range where they may
        self.append(*(max(count - 1, 0) for count in counts))

    def append(self, *counts: int) -> None:
        """Appends so many tokens to each layer, or as many to all."""
        for number, (elastic, stock) in enumerate(zip(self.elastic, self.stock, strict=True)):
            self.seed += 1
            batch = stock.keys.shape[0] if stock.is_initialized else 2
            if count := counts[number % len(counts)]:
                pair = tokens(count, self.seed, batch)
                assert all(map(torch.equal, elastic.update(*pair), stock.update(*pair)))

    @property
    def tier(self) -> Any:
        (tier,) = tiers(kv_ranges(self.elastic))
        return tier

    def check(self) -> None:
        for elastic, stock in zip(self.elastic, self.stock, strict=True):
            assert is_as(elastic, stock)

    def use(self) -> None:
        """Takes pages, appends, copies behind and restores, whatever its state is; it is empty then."""
        self.append(1)
        for _ in range(2):
            self.check()
            press(self.device, 2)
        for count in (30, 1, 1, 1):
            self.append(count)
        press(self.device, 4)
        self.check()
        for tier in tiers(kv_ranges(self.elastic)):
            tier.client.write_behind(9)
            tier.restore(20, 0)
        press(self.device, 4)
        self.append(1)
        self.check()
        assert all(layer.elastic for layer in self.elastic)
        assert self.ranges.group(self.device).leases == 1, "that of the thread that uses it by hand"
        self.device.check()
        for layer in self.elastic:
            layer.reset()
        assert kv_pages(self.device) == 0


def is_as(elastic: Any, stock: Any) -> bool:
    if not stock.is_initialized:
        return elastic.get_seq_length() == 0
    return is_as_long(elastic, stock) and all(
        ours.shape == theirs.shape and torch.equal(ours, theirs)
        for ours, theirs in ((elastic.keys, stock.keys), (elastic.values, stock.values))
    )


def is_as_long(elastic: Any, stock: Any) -> bool:
    return bool(elastic.get_seq_length() == stock.get_seq_length())


# -- Caches


@contextmanager
def shared(device: Device) -> Iterator[Cache]:
    """Two layers in one range."""
    cache = Cache(device, 40, 40, expected=1)
    assert cache.elastic[0].kv_range is cache.elastic[1].kv_range
    device.trim()
    yield cache


@contextmanager
def empty(device: Device) -> Iterator[Cache]:
    """One of two layers."""
    cache = Cache(device, 0, 40, expected=1)
    device.trim()
    yield cache


@contextmanager
def roomy(device: Device) -> Iterator[Cache]:
    with shared(device) as cache:
        yield cache


@contextmanager
def away(device: Device) -> Iterator[Cache]:
    """Pages have been taken, and others copied behind."""
    cache = Cache(device, 100)
    press(device, 3)
    cache.tier.client.write_behind(2)
    device.synchronize()
    device.trim()
    yield cache


@contextmanager
def released(device: Device) -> Iterator[Cache]:
    """The pages of most tokens were given up."""
    cache = Cache(device, 100)
    cache.elastic[0].kv_range.release_prefix(60)
    device.trim()
    yield cache


@contextmanager
def crowded(device: Device) -> Iterator[Cache]:
    """Four layers have more pages than there is room for, and will take turns in slots."""
    other = hog(device, device.budget // PAGE - 26)
    cache = Cache(device, 100, 100, 100, 100, expected=200, alone=True)
    for kv_range in kv_ranges(cache.elastic):
        for piece in (1, 3, 5):  # what is away has gaps
            MovableKV(kv_range.pages).displace(piece)
    yield cache
    assert device.available >= 26
    other.close()


@contextmanager
def slots(device: Device) -> Iterator[Cache]:
    """Four layers take turns in slots."""
    with crowded(device) as cache:
        for _ in range(9):
            cache.append(1)
        assert all(kv_range.pages._extent.mover.in_slot for kv_range in kv_ranges(cache.elastic))
        yield cache


SETTINGS: dict[Any, dict[str, Any]] = {
    shared: {"budget": 40 * PAGE, "host_budget": 16 * PAGE},
    empty: {"budget": 40 * PAGE, "host_budget": 16 * PAGE},
    roomy: {"budget": 340 * PAGE, "host_budget": 16 * PAGE},
    away: {"budget": 40 * PAGE, "host_budget": 24 * PAGE, "spill": True},
    released: {"budget": 40 * PAGE, "host_budget": 24 * PAGE, "spill": True},
    crowded: {"budget": 96 * PAGE, "host_budget": 96 * PAGE, "spill": True},
    slots: {"budget": 96 * PAGE, "host_budget": 96 * PAGE, "spill": True},
}

# -- What is done to them


def append(count: int) -> Callable[[Any, int], object]:
    return lambda layer, number: layer.update(*tokens(count, 90 + number))


def crop(count: int) -> Callable[[Any, int], object]:
    return lambda layer, _: layer.crop(-count)


def restore_prefix(cache: Cache) -> None:
    (layer,), (stock,) = cache.elastic, cache.stock
    with layer.kv_range.restoring_prefix() as missing:
        layer.write(0, stock.keys[:, :, :missing], stock.values[:, :, :missing])
        cache.written = True


def take(cache: Cache) -> None:
    movable = MovableKV(cache.elastic[0].kv_range.pages)
    for piece in (3, 6):
        movable.displace(piece)


@dataclass(frozen=True)
class Operation:
    begin: Callable[[Device], AbstractContextManager[Cache]]
    steps: Sequence[Callable[[Any, int], object]] = ()  # what is done to each of the first `layers`
    layers: int = 1
    move: Callable[[Cache], object] = lambda _: None  # what changes no token
    torn: bool = False  # Ctrl-C may leave a mixture: tokens change where they are
    most: int | None = 16  # lines
    calls: int = 3  # of each function

    def act(self, cache: Cache) -> None:
        for step in self.steps:
            for number, layer in enumerate(cache.elastic[: self.layers]):
                step(layer, number)
        self.move(cache)
        if self.begin not in (crowded, slots):  # where copies are to be under way
            cache.device.reap(wait=True)  # which the core's thread does otherwise, sooner or later


REORDER = [lambda layer, _: layer.reorder_cache(torch.tensor([1, 0]))]
REPEAT = [lambda layer, _: layer.batch_repeat_interleave(2)]
SELECT = [lambda layer, _: layer.batch_select_indices(torch.tensor([1]))]
OPERATIONS = {
    "the-first-tokens": Operation(empty, [append(3)], most=None),
    "a-token": Operation(shared, [append(1)]),
    "tokens-on-new-pages": Operation(shared, [append(90)]),
    "tokens-after-a-cut": Operation(shared, [crop(3), append(3)]),
    "tokens-in-a-larger-place": Operation(roomy, [append(4100)], most=12),
    "a-cut": Operation(shared, [crop(30)], 2),
    "a-cut-of-everything": Operation(shared, [crop(40)], 2),
    "a-larger-batch": Operation(shared, REPEAT),
    "a-smaller-batch": Operation(shared, SELECT),
    "rows-in-another-order": Operation(shared, REORDER, torn=True),
    "a-copy": Operation(shared, move=lambda cache: copy.deepcopy(cache.elastic[0]).update(*tokens(1))),
    "tokens-behind-pages-that-are-away": Operation(away, [append(40)]),
    "a-cut-into-pages-that-are-away": Operation(away, [crop(70)]),
    "rows-of-pages-that-are-away": Operation(away, REORDER, torn=True),
    "copies-behind": Operation(away, move=lambda cache: cache.tier.client.write_behind(4)),
    "pages-are-taken": Operation(away, move=take, most=None),
    "pages-are-brought-back": Operation(away, move=lambda cache: cache.tier.restore(9, 0), most=None),
    "a-prefix-is-restored": Operation(released, move=restore_prefix, most=None),
    "layers-come-into-slots": Operation(crowded, [append(1)] * 4, 4, most=15, calls=8),
    "tokens-of-layers-in-slots": Operation(slots, [append(1)], 4, most=10),
    "many-tokens-of-layers-in-slots": Operation(slots, [append(30)], 4, most=10),
    "a-look-at-layers-in-slots": Operation(slots, move=Cache.check, most=10),
    "slots-are-given-up": Operation(slots, move=lambda cache: cache.tier.client.way.give(), most=10),
}


@pytest.fixture(params=OPERATIONS)
def does(request: pytest.FixtureRequest) -> Operation:
    return OPERATIONS[request.param]


@pytest.fixture
def device(does: Operation, tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if does.begin in (crowded, slots):  # pages so small are worth no copy of their own, and nothing depends on the time
        tuned(kv_reads={"copy": 0.0, "again": 1})
        monkeypatch.setattr(kv_read_plan.KVReadPlan, "_learn", lambda *_: None)
    with started(page_size=PAGE, **SETTINGS[does.begin]) as opened:
        poison(opened)
        yield opened


@pytest.mark.parametrize("trouble", ["call", "line"])
def test_tokens_are_those_of_before_or_after(does: Operation, device: Device, trouble: str) -> None:
    if trouble == "call":
        runs = at_each_call(lambda: does.begin(device), does.act, most=does.calls, least=1)
    else:
        runs = at_each_line(lambda: does.begin(device), does.act, *MODULES, most=does.most)
    for cache, done in runs:
        settle(cache, does, done, again=trouble == "call")
        cache.use()


def settle(cache: Cache, does: Operation, done: bool, again: bool) -> None:
    """Looks which steps each layer has had. `again`: does the others."""
    if (kv_range := cache.elastic[0].kv_range) is not None and kv_range.missing:
        assert cache.written or kv_pages(cache.device) == 4, "as many as before"
        restore_prefix(cache)
    has = is_as_long if again and does.layers == 4 else is_as  # a look would bring them to rest
    had = []
    for number, (elastic, stock) in enumerate(zip(cache.elastic, cache.stock, strict=True)):
        states = [stock]
        for step in does.steps if number < does.layers else ():
            states.append(copy.deepcopy(states[-1]))
            step(states[-1], number)
        matching = [had for had, state in enumerate(states) if has(elastic, state)]
        if not matching and does.torn and not done and not again:
            elastic.keys, elastic.values = stock.keys.clone(), stock.values.clone()
            matching = [0]
        assert matching
        assert not done or len(states) - 1 in matching
        had.append(matching[0])
        cache.stock[number] = states[-1 if again else matching[0]]
    if again and not done:
        for at, step in enumerate(does.steps):
            for number in range(does.layers):
                if had[number] <= at:
                    step(cache.elastic[number], number)
        does.move(cache)
    lengths = [stock.get_seq_length() for stock in cache.stock]
    if does.layers > 1:  # the layers of a cache are as long as each other
        for length, *pair in zip(lengths, cache.elastic, cache.stock, strict=True):
            for layer in pair:
                layer.crop(min(lengths) - length)


# -- While another thread looks


class InTheMiddle:
    """A range that does something else between what a caller asks it first and the answer."""

    def __init__(self, range_: Any, act: Callable[[], object]) -> None:
        self._range = range_
        self._acts = [act]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._range, name)

    def runs(self, first: int, count: int) -> Any:
        runs = self._range.runs(first, count)
        while self._acts:
            self._acts.pop()()
        return runs


@pytest.fixture
def cache() -> Iterator[Cache]:
    with started(page_size=PAGE, **SETTINGS[away]) as device:
        cache = Cache(device, 100)
        yield cache
        cache.use()


def pages_of(cache: Cache) -> MovableKV:
    (kv_range,) = kv_ranges(cache.elastic)
    return MovableKV(kv_range.pages)


def test_pages_that_come_home_while_another_thread_looks_do_not_count_as_away(cache: Cache) -> None:
    pages, looked, is_home = pages_of(cache), threading.Event(), threading.Event()
    extent: Any = pages._extent

    def wait() -> None:
        looked.set()
        is_home.wait(0.3)  # who looks on holds that up

    assert pages.displace(1)
    extent.mover.range = InTheMiddle(extent.range, wait)
    other = threading.Thread(target=extent.look)
    other.start()
    looked.wait()
    assert pages.bring_back(1)
    is_home.set()
    other.join()
    assert pages.leads_to(1) == "device"
    assert extent.mover.states.of(1) is PieceState.CLEAN


def test_a_page_that_goes_to_the_host_and_home_has_what_was_written_there(cache: Cache) -> None:
    pages = pages_of(cache)
    assert pages.displace(1)
    assert pages.bring_back(1), "and the host has a copy"
    assert pages.move(1, "host")
    for layer in (*cache.elastic, *cache.stock):
        layer.reorder_cache(torch.tensor([1, 0]))
    assert pages.move(1, "device")
    press(cache.device, 9)
    cache.check()
