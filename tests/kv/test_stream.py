"""Layers of a cache that take turns in slots, and layers that are restored one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.allocator.errors import BallonetError
from ballonet.hooks.device import managers
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.hooks.kv import pages as kv_pages_module
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.hooks.prefix.sequence import CachedSequence, Gone
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.manager.client import KEYS_PER_CLIENT as KEYS
from ballonet.offload.policy.kv_pages import Way
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.residency import kv_slots
from ballonet.offload.residency.pieces import PieceState

from ..test_kv import tokens
from ..threads import elsewhere
from ..tuned import Tuned
from .pressure import away, hog, kv_ranges, poison, press, started, tiers
from .test_taken import Fuzz

PAGE = 4096
LAYERS = 4


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """Pages so small are not worth a copy of their own."""
    tuned(kv_reads={"copy": 0.0})
    monkeypatch.setattr(
        kv_read_plan.KVReadPlan, "_learn", lambda *_: None
    )  # what is decided does not depend on the time


@pytest.fixture(params=[{}])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    settings = {"budget": 96 * PAGE, "host_budget": 512 * PAGE, "page_size": PAGE, "spill": True, **request.param}
    with started(**settings) as opened:
        yield opened


class Layers:
    """The layers of a cache, each beside a stock one. Nobody holds what was shown while the next layer runs."""

    def __init__(self, count: int = 0, layers: int = LAYERS) -> None:
        self.ranges = CacheRanges(layers=layers, expected=200, alone=True)
        self.pairs = [(ElasticLayer(self.ranges), DynamicLayer()) for _ in range(layers)]
        self.seed = 0
        self.append = self._append
        if count:
            self.update(count)

    def update(self, count: int = 1, only: int | None = None) -> None:
        """An iteration with so many new tokens; up to the layer `only`."""
        for index, (elastic, stock) in enumerate(self.pairs):
            if only is not None and index > only:
                return
            self.seed += 1
            new = tokens(count, self.seed)
            self.append(index, elastic, stock, new)

    def _append(self, index: int, elastic: Any, stock: Any, new: Any) -> None:
        assert all(map(torch.equal, elastic.update(*new), stock.update(*new))), index

    def both(self, act: Callable[[Any], object]) -> None:
        for pair in self.pairs:
            for layer in pair:
                act(layer)

    def check(self) -> None:
        """Looks at all of it, layer by layer."""
        for elastic, stock in self.pairs:
            assert torch.equal(elastic.keys, stock.keys)
            assert torch.equal(elastic.values, stock.values)

    @property
    def kv_ranges(self) -> list[Any]:
        return kv_ranges(elastic for elastic, _ in self.pairs)

    @property
    def tier(self) -> Any:
        (tier,) = tiers(self.kv_ranges)
        return tier

    @property
    def flying(self) -> int:
        """Layers that do."""
        return sum(kv_range.pages._extent.mover.in_slot for kv_range in self.kv_ranges)

    def way(self) -> Any:
        return self.tier.client.streamed


@pytest.fixture(params=[26])
def room(request: pytest.FixtureRequest, device: Device) -> Iterator[Any]:
    """Somebody has all pages but so many. The layers below have 32."""
    other = hog(device, device.budget // PAGE - request.param)
    yield other
    other.close()


def fly(layers: Layers) -> None:
    for _ in range(3 * DEFAULT.kv_reads.again):
        layers.update()
        if layers.flying == LAYERS:
            return
    raise AssertionError(layers.way())


@pytest.fixture
def streamed(room: Any) -> Iterator[Layers]:
    """Layers in slots."""
    layers = Layers(100)
    fly(layers)
    yield layers
    layers.both(lambda layer: layer.reset())


class Trace:
    """What is submitted to the copies of a cache, what waits for it, and which attention was launched, in their
    order."""

    def __init__(self, layers: Layers) -> None:
        self.steps: list[tuple[str, Any]] = []
        self._layers = layers
        twins = [kv_range.pages._extent for kv_range in layers.kv_ranges]
        self.owner = {
            twin.backing.pages.address + piece * PAGE: (index, piece)
            for index, twin in enumerate(twins)
            for piece in range(twin.end)
        }
        self.here = {
            kv_range.range.address + piece * PAGE: (index, piece)
            for index, kv_range in enumerate(layers.kv_ranges)
            for piece in range(kv_range.pages._extent.end)
        }
        tier, trace, inner = layers.tier, self, layers.tier.transfer

        class Transfers:
            def copy(self, parts: Any, *, after: int, owner: str, to: str) -> Any:
                of_layers = trace._found(parts, to)
                trace.steps.append((f"to the {to}", of_layers))
                return Waits(inner.copy(parts, after=after, owner=owner, to=to), of_layers)

        class Waits:
            def __init__(self, done: Any, layers: Any) -> None:
                self.done, self.layers = done, layers

            def before(self, stream: int) -> None:
                trace.steps.append(("wait", self.layers))
                self.done.before(stream)

            def passed(self) -> bool:
                return bool(self.done.passed())

            def wait(self) -> None:
                trace.steps.append(("the host waits", self.layers))
                self.done.wait()

        tier.transfer = tier.client.saving._transfer = tier.client.way._transfer = (
            tier.client.way.kv_slots._filler._transfer
        ) = Transfers()
        append = layers.append

        def appended(index: int, *args: Any) -> None:
            append(index, *args)
            self.steps.append(("attention", index))

        layers.append = appended

    def _found(self, parts: Any, to: str) -> Any:
        """The layer whose bytes are copied."""
        layers = {(self.owner if to == "device" else self.here)[at][0] for _, at, _ in parts}
        return layers.pop() if len(layers) == 1 else sorted(layers)


def test_a_load_waits_for_the_attention_before_and_attention_for_its_own_load(streamed: Layers) -> None:
    """The dependencies of SwiftCache §3.3, with two slots: the load of layer j begins when the attention of the layer
    that had its slot has been launched, which is while the layer before it computes."""
    trace = Trace(streamed)
    streamed.update()
    trace.steps.clear()
    for _ in range(3):
        streamed.update()
    assert streamed.flying == LAYERS
    once = [("to the device", 1), ("wait", 0), ("attention", 0), ("to the device", 2), ("wait", 1), ("attention", 1)]
    once += [("to the device", 3), ("wait", 2), ("attention", 2), ("to the device", 0), ("wait", 3), ("attention", 3)]
    assert trace.steps == once * 3


def test_layers_are_restored_one_after_the_other(device: Device) -> None:
    layers = Layers(100)
    layers.update()
    assert press(device, 16) == 16
    layers.check()
    trace = Trace(layers)
    assert layers.tier.restore(99, 0) == 16
    assert trace.steps == [("to the device", index) for index in range(LAYERS)]  # and nothing is waited for
    trace.steps.clear()
    layers.update()
    waits = [("wait", 0), ("attention", 0), ("wait", 1), ("attention", 1), ("wait", 2), ("attention", 2)]
    assert trace.steps == [*waits, ("wait", 3), ("attention", 3)]
    layers.check()
    device.check()


def test_look_at_pages_on_their_way_back_waits(device: Device) -> None:
    layers = Layers(100)
    layers.update()
    assert press(device, 16) == 16
    held = layers.pairs[3][0].keys
    trace = Trace(layers)
    assert layers.tier.restore(99, 0) == 16
    assert trace.steps[LAYERS:] == [("the host waits", 3)]  # somebody might read that at any time, on any stream
    assert torch.equal(held, layers.pairs[3][1].keys)
    assert torch.equal(layers.pairs[1][0].values, layers.pairs[1][1].values)
    assert trace.steps[LAYERS + 1 :] == [("wait", 1)]
    layers.pairs[2][0].reorder_cache(torch.tensor([1, 0]))
    assert trace.steps[LAYERS + 2] == ("wait", 2)
    layers.pairs[2][1].reorder_cache(torch.tensor([1, 0]))
    layers.check()


@pytest.mark.parametrize("way", ["reordered", "refilled"])
def test_copy_behind_waits_for_the_stream_that_wrote(device: Device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two iterations that is the stream of whoever changed the cache."""
    layers, stream, waited = Layers(100), [0], list[int]()
    elastic, stock = layers.pairs[0]
    tier, inner = layers.tier, layers.tier.transfer

    class Transfers:
        def copy(self, parts: Any, *, after: int, owner: str, to: str) -> Any:
            waited.append(after)
            return inner.copy(parts, after=0, owner=owner, to=to)

    tier.transfer = tier.client.saving._transfer = Transfers()
    monkeypatch.setattr(kv_pages_module.KVPages, "stream", property(lambda _: stream[0]))
    if way == "reordered":
        stream[0] = 7
        for layer in (elastic, stock):
            layer.reorder_cache(torch.tensor([1, 0]))
    else:
        elastic.kv_range.release_prefix(60)
        with elastic.kv_range.restoring_prefix() as missing:
            elastic.write(0, stock.keys[:, :, :missing], stock.values[:, :, :missing])
            stream[0] = 7
    stream[0] = 0
    tier.client.write_behind(1)
    assert waited == [7]
    layers.check()


