"""Layers that a replica drops and restores: pages exactly, no copy where that was prepared, with others beside; and
drops that are refused, where nothing has changed.
"""

from __future__ import annotations

import gc
import random
import threading
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import DropRefused, ManageError, ModelInUse
from ballonet.hooks.device import managers
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.offload.policy.replicas.groups import Span
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.testing import chaos_of, manage

from ... import graphs
from ...models import Output, build
from ...pool import bytes_that_exist
from ...streaming.conftest import BUDGET, PAGE
from ...tuned import Clock, Tuned
from .holding import LAYERS, Peer, copied, logits, on_host, pages_of, prepared, say, settled, stocks_logits


@pytest.fixture
def clock(tuned: Tuned) -> Clock:
    slow_clock = Clock(step=1e-6)
    tuned(clock=slow_clock)
    return slow_clock


def test_room_that_is_kept_is_whose_layers_come_home(
    kind: str, model: Any, managed: ballonet.Managed, held: HeldLayers, stock: Output
) -> None:
    """All of it while it is kept; none of it once it is given back, or layers are dropped again."""
    pages, there = pages_of(managed), settled()
    freed = held.drop(Span(0, 3))
    held.keep_room()
    held.keep_room()
    assert settled() == there - freed + sum(pages[3:])
    assert say(model).agrees(stock), "through the slot"
    device = devices.require()
    filler = device.reserve(device.available * PAGE, "kv", device.group())
    filler.map(0, filler.pieces)
    assert [layer.layer for layer in held.restore(range(LAYERS))] == [3, 4, 5]
    filler.close()
    assert settled() == there
    held.drop(Span(0, 5))
    held.keep_room()
    held.give_back()
    held.give_back()
    assert settled() == there
    held.keep_room()
    assert held.drop(Span(0, 3)) == freed
    assert settled() == there - freed
    assert say(model).agrees(stock)


def test_freed_pages_are_exact_and_nothing_goes_to_the_host(
    kind: str, model: Any, managed: ballonet.Managed, held: HeldLayers, stock: Output
) -> None:
    """Counted from outside: the layers' pages, less the slot of the largest; and for a file no host page at all."""
    assert say(model).agrees(stock)
    pages, before = pages_of(managed), on_host()
    assert list(held.prepare([4, 3])) == [4, 3]
    assert list(held.prepare([3, 4, 5])) == [5]
    assert held.ready == (3, 4, 5)
    assert on_host() - before <= 1 if kind == "file" else on_host() - before == sum(pages[3:])
    assert managed.report().host_pages == (0 if kind == "file" else sum(pages[3:]))
    there, to_host, here = settled(), copied("d2h"), copied("h2d")
    freed = held.drop(Span(0, 3))
    assert freed == sum(pages[3:]) - max(pages[3:])
    assert there - settled() == freed
    assert (copied("d2h"), copied("h2d")) == (to_host, here)
    assert held.dropped == managed.report().streamed == (3, 4, 5)
    assert say(model).agrees(stock), "alone, through the slot"
    assert copied("h2d") > here
    assert copied("d2h") == to_host
    assert [layer.layer for layer in held.restore([5, 0, 3, 4])] == [5, 3, 4]
    assert (held.dropped, managed.report().streamed) == ((), ())
    assert settled() == there
    assert say(model).agrees(stock)
    assert held.drop(Span(0, 3)) == freed, "it is ready yet"
    assert copied("d2h") == to_host
    assert len(list(held.restore(range(LAYERS)))) == 3


def test_a_cold_drop_prepares_by_itself(model: Any, managed: ballonet.Managed, held: HeldLayers, stock: Output) -> None:
    pages = pages_of(managed)
    assert held.drop(Span(2, 4)) == sum(pages) - sum(pages[2:4]) - max(pages[:2] + pages[4:])
    assert held.drop(Span(2, 4)) == 0
    assert held.drop(Span(3, 4)) == pages[2]
    assert held.dropped == (0, 1, 2, 4, 5)
    assert say(model).agrees(stock)


