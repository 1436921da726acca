"""The reclaim order: who gives and gets back first, with floors and priorities; no flapping on a square wave."""

from __future__ import annotations

import gc
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.allocator.events import Events
from ballonet.offload.manager.client import KEYS_PER_CLIENT
from ballonet.offload.manager.reclaim import CLEAN
from ballonet.offload.policy.plan import Plan, streaming
from ballonet.offload.policy.price import Price
from ballonet.offload.policy.reclaim_order import LISTED, Candidate, PageSource, above_floors, ordered
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Point

from .fake_manager import EQUAL, LINK, PAGE, STAYING, FakeCache, FakeDevice, FakeModel, a_manager, keys, trace

PAGES = DEFAULT.pages

HERE = Point("decode", 1, 8)

# -- the order


def test_candidates_are_in_order() -> None:
    """What costs nothing, then priority, then what a page costs, then recency; pages decide nothing."""
    every = [
        [Candidate(PageSource.IDLE_KV, client, 0, pages, Price(rate, once), priority=priority, recency=recency)]
        for client, (priority, rate, once, recency, pages) in enumerate(
            itertools.product((-1, 0, 2), (0.0, 0.5), (0.0, 2.0), (0.0, 1.0, 2.0), (1, 7))
        )
    ]
    for them in (every, every[::-1]):  # equals stay as they come
        expected = sorted(
            itertools.chain(*them),
            key=lambda it: (it.price.over(10.0) > 0, it.priority, it.price.over(10.0), -it.recency),
        )
        assert ordered(them, 10.0) == expected


some_candidates = st.lists(
    st.builds(
        Candidate,
        st.sampled_from(LISTED),
        client=st.integers(1, 3),
        index=st.integers(0, 9),
        pages=st.integers(1, 4),
        owner=st.integers(0, 3),
    ),
    max_size=12,
)


@given(some_candidates, st.dictionaries(st.integers(1, 3), st.integers(-3, 12)), st.data())
def test_no_part_of_the_list_goes_below_a_floor(
    candidates: list[Candidate], spare: dict[int, int], data: st.DataObject
) -> None:
    """Whatever the core takes of it: a beginning, or out of turn what is not leased."""
    kept = above_floors(candidates, spare)
    taken = data.draw(st.lists(st.sampled_from(kept), unique_by=id)) if kept else []
    for owner, pages in spare.items():
        assert sum(candidate.pages for candidate in taken if candidate.owner == owner) <= max(0, pages)
    for candidate in candidates:
        if candidate.owner not in spare:
            assert candidate in kept, "no floor"
    for owner, pages in spare.items():
        mine = [candidate for candidate in candidates if candidate.owner == owner]
        left = pages - sum(candidate.pages for candidate in kept if candidate.owner == owner)
        assert all(candidate.pages > left for candidate in mine if kept.count(candidate) < mine.count(candidate)), (
            "as many as it allows"
        )


# -- the list of a device with models and caches


def test_the_whole_list() -> None:
    """What costs least per page while it is away goes first, and of each client in its order: prefixes that the host
    has, layers that hide, idle KV, layers of an idle model, layers that passes wait for, KV that they read."""
    device, manager, clock, (a, b) = a_manager(200, {}, {})
    old, prefix = (FakeCache(device, manager, clock, name) for name in ("old", "prefix"))
    old.step(6)
    prefix.step(3)
    prefix.only_cached, prefix.clean = True, {0, 1}
    a.step(manager)
    clock.now += 2 * PAGES.idle
    b.step(manager)
    with_model_b(manager, b, new := FakeCache(device, manager, clock, "new"), 4)
    device.kv = device.free
    while device.want(1, b):
        device.kv += device.free
    taken = [manager._known.list.named(key).source for key in _keys_taken(device, manager, a, b, old, prefix, new)]
    listed = [source.label for source in LISTED if source is not PageSource.LEND]  # nobody lacks anything
    assert {*taken} == {*listed}
    prices = {
        (candidate.client, candidate.index): candidate.price.over(DEFAULT.prices.horizon)
        for candidate in manager.reclaim.candidates()
    }
    assert not prices, "all was taken"
    first = {source: taken.index(source) for source in listed}
    assert first["prefix"] < first["idle KV"], "it has to be copied to the host as well"
    assert first["idle weights"] < first["hidden weights"], "equals: what is idle"
    assert max(first["idle KV"], first["hidden weights"]) < min(first["stalling weights"], first["running KV"])


