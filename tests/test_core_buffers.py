"""A buffer that ranges take turns in, on the reclaim list: it goes at any moment, and nobody reads other bytes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, PoolExhausted

from .core import PAGE, Core, Gate, Other, behind, holds, opened, physical, refused, write
from .faulting import faults_at_every_call

PIECES = 3
LAYERS = 2


@dataclass
class Turns:
    """Ranges whose first pieces lead to one buffer, which holds the bytes of `holder`, and a page of their own behind
    it. Each has all its bytes in a twin on the host."""

    core: Core
    group: _native.Group = field(init=False)
    ranges: list[_native.Range] = field(default_factory=list)
    twins: list[_native.Range] = field(default_factory=list)
    buffer: _native.Range = field(init=False)
    holder: int = 0

    def __post_init__(self) -> None:
        self.group = self.core.device.group()
        for layer in range(LAYERS):
            range_, twin = (self.core.range(PIECES + 1, "kv", self.group) for _ in range(2))
            twin.map_host(0, PIECES)
            range_.map(PIECES, 1)
            for piece in range(PIECES):
                write(twin.address + piece * PAGE, self.value(layer, piece))
            write(range_.address + PIECES * PAGE, self.value(layer, PIECES))
            self.ranges.append(range_)
            self.twins.append(twin)
        self.again()
        self.fill(0)

    def again(self) -> None:
        """The addresses lead to a new buffer."""
        self.buffer = self.core.range(PIECES, "kv", self.group)
        while not self.buffer.backed:
            with contextlib.suppress(PoolExhausted):
                self.buffer.map(0, PIECES)
        for range_ in self.ranges:
            assert range_.alias(0, self.buffer, 0, PIECES)

    def fill(self, layer: int) -> None:
        self.holder = layer
        for piece in range(PIECES):
            write(self.buffer.address + piece * PAGE, self.value(layer, piece))

    def value(self, layer: int, piece: int) -> int:
        return 16 * (layer + 1) + piece

    def entry(self, key: int = 1, first: int = 0, count: int = PIECES, layers: int = LAYERS) -> _native.Entry:
        parts: list[_native.Part] = [(self.buffer, first, count, None, 0, [])]
        pairs = list(zip(self.ranges, self.twins, strict=True))[:layers]
        parts += [(range_, first, count, twin, first, []) for range_, twin in pairs]
        return key, self.group, parts

    def shows(self, layer: int) -> bool:
        range_ = self.ranges[layer]
        return all(holds(range_.address + piece * PAGE, self.value(layer, piece)) for piece in range(PIECES + 1))

    def places(self, layer: int) -> list[str | None]:
        return [behind(self.ranges[layer].address + piece * PAGE)[0] for piece in range(PIECES + 1)]


@pytest.fixture
def core() -> Iterator[Core]:
    with opened(budget=PIECES + LAYERS) as made:
        yield made


@pytest.fixture
def turns(core: Core) -> Turns:
    return Turns(core)


def test_a_buffer_goes_and_whoever_led_there_reads_its_own_bytes_on_the_host(core: Core, turns: Turns) -> None:
    assert turns.shows(0)
    assert not turns.shows(1), "it is the other one's turn"
    core.device.publish([turns.entry()])
    assert core.device.published == [1]
    core.device.check()
    copied, host = core.device.snapshot()["copied"], physical("host")
    core.device.allocate(PIECES * PAGE)  # in the middle of any operator
    assert core.device.snapshot()["copied"] == copied, "nothing is copied for it"
    assert physical("host") == host
    assert [row[1:] for row in core.device.taken()] == [(1, PIECES)]
    for layer in range(LAYERS):
        assert turns.shows(layer)
        assert turns.places(layer) == ["host"] * PIECES + ["device"]
    assert turns.buffer.backed == 0
    assert physical() == core.device.budget


def test_part_of_it_goes(core: Core, turns: Turns) -> None:
    core.device.publish([turns.entry(1, 2, 1), turns.entry(2, 0, 2)])
    core.range(1).map(0, 1)
    assert [turns.buffer.leads_to(piece) for piece in range(PIECES)] == ["device", "device", "none"]
    assert turns.shows(0), "what it holds is read where it was"
    assert turns.places(0) == ["device", "device", "host", "device"]
    turns.buffer.retire(0, 2)  # it would be wrong to take that now
    core.device.reap(wait=True)
    assert core.device.take([2]) == 0


def test_range_that_an_entry_does_not_name_keeps_the_buffer(core: Core, turns: Turns) -> None:
    """Another address leads there, and nobody says where it could lead instead."""
    core.device.publish([turns.entry(layers=1)])
    refused(lambda: core.range(1).map(0, 1))
    assert turns.shows(0)
    core.device.publish([turns.entry()])
    core.range(1).map(0, 1)
    assert turns.shows(1)


@pytest.mark.parametrize("change", ["led to its twin", "led to the buffer again", "closed", "the twin has no page"])
def test_an_entry_is_void_once_anything_leads_elsewhere(core: Core, turns: Turns, change: str) -> None:
    core.device.publish([turns.entry()])
    if change == "led to its twin":
        assert turns.ranges[1].alias(0, turns.twins[1], 0, 1)
    elif change == "led to the buffer again":
        assert turns.ranges[1].alias(1, turns.twins[1], 1, 1)
        assert turns.ranges[1].alias(1, turns.buffer, 1, 1)
    elif change == "closed":
        turns.ranges[1].close()
    else:
        turns.twins[1].retire(1, 1)
    assert core.device.published == []
    refused(lambda: core.range(PIECES).map(0, PIECES))


def test_range_without_bytes_on_the_host_does_not_enter_the_list(core: Core, turns: Turns) -> None:
    """A page without bytes would be filled from the buffer, which holds another one's."""
    turns.twins[1].retire(1, 1)
    core.device.reap(wait=True)
    core.device.publish([turns.entry()])
    assert core.device.published == []
    own = core.range(1, "kv", turns.group)
    own.map_host(0, 1)
    key, group, parts = turns.entry()
    with pytest.raises(BallonetError, match="sources"):
        core.device.publish([(key, group, [(*parts[0][:3], None, 0, [(0, 0, 1)]), *parts[1:]])])