def test_freed_pages_are_kv_s_at_once(managed: ballonet.Managed, held: HeldLayers) -> None:
    prepared(held)
    device = devices.require()
    settled()
    group, few = device.group(), 4  # pages for whatever torch allocates
    rest = device.reserve((device.available - few) * PAGE, "kv", group)
    rest.map(0, rest.pieces)
    assert device.available == few
    freed = held.drop(Span(0, 3))
    assert managed.report().streamed == held.dropped
    kv = device.reserve(freed * PAGE, "kv", group)
    kv.map(0, freed)
    assert bytes_that_exist() <= BUDGET
    with pytest.raises(torch.OutOfMemoryError, match="no room for layer 3"):
        list(held.restore([3]))
    assert managed.report().streamed == held.dropped == (3, 4, 5)
    kv.close()
    steps = held.restore([3, 4, 5])
    assert [next(steps).layer, next(steps).layer] == [3, 4]
    rest.close()  # until the last has its pages, the slot has some
    assert next(steps).layer == 5


def test_dropped_layers_stay_dropped_until_they_are_released(
    model: Any, original: Any, clock: Clock, managed: ballonet.Managed, held: HeldLayers
) -> None:
    """Whatever is free, and for how long; but a layer of the span that pages were short for comes back as ever."""
    manager = managers.of(devices.require())
    manager.link.bandwidth, expected = 1e12, stocks_logits(original)
    logits(model)
    held.drop(Span(0, 4))
    settled()
    pages = devices.require().snapshot()["pages"]
    ballonet.set_budget((sum(pages.values()) - pages["free"] - pages_of(managed)[0] // 2) * PAGE, timeout="60s")
    taken = {*managed.report().streamed} - {4, 5}
    ballonet.set_budget(BUDGET)
    assert taken
    for _ in range(12):
        assert torch.equal(logits(model), expected)
        clock.now += 5.0
    assert managed.report().streamed == held.dropped == (4, 5)
    assert manager.sources.restore(PageSource.HIDDEN_WEIGHTS, 10**6) == 0
    assert {candidate.index for candidate in manager.reclaim.candidates()}.isdisjoint({4, 5})
    host = managed.report().host_pages
    held.release()
    held.release()
    assert (held.dropped, managed.report().streamed, managed.report().host_pages) == ((), (4, 5), host)
    for _ in range(12):
        assert torch.equal(logits(model), expected)
        clock.now += 5.0
    assert managed.report().streamed == ()


def test_an_slo_that_allows_it_streams_layers_of_the_span_only(model: Any, stock: Output, clock: Clock) -> None:
    """Layers stream for nothing where an SLO allows it: of those that are held."""
    with ballonet.manage(model, tpot_slo="10s", ttft_slo="10s") as managed:
        held = HeldLayers(managed)
        held.drop(Span(1, 5))
        for _ in range(4):
            assert say(model).agrees(stock)
            clock.now += 2 * DEFAULT.pages.forget
        assert {*managed._residency.plan.streamed} <= {1, 2, 3, 4}
        assert {0, 5} <= {*managed.report().streamed}
        assert held.dropped == (0, 5)
        list(held.restore([0, 5]))
        assert say(model).agrees(stock)


def test_layers_of_several_sizes_share_a_slot_of_the_largest() -> None:
    with install.stock():
        model = build("llama", num_hidden_layers=4)
        for layer, factor in zip(model.model.layers, (1, 3, 2, 1), strict=True):
            mlp = layer.mlp
            for name in ("gate_proj", "up_proj", "down_proj"):
                old = getattr(mlp, name)
                wide = (old.in_features, old.out_features * factor)
                wide = (old.in_features * factor, old.out_features) if name == "down_proj" else wide
                new = torch.nn.Linear(*wide, bias=False)
                torch.nn.init.normal_(new.weight, std=0.05)
                setattr(mlp, name, new)
        expected = logits(model)
    with ballonet.manage(model) as managed:
        held = prepared(HeldLayers(managed), 4)
        pages = pages_of(managed)
        assert len(set(pages)) == 3
        there = settled()
        for kept in range(4):
            gone = [pages[layer] for layer in range(4) if layer != kept]
            assert held.drop(Span(kept, kept + 1)) == there - settled() == sum(gone) - max(gone)
            assert torch.equal(logits(model), expected)
            list(held.restore(range(4)))
            assert settled() == there


def test_many_cycles_under_chaos_lose_nothing(kind: str, model: Any, original: Any) -> None:
    """Spans of any size, restored in any order and not always all; pages move at random, given and taken back."""
    expected = stocks_logits(original)
    seed = {"host": 1, "file": 7}[kind]
    spans, before, whole = random.Random(seed), (settled(), on_host()), 0
    with manage(model, chaos=seed) as managed:
        held = HeldLayers(managed)
        assert torch.equal(logits(model), expected)
        prepared(held)
        here, host = settled(), on_host() - managed.report().host_pages
        for cycle in range(24):
            begin = spans.randrange(LAYERS)
            held.drop(Span(begin, spans.randint(begin + 1, LAYERS)))
            assert torch.equal(logits(model), expected), cycle
            order = spans.sample(held.dropped, len(held.dropped))
            for step in held.restore(order[: spans.choice((len(order), len(order) // 2))]):
                assert step.layer not in held.dropped
                assert torch.equal(logits(model), expected), (cycle, step)
            if cycle % 3 == 2:
                list(held.restore(range(LAYERS)))
                if not managed._weights.on_host():  # chaos pulls sources, too
                    whole += 1
                    assert (settled(), on_host() - managed.report().host_pages) == (here, host), cycle
        assert whole > 2
        assert chaos_of(managed).moved["weights"] > 0
        held.close()
        for _ in range(3):
            assert torch.equal(logits(model), expected)
    assert (settled(), on_host()) == before


# Beside another thread, and the reclaim order


@pytest.fixture
def patient(tuned: Tuned) -> None:
    """However slow this machine is, no wait for another thread's forward times out."""
    tuned(waiting={"gate": 600.0, "slots": 600.0})


@pytest.mark.usefixtures("patient")
def test_generate_goes_on_beside_it(model: Any, held: HeldLayers, stock: Output, original: Any) -> None:
    """Another thread generates all the time: its answers are right, and no call fails."""
    done, failed, said = threading.Event(), list[BaseException](), 0

    def ask() -> None:
        nonlocal said
        try:
            while not done.is_set():
                assert say(model).agrees(stock)
                said += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        prepared(held)
        for cycle in range(6):
            held.drop(Span(cycle % 3, cycle % 3 + 2))
            before = said
            while said < before + 2 and not failed:
                assert not done.wait(0.01)
            list(held.restore(held.dropped, Peer(original) if cycle % 2 else None))
    finally:
        done.set()
        thread.join(120)
    assert not failed, failed
    assert said >= 12
    assert held.dropped == ()


@pytest.mark.usefixtures("patient")
def test_a_wish_comes_to_whoever_offered(held: HeldLayers, managed: ballonet.Managed) -> None:
    wishes: list[int] = []
    manager, pages = managers.of(devices.require()), pages_of(managed)
    held.begin(lambda pages: wishes.append(-pages), bool)
    held.begin(wishes.append, bool)
    manager.duplicates.request_drop(7)
    assert wishes == [7]
    assert manager.duplicates.pages == sum(pages) - pages[0] - max(pages)
    held.drop(Span(0, 1))
    assert manager.duplicates.pages == 0
    held.close()
    manager.duplicates.request_drop(7)
    assert wishes == [7]


@pytest.mark.usefixtures("patient")
def test_a_forward_that_finds_no_pages_leads_to_a_wish(host_model: Any, tuned: Tuned) -> None:
    """Nothing else can give any, as the model has a floor: a cache grows until there are none, and a drop has some."""
    tuned(waiting={"room": 0.1})
    with install.stock():
        ids = torch.arange(2 * 8).reshape(2, 8)
        expected = logits_of(host_model, ids)
    device, wishes = devices.require(), list[int]()
    with ballonet.manage(host_model, floor=BUDGET // 2) as managed:
        held = prepared(HeldLayers(managed))
        held.begin(wishes.append, bool)
        cache = ballonet.KVCache(host_model.config)
        logits_of(host_model, ids, cache)
        settled()
        filler = device.reserve((device.available - 40) * PAGE, "kv", device.group())
        filler.map(0, filler.pieces)
        with pytest.raises(torch.OutOfMemoryError):
            _ = [logits_of(host_model, ids, cache) for _ in range(64)]
        del cache
        gc.collect()
        assert torch.equal(logits_of(host_model, ids), expected)  # at the latest: an operator cannot tell of it
        assert wishes
        assert min(wishes) > 0
        freed = held.drop(Span(2, 3))
        assert freed >= sum(wishes)
        assert torch.equal(logits_of(host_model, ids), expected)
        filler.close()
        held.close()


def logits_of(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    with torch.no_grad():
        computed: torch.Tensor = model(ids, past_key_values=cache, use_cache=cache is not None).logits
    return computed


@pytest.mark.usefixtures("patient")
def test_a_drop_is_an_event_of_level_7(held: HeldLayers) -> None:
    def moved(verb: str) -> int:
        counts = devices.of().events.counts().get("duplicates", {})
        return counts[verb].pages if verb in counts else 0

    def others() -> dict[str, Any]:
        return {name: count for name, count in devices.of().events.counts().items() if "weights" in name}

    before, rest = (moved("reclaim"), moved("restore")), others()
    freed = held.drop(Span(0, 3))
    home = sum(layer.pages for layer in held.restore([3, 4, 5]))
    assert (moved("reclaim") - before[0], moved("restore") - before[1]) == (freed, home)
    assert others() == rest


# Refusals


def test_without_host_pages_nothing_is_dropped(host_model: Any, stock: Output) -> None:
    device = devices.require()
    with ballonet.manage(host_model) as managed:
        held = HeldLayers(managed)
        pages, here = pages_of(managed), settled()
        left = pages[3] + pages[4] + pages[5] // 2
        now = device.snapshot()
        filler = device.reserve(BUDGET - (now["host_pages"] - now["host_free"] + left) * PAGE, "kv", device.group())
        filler.map_host(0, filler.pieces)
        try:
            for _ in range(2):
                with pytest.raises(DropRefused, match=r"layer 5 of .* no host pages"):
                    held.drop(Span(0, 3))
                assert (held.dropped, held.ready, settled()) == ((), (3, 4), here)
                assert say(host_model).agrees(stock)
        finally:
            filler.close()
            device.reap(wait=True)
        assert held.drop(Span(0, 3)) == sum(pages[3:]) - max(pages)
        assert say(host_model).agrees(stock)


def test_drop_of_layers_that_cannot_be_dropped_is_refused(
    model: Any, managed: ballonet.Managed, held: HeldLayers
) -> None:
    for span in (Span(2, LAYERS + 1), Span(LAYERS, LAYERS + 1)):
        with pytest.raises(ManageError, match="are none of it"):
            held.drop(span)
    failed: list[BaseException] = []

    def within(*_: object) -> None:
        for act in (lambda: held.drop(Span(0, 3)), held.release, lambda: list(held.restore([5]))):
            try:
                act()
            except ModelInUse as error:
                failed.append(error)

    held.drop(Span(0, 5))
    handle = model.model.layers[0].register_forward_pre_hook(within)
    logits(model)
    handle.remove()
    assert len(failed) == 3
    assert held.dropped == (5,)
    fixed = build("llama", num_hidden_layers=1)
    with ballonet.manage(fixed, interval=1) as other, pytest.raises(ManageError, match="interval=1"):
        HeldLayers(other)


def test_a_model_that_is_managed_no_more_has_nothing_to_drop(model: Any, stock: Output) -> None:
    managed = ballonet.manage(model)
    held = HeldLayers(managed)
    held.drop(Span(0, 3))
    managed.release()
    assert say(model).agrees(stock)
    assert held.dropped == ()
    for act in (lambda: held.drop(Span(0, 3)), lambda: list(held.prepare([0]))):
        with pytest.raises(ManageError, match="managed no more"):
            act()
    assert list(held.restore([3])) == []
    held.close()


def test_layers_in_cuda_graphs_are_not_dropped(host_model: Any, stock: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs.pretend(monkeypatch)
    with ballonet.manage(host_model) as managed:
        held = prepared(HeldLayers(managed))
        graph = torch.cuda.CUDAGraph()
        with graphs.capture(graph):
            logits(host_model)
        here = settled()
        with pytest.raises(ManageError):
            held.drop(Span(0, 3))
        assert (held.dropped, settled()) == ((), here)
        del graph
        gc.collect()
        held.drop(Span(0, 3))
        assert say(host_model).agrees(stock)
