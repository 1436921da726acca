"""Anything, in any order, with a fault at any driver call: the core keeps its promises after every step.

What must be so after each step is checked from outside as far as it can be: the blocks of the memfds,
/proc/self/maps, and the bytes behind every address. `Machine.must_stay` says how many pages nothing could free, so
that it is known exactly when memory may be refused.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, BudgetInUse, PoolExhausted

from . import core as outside
from .core import Core, clean, current_context, driver, holds, make, physical, write
from .faulting import arm, disarm, faults_fired, pending

STREAMS = 3  # and stream 0
HOST_BUDGET = 6  # pages
MAPPING = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemAddressReserve")
EVENTS = ("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuCtxSynchronize")
OTHERS = (
    "cuMemAddressFree",
    "cuMemcpyAsync",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuCtxSetCurrent",
    "cuCtxGetCurrent",
    "cuThreadExchangeStreamCaptureMode",
)

NTH = st.integers(0, 63)
T = TypeVar("T")
values = itertools.count()


def pick(some: Sequence[T], n: int) -> T | None:
    """The nth of some, counted round and round; what there is may depend on time, what hypothesis draws may not."""
    return some[n % len(some)] if some else None


def fresh() -> int:
    """A byte that differs from those before it."""
    return next(values) % 251 + 1


@dataclass(eq=False)
class Page:
    """A physical page as the model sees it: who put it there, and the byte that fills it."""

    place: str
    value: int


@dataclass(eq=False)
class Space:
    """A range, what lies behind its pieces, and how many tensors hold each."""

    range: _native.Range
    pages: list[Page | None]
    pins: list[int]
    alias: list[bool]
    doomed: list[bool]
    tensors: list[tuple[object, range]] = field(default_factory=list)
    closed: bool = False

    def drop(self, piece: int) -> None:
        self.pages[piece], self.alias[piece], self.doomed[piece] = None, False, False


class State(NamedTuple):
    """All that the device's thread changes."""

    created: int
    unmapped: int
    backings: list[list[_native.Backing]]