def with_model_b(manager: Any, model: FakeModel, cache: FakeCache, pages: int) -> None:
    """The cache becomes the model's, and has so many pages."""
    manager._known.clients.paged[-1][0].model = manager._known.clients.of_model(model).number
    cache.step(pages)


def test_kv_that_rests_goes_before_layers_that_passes_wait_for() -> None:
    """Nobody reads it for now, so that it costs no iteration anything; what else the cache has is read in each."""
    device, manager, _, (a,) = a_manager(100, {})
    a.step(manager)
    cache = FakeCache(device, manager, manager.clock)
    cache.step(4)
    cache.at_rest = {2, 3}
    manager.client_changed(cache.number)
    order = keys(device)
    kept = [place for place, (name, _) in enumerate(order) if name == "cache"]
    assert [order[place] for place in kept] == [("cache", index) for index in (2, 3, 0, 1)]
    sources = [candidate.source for candidate in manager.reclaim.candidates()]
    assert kept[1] < sources.index(PageSource.STALLING_WEIGHTS)


def _keys_taken(device: FakeDevice, manager: Any, *clients: FakeModel | FakeCache) -> list[int]:
    by_name = {
        client.name: client if isinstance(client, FakeCache) else manager._known.clients.of_model(client)
        for client in clients
    }
    return [by_name[name].number * KEYS_PER_CLIENT + index for name, index in device.trace]


def test_the_newest_request_gives_first_and_its_oldest_tokens() -> None:
    device, manager, clock, _ = a_manager(20)
    one, two = (FakeCache(device, manager, clock, name) for name in ("one", "two"))
    for model in (two, one):
        model.step(5)
    device.kv = 10
    assert device.want(7)
    assert device.trace == [("two", index) for index in range(5)] + [("one", 0), ("one", 1)]


def test_of_idle_caches_the_one_used_last_gives_first_one_after_the_other() -> None:
    device, manager, clock, _ = a_manager(40)
    them = [FakeCache(device, manager, clock, name) for name in "xyz"]
    for cache in (them[1], them[0], them[2]):
        cache.step(4)
        clock.now += 2 * PAGES.idle
    manager.reclaim.publish_now()
    device.kv = 28
    assert device.want(12)
    assert trace(device) == ["z"] * 4 + ["x"] * 4 + ["y"] * 4


def test_clean_pages_are_offered_first_by_the_cache_and_stay_so() -> None:
    device, manager, clock, _ = a_manager(20)
    cache = FakeCache(device, manager, clock)
    cache.step(4)
    order = [2, 0, 3, 1]
    cache.offers = lambda: [  # type: ignore[method-assign]
        offer for index in order for offer in FakeCache.offers(cache) if offer.index == index
    ]
    manager.reclaim.publish_now()
    device.kv = 16
    assert device.want(4)
    assert [index for _, index in device.trace] == order


def test_a_cache_has_the_priority_of_the_model_whose_forward_made_it() -> None:
    device, manager, clock, (a, b) = a_manager(
        120, {"priority": 0, "interval": None}, {"priority": 5, "interval": None}
    )
    caches = {}
    for model in (a, b):
        manager.before(model, HERE)
        caches[model.name] = FakeCache(device, manager, clock, f"of {model.name}")
        manager.after(model)
    assert [seat.name for seat, _ in manager._known.clients.paged] == ["of a of a", "of b of b"]
    free = FakeCache(device, manager, clock, "of nobody")
    for cache in (caches["b"], caches["a"], free):
        cache.step(3)
    device.kv = device.free
    assert device.want(9)
    assert trace(device) == ["of nobody"] * 3 + ["of a"] * 3 + ["of b"] * 3


