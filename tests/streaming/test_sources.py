"""The reclaim order as a list of sources, and chaos that reclaims them while real models run."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.hooks.device import managers
from ballonet.offload.policy.reclaim_order import LISTED, PageSource
from ballonet.testing import chaos_of
from ballonet.testing.sources import ReclaimSource, sources

from ..models import Output
from ..pool import bytes_that_exist
from ..tuned import Clock, Tuned
from .conftest import BUDGET, LAYERS, PAGE, full, say

CYCLES = 4
IDS = torch.arange(2 * 120).reshape(2, 120) % 190
HELD = 64  # tokens of the cache


@pytest.fixture
def clock(tuned: Tuned) -> Clock:
    """The manager's: next to nothing passes unless a test says so, and iterations take a while."""
    clock = Clock(step=1e-6)
    tuned(clock=clock)
    return clock


@pytest.fixture
def returns() -> float:
    """As `tuning.Prices` has it."""
    return 1.0


@pytest.fixture(autouse=True)
def manager(monkeypatch: pytest.MonkeyPatch, tuned: Tuned, clock: Clock, returns: float) -> Iterator[Any]:
    """Whose pages are always scarce, and whose link hides every copy."""
    tuned(chaos={"seldom": 2}, prices={"returns": returns})
    ours = managers.of(devices.require())
    monkeypatch.setattr(ours.pages, "scarce", True)
    ours.link.bandwidth = 1e12
    yield ours
    devices.require().check()


def by_kind(manager: Any) -> dict[PageSource, ReclaimSource]:
    return {source.source: source for source in sources(manager, devices.require(), spill=True)}


@pytest.mark.parametrize("returns", [math.inf])
def test_four_verbs(model: Any, larger: Any, manager: Any, clock: Clock, returns: float) -> None:
    assert returns == math.inf, "nothing comes back by itself"
    with install.stock():
        expected, idle = say(model), copy.deepcopy(larger)
    device = devices.require()
    with ballonet.manage(idle) as other, ballonet.manage(model) as active:
        say(idle)
        clock.now += 5
        say(model)
        say(model)
        levels = by_kind(manager)
        assert list(levels) == sorted(levels)
        assert {*LISTED} <= {*levels}
        source = levels[PageSource.IDLE_WEIGHTS]
        assert min(source.would_cost()) > 0.0, "it will run again"
        device.reap(wait=True)  # what is retired now would be free with the next pages
        pages, free, before = other.report().pages, levels[PageSource.TRIM].would_free(), source.would_free()
        given = source.reclaim(1)
        assert 1 <= given <= before
        assert source.would_free() == before - given
        assert (other.report().pages, active.report().streamed) == (pages - given, ())
        assert levels[PageSource.TRIM].would_free() == free + given
        assert source.reclaim(before) == before - given
        assert source.reclaim(1) == 0
        assert bytes_that_exist() <= BUDGET
        say(idle)
        assert other.report().streamed
        counts = devices.of().events.counts()
        assert counts["idle weights"]["reclaim"].pages >= before
        assert source.restore(10**6) > 0
        say(idle)
        assert (other.report().streamed, other.report().pages) == ((), pages)
        assert say(model).agrees(expected)
        assert (
            levels[PageSource.SPILL].reclaim(1),
            levels[PageSource.TRIM].restore(1),
            levels[PageSource.IDLE_ACTIVATIONS].restore(1),
        ) == (
            0,
            0,
            0,
        )
        assert levels[PageSource.SPILL].would_free() > 0
        assert sources(manager, device, spill=False)[-1].would_free() == 0
        torch.empty(64 * PAGE)  # whose block is free now
        assert levels[PageSource.IDLE_ACTIVATIONS].would_free() > 0
        assert levels[PageSource.IDLE_ACTIVATIONS].reclaim(1) > 0
        assert levels[PageSource.WAIT].reclaim(1) == device.page_request == 0


