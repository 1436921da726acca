"""Pages that come to other addresses with their bytes, and who reads there meanwhile."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError

from .core import PAGE, Core, backings, eventually, holds, opened, write
from .faulting import arm, disarm, faults_at_every_call

COUNT = 3
MANY = 256  # pages: their comparison takes longer than a thread takes to wake up
LIBC = ctypes.CDLL(None)


class Layer:
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


@pytest.fixture
def core() -> Iterator[Core]:
    with opened(budget=2 * MANY, host_budget=2 * MANY) as made:
        yield made
        made.device.check()


def test_what_is_refused(core: Core) -> None:
    layer = Layer(core)
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
    for layer, done in faults_at_every_call(Layer, Layer.adopt):
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


def test_bytes_can_be_read_while_their_pages_are_exchanged(core: Core) -> None:
    """By a thread that holds no lease, at any moment: where pages leave, come back, move, and where a driver fails."""
    layer = Layer(core, MANY)
    with reading(layer.range.address, b"".join(bytes([n]) * PAGE for n in range(MANY))) as differences:
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
    assert set(differences) == {0}
