"""A fault at every driver call of a life of a device, one at a time: the work is done or a typed error says why not.

Afterwards the books are right, every byte that was written is still there, and every page comes back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, BudgetInUse, DriverUnavailable

from .core import PAGE, Core, behind, calls, clean, holds, make, opened, physical, write
from .faulting import arm, at_each_call, disarm, faults_fired


@dataclass
class Life:
    """What one device did, in order. Everything in use is in a field, so that what a fault leaves can be looked at."""

    device: _native.Device | None = None
    ranges: list[_native.Range] = field(default_factory=list)
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> bytes, and the byte they hold
    pieces: dict[int, int] = field(default_factory=dict)  # address of a mapped piece -> the byte it holds
    tensors: list[object] = field(default_factory=list)

    def block(self, nbytes: int, value: int, stream: int = 0) -> int:
        assert self.device is not None
        address = self.device.allocate(nbytes, stream)
        write(address, value, nbytes)
        self.blocks[address] = nbytes, value
        return address

    def free(self, address: int) -> None:
        assert self.device is not None
        nbytes, value = self.blocks.pop(address)
        assert holds(address, value, nbytes)
        self.device.deallocate(address)

    def put(self, one: _native.Range, piece: int, value: int) -> None:
        write(one.address + piece * PAGE, value)
        self.pieces[one.address + piece * PAGE] = value

    def retire(self, one: _native.Range, piece: int) -> None:
        self.pieces.pop(one.address + piece * PAGE)
        one.retire(piece, 1)

    def live(self) -> None:
        before = faults_fired()
        device = self.device = make(PAGE, 12, 4)
        big, small, shared = self.block(2 * PAGE, 1), self.block(100, 2), self.block(3 * PAGE, 3)
        device.record_stream(shared, 0)
        kv = device.reserve(6 * PAGE, "kv", device.group())
        self.ranges.append(kv)
        for piece in range(4):
            kv.map(piece, 1)
            self.put(kv, piece, piece + 10)
        self.tensors.append(kv.tensor(PAGE, (PAGE,), (1,), 1, 8))
        self.free(big)
        slot = device.reserve(2 * PAGE, "weights", device.group())
        self.ranges.append(slot)
        slot.map(0, 1)
        self.put(slot, 0, 20)
        slot.alias(1, slot, 0, 1)
        assert holds(slot.address + PAGE, 20)
        device.trim()
        moved = [kv.move(2, "host"), kv.move(0, "device"), kv.move(2, "device")]
        assert all(moved) or faults_fired() > before  # one that was not made has changed nothing
        self.free(shared)
        late = self.block(5 * PAGE, 4)  # needs what the freed block had
        self.retire(kv, 0)
        kv.retire(1, 1)  # is under a tensor, and stays
        self.retire(kv, 3)
        self.free(late)
        device.set_budget(7 * PAGE)
        kv.map(3, 1)
        self.put(kv, 3, 30)
        with contextlib.suppress(BudgetInUse):
            device.set_budget(2 * PAGE)  # there is more in use
        self.pieces.pop(kv.address + PAGE)
        self.tensors.clear()
        self.free(small)
        device.set_budget(4 * PAGE)
        assert device.snapshot()["created"] <= 4
        device.free_memory()
        device.synchronize()

    def intact(self) -> None:
        """What is in use is there, with the bytes that were written."""
        if self.device is None:
            return
        self.device.check()
        created = self.device.snapshot()["created"]
        assert physical() == created * PAGE
        for address, (nbytes, value) in self.blocks.items():
            assert holds(address, value, nbytes)
        for address, value in self.pieces.items():
            assert behind(address)[1] == "rw-s"
            assert holds(address, value)

    def end(self) -> None:
        """Gives everything back, as a program that goes on after an error does, and closes."""
        if self.device is None:
            return
        for address in list(self.blocks):
            self.free(address)
        self.tensors.clear()
        for one in self.ranges:
            one.close()
        self.ranges.clear()
        self.pieces.clear()
        self.device.check()
        self.device.close()
        self.device = None


@contextlib.contextmanager
def a_life(lived: bool) -> Iterator[Life]:
    life = Life()
    if lived:
        life.live()
    yield life
    life.intact()
    life.end()
    assert physical() == physical("host") == 0


@pytest.mark.parametrize(("begin", "act"), [(False, Life.live), (True, Life.end)], ids=["live", "end"])
def test_a_fault_at_every_driver_call(begin: bool, act: Callable[[Life], None]) -> None:
    clean()
    went_on = []
    for life, done in at_each_call(lambda: a_life(begin), act, least=40, most=8):
        life.intact()
        went_on.append(done)
    assert went_on.count(True) > len(went_on) // 4  # most of them are survived without anyone noticing


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_an_allocation_survives_one_fault(core: Core, function: str) -> None:
    """The second try has a driver that works again; nobody needs to hear of the first."""
    arm(function)
    write(core.device.allocate(3 * PAGE), 1, 3 * PAGE)


def test_a_constructor_that_fails_leaves_nothing() -> None:
    clean()
    for _ in at_each_call(contextlib.nullcontext, lambda _: make(PAGE, 8).close()):
        assert physical() == 0


def test_faults_have_names_and_strike_once() -> None:
    with pytest.raises(BallonetError, match="no driver function is called 'cuMemMapp'"):
        make(faults=[("cuMemMapp", 1)])
    with pytest.raises(DriverUnavailable, match="cannot be loaded"):
        make(path="/nonexistent")
    device = make(PAGE, 8, faults=[("cuMemMap", calls()["cuMemMap"] + 3)])  # after those that try host pages
    one = device.reserve(PAGE, "kv", device.group())
    with pytest.raises(BallonetError, match="cuMemMap failed with CUDA_ERROR_OPERATING_SYSTEM"):
        one.map(0, 1)
    one.map(0, 1)
    one.close()
    device.close()


def test_a_fault_that_was_disarmed_counts_once_when_it_strikes_after_all() -> None:
    with opened(budget=4) as core:
        some, before = core.range(1), faults_fired()
        for _ in range(2):
            arm("cuMemMap")
            disarm()
        assert faults_fired() == before
        arm("cuMemMap")
        with pytest.raises(BallonetError, match="cuMemMap failed"):
            some.map(0, 1)
        assert faults_fired() == before + 1
        disarm()


@pytest.mark.parametrize("second", ["cuMemUnmap", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("first", ["cuMemMap", "cuMemSetAccess"])
def test_two_faults_in_a_move_lose_neither_bytes_nor_pages(first: str, second: str) -> None:
    """The new page cannot be put in place, and what undoes that fails as well."""
    for ahead in (1, 2, 3):
        with opened(budget=4, host_budget=4) as core:
            some = core.range(1, mapped=1, value=5)
            arm(first, 2)  # the first of them is for the scratch addresses
            arm(second, ahead + (first == second))
            with contextlib.suppress(BallonetError):
                some.move(0, "host")
            core.device.check()
            disarm()
            (some.map if some.leads_to(0) == "device" else some.map_host)(0, 1)
            assert behind(some.address)[1] == "rw-s"
            assert holds(some.address, 5)