def test_layers_that_were_taken_come_back_though_the_plan_is_the_one_of_before(
    model: Any, manager: Any, clock: Clock
) -> None:
    """As where requests ask for more than streaming allows, and there is room again."""
    with install.stock():
        expected = say(model)
    with ballonet.manage(model) as managed:
        say(model)
        clock.now += 5
        source = by_kind(manager)[PageSource.IDLE_WEIGHTS]
        assert source.reclaim(source.would_free()) > 0
        residency = managed._residency
        assert residency.arrangement.plan.streamed == (), "the model does not know of it yet"
        residency.require(1e-9, 1e-9, True)
        assert say(model).agrees(expected)
        assert residency.arrangement.read_in_place == 0
        assert managed.report().streamed == ()


@pytest.mark.counts
def test_an_idle_model_gives_and_gets_back(model: Any, larger: Any, stock: Output, manager: Any, clock: Clock) -> None:
    """Weights give their pages to a KV cache that finds no others, and take them back (Oneiros §5)."""
    manager.pages.scarce, manager.link.bandwidth = False, 1e12  # every layer's copy is hidden
    with install.stock(), torch.no_grad():
        idle, stock_of_larger = copy.deepcopy(larger), say(larger)
        long = model(IDS).logits  # a text that needs more pages than there are
    with ballonet.manage(model) as active, ballonet.manage(idle) as other:
        say(idle)
        say(model)
        whole = other.report().pages
        clock.now += 5
        with full(but=200):
            say(idle)
            say(model)
            clock.now += 5
            say(model)
            assert other.report().streamed == () == active.report().streamed, "nothing is remapped while pages are free"
            assert other.report().host_pages == 0, "nor prepared"
        moved = ballonet.stats().copied.weights_d2h
        with full(but=72):
            with torch.no_grad():
                assert torch.equal(model(IDS, use_cache=True).logits, long)
            assert 0 < len(other.report().streamed) < 2 * LAYERS, "never a whole model"
            assert active.report().streamed == ()
            assert bytes_that_exist() <= BUDGET
            gone = sum(other._residency.arrangement.pages[layer] for layer in other.report().streamed)
            assert ballonet.stats().copied.weights_d2h - moved == gone * PAGE, "once, when they leave"
        clock.now += 5
        assert say(idle).agrees(stock_of_larger)
        for _ in range(3):
            clock.now += 20
            assert say(model).agrees(stock)
            assert say(idle).agrees(stock_of_larger)
        assert other.report().streamed == ()
        assert other.report().pages == whole


def test_a_floor_in_bytes(model: Any, larger: Any, manager: Any, clock: Clock) -> None:
    with install.stock():
        idle = copy.deepcopy(larger)
    with ballonet.manage(idle) as other:
        layers = sum(other._residency.plan.pages)
    floor = layers * PAGE - 2 * PAGE
    with ballonet.manage(idle, floor=floor) as other, ballonet.manage(model, floor=f"{PAGE * layers}"):
        assert ballonet.manage(idle) is other
        assert ballonet.manage(idle, floor=floor) is other
        say(idle)
        clock.now += 5
        say(model)
        candidates = manager.reclaim.candidates()
        offered = sum(candidate.pages for candidate in candidates if candidate.source is PageSource.IDLE_WEIGHTS)
        assert other.report().pages - offered >= floor // PAGE
        assert not [candidate for candidate in candidates if candidate.source is PageSource.HIDDEN_WEIGHTS]
    with ballonet.manage(idle) as other:
        say(idle)
        manager.link.bandwidth = 2.0**50  # on the test's clock an iteration takes a few microseconds
        assert (
            sum(
                candidate.pages
                for candidate in manager.reclaim.candidates()
                if candidate.source is PageSource.HIDDEN_WEIGHTS
            )
            > 2
        )