def test_cache_that_becomes_idle_moves_up_the_list() -> None:
    device, manager, clock, _ = a_manager(64)
    one, two = (FakeCache(device, manager, clock, name) for name in ("one", "two"))
    one.step(4)
    two.step(4)
    assert [name for name, _ in keys(device)] == [*["two"] * 4, *["one"] * 4], "the newest first"
    clock.now += 0.9 * PAGES.idle
    two.step()
    clock.now += 0.2 * PAGES.idle
    two.step()
    manager.client_changed(two.number)
    assert [name for name, _ in keys(device)] == [*["one"] * 4, *["two"] * 4]


def test_pages_taken_are_not_offered_again_before_the_cache_knows() -> None:
    device, manager, clock, _ = a_manager(20)
    cache = FakeCache(device, manager, clock)
    cache.step(4)
    offers = cache.offers()
    cache.offers = lambda: offers  # type: ignore[method-assign]
    device.kv = 16
    assert device.want(2)
    manager.reclaim.publish_now()
    assert {candidate.index for candidate in manager.reclaim.candidates()} == {2, 3}
    assert manager.taken_of(cache.number) == {0, 1}
    assert manager.taken_of(cache.number) == frozenset()


# -- floors


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abcxy"), st.integers(-6, 6), st.sampled_from([0.1, 0.6, 2.0])), max_size=40),
    st.integers(0, 40),
    st.integers(0, 60),
)
def test_no_floor_is_ever_crossed(steps: list[tuple[str, int, float]], low: int, high: int) -> None:
    device, manager, clock, them = a_manager(130, {"floor": low}, {"floor": high, "priority": 3}, {"decode": 0.005})
    caches = {}
    for name, model in zip("xy", them, strict=False):
        manager.before(model, HERE)
        caches[name] = FakeCache(device, manager, clock, name)
        manager.after(model)
    owned = {"a": caches["x"], "b": caches["y"]}
    for name, pages, passed in steps:
        clock.now += passed
        device.trace.clear()
        try:
            if name in caches and pages < 0:
                caches[name].drop(-pages)
            elif name in caches:
                caches[name].step(pages)
            else:
                them["abc".index(name)].step(manager, kv=max(pages, -device.kv))
        except MemoryError:
            pass
        assert device.free >= 0
        for model in them[:2]:
            if {model.name, owned[model.name].name} & {*trace(device)}:
                assert model.device_pages + owned[model.name].device_pages >= model.floor, (
                    "it was taken from below its floor"
                )


@pytest.mark.parametrize("floor", [0, 20, 26, 40, 70])
def test_an_slo_lends_nothing_of_a_floor(floor: int) -> None:
    """The SLO alone would stream every second layer, in two slots."""
    device, manager, _, (a,) = a_manager(60, {"tpot": 0.03, "floor": floor})
    for _ in range(3):
        a.step(manager)
    assert a.device_pages >= min(floor, 40)
    assert (a.device_pages < 40) == (floor < 40)
    assert device.free == 60 - a.device_pages


# -- restored


def test_kv_and_layers_come_back_to_free_pages_once_the_link_was_used_for_as_long() -> None:
    device, manager, clock, (a,) = a_manager(64, {})
    cache = FakeCache(device, manager, clock)
    a.step(manager)
    cache.step(10)
    device.kv = 14
    while cache.displaced < 10:
        a.step(manager)
        assert device.want(1)
        device.kv += 1
    a.step(manager)
    assert a.plan.streamed
    device.kv = 0
    cache.step()
    assert cache.displaced == 10, "not yet"
    for _ in range(3):
        a.step(manager)
        cache.step()
    assert cache.displaced == 0
    assert a.plan == Plan(EQUAL)