def test_each_iteration_copies_what_is_away_once(streamed: Layers, device: Device) -> None:
    streamed.update()
    before, copied = streamed.way(), device.snapshot()["copied"]
    for _ in range(5):
        streamed.update()
    after = device.snapshot()["copied"]
    assert streamed.way().copied - before.copied == 5 * before.away * PAGE
    assert after["kv_h2d"] - copied["kv_h2d"] == 5 * before.away * PAGE
    assert after["kv_d2h"] == copied["kv_d2h"]
    assert before.way is Way.STREAMED
    assert before.slots == 2
    assert before.away == away(streamed.kv_ranges)
    assert before.slots * before.slot_pages + 32 - before.away <= 26


def test_where_nobody_looks_nothing_changes_and_who_looks_sees_what_is_there(streamed: Layers, device: Device) -> None:
    streamed.update(only=1)
    elastic, stock = streamed.pairs[1]
    assert torch.equal(elastic.keys, stock.keys)  # it computes
    assert streamed.flying == LAYERS
    for index in (0, 3):
        elastic, stock = streamed.pairs[index]
        assert torch.equal(elastic.keys, stock.keys)
        assert torch.equal(elastic.values, stock.values)
    assert streamed.flying == LAYERS - 2
    for elastic, stock in streamed.pairs[2:]:
        new = tokens(1, 77)
        assert all(map(torch.equal, elastic.update(*new), stock.update(*new)))
    streamed.both(lambda layer: layer.crop(0))
    while streamed.flying < LAYERS:
        streamed.update()
    device.check()
    streamed.check()