def test_a_tensor_over_the_buffer_keeps_it(core: Core, turns: Turns) -> None:
    held = turns.buffer.tensor(0, (PAGE,), (1,), 1, 8)
    core.device.publish([turns.entry()])
    assert core.device.take([1]) == 0
    del held
    assert core.device.take([1]) == PIECES


def test_thread_that_leases_the_buffer_gives_it(core: Core, turns: Turns, other: Other) -> None:
    core.device.publish([turns.entry()])
    other.does(turns.group.enter)
    refused(lambda: core.range(1).map(0, 1))
    assert turns.buffer.backed == PIECES
    assert core.device.page_request == 1
    assert other.does(core.device.yield_pages) == PIECES
    assert turns.shows(0)
    assert turns.shows(1)


def test_while_a_graph_is_captured_it_stays(gate: Gate) -> None:
    with opened(budget=PIECES + LAYERS, path=gate.path) as core:
        core.device.publish([Turns(core).entry()])
        gate.capture(True)
        assert core.device.take([1]) == 0
        gate.capture(False)
        assert core.device.take([1]) == PIECES
        core.device.check()


def test_a_fault_leaves_it_as_it_was_or_gone() -> None:
    def prepare(core: Core) -> Turns:
        turns = Turns(core)
        core.device.publish([turns.entry()])
        return turns

    def take(turns: Turns) -> bool:
        return turns.core.device.take([1]) > 0

    for turns, done in faults_at_every_call(prepare, take, budget=PIECES + LAYERS):
        assert turns.shows(0)
        assert turns.shows(1) == done
        if not done:
            turns.core.device.publish([turns.entry()])
            assert turns.core.device.take([1]) == PIECES
            assert turns.shows(1)


def test_threads_take_buffers_while_others_lead_to_them() -> None:
    """What a layer shows under a lease is its own, whoever takes what meanwhile."""
    with opened(budget=2 * PIECES + LAYERS) as core:
        turns = Turns(core)
        stop, tried = threading.Event(), threading.Semaphore(0)

        def take() -> None:
            while not stop.is_set():
                hog = core.device.reserve(2 * PIECES * PAGE, "weights", core.device.group())
                with contextlib.suppress(PoolExhausted):
                    hog.map(0, PIECES + 1)
                hog.close()
                core.device.reap(wait=True)
                tried.release()

        thread = threading.Thread(target=take)
        thread.start()
        gone = 0
        try:
            for step in range(100):
                turns.group.enter()
                if turns.buffer.backed < PIECES:
                    gone += 1
                    assert turns.shows(1 - turns.holder)
                    turns.again()
                turns.fill(step % LAYERS)
                core.device.publish([turns.entry()])
                tried.acquire()
                assert turns.shows(step % LAYERS)
                turns.group.leave()
                if step % 3 == 0:
                    while tried.acquire(blocking=False):
                        pass  # those that are over
                    for _ in range(2):  # the second one began after this
                        tried.acquire()
        finally:
            stop.set()
            thread.join()
        core.device.check()
        assert gone > 0
