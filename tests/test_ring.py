"""Slots that layers take turns in: whatever order the layers run in, each reads its own weights or nothing at all."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.allocator._native import Range, Transfer
from ballonet.allocator.errors import BallonetError, PoolExhausted
from ballonet.offload.policy.plan import streaming
from ballonet.offload.residency.backing import Backing
from ballonet.offload.residency.mover import Mover
from ballonet.offload.residency.ring import LayerPart, Ring, StreamedLayer

from .core import PAGE, PAGE_CALLS, Core, calls, holds, opened, write
from .faulting import at_each_call


class Model:
    """Layers of the given pages, of which some stream; layer n is full of the byte n + 1."""

    def __init__(self, core: Core, pages: Sequence[int], streamed: Sequence[int], slots: int) -> None:
        self.core = core
        self.plan = streaming(pages, streamed, slots)
        self.group = core.device.group()
        self.movers: list[Mover] = []
        layers = []
        for layer, slot in zip(self.plan.streamed, self.plan.slots, strict=True):
            parts, offset = [], 0
            for count in split(pages[layer]):
                range_ = core.range(count, "weights", self.group)
                mover = self.mover(range_)
                twin = mover.backing
                twin.pages.map_host(0, count)
                write(twin.pages.address, layer + 1, count * PAGE)
                range_.alias(0, twin.pages, 0, count)
                parts.append(LayerPart(range_, mover, offset, 0, range_.pieces))
                offset += count
            layers.append(StreamedLayer(layer, slot, tuple(parts)))
        self.layers = {entry.layer: entry for entry in layers}
        self.values = {layer: layer + 1 for layer in self.layers}
        self.ring = Ring(core.device, self.group)
        self.ring.arrange(self.plan.slot_pages, layers)

    def close(self) -> None:
        self.ring.close()
        for mover in self.movers:
            mover.backing.close()

    def mover(self, range_: Range) -> Mover:
        """What moves the pieces of a range, with a backing of its own."""
        made = Mover(self.core.device, range_, Backing(self.core.device, self.group, range_, "weights"), Lock())
        self.movers.append(made)
        return made

    def enter(self, layer: int, stream: int = 0) -> Range | None:
        """As a pass that has reached the layer does."""
        self.ring.bring(layer, stream)
        return self.ring.enter(layer, stream)

    def run(self, layer: int, stream: int = 0, ahead: bool = False) -> None:
        assert self.enter(layer, stream)
        assert self.reads_right(layer, stream)
        self.ring.leave(layer, lambda _: ahead)

    def slot(self, layer: int) -> Range:
        taken = self.ring.slot(layer)
        assert taken is not None
        return taken.range

    def reads_right(self, layer: int, stream: int = 0, slot: Range | None = None) -> bool:
        """Reads its slot as an operator of the layer does: told to the order checker, which is all that there is of
        other streams than the calling thread's."""
        slot = slot or self.slot(layer)
        slot.note_use(stream, False)
        if stream != 0:
            return True
        parts = self.layers[layer].parts
        return all(holds(slot.address + part.offset * PAGE, self.values[layer], part.range.nbytes) for part in parts)

    def shows_right(self, layer: int) -> bool:
        """Whoever looks reads the same, at any time."""
        for part in self.layers[layer].parts:
            part.range.note_use(0, False)
            if not holds(part.range.address, self.values[layer], part.range.nbytes):
                return False
        return True

    def write(self, layer: int, value: int) -> None:
        """Somebody fills it with that byte, where it is shown."""
        self.values[layer] = value
        for part in self.layers[layer].parts:
            ctypes.memset(part.range.address, value, part.range.nbytes)

    def arrange(self, streamed: Sequence[int]) -> None:
        """Streams these from now on; those that are resident have new backings."""
        for layer, entry in self.layers.items():
            if any(part.backing.closed for part in entry.parts):
                parts = tuple(replace(part, mover=self.mover(part.range)) for part in entry.parts)
                self.layers[layer] = replace(entry, parts=parts)
        coming = self.on_host() - {*streamed, *self.ring.own.layers}
        given = ([self.layers[layer] for layer in layers] for layers in (streamed, sorted(coming)))
        self.ring.arrange(self.plan.slot_pages, *given)

    def on_host(self) -> set[int]:
        return {
            layer
            for layer, entry in self.layers.items()
            if any(part.range.leads_to(0) == "alias" for part in entry.parts)
        }

    def take(self, layer: int) -> int:
        """The core takes its own slot, or its pages; how many."""
        entry = self.layers[layer]
        offer = self.ring.own.offer(layer) or [
            (part.range, part.first, part.count, part.backing.pages, part.first, []) for part in entry.parts
        ]
        self.core.device.publish([(layer, self.group, offer)])
        return self.core.device.take([layer])

    def used(self) -> tuple[int, int]:
        """Pages of weights on the device, and pages on the host."""
        self.core.device.reap(wait=True)
        now = self.core.device.snapshot()
        return now["pages"]["weights"], now["host_pages"] - now["host_free"]

    def copied(self) -> int:
        """Pages."""
        moved: int = self.core.device.snapshot()["copied"]["weights_h2d"]
        return moved // PAGE


