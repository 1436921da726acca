"""Slots and the copies that fill them: what lies behind a layer's addresses, and in which order things happen."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, DriverError

from .core import PAGE, Core, Gate, all_calls, backings, behind, calls, eventually, holds, opened, write
from .faulting import arm, disarm, faults_at_every_call


def layer(core: Core, pieces: int = 2, value: int = 1) -> _native.Range:
    return core.range(pieces, "weights", mapped=pieces, value=value)


def test_pieces_that_cannot_be_led_elsewhere_are_refused(core: Core) -> None:
    one, slot = layer(core), layer(core)
    bare = core.range(2, "weights")
    with pytest.raises(BallonetError, match="does not lead to another"):
        one.own(0, 1)
    assert one.alias(0, slot, 0, 1)
    for source in (bare, one):
        with pytest.raises(BallonetError, match="no page of its own"):
            bare.alias(0, source, 0, 1)
    with pytest.raises(BallonetError, match="itself"):
        slot.alias(0, slot, 0, 1)
    for source in (slot, one):
        with pytest.raises(BallonetError, match="others lead to the page"):
            slot.alias(0, source, 1, 1)
    with pytest.raises(BallonetError, match="outside"):
        one.own(0, 3)
    assert not slot.move(0, "host"), "it would leave the alias behind"
    assert not one.move(0, "host")
    assert backings(one) == ["alias", "device"]


@pytest.mark.parametrize("back", [False, True])
def test_a_failure_leaves_the_layer_as_it_was(back: bool) -> None:
    """Where it is led to a slot, and where it gets pages of its own back."""

    def prepare(core: Core) -> tuple[_native.Range, _native.Range, list[int]]:
        one, slot = layer(core, pieces=3, value=5), layer(core, pieces=3, value=9)
        assert not back or one.alias(0, slot, 0, 3)
        return one, slot, [one.page(piece) for piece in range(3)]

    def change(scene: tuple[_native.Range, _native.Range, list[int]]) -> bool:
        one, slot, _ = scene
        return one.own(0, 3) if back else one.alias(0, slot, 0, 3)

    for scene, done in faults_at_every_call(prepare, change):
        one, _, before = scene
        if not done:
            assert [one.page(piece) for piece in range(3)] == before
            assert holds(one.address, 9 if back else 5, 3 * PAGE)
            assert change(scene)
        assert behind(one.address)[1] == "rw-s"


def twin(core: Core, value: int, pieces: int = 2) -> _native.Range:
    """A page twin: the bytes of a layer on the host."""
    made = core.range(pieces, "weights")
    made.map_host(0, pieces)
    write(made.address, value, pieces * PAGE)
    return made


def copied(core: Core, target: _native.Range, source: _native.Range, pages: int = 1, after: int = 0) -> _native.Done:
    """A copy of the first pages of a range to those of another, under way."""
    copies = [(target.address, source.address, pages * PAGE)]
    return _native.Transfer(core.device).copy(copies, after=after, owner="weights", to="device")


def test_a_copy_fills_a_slot_and_is_counted(core: Core) -> None:
    one, slot, on_host = layer(core), layer(core), twin(core, 4)
    assert one.alias(0, slot, 0, 2)
    done = copied(core, slot, on_host, pages=2)
    done.before(0)
    assert holds(one.address, 4, 2 * PAGE)
    done.wait()
    assert done.passed()
    assert core.device.snapshot()["copied"]["weights_h2d"] == 2 * PAGE
    copies = [(on_host.address, one.address, PAGE)]
    _native.Transfer(core.device).copy(copies, after=0, owner="kv", to="host").wait()
    assert core.copied() == {"weights_h2d": 2 * PAGE, "kv_d2h": PAGE}


def test_copies_run_beside_the_host_and_in_their_order(core: Core) -> None:
    """The host goes on; what is not waited for is poison; the second copy of a call follows the first."""
    slot, first, second = layer(core, value=1), twin(core, 2), twin(core, 3)
    transfer = _native.Transfer(core.device)
    parts = [(slot.address, first.address, 2 * PAGE), (slot.address, second.address, PAGE)]
    with core.held_copies():
        done = transfer.copy(parts, after=0, owner="weights", to="device")
        assert not done.passed()
        assert not holds(slot.address, 3)
        assert not holds(slot.address + PAGE, 2)
    done.before(0)
    assert holds(slot.address, 3)
    assert holds(slot.address + PAGE, 2)


def test_a_copy_waits_for_the_work_that_was_submitted_before_it(core: Core) -> None:
    slot, on_host = layer(core), twin(core, 6)
    lane = core.stream()
    with core.occupied(lane):
        done = copied(core, slot, on_host, after=lane)
        assert not done.passed(), "what still runs may read it"
        assert not holds(slot.address, 6)
    done.before(lane)
    done.wait()
    assert holds(slot.address, 6)


def test_whoever_waits_for_a_copy_keeps_nobody_else_waiting(core: Core) -> None:
    slot, on_host = layer(core), twin(core, 6)
    with core.held_copies():
        done, waits = copied(core, slot, on_host), calls()["cuEventSynchronize"]
        thread = threading.Thread(target=done.wait)
        thread.start()
        while thread.is_alive() and calls()["cuEventSynchronize"] == waits:
            thread.join(0.001)
        core.device.note_stream(0)  # takes the lock that the one who waits must not hold
        assert not done.passed()
    thread.join()
    assert done.passed()
    assert holds(slot.address, 6)


def test_where_a_stream_is_captured_the_host_waits_for_a_copy(gate: Gate) -> None:
    """A capture that waits for what is not part of it is no graph."""
    with opened(path=gate.path, link_latency_ns=100_000_000) as core:
        slot, on_host = layer(core), twin(core, 6)
        done = copied(core, slot, on_host)
        gate.capture(True)
        made = all_calls(lambda: done.before(0))
        assert "cuStreamWaitEvent" not in made
        assert made["cuEventSynchronize"] == 1
        gate.capture(False)
        assert done.passed()
        assert holds(slot.address, 6)


def test_one_range_may_lead_to_the_device_and_to_the_host(core: Core) -> None:
    """Host pages are opened for the CPU, too, which those of the device cannot be."""
    one, slot = layer(core, 4), core.range(4, "weights")
    slot.map(0, 1)
    slot.map_host(1, 2)
    slot.map(3, 1)
    assert one.alias(0, slot, 0, 4)
    assert [behind(one.address + piece * PAGE)[0] for piece in range(4)] == ["device", "host", "host", "device"]
    for piece in range(4):
        write(slot.address + piece * PAGE, piece + 1)
        assert holds(one.address + piece * PAGE, piece + 1)
    other = twin(core, 7)
    transfer = _native.Transfer(core.device)
    transfer.copy([(one.address + PAGE, other.address, 2 * PAGE)], after=0, owner="weights", to="device").wait()
    assert holds(slot.address + PAGE, 7, 2 * PAGE)


def test_a_read_that_waits_for_no_copy_is_seen(core: Core) -> None:
    slot, on_host = layer(core), twin(core, 6)
    core.device.note_use(slot.address, PAGE, 0, False)
    done = copied(core, slot, on_host)
    with pytest.raises(DriverError, match="order"):
        core.device.note_use(slot.address, PAGE, 0, False)
    done.before(0)
    core.device.note_use(slot.address, PAGE, 0, False)


def test_a_page_does_not_leave_while_it_is_copied_to() -> None:
    with opened(link_latency_ns=100_000_000) as core:
        one, slot, on_host = layer(core), layer(core), twin(core, 6)
        copied(core, one, on_host)
        assert one.alias(0, slot, 0, 2), "waits for the copy, or the order checker would refuse the unmap"


@pytest.mark.parametrize("function", ["cuMemcpyAsync", "cuStreamWaitEvent", "cuEventRecord", "cuEventCreate"])
def test_a_copy_that_fails_leaves_nothing_running(core: Core, function: str) -> None:
    slot, on_host = layer(core), twin(core, 6)
    transfer = _native.Transfer(core.device)
    parts = [(slot.address, on_host.address, PAGE)] * 3
    arm(function)
    try:
        done = transfer.copy(parts, after=0, owner="weights", to="device")
    except DriverError:
        done = transfer.copy(parts, after=0, owner="weights", to="device")
    done.before(0)
    assert holds(slot.address, 6)


def test_where_a_stream_cannot_be_made_to_wait_the_host_does() -> None:
    with opened(link_latency_ns=100_000_000) as core:
        slot, on_host = layer(core), twin(core, 6)
        stream = core.stream()
        arm("cuStreamWaitEvent", 2)  # the first one is of the copy, which waits for what runs
        done = copied(core, slot, on_host)
        made = all_calls(lambda: done.before(stream))
        assert made["cuEventSynchronize"] == 1
        assert done.passed()
        assert holds(slot.address, 6)


# -- pages that come to other addresses with their bytes, and who reads there meanwhile


COUNT = 3
MANY = 256  # pages: their comparison takes longer than a thread takes to wake up
LIBC = ctypes.CDLL(None)


class LedLayer:
    """Leads to the host, with the same bytes in device pages of another range; each page has a byte of its own."""

    def __init__(self, core: Core, count: int = COUNT) -> None:
        self.count = count
        self.group = core.device.group()
        self.range = core.range(self.count, "weights", self.group)
        self.twin = core.range(self.count, "weights", self.group)
        self.twin.map_host(0, self.count)
        self.write(self.twin)
        self.range.alias(0, self.twin, 0, self.count)
        self.spare = core.range(self.count, "weights", self.group)
        self.fill()

    def fill(self) -> None:
        self.spare.map(0, self.count)
        self.write(self.spare)
        self.pages = self.pages_of(self.spare)

    def write(self, some: _native.Range) -> None:
        for n in range(self.count):
            write(some.address + n * PAGE, n % 256)

    def pages_of(self, some: _native.Range) -> list[int]:
        return [some.page(n) for n in range(self.count)]

    def adopt(self) -> bool:
        return self.range.adopt(0, self.spare, 0, self.count)

    def leave(self) -> bool:
        return self.range.alias(0, self.twin, 0, self.count)


def test_pages_that_cannot_be_adopted_are_refused(core: Core) -> None:
    layer = LedLayer(core)
    with pytest.raises(BallonetError, match="another group"):
        layer.range.adopt(0, core.range(COUNT, "weights", core.device.group()), 0, COUNT)
    with pytest.raises(BallonetError, match="does not lead to another range"):
        layer.spare.adopt(0, layer.range, 0, COUNT)
    with pytest.raises(BallonetError, match="no device page of its own"):
        layer.range.adopt(0, layer.twin, 0, COUNT)
    view = layer.spare.tensor(0, (PAGE,), (1,), 1, 8)
    assert not layer.adopt(), "a tensor shows the page where it is"
    del view
    assert layer.adopt()


def test_pages_come_with_their_bytes_and_a_failure_leaves_them_where_they_were() -> None:
    for layer, done in faults_at_every_call(LedLayer, LedLayer.adopt):
        assert all(holds(layer.range.address + n * PAGE, n) for n in range(COUNT))
        assert done or ({*backings(layer.range)} == {"alias"} and layer.adopt())
        assert layer.pages_of(layer.range) == layer.pages
        assert ({*backings(layer.range)}, {*backings(layer.spare)}) == ({"device"}, {"none"})
        assert all(holds(layer.range.address + n * PAGE, n) for n in range(COUNT))


@contextmanager
def reading(address: int, right: bytes) -> Iterator[list[int]]:
    """A thread that compares these bytes as often as it can, without the lock of the interpreter; what came of it."""
    differences, done = [0], threading.Event()

    def read() -> None:
        while not done.is_set():
            differences.append(LIBC.memcmp(ctypes.c_void_p(address), right, len(right)))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield differences
    finally:
        done.set()
        thread.join(600)


def test_bytes_can_be_read_while_their_pages_are_exchanged() -> None:
    """By a thread that holds no lease, at any moment: where pages leave, come back, move, and where a driver fails."""
    expected = b"".join(bytes([n]) * PAGE for n in range(MANY))
    with opened(budget=2 * MANY, host_budget=2 * MANY) as core:
        layer = LedLayer(core, MANY)
        with reading(layer.range.address, expected) as differences:
            exchange(layer, differences)
        assert set(differences) == {0}


def exchange(layer: LedLayer, differences: list[int]) -> None:
    """Whatever moves pages, in twenty rounds; each is read."""
    for n in range(20):
        assert layer.adopt()
        assert layer.range.move(n, "host")
        assert layer.range.move(n, "device")
        if n % 10 == 9:
            arm("cuMemMap", 1 + n)
            with suppress(BallonetError):
                layer.leave()
            disarm()
        assert layer.range.leads_to(0) == "alias" or layer.leave()
        layer.fill()
        eventually(lambda n=n: len(differences) > n + 1)  # read in each round