def test_a_square_wave(model: Any, larger: Any, manager: Any, clock: Clock) -> None:
    """In each cycle all that is taken comes back; not a page is lost."""
    device = devices.require()

    def logits(of: Any, cache: Any = None) -> torch.Tensor:
        """With a cache of the token after those that it holds; it holds as many afterwards."""
        clock.now += 4
        ids = IDS[:, :8] if cache is None else IDS[:, HELD : HELD + 1]
        with torch.no_grad():
            scores: torch.Tensor = of(ids, past_key_values=cache, use_cache=cache is not None).logits
        if cache is not None:
            cache.crop(HELD - cache.get_seq_length())
        return scores

    def filled(cache: Any) -> Any:
        with torch.no_grad():
            model(IDS[:, :HELD], past_key_values=cache)
        return cache

    def moved(levels: tuple[str, ...], *verbs: str) -> int:
        """Pages so far."""
        counts = devices.of().events.counts()
        them = [counts[level] for level in levels if level in counts]
        return sum(events[verb].pages for events in them for verb in verbs if verb in events)

    with install.stock():
        idle = copy.deepcopy(larger)
        held = filled(DynamicCache(config=model.config))
        expected = [logits(model), logits(idle), logits(model, held)]
    gc.collect()
    gc.freeze()  # or `full` looks through all of torch each time
    weights = ("idle weights", "hidden weights", "stalling weights")
    kv = ("idle KV", "running KV")
    taken, owners = set(), set()
    try:
        with ballonet.manage(model) as active, ballonet.manage(idle) as other:
            cache = filled(ballonet.KVCache(config=model.config))
            logits(idle)
            logits(model)
            logits(model, cache)
            resident = (active.report().pages, other.report().pages)
            for cycle in range(CYCLES):
                before = [
                    moved(source, *verbs) for source in (weights, kv) for verbs in (("reclaim", "yield"), ("restore",))
                ]
                candidates = manager.reclaim.candidates()
                with full(but=2):
                    torch.empty(sum(candidate.pages for candidate in candidates) * PAGE, dtype=torch.uint8)
                    assert torch.equal(logits(model), expected[0])
                    gone = sum(resident) - active.report().pages - other.report().pages
                    assert bytes_that_exist() <= BUDGET
                for _ in range(4):
                    assert torch.equal(logits(idle), expected[1])
                    assert torch.equal(logits(model, cache), expected[2])
                after = [
                    moved(source, *verbs) for source in (weights, kv) for verbs in (("reclaim", "yield"), ("restore",))
                ]
                reclaimed, back, kv_pulled, kv_back = (now - then for now, then in zip(after, before, strict=True))
                assert reclaimed == back >= gone, cycle
                assert kv_pulled == kv_back, cycle
                assert (active.report().pages, other.report().pages) == resident, cycle
                device.trim()
                device.reap(wait=True)
                pages = device.snapshot()["pages"]
                taken.add((gone, kv_pulled))
                owners.add(tuple(pages[owner] for owner in ("weights", "kv", "pending_free")))
                device.check()
    finally:
        gc.unfreeze()
    assert min(min(sizes) for sizes in taken) > 0
    assert len(owners) == 1, owners


def test_chaos_with_all_sources(model: Any, larger: Any, manager: Any) -> None:
    with install.stock():
        them: list[tuple[Any, Output]] = [(model, say(model)), (copy.deepcopy(larger), say(larger))]
    managed = [testing.manage(network, chaos=seed) for seed, (network, _) in enumerate(them)]
    for network, _ in them:
        say(network)
    for _ in range(4):
        for network, expected in them:
            assert say(network).agrees(expected)
        assert bytes_that_exist() <= BUDGET
    reclaimed: dict[tuple[str, str], int] = {}
    for network in managed:
        assert chaos_of(network) is not None
        for name, pages in chaos_of(network).reclaimed.items():
            reclaimed[name] = reclaimed.get(name, 0) + pages
    for name in (
        ("hidden weights", "reclaim"),
        ("hidden weights", "restore"),
        ("idle activations", "reclaim"),
        ("trim", "reclaim"),
        ("running KV", "reclaim"),
    ):
        assert reclaimed.get(name, 0) > 0, reclaimed
    for network in managed:
        network.release()


def test_a_link_that_matters_is_measured(model: Any, manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager.link, "_bandwidth", None)
    monkeypatch.setattr(manager.pages, "scarce", False)
    with ballonet.manage(model):
        say(model)
        assert manager.link.bandwidth is None
        monkeypatch.setattr(manager.pages, "scarce", True)
        say(model)
        assert manager.link.bandwidth is not None