def split(pages: int) -> list[int]:
    """A layer has one range, a larger one two."""
    return [pages] if pages < 3 else [pages - 1, 1]


@contextmanager
def model(pages: Sequence[int], streamed: Sequence[int], slots: int, **options: int) -> Iterator[Model]:
    with opened(budget=200, host_budget=200, **options) as core:
        made = Model(core, pages, streamed, slots)
        yield made
        assert all(made.shows_right(layer) for layer in made.layers)
        core.device.check()
        made.close()


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_number_of_layers_and_slots(layers: int, slots: int) -> None:
    with model([2] * layers, range(layers), slots) as it:
        used = it.core.pages()["weights"]
        assert used == 2 * min(slots, layers)
        before = calls()
        for _ in range(4):
            it.ring.begin(0)
            for layer in range(layers):
                it.run(layer)
                assert it.shows_right(layer)
            it.core.device.check()
        assert {name: calls()[name] for name in PAGE_CALLS if name in before} == {
            name: before[name] for name in PAGE_CALLS if name in before
        }
        assert it.core.pages()["weights"] == used
        assert it.copied() == 2 * layers * 4, "one copy per streamed layer and pass, and nothing for the next"


@pytest.mark.parametrize("layers", [1, 3, 5])
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("written", [False, True])
def test_copies_for_the_next_pass(layers: int, slots: int, written: bool) -> None:
    """Copies begin before the pass does, where nobody may write meanwhile, and are made again where somebody has."""
    with model([2] * layers, range(layers), slots) as it:
        for _ in range(4):
            it.ring.begin(0, lambda layer: not written)
            for layer in range(layers):
                it.run(layer, ahead=True)
        alone = sum(len(slot.turns) == 1 for slot in it.ring.shared.slots)
        used = min(slots, layers)
        once = 2 * ((layers - alone) * 4 + alone + (used - alone))
        assert it.copied() == once + (2 * 3 * used if written else 0)


def test_the_next_copies_are_on_their_way_before_they_are_asked_for() -> None:
    with model([1] * 6, [1, 3, 5], 2) as it:
        it.ring.begin(0)
        assert it.copied() == 2
        it.run(1)
        assert it.copied() == 3, "the slot of 1 is free for 5"
        it.run(3)
        it.run(5)
        assert it.copied() == 3
        it.ring.begin(0)
        assert it.copied() == 5, "it may have been written in between"


# `run`, `enter` and `keep` use a layer, on any stream; the others are what is done to it meanwhile
STEPS = ["run", "run", "run", "enter", "begin", "keep", "write", "arrange", "arrange", "arrange", "take", "release"]
STEPS += ["become resident", "become resident", "be held"]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 3), st.data())
def test_any_order_of_layers_and_of_what_is_done_to_them(pages: list[int], slots: int, data: st.DataObject) -> None:
    """Layers left out, run twice, passes that end anywhere, layers that are not left, on any streams; somebody who
    keeps what a layer read or the slot that it came back to; layers that come back, are taken and leave again."""
    streamed = sorted(data.draw(st.sets(st.integers(0, len(pages) - 1), min_size=1)))
    with model(pages, streamed, slots) as it:
        lanes = [0, it.core.stream(), it.core.stream()]
        it.ring.begin(0)
        resident = False
        for step in data.draw(st.lists(st.sampled_from(STEPS), min_size=8, max_size=30)):
            layer, lane = data.draw(st.sampled_from(streamed)), data.draw(st.sampled_from(lanes))
            own = it.ring.own.layers
            if own and step in ("take", "become resident", "be held"):
                layer = data.draw(st.sampled_from(own))
            if step == "begin":
                it.ring.begin(lane)
            elif step == "arrange":
                it.arrange(sorted(data.draw(st.sets(st.sampled_from(streamed)))))
            elif step == "write":
                it.write(layer, data.draw(st.integers(7, 9)))
                it.ring.begin(0)
            elif step == "take" and own:
                assert it.take(layer) == pages[layer]
                assert layer not in it.ring.own.layers
            elif step == "become resident" and own:
                it.write(layer, data.draw(st.integers(7, 9)))
                device, host = it.used()
                it.ring.make_resident(layer)
                resident = True
                assert layer not in it.on_host()
                assert it.used() == (device, host - pages[layer]), "the pages of the slot are the layer's"
            elif step == "be held" and own:
                offset = data.draw(st.sampled_from([part.offset for part in it.layers[layer].parts]))
                view = it.slot(layer).tensor(offset * PAGE, (PAGE,), (1,), 1, 8)
                with pytest.raises(BallonetError, match="cannot be exchanged"):
                    it.ring.make_resident(layer)
                del view
                assert (layer in it.ring.own.layers) == (offset == 0), (
                    "of which a part had come it has no slot any more"
                )
                assert {part.range.leads_to(0) for part in it.layers[layer].parts} == {"alias"}
            elif step == "release":
                it.ring.release_layers()
                assert it.ring.enter(layer, lane) is None
            elif step in ("run", "enter", "keep") and it.enter(layer, lane):
                assert it.reads_right(layer, lane)
                if step == "run":
                    it.ring.leave(layer)
                elif step == "keep" and layer in it.ring.streamed:
                    kept = it.slot(layer)
                    it.ring.give_away(layer)
                    assert it.reads_right(layer, 0, kept)
                    kept.close()
            assert all(it.shows_right(index) for index in streamed)
            assert resident or it.core.device.snapshot()["copied"]["weights_d2h"] == 0, "the host has them all the time"
            it.core.device.check()