def test_restoring_ends_once_pages_are_wanted_again() -> None:
    device, manager, clock, _ = a_manager(20)
    cache = FakeCache(device, manager, clock)
    cache.step(8)
    device.kv = 12
    assert device.want(4)
    device.kv = 4
    for _ in range(44):
        clock.now += PAGES.idle / 4
        cache.used = clock.now
        manager.reclaim.publish_now()
        manager.client_changed(cache.number)
    device.kv += device.free
    assert device.want(1), "between the promise and the next iteration"
    device.kv = 4
    cache.step()
    assert cache.displaced == 5


def test_an_idle_cache_that_is_used_again_swaps_with_one_that_is_idle_now() -> None:
    device, manager, clock, _ = a_manager(16)
    one, two = (FakeCache(device, manager, clock, name) for name in ("one", "two"))
    one.step(10)
    clock.now += 2 * PAGES.idle
    two.step(10)
    assert (one.device_pages, two.device_pages) == (6, 10)
    clock.now += 2 * PAGES.idle
    one.step()
    assert (one.device_pages, two.device_pages) == (6, 10), "not yet"
    for _ in range(8):
        one.step()
    assert (one.device_pages, two.device_pages) == (10, 6), "it has read them for as long as that takes"
    for _ in range(20):
        clock.now += PAGES.idle / 3
        one.step()
        two.step()
    assert (one.device_pages + two.device_pages, device.free) == (16, 0)
    assert one.moved + two.moved < 40, "both run: none is worth more than the other"


def both_idle() -> tuple[FakeDevice, Any, FakeCache, FakeCache]:
    """Two caches that fill a device, idle both; somebody else has taken three pages of the second."""
    device, manager, clock, _ = a_manager(16)
    one, two = (FakeCache(device, manager, clock, name) for name in ("one", "two"))
    one.step(6)
    clock.now += PAGES.idle / 2
    two.step(10)
    clock.now += 2 * PAGES.idle
    manager.reclaim.publish_now()
    assert device.want(3)
    device.kv = 3
    return device, manager, one, two


def test_a_cache_that_wakes_takes_from_others_and_not_from_itself() -> None:
    device, _, _, two = both_idle()
    assert trace(device) == ["two"] * 3, "it was used last"
    for _ in range(9):
        two.step()
    assert trace(device) == ["two"] * 3 + ["one"] * 3
    assert two.displaced == 0


def test_a_cache_that_wakes_counts_neither_with_itself_nor_with_who_is_gone() -> None:
    device, manager, one, two = both_idle()
    assert two.displaced == 3
    device.caches.remove(one)
    manager.remove_client(one.number)
    device.kv += device.free
    assert manager.restorable_pages(two.number) == 0


# -- write-behind


def test_kv_is_copied_ahead_only_while_pages_are_short_and_the_link_idle() -> None:
    device, manager, clock, (a,) = a_manager(320, {}, tuning=STAYING)
    cache = FakeCache(device, manager, clock)
    a.step(manager)
    cache.step(100)
    assert cache.asked_to_copy == [], "pages are plenty"
    device.kv = device.free - 320 // PAGES.short + 1
    a.step(manager)
    cache.step(1)
    ahead = 320 // CLEAN
    assert cache.clean == {*range(ahead)}, "those that are taken first, and a part of the budget at most"
    copied = len(cache.asked_to_copy)
    a.arrange(manager, streaming(EQUAL, (0, 2, 4, 6), 1))
    device.kv += device.free - 320 // PAGES.short + 2
    a.step(manager)
    cache.clean.clear()
    cache.step(1)
    a.step(manager)
    a.step(manager)
    assert {*cache.asked_to_copy[copied:]} == {0}, "the link serves layers; what was copied is looked after"


# -- who is told