def test_held_tensors_of_layers_in_slots_keep_their_values(streamed: Layers, device: Device) -> None:
    """Attention weights, hooks, a debugger: whoever keeps what a layer was shown."""
    held = []
    for elastic, stock in streamed.pairs:
        new = tokens(1, 78)
        held.append((elastic.update(*new), stock.update(*new)))
    poison(device)
    streamed.update()
    for ours, theirs in held:
        assert all(map(torch.equal, ours, theirs))
    assert streamed.flying == 0  # all but the last came to rest when the next one ran, and that one now
    for _ in range(3):
        streamed.update()
        for ours, theirs in held:
            assert all(map(torch.equal, ours, theirs))
    held.clear()
    del ours, theirs
    for _ in range(20):
        streamed.update()
    assert streamed.flying == LAYERS


def test_sequence_of_layers_in_slots_cannot_be_leased(streamed: Layers) -> None:
    """The thread that computes with it may have to bring it to rest at any time."""
    sequence = CachedSequence([elastic for elastic, _ in streamed.pairs], range(100), b"")
    sequence.in_use = True
    with pytest.raises(Gone), sequence.leased(0):
        pass
    streamed.tier.client.only_cached = True  # its slots go back
    with sequence.leased(0):
        pass
    streamed.check()
    sequence.layers.clear()


def test_layers_that_have_run_give_first(device: Device) -> None:
    layers = Layers(100)
    layers.update(70, only=2)
    tier = layers.tier
    given = [[part[0] for part in tier.client.entry(offer.index)[1]] for offer in tier.client.offers()]
    ran = [kv_range.range for kv_range in layers.kv_ranges[:2]]
    assert all(kv_range in ran for kv_range in given[0])
    assert not any(kv_range in ran for kv_range in given[-1])
    layers.update(70)


@pytest.mark.parametrize("room", [46], indirect=True)
def test_any_sequence_of_calls_equals_stock(device: Device, room: Any, tuned: Tuned) -> None:
    """As in test_taken.py, but with little room, so that layers fly whenever nobody looks."""
    tuned(kv_reads={"again": 1, "look": 4})
    fuzz = Fuzz(device, 0, 1, layers=LAYERS)
    ways = [fuzz.update] * 30 + [fuzz.prefill, fuzz.crop, fuzz.crop, fuzz.reorder, fuzz.repeat, fuzz.select]
    ways += [fuzz.replace, fuzz.hold, fuzz.let_go, fuzz.let_go, fuzz.reset, fuzz.check]
    flown = steps = 0
    while steps < 200 or (flown < 20 and steps < 2000):
        steps += 1
        fuzz.random.choice(ways)()
        device.check()
        flown += sum(
            tier.client.way.kv_slots.pieces > 0 for tier in tiers(kv_ranges(elastic for elastic, _ in fuzz.pairs))
        )
        if fuzz.pairs[0][1].get_seq_length() > 500:
            fuzz.held.clear()
            for pair in fuzz.pairs:
                for layer in pair:
                    layer.crop(-400)
    fuzz.check()
    assert flown >= 20