def test_a_slot_holds_nothing_outside_of_its_turn() -> None:
    with model([1] * 3, range(3), 1, link_latency_ns=1_000_000) as it:
        it.ring.begin(0)
        it.run(0)
        assert not holds(it.slot(0).address, 1), "the slot is poison or the next layer's"
        assert it.slot(0) is it.slot(2)
        it.ring.enter(1, 0)
        assert holds(it.slot(0).address, 2)


def test_a_read_before_enter_is_out_of_order() -> None:
    with model([1] * 4, range(4), 2) as it:
        it.ring.begin(0)
        with pytest.raises(BallonetError, match="order"):
            it.slot(1).note_use(0, False)
        it.run(0)
        it.run(1)


def test_a_layer_that_has_come_back_is_copied_to_its_slot_once() -> None:
    with model([2, 2], range(2), 1) as it:
        it.arrange([0])
        before = it.copied()
        for _ in range(3):
            it.ring.begin(0, lambda layer: True)
            it.run(1)
        copied = it.copied() - before
        assert copied == 2 * 2, "layer 0 to the shared slot, once, and layer 1 to its own"
        ctypes.memset(it.layers[1].parts[0].range.address, 7, 2 * PAGE)
        it.ring.begin(0, lambda layer: layer == 0)
        assert it.ring.enter(1, 0)
        assert holds(it.slot(1).address, 7, 2 * PAGE)
        assert it.copied() - before == 3 * 2
        ctypes.memset(it.layers[1].parts[0].range.address, 2, 2 * PAGE)


def test_slots_that_do_not_fit_leave_nothing() -> None:
    with opened(budget=3, host_budget=20) as core:
        with pytest.raises(PoolExhausted):
            Model(core, [2, 2], [0, 1], 2)
        core.device.reap(wait=True)
        assert core.pages()["weights"] == 0


def test_a_layer_for_whose_slot_a_pass_finds_no_page_has_none_until_layers_are_arranged() -> None:
    with opened(budget=4, host_budget=20) as core:
        it = Model(core, [2, 3], [0, 1], 1)
        it.arrange([0])  # the shared slot has 3 of 4 pages
        it.ring.begin(0)
        it.run(0)
        it.ring.bring(1, 0)
        assert it.ring.slot(1) is None
        it.arrange([0, 1])
        it.run(1)
        it.close()


def passes(it: Model) -> None:
    for _ in range(3):
        it.ring.begin(0)
        for layer in it.layers:
            it.run(layer)


def changes(it: Model) -> None:
    for streamed in ([], [0, 1, 3], [1], [0, 1, 3], [], [3], [0, 1, 3]):
        it.arrange(streamed)
        for layer in sorted(it.ring.own.back):
            it.ring.make_resident(layer)


@pytest.mark.parametrize("act", [passes, changes])
def test_a_failure_anywhere_leaves_layers_that_are_right_and_a_ring_that_works(act: Callable[[Model], None]) -> None:
    for it, done in at_each_call(lambda: model([3] * 4, [0, 1, 3], 2), act, most=8):
        assert all(it.shows_right(layer) for layer in it.layers)
        it.core.device.check()
        for layer in it.layers if act is passes and not done else ():
            it.run(layer)  # no pass has begun: what a slot held before is half overwritten
        changes(it)
        passes(it)


def test_weights_leave_once_every_stream_has_written() -> None:
    """Weights may be loaded on a stream of somebody's own, which the thread that moves them knows nothing of."""
    with opened(budget=20, host_budget=20) as core:
        group, lane = core.device.group(), core.stream()
        range_ = core.range(2, "weights", group)
        range_.map(0, 2)
        range_.note_use(lane, True)
        mover = Mover(core.device, range_, Backing(core.device, group, range_, "weights"), Lock())
        assert mover.evict([0, 1], Transfer(core.device), None, whole=True) == 2
        assert mover.backing.backed == 2
        mover.backing.close()