@dataclass(eq=False)
class Block:
    address: int
    nbytes: int
    stream: int
    value: int
    users: set[int] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    page = 4096

    def __init__(self) -> None:
        super().__init__()
        clean()
        self.budget = 24
        self.core = Core(make(self.page, self.budget, HOST_BUDGET), self.page)
        self.device = self.core.device
        self.streams = [0, *(self.core.stream() for _ in range(STREAMS))]
        self.spaces: list[Space] = []
        self.blocks: list[Block] = []
        self.group = self.device.group()

    # -- what the model knows -----------------------------------------------------------------------------------------

    def seen(self, block: Block) -> range:
        """The pages, by address, that a block lies on."""
        return range(block.address // self.page, (block.address + block.nbytes - 1) // self.page + 1)

    def must_stay(self) -> int:
        """Device pages that no trim and no wait can free."""
        mapped = {page for space in self.spaces for page in space.pages if page and page.place == "device"}
        lanes = STREAMS  # a page for each stream to copy to
        return lanes + len(mapped) + len({page for block in self.blocks for page in self.seen(block)})

    def host_pages(self) -> int:
        return sum(page is not None and page.place == "host" for space in self.spaces for page in space.pages)

    def attempt(self, work: Callable[[], T], refused: bool | None = False) -> T | None:
        """`work`, again where a fault struck it; None where it was refused for want of memory.

        `refused` says whether it must be; None where that depends on what has passed meanwhile.
        """
        for _ in range(9):
            before = faults_fired()
            try:
                done = work()
            except PoolExhausted:
                if refused or refused is None:
                    return None
                assert faults_fired() > before, "refused although there is memory"
            except BallonetError:
                if faults_fired() == before:
                    raise
            else:
                assert not refused, "more memory was given than there is"
                return done
            self.everything_holds()
        raise AssertionError("fails again and again")

    # -- ranges -------------------------------------------------------------------------------------------------------

    def a_space(self, n: int) -> Space | None:
        return pick([space for space in self.spaces if not space.closed], n)

    def a_span(self, space: Space, ends: tuple[int, int]) -> range:
        first, last = sorted(n % len(space.pages) for n in ends)
        return range(first, last + 1)

    @rule(
        pieces=st.integers(1, 12),
        owner=st.sampled_from(["weights", "kv", "kv", "activations"]),
        expected=st.integers(0, 12),
        reuse=st.booleans(),
        more=st.integers(0, 3),
        keeps=st.booleans(),
    )
    def reserve(self, pieces: int, owner: _native.Owner, expected: int, reuse: bool, more: int, keeps: bool) -> None:
        if sum(not space.closed for space in self.spaces) == 4:
            return
        soon: dict[str, Any] = {"expected": expected * self.page, "reuse": reuse, "more": more, "keeps": keeps}
        made = self.attempt(lambda: self.device.reserve(pieces * self.page, owner, self.group, **soon))
        assert made is not None
        self.spaces.append(Space(made, [None] * pieces, [0] * pieces, [False] * pieces, [False] * pieces))

    @rule(n=NTH, ends=st.tuples(NTH, NTH), place=st.sampled_from(["device", "device", "device", "host"]))
    def map(self, n: int, ends: tuple[int, int], place: str) -> None:
        if (space := self.a_space(n)) is None:
            return
        span = self.a_span(space, ends)
        if any(page and (page.place != place or space.alias[i]) for i, page in enumerate(space.pages) if i in span):
            with pytest.raises(BallonetError):
                self.mapping(space, span, place)()
            return
        new = [i for i in span if space.pages[i] is None]
        used, most = (self.must_stay(), self.budget) if place == "device" else (self.host_pages(), HOST_BUDGET)
        refused: bool | None = bool(new) and used + len(new) > most
        if refused and any(space.range.leads_to(i) == "retiring" for i in new):
            refused = None  # a page that an alias still shows may be taken back
        aliased = self.pages_behind_aliases() if place == "device" else {}
        if self.attempt(self.mapping(space, span, place), refused) is None:
            return
        for i in span:
            space.doomed[i] = False
        table = AddressTable(self.page)
        for i in new:
            offset = table.behind(space.range.address + i * self.page)[2]
            space.pages[i] = aliased.get(offset) or Page(place, fresh())
            self.write_piece(space, i)

    def pages_behind_aliases(self) -> dict[int, Page]:
        """By offset in the device's memfd."""
        table = AddressTable(self.page)
        return {
            table.behind(space.range.address + i * self.page)[2]: page
            for space in self.spaces
            for i, page in enumerate(space.pages)
            if page is not None and space.alias[i]
        }

    def mapping(self, space: Space, span: range, place: str) -> Callable[[], bool]:
        function = space.range.map if place == "device" else space.range.map_host

        def work() -> bool:
            function(span.start, len(span))
            return True

        return work

    @rule(n=NTH, m=NTH, which=NTH)
    def alias(self, n: int, m: int, which: int) -> None:
        space, source = self.a_space(n), self.a_space(m)
        if space is None or source is None:
            return
        pairs = [
            (i, j)
            for i, j in itertools.product(range(len(space.pages)), range(len(source.pages)))
            if space.pages[i] is None and (page := source.pages[j]) and page.place == "device" and not source.alias[j]
        ]
        if (pair := pick(pairs, which)) is None:
            return
        piece, slot = pair
        self.attempt(lambda: (space.range.alias(piece, source.range, slot, 1), True))
        space.pages[piece], space.alias[piece] = source.pages[slot], True

    @rule(n=NTH, ends=st.tuples(NTH, NTH), wait=st.booleans())
    def map_ahead(self, n: int, ends: tuple[int, int], wait: bool) -> None:
        """Whether these pieces have pages then is nobody's business before they are mapped."""
        if (space := self.a_space(n)) is None or space.range.owner != "kv":
            return
        span = self.a_span(space, ends)
        space.range.map_ahead(span.start, len(span))
        if wait:
            self.attempt(lambda: self.device.reap(wait=True))

    @rule(n=NTH, ends=st.tuples(NTH, NTH))
    def retire(self, n: int, ends: tuple[int, int]) -> None:
        if (space := self.a_space(n)) is None:
            return
        span = self.a_span(space, ends)
        self.attempt(lambda: (space.range.retire(span.start, len(span)), True))
        self.gone(space, span)

    def gone(self, space: Space, span: range) -> None:
        for i in span:
            if space.pins[i]:
                space.doomed[i] = space.pages[i] is not None
            else:
                space.drop(i)

    @rule(n=NTH, out=st.tuples(NTH, NTH), back=st.tuples(NTH, NTH), stream=st.integers(1, STREAMS))
    def shrink_and_grow(self, n: int, out: tuple[int, int], back: tuple[int, int], stream: int) -> None:
        """What retires while a stream is busy is taken back, among pieces that need pages of their own."""
        self.occupy(stream)
        self.retire(n, out)
        self.map(n, back, "device")

    @rule(n=NTH, which=NTH, place=st.sampled_from(["device", "host"]))
    def move(self, n: int, which: int, place: str) -> None:
        if (space := self.a_space(n)) is None:
            return
        piece = which % len(space.pages)
        page = space.pages[piece]
        moved = self.attempt(lambda: (space.range.move(piece, place),))  # type: ignore[arg-type]
        assert moved is not None
        if not moved[0]:
            return
        assert page is not None
        assert not space.alias[piece]
        assert not space.doomed[piece]
        page.place = place

    @rule(n=NTH, ends=st.tuples(NTH, NTH))
    def make_tensor(self, n: int, ends: tuple[int, int]) -> None:
        if (space := self.a_space(n)) is None:
            return
        span = self.a_span(space, ends)
        arguments = (span.start * self.page, (len(span) * self.page,), (1,), 1, 8)
        if any(space.pages[i] is None or space.doomed[i] for i in span):
            with pytest.raises(BallonetError):
                space.range.tensor(*arguments)
            return
        space.tensors.append((space.range.tensor(*arguments), span))
        for i in span:
            space.pins[i] += 1

    @rule(n=NTH, which=NTH)
    def drop_tensor(self, n: int, which: int) -> None:
        if (space := pick([space for space in self.spaces if space.tensors], n)) is None:
            return
        _, span = space.tensors.pop(which % len(space.tensors))
        for i in span:
            space.pins[i] -= 1
            if space.pins[i] == 0 and space.doomed[i]:
                space.drop(i)

    @rule(n=NTH)
    def close_range(self, n: int) -> None:
        if (space := self.a_space(n)) is None:
            return
        self.attempt(lambda: (space.range.close(), True))
        space.closed = True
        self.gone(space, range(len(space.pages)))

    @rule(n=NTH, stream=st.integers(0, STREAMS))
    def read(self, n: int, stream: int) -> None:
        """Work on a stream reads a range: its pages may not leave before that has passed."""
        if (space := self.a_space(n)) is None:
            return
        for i, page in enumerate(space.pages):
            if page is not None:
                self.device.note_stream(self.streams[stream])
                self.device.note_use(space.range.address + i * self.page, self.page, self.streams[stream], False)

    # -- blocks -------------------------------------------------------------------------------------------------------

    @rule(
        nbytes=st.one_of(st.integers(1, 600), st.integers(1, 5 * 4096), st.sampled_from([4096, 8192, 65536, 3 << 16])),
        stream=st.integers(0, STREAMS),
    )
    def allocate(self, nbytes: int, stream: int) -> None:
        nbytes = min(nbytes, 6 * self.page)
        at_most = -(-nbytes // self.page)
        room = self.budget - self.must_stay()
        try:
            address = self.attempt(lambda: self.device.allocate(nbytes, self.streams[stream]), refused=False)
        except AssertionError:
            if at_most <= room:  # pages of its own would have done
                raise
            return
        assert address is not None
        block = Block(address, nbytes, self.streams[stream], fresh())
        assert self.device.block_size(address) >= nbytes
        # Whoever used these bytes before must be done, as far as this stream can know.
        self.device.note_use(address, nbytes, block.stream, True)
        write(address, block.value, nbytes)
        self.blocks.append(block)

    @rule(n=NTH, stream=st.integers(0, STREAMS))
    def use_elsewhere(self, n: int, stream: int) -> None:
        """Work on another stream, ordered after that of the block's own, reads it."""
        block, other = pick(self.blocks, n), self.streams[stream]
        if block is None or other in (block.stream, *block.users):
            return
        event = outside.ctypes.c_void_p()
        with current_context() as it:
            it.ok("cuEventCreate", outside.ctypes.byref(event), 2)
            it.ok("cuEventRecord", event, block.stream)
            it.ok("cuStreamWaitEvent", other, event, 0)
            it.ok("cuEventDestroy", event)
        self.device.record_stream(block.address, other)
        self.device.note_use(block.address, block.nbytes, other, False)
        block.users.add(other)

    @rule(n=NTH)
    def deallocate(self, n: int) -> None:
        if (block := pick(self.blocks, n)) is None:
            return
        self.blocks.remove(block)
        assert holds(block.address, block.value, block.nbytes)
        self.device.deallocate(block.address)
        self.device.deallocate(block.address)  # now unknown, and ignored
        assert self.device.block_size(block.address) == 0

    # -- the whole ----------------------------------------------------------------------------------------------------

    @rule(pages=st.integers(0, 30))
    def set_budget(self, pages: int) -> None:
        before = faults_fired()
        try:
            self.attempt(lambda: (self.device.set_budget(pages * self.page), True))
        except BudgetInUse:
            # An unmap that fails is made up for by the next reap.
            assert pages < self.must_stay() or faults_fired() > before
            assert self.device.budget == self.budget * self.page
        else:
            self.budget = pages
            assert physical() <= pages * self.page

    @rule()
    def trim(self) -> None:
        before = faults_fired()
        self.attempt(self.device.trim)
        if faults_fired() == before:
            assert self.device.snapshot()["created"] == self.must_stay()

    @rule(wait=st.booleans())
    def reap(self, wait: bool) -> None:
        before = faults_fired()
        self.attempt(lambda: self.device.reap(wait=wait))
        if wait and faults_fired() == before:
            known = {page for s in self.spaces for i, page in enumerate(s.pages) if page and s.alias[i]}
            owned = {page for s in self.spaces for i, page in enumerate(s.pages) if page and not s.alias[i]}
            assert self.device.snapshot()["pages"]["retiring"] == len(known - owned)

    @rule(stream=st.integers(1, STREAMS))
    def occupy(self, stream: int) -> None:
        self.core.occupy(self.streams[stream], 0.02)

    @rule(function=st.sampled_from(MAPPING + MAPPING + EVENTS + OTHERS), ahead=st.integers(1, 3))
    def fault(self, function: str, ahead: int) -> None:
        # Twice in a row a page is kept for the next time.
        if function not in ("cuMemRelease", "cuMemUnmap") or not pending(function):
            arm(function, ahead)

    # -- what must always be so ---------------------------------------------------------------------------------------

    def write_piece(self, space: Space, piece: int) -> None:
        page = space.pages[piece]
        assert page is not None
        write(space.range.address + piece * self.page, page.value, self.page)

    @invariant()
    def everything_holds(self) -> None:
        self.device.check()
        for _ in range(1000):
            before = self.state()
            snapshot = self.device.snapshot()
            exist, table = physical(), AddressTable(self.page)
            if before == self.state():  # the device's thread has done nothing in between
                break
        else:
            raise AssertionError("the device's thread never comes to an end")
        assert sum(snapshot["pages"].values()) == snapshot["created"]
        assert exist == snapshot["created"] * self.page
        assert physical("host") == snapshot["host_pages"] * self.page
        assert snapshot["created"] <= self.budget
        assert snapshot["kept"] + snapshot["ahead"] <= snapshot["pages"]["free"]
        self.addresses_show_what_they_should(table, before.backings)
        for space in self.spaces:
            for i, page in enumerate(space.pages):
                if page is not None:
                    assert holds(space.range.address + i * self.page, page.value, self.page)
        for block in self.blocks:
            assert holds(block.address, block.value, block.nbytes)

    def state(self) -> State:
        backings = [[space.range.leads_to(i) for i in range(len(space.pages))] for space in self.spaces]
        return State(self.core.created(), self.device.snapshot()["driver_calls"]["cuMemUnmap"], backings)

    def addresses_show_what_they_should(self, table: AddressTable, backings: list[list[_native.Backing]]) -> None:
        """Every page that is owned lies behind one owner's addresses only, and what is not mapped is out of reach."""
        owner_of: dict[int, object] = {}  # offset in the device's memfd -> page of the model, or page of addresses
        for number, space in enumerate(self.spaces):
            for i, page in enumerate(space.pages):
                if page is None and space.closed:
                    continue  # the addresses may be someone else's, or the system's
                place, access, offset = table.behind(space.range.address + i * self.page)
                if page is not None:
                    assert (place, access) == (page.place, "rw-s")
                    assert backings[number][i] == ("alias" if space.alias[i] else page.place)
                    if place == "device":
                        assert owner_of.setdefault(offset, page) is page
                    continue
                backing = backings[number][i]
                if backing == "kept":
                    assert (place, access) == ("device", "rw-s")
                    assert owner_of.setdefault(offset, (space, i)) == (space, i)
                elif backing == "none":
                    assert (place, access) == (None, "---p")
                    assert space.range.page(i) == -1
                else:
                    assert backing == "retiring"
        for block in self.blocks:
            for page in self.seen(block):
                place, access, offset = table.behind(page * self.page)
                assert (place, access) == ("device", "rw-s")
                assert owner_of.setdefault(offset, page) == page

    def teardown(self) -> None:
        disarm()
        for block in self.blocks:
            self.device.deallocate(block.address)
        for space in self.spaces:
            space.tensors.clear()
            space.range.close()
        self.spaces.clear()
        self.core.finish()
        self.device.check()
        self.device.close()
        assert physical() == physical("host") == 0


class AddressTable:
    """/proc/self/maps, read once."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.lines = outside.maps(0, 2**48, only=("---p", "memfd:ballonet"))

    def behind(self, address: int) -> tuple[str | None, str, int]:
        for one in self.lines:
            if one.begin <= address and address + self.page <= one.end:
                return one.place, one.access, one.offset + address - one.begin
        raise AssertionError(f"no single map covers {address:#x}")


@pytest.mark.parametrize("page", [4096, 65536])
def test_anything_in_any_order(page: int) -> None:
    assert driver().is_standin
    machine = type("MachineOfPages", (Machine,), {"page": page})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(os.environ.get("BALLONET_EXAMPLES", "25")),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