@pytest.mark.parametrize("room", [40], indirect=True)
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_pages_of_a_prefill_leave_while_it_computes(device: Device, room: Any, chunks: int) -> None:
    """eLLM §4.3.2: of the layers that have run, the pages of a long prompt go to the host, once each."""
    managers.of(device).link.bandwidth = 2.0**20  # so that an event says whether anything was copied for it
    layers = Layers(layers=8)
    left = []
    append = layers.append

    def appended(index: int, *args: Any) -> None:
        append(index, *args)
        device.synchronize()  # the copies have passed by the time that the next layer has computed
        left.append([away([kv_range]) for kv_range in layers.kv_ranges])

    layers.append = appended
    for _ in range(chunks):
        layers.update(225 // chunks)  # 16 pages in each of 8 layers
    assert away(layers.kv_ranges) >= 128 - 40
    if chunks == 1:
        assert all(move[-1] == 0 for move in left), "a layer that has not been read yet has given pages"
    assert device.snapshot()["copied"]["kv_d2h"] // PAGE == len(_copied(layers))
    devices.of().events.hear()
    given = [
        event for event in devices.of().events.since().events if (event.source, event.verb) == ("running KV", "reclaim")
    ]
    assert given
    assert not any(event.predicted for event in given), "it was not there yet when the page was needed"
    layers.check()
    for _ in range(3):
        layers.update()
    layers.check()


def _copied(layers: Layers) -> list[int]:
    """Pages of which the host has the bytes, or had them."""
    twins = [kv_range.pages._extent for kv_range in layers.kv_ranges]
    states = (PieceState.OFFLOADED, PieceState.IN_SLOT, PieceState.CLEAN, PieceState.SAVING)
    return [piece for twin in twins for state in states for piece in twin.mover.states[state]]


def test_no_other_thread_looks_at_what_flies(streamed: Layers) -> None:
    with pytest.raises(BallonetError, match="another thread"):
        elsewhere(lambda: streamed.pairs[0][0].keys)
    streamed.update()
    streamed.check()


def test_slots_are_the_last_that_a_cache_has(streamed: Layers, device: Device) -> None:
    assert streamed.way().slots == 2
    tier = streamed.tier
    tier.manager.remove_client(tier.number)  # so that nothing of it is taken
    streamed.update(40)
    assert streamed.way().slots == 2
    assert "host" in {
        kv_range.range.leads_to(piece) for kv_range in streamed.kv_ranges for piece in range(kv_range._most)
    }
    streamed.both(lambda layer: layer.crop(-40))
    tier.number = tier.manager.add_client(tier.client)
    streamed.update(40)
    assert tier._device.snapshot()["reclaimed"]
    streamed.check()
    device.check()


def test_slots_whose_pages_are_taken_while_they_are_opened(device: Device, room: Any) -> None:
    """The second one may find no pages but those of the first, once another thread has published that."""
    open_slots, taken = kv_slots.KVSlots.open, 0

    def opened(stream: kv_slots.KVSlots, count: int, pages: int) -> int:
        nonlocal taken
        made = open_slots(stream, count, pages)
        layers.tier.manager.reclaim.publish_now()
        candidates, slots = layers.tier.manager.reclaim.candidates(), layers.tier.client.takable._slices
        mine = [
            candidate.index
            for candidate in candidates
            if candidate.client == layers.tier.number and candidate.index in slots
        ]
        taken += device.take([layers.tier.number * KEYS + index for index in mine])
        return made

    layers = Layers(100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_slots.KVSlots, "open", opened)
        for _ in range(3 * DEFAULT.kv_reads.again):
            layers.update()
    assert taken > 0
    layers.check()
    device.check()


@pytest.mark.usefixtures("room")
def test_an_idle_cache_gives_its_slots_to_who_asks() -> None:
    lease = ForwardLease().open()
    layers = Layers(100)
    fly(layers)
    layers.tier.client.give_slots()
    assert layers.way().slots == 2, "it is used"
    lease.close()
    layers.tier.client.give_slots()
    assert layers.way().slots == 0
    layers.check()


def test_kv_that_goes_through_slots_is_restored_when_there_is_room(device: Device, room: Any, streamed: Layers) -> None:
    room.close()
    device.reap(wait=True)
    assert streamed.way().way is Way.STREAMED
    assert streamed.flying == LAYERS
    for _ in range(DEFAULT.kv_reads.look):  # and the link has brought it for as long as that takes
        streamed.update()
    assert streamed.way() == replace(streamed.way(), way=Way.RESIDENT, away=0, slots=0, slot_pages=0)
    streamed.check()
    device.check()
