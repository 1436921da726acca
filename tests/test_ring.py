"""Slots that layers take turns in: whatever order the layers run in, each reads its own weights or nothing at all."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.allocator._native import Done
from ballonet.allocator.errors import BallonetError, PoolExhausted
from ballonet.offload.decide.plan import streaming
from ballonet.offload.move.ring import Part, Ring, Streamed
from ballonet.offload.move.twins import Twin

from .core import PAGE, Core, arm, behind, holds, opened, write


class Model:
    """Layers of the given pages, of which some stream; layer n is full of the byte n + 1."""

    def __init__(self, core: Core, pages: Sequence[int], streamed: Sequence[int], slots: int) -> None:
        self.core = core
        self.plan = streaming(pages, streamed, slots)
        self.group = core.device.group()
        self.twins: list[Twin] = []
        layers = []
        for layer, slot in zip(self.plan.streamed, self.plan.slots, strict=True):
            parts, offset = [], 0
            for count in split(pages[layer]):
                home = core.range(count, "weights", self.group)
                twin = Twin(core.device, self.group, home)
                self.twins.append(twin)
                twin.pages.map_host(0, count)
                write(twin.pages.address, layer + 1, count * PAGE)
                home.alias(0, twin.pages, 0, count)
                parts.append(Part(home, twin, offset, 0, home.pieces))
                offset += count
            layers.append(Streamed(layer, slot, tuple(parts)))
        self.layers = {each.layer: each for each in layers}
        self.ring = Ring(core.device, self.group)
        self.ring.arrange(self.plan.slot_pages, layers, 0)

    def close(self) -> None:
        self.ring.close()
        for twin in self.twins:
            twin.close()

    def run(self, layer: int) -> None:
        self.ring.enter(layer, 0)
        assert self.reads_right(layer)
        self.ring.leave(layer, 0)

    def reads_right(self, layer: int) -> bool:
        """Reads as an operator of the layer does: told to the order checker first."""
        for part in self.layers[layer].parts:
            part.home.note_use(0, False)
            if not holds(part.home.address, layer + 1, part.home.nbytes):
                return False
        return True

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
        made.ring.rest()
        assert all(made.reads_right(layer) for layer in made.layers)
        core.device.check()
        made.close()
        assert core.device.snapshot()["copied"]["weights_d2h"] == 0


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_number_of_layers_and_slots(layers: int, slots: int) -> None:
    with model([2] * layers, range(layers), slots) as it:
        used = it.core.pages()["weights"]
        assert used == 2 * min(slots, layers)
        for _ in range(4):
            it.ring.begin(0)
            for layer in range(layers):
                it.run(layer)
            it.core.device.check()
        assert it.core.pages()["weights"] == used
        alone = sum(len(slot.turns) == 1 for slot in it.ring._slots)
        # One copy per streamed layer and pass, but of layers that have a slot to themselves only the first; and what
        # the last pass has begun for the next.
        assert it.copied() == 2 * ((layers - alone) * 4 + alone + (min(slots, layers) - alone))


def test_the_next_copies_are_on_their_way_before_they_are_asked_for() -> None:
    with model([1] * 6, [1, 3, 5], 2) as it:
        it.ring.begin(0)
        assert it.copied() == 2
        it.run(1)
        assert it.copied() == 3, "the slot of 1 is free for 5"
        it.run(3)
        it.run(5)
        before = it.copied()
        it.ring.begin(0)
        it.ring.enter(1, 0)
        assert it.copied() == before, "the pass before has begun it"


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(1, 3),
    st.data(),
)
def test_any_order_of_layers_and_interruptions(pages: list[int], slots: int, data: st.DataObject) -> None:
    """Layers left out, run twice, passes that end anywhere, layers that are not left; and rests in between."""
    streamed = sorted(data.draw(st.sets(st.integers(0, len(pages) - 1), min_size=1)))
    with model(pages, streamed, slots) as it:
        it.ring.begin(0)
        for step in data.draw(st.lists(st.sampled_from(["run", "run", "run", "enter", "begin", "rest"]), max_size=25)):
            layer = data.draw(st.sampled_from(streamed))
            if step == "run":
                it.run(layer)
            elif step == "enter":
                it.ring.enter(layer, 0)
                assert it.reads_right(layer)
            elif step == "begin":
                it.ring.begin(0)
            else:
                it.ring.rest()
                assert it.ring.flying == frozenset()
                assert all(it.reads_right(each) for each in streamed)
            it.core.device.check()


def test_what_flies_holds_nothing_outside_of_its_turn() -> None:
    with model([1] * 3, range(3), 1, link_latency_ns=1_000_000) as it:
        it.ring.begin(0)
        it.run(0)
        assert not holds(it.layers[0].parts[0].home.address, 1), "the slot is poison or the next layer's"
        assert behind(it.layers[0].parts[0].home.address) == behind(it.layers[2].parts[0].home.address)
        it.ring.enter(1, 0)
        assert holds(it.layers[0].parts[0].home.address, 2)


def test_a_read_before_enter_is_out_of_order() -> None:
    with model([1] * 4, range(4), 2) as it:
        it.ring.begin(0)
        with pytest.raises(BallonetError, match="order"):
            it.layers[1].parts[0].home.note_use(0, False)
        it.run(0)
        it.run(1)


def test_layers_run_on_any_stream() -> None:
    with model([1] * 3, range(3), 1) as it:
        lane = it.core.stream()
        it.ring.begin(0)
        for stream in (lane, 0, lane, lane, 0):
            for layer in range(3):
                it.ring.enter(layer, stream)
                it.layers[layer].parts[0].home.note_use(stream, False)
                it.ring.leave(layer, stream)


def test_at_rest_a_layer_can_be_written() -> None:
    with model([2] * 2, range(2), 1) as it:
        it.ring.begin(0)
        it.ring.enter(0, 0)
        it.ring.rest()
        ctypes.memset(it.layers[0].parts[0].home.address, 7, 2 * PAGE)
        it.ring.begin(0)
        it.ring.enter(0, 0)
        assert holds(it.layers[0].parts[0].home.address, 7, 2 * PAGE)
        it.ring.rest()
        ctypes.memset(it.layers[0].parts[0].home.address, 1, 2 * PAGE)


def test_a_layer_that_leaves_again_is_not_still_coming_home() -> None:
    """Its copy may be on its way when its stream is told to wait, and is forgotten only once it has passed."""
    with model([1] * 2, range(2), 1, link_latency_ns=50_000_000) as it:
        lane = it.core.stream()
        both = list(it.layers.values())
        it.ring.arrange(it.plan.slot_pages, both[:1], lane)
        it.ring.enter(1, lane)
        it.ring.leave(1, lane)
        it.ring.arrange(it.plan.slot_pages, both, lane)
        it.ring.begin(0)
        it.run(0)
        it.run(1)


def test_someone_looks_at_a_layer_that_comes_home_while_it_runs() -> None:
    with model([1] * 2, range(2), 1) as it:
        it.ring.arrange(it.plan.slot_pages, [it.layers[0]], 0)
        done, each = it.ring._arriving[1]

        class Copy:
            """That of the layer, which runs while someone else waits for it."""

            before, passed = done.before, done.passed

            def wait(self) -> None:
                done.wait()
                it.run(1)

        it.ring._arriving[1] = cast(Done, Copy()), each
        it.ring.settle(1)
        assert not it.ring._arriving
        assert it.ring.show(0)
        assert not it.ring.show(1), "it does not stream"
        it.ring.settle(1)


def test_slots_that_do_not_fit_leave_nothing() -> None:
    with opened(budget=3, host_budget=20) as core:
        with pytest.raises(PoolExhausted):
            Model(core, [2, 2], [0, 1], 2)
        core.device.reap(wait=True)
        assert core.pages()["weights"] == 0


@pytest.mark.parametrize("function", ["cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemcpyAsync", "cuStreamWaitEvent"])
@pytest.mark.parametrize("ahead", [1, 2, 4, 5, 6, 8])
def test_a_failure_anywhere_leaves_a_ring_that_works(function: str, ahead: int) -> None:
    with model([3] * 4, [0, 1, 3], 2) as it:
        arm(function, ahead)
        failed = 0
        for _ in range(6):
            try:
                it.ring.begin(0)
                for layer in it.layers:
                    it.run(layer)
                it.ring.rest()
            except BallonetError:
                failed += 1
            it.core.device.check()
            assert all(it.reads_right(layer) for layer in it.layers if layer not in it.ring.flying)
        assert failed <= 1


def test_a_twin_is_made_once_every_stream_has_written() -> None:
    """Weights may be loaded on a stream of somebody's own, which the thread that makes the twin knows nothing of."""
    with opened(budget=20, host_budget=20) as core:
        group, lane = core.device.group(), core.stream()
        home = core.range(2, "weights", group)
        home.map(0, 2)
        home.note_use(lane, True)
        twin = Twin(core.device, group, home)
        twin.copy_home([(0, 2)])
        assert twin.pages.backed == 2
        twin.close()