def test_events_name_the_source_whose_pages_and_the_cost_that_was_expected() -> None:
    events = Events()
    device, manager, clock, (a,) = a_manager(64, {}, events=events)
    cache = FakeCache(device, manager, clock, "of a chat")
    a.step(manager)
    cache.step(4)
    device.kv = device.free
    while cache.displaced < 4:
        assert device.want(1, a)
        device.kv += device.free
    named = [events.naming(key) for key in _keys_taken(device, manager, a, cache)]
    assert [decision.what for decision in named] == trace(device)
    assert named[0] == ("hidden weights", "a", 0.0, 0)
    cold = [decision for decision in named if decision.what == "of a chat"]
    assert cold[-1] == ("running KV", "of a chat", PAGE / LINK, 0), "it is dirty: a page over the link"
    device.kv, gone = 0, sum(EQUAL) - a.device_pages
    for _ in range(12):
        a.step(manager)
        clock.now += 1.0
    counts = events.counts()
    assert counts["hidden weights"]["restore"].pages == gone > 0
    event = next(decision for decision in events.since().events if decision.verb == "restore")
    assert (event.what, event.by) == ("a", threading.current_thread().name)
    assert event.predicted == pytest.approx(event.pages * PAGE / LINK)
    assert event.measured is not None


# -- one that is gone, and one that waits


def test_a_cache_that_is_collected_is_forgotten() -> None:
    device, manager, clock, _ = a_manager(20)
    cache = FakeCache(device, manager, clock)
    cache.step(3)
    number = cache.number
    device.caches.clear()
    device.listed.clear()
    del cache
    gc.collect()
    manager.reclaim.publish_now()
    assert device.listed == []
    with manager._known.lock:  # in the middle of anything, even here
        manager.remove_client(number)
    manager.reclaim.publish_now()
    assert len(manager._known.clients._paged) == 0
    assert manager.restorable_pages(number) == 0
    assert manager.taken_of(number) == frozenset()
    manager.client_changed(number)


def test_whoever_waits_hears_of_pages_and_gives_what_others_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    device, manager, _, _ = a_manager(10)
    device.kv = 10
    assert not manager.pages.wait(0.0)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(manager.pages.wait, 600)
        device.kv = 9
        assert waiting.result()
    demands = iter([3, 3, 0])
    monkeypatch.setattr(FakeDevice, "page_request", property(lambda _: next(demands)), raising=False)
    device.kv = 10
    assert manager.pages.wait(600), "what was missing can be had now"
    monkeypatch.setattr(FakeDevice, "page_request", 3)
    device.yield_pages = lambda: 3  # type: ignore[method-assign]
    assert manager.pages.wait(600)


# -- a square wave


@pytest.mark.parametrize("half", [0.3, 3.0, 8.0, 15.0, 40.0])
def test_on_a_square_wave_moves_take_no_longer_than_the_link_was_used_and_nothing_leaks(half: float) -> None:
    """A load is there for `half` seconds and away for as many."""
    device, manager, clock, (a, b) = a_manager(110, {}, {"priority": 1})
    chat = FakeCache(device, manager, clock, "chat")
    chat.step(8)
    ticks, back = 6, 0
    used = 0.0  # pages that the link had to bring, for layers that streamed and KV that was read in place
    for _ in range(20):
        for load in (55, 0):
            burst = FakeCache(device, manager, clock, "burst") if load else None
            for _ in range(ticks):
                clock.now += half / ticks
                for model in (a, b) if not load else (a,):
                    model.step(manager)
                    used += model.plan.copied_pages
                away = chat.displaced
                chat.step()
                used, back = used + away, back + max(0, away - chat.displaced)
                if burst is not None and burst.pages < load:
                    burst.step(min(load - burst.pages, 20))
            if burst is not None:
                device.caches.remove(burst)
                manager.remove_client(burst.number)
    assert 0 < 2 * (a.loaded + b.loaded + back) <= used + 2 * (sum(EQUAL) + chat.pages)
    for _ in range(40):
        clock.now += 1.0
        a.step(manager)
        b.step(manager)
        chat.step()
    assert (a.plan, b.plan, chat.displaced) == (Plan(EQUAL), Plan(EQUAL), 0)
    assert device.free == 110 - 2 * sum(EQUAL) - chat.pages
    assert len(manager._known.clients._paged) == 1
