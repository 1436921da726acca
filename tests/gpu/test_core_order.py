"""Who waits for whom at the core: copies, the streams before and after them, streams that pages and blocks have seen,
threads with a lease. In each scene somebody is slow, and what happens if nobody waits for it shows in the bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.dlpack import from_dlpack

from ballonet.allocator._native import Done, Lease, Transfer

from .hold import held, meanwhile
from .scene import UINT8, Captured, Place, over, scene

PIECES = 4


def words(place: Place) -> int:
    return PIECES * place.page // 4


class Link:
    """Two ranges, the second of which lies on the host if it can, and copies between them."""

    def __init__(self, place: Place) -> None:
        self.here, self.there = place.range(PIECES), place.range(PIECES, mapped=False)
        (self.there.map_host if place.device.host_pages else self.there.map)(0, PIECES)
        self.near, self.far = (over(memory, torch.int32, words(place)) for memory in (self.here, self.there))
        self.near.fill_(1)
        self.far.fill_(2)
        self._transfer = Transfer(place.device)
        place.synchronize()

    def fetch(self, after: int | None, times: int = 1) -> Done:
        copies = [(self.here.address, self.there.address, self.here.nbytes)] * times
        return self._transfer.copy(copies, after=after, owner="kv", to="device")

    def send(self, after: int | None, times: int = 1) -> Done:
        copies = [(self.there.address, self.here.address, self.here.nbytes)] * times
        return self._transfer.copy(copies, after=after, owner="kv", to="host")


def a_copy_waits_for_who_reads(place: Place) -> None:
    """What a copy overwrites was read by work that is slow."""
    link, reader = Link(place), place.lane()
    read = torch.empty_like(link.near)
    with reader():
        place.sleep()
        read.copy_(link.near)
        done = link.fetch(place.current)
    done.wait()
    assert done.passed(), "the host did not wait for the copy"
    assert read.eq(1).all().item(), "the copy did not wait for who reads what it overwrites"
    assert link.near.eq(2).all().item()


def a_copy_of_all_waits_for_all(place: Place) -> None:
    """A copy that names no stream comes after the work of every stream that the pool has seen."""
    link, writer = Link(place), place.lane()
    with writer():
        place.sleep()
        link.near.fill_(3)
    link.send(None).wait()
    assert link.far.eq(3).all().item()


def who_reads_waits_for_a_copy(place: Place) -> None:
    """The copy begins late, as its source is written by slow work; another stream is to read what it brings."""
    link, writer, reader = Link(place), place.lane(), place.lane()
    read = torch.empty_like(link.near)
    with writer():
        place.sleep()
        link.far.fill_(3)
        done = link.fetch(place.current)
    with reader():
        done.before(place.current)
        read.copy_(link.near)
    assert place.kind == "cpu" or not done.passed(), "a copy is said to be done before it has begun"
    reader.lead()
    assert read.eq(3).all().item(), "the stream did not wait for the copy"
    assert done.passed()


def copies_of_one_direction_keep_their_order(place: Place) -> None:
    """The second one waits for nothing but the first, and both write to the same pages."""
    link, writer = Link(place), place.lane()
    other = place.range(PIECES)
    over(other, torch.int32, words(place)).fill_(5)
    place.synchronize()
    with writer():
        place.sleep()
        link.fetch(place.current)
    copies = [(link.here.address, other.address, other.nbytes)]
    Transfer(place.device).copy(copies, after=place.current, owner="kv", to="device").wait()
    place.synchronize()
    assert link.near.eq(5).all().item(), "the first one came last"


def pages_wait_for_a_copy(place: Place) -> None:
    """Pages that copies read or write are given up before those have begun: they leave after them."""
    link, writer = Link(place), place.lane()
    del link.near, link.far
    for copy, gone in ((link.fetch, link.here), (link.send, link.there)):
        with writer():
            place.sleep()
            done = copy(place.current, 16)
        gone.retire(0, 1)
        while not done.passed():
            place.device.reap()
            place.device.free_memory()  # raises where the device has failed
        place.device.reap(wait=True)
        (gone.map if gone is link.here or not place.device.host_pages else gone.map_host)(0, 1)


def pages_wait_for_streams_of_copies(place: Place) -> None:
    """A stream that has copies come after it is known by that."""
    link = Link(place)
    seen = torch.empty_like(link.near)
    place.synchronize()
    with place.lane(known=False)():
        place.sleep()
        link.fetch(place.current).before(place.current)
        seen.copy_(link.near)
        place.sleep()
        seen.copy_(link.near)
    del link.near
    time.sleep(0.6 if place.cuda else 0)  # the copies have passed, and what the stream was given has not
    link.here.retire(0, 1)
    place.device.reap()
    place.synchronize()
    assert seen.eq(2).all().item()


def pages_wait_for_streams(place: Place, recorded: bool) -> None:
    """A page that a stream reads does not leave before. The stream is known only by what it has allocated, or by a
    tensor over the page that says so, as any tensor does."""
    held, lane = place.range(1), place.lane(known=False)
    given = over(held, torch.int32, place.page // 4).fill_(7)
    seen = torch.empty_like(given)
    place.synchronize()
    with lane():
        if not recorded:
            seen = torch.empty_like(given)
        place.sleep()
        seen.copy_(given)
    if recorded:
        lane.uses(given)
    del given
    held.retire(0, 1)
    assert place.device.reap() == 0 or not place.cuda
    place.synchronize()
    assert seen.eq(7).all().item()


def blocks_wait_for_recorded_streams(place: Place) -> None:
    """A block that another stream still reads is not given to who asks for as much."""
    given = torch.full((words(place),), 7, dtype=torch.int32, device=place.kind)
    lane, seen = place.lane(), torch.empty_like(given)
    place.synchronize()
    with lane():
        place.sleep()
        seen.copy_(given)
        lane.uses(given)
    del given
    others = [torch.full((words(place),), 9, dtype=torch.int32, device=place.kind) for _ in range(2)]
    lane.lead()
    assert seen.eq(7).all().item(), "somebody got a block while it was read"
    assert all(other.eq(9).all().item() for other in others)


class Counting:
    """A thread's forward, as the core sees one: it counts in pages that it leases, launch after launch."""

    def __init__(self, place: Place) -> None:
        self.group = place.device.group()
        self.range, self.twin = (place.device.reserve(PIECES * place.page, "kv", self.group) for _ in range(2))
        self.range.map(0, PIECES)
        self._place, self._lane = place, place.lane()
        self._counter = over(self.range, torch.int32, words(place)).zero_()
        self._launched = 0
        self._lane.follow()

    def forward(self, launches: int, between: Callable[[int], bool] = lambda _: True) -> None:
        """`between`: after each launch; should it go on?"""
        lease = Lease()
        lease.enter(self.group)
        for number in range(launches):
            with self._lane():
                self._counter.add_(1)
            self._launched += 1
            if number % 16 == 15:
                self._place.synchronize()
            if not between(number):
                break
        lease.close()

    def check(self) -> None:
        self._lane.lead()
        assert self._counter.eq(self._launched).all().item(), "a launch counted in pages that were gone"


def beside(place: Place, act: Callable[[Counting], bool]) -> None:
    """`act` says whether it did what it is to do, which the lease of another thread forbids."""
    counting, inside = Counting(place), threading.Event()

    def between(number: int) -> bool:
        if number == 8:
            inside.set()
        return not acted.done()

    with ThreadPoolExecutor(1) as threads:
        acted = threads.submit(lambda: inside.wait(600) and act(counting))
        counting.forward(5000, between)
    counting.check()
    assert acted.result() is False, "another thread's lease was not asked for"
    counting.forward(12)
    assert act(counting), "beside what was launched before it waits"
    counting.forward(3)
    counting.check()


@scene()
def test_moves_beside_a_forward(place: Place) -> None:
    beside(place, lambda counting: counting.range.move(1, "device"))


@scene(needs_host=True)
def test_pages_taken_beside_a_forward(place: Place) -> None:
    def take(counting: Counting) -> bool:
        place.device.publish([(1, counting.group, [(counting.range, 0, PIECES, counting.twin, 0, [])])])
        return place.device.take([1]) == PIECES

    beside(place, take)


@scene()
def test_captures_go_on(place: Place) -> None:
    """While one stream is captured pages and blocks are given up and looked after, and copies wait for what others do:
    the capture ends well, and its graph does what was captured. What was given up leaves afterwards."""
    link, aside, held = Link(place), place.lane(), place.range(2)
    given, x = over(held, torch.int32, place.page // 4), torch.ones(1000, device=place.kind)
    given.fill_(1)
    copied: list[Done] = []

    def work() -> tuple[torch.Tensor, ...]:
        doubled = x * 2
        if place.cuda and torch.cuda.is_current_stream_capturing():
            block = torch.empty(1000, device=place.kind)
            aside.uses(block)
            del block
            held.retire(1, 1)
            assert place.device.reap() == 0, "what may belong to a graph was looked at"
            assert not held.move(0, "device")
            with aside():
                copied.append(link.fetch(place.current))
        return (doubled + 1,)

    captured = Captured(place, work)
    x.fill_(5)
    assert captured.replay()[0].eq(11).all().item()
    for done in copied:
        done.before(place.current)
    assert link.near.eq(2 if place.cuda else 1).all().item()
    del captured, given
    place.synchronize()
    place.device.reap(wait=True)
    assert held.leads_to(1) == ("none" if place.cuda else "device")


@scene()
def test_copies(place: Place) -> None:
    a_copy_waits_for_who_reads(place)
    a_copy_of_all_waits_for_all(place)
    who_reads_waits_for_a_copy(place)
    copies_of_one_direction_keep_their_order(place)


@scene()
def test_pages_and_blocks(place: Place) -> None:
    pages_wait_for_streams(place, recorded=False)
    pages_wait_for_streams_of_copies(place)
    pages_wait_for_streams(place, recorded=True)
    blocks_wait_for_recorded_streams(place)
    pages_wait_for_a_copy(place)


@scene()
def test_pages_are_made_beside_a_busy_stream(place: Place) -> None:
    """What one stream has freed serves another one once it has passed. Until then the other one gets new pages."""
    nbytes = 8 * place.page
    del (block := [torch.empty(nbytes, dtype=torch.uint8, device=place.kind)])[:]
    with held(place):
        with place.lane()():
            block.append(torch.empty(nbytes, dtype=torch.uint8, device=place.kind))
        created = place.device.snapshot()["created"]
        assert created * place.page >= 2 * nbytes or not place.cuda
    place.synchronize()
    place.device.reap(wait=True)
    with place.lane()():
        block.append(torch.empty(nbytes, dtype=torch.uint8, device=place.kind))
    assert place.device.snapshot()["created"] <= created + 1 or not place.cuda


@scene()
def test_given_up_beside_moves(place: Place) -> None:
    """One thread gives pages up and maps others without a lease; another one is moving them at that moment."""
    group, moves, tried, at = place.device.group(), 0, 0, 0
    held = place.device.reserve(PIECES * place.page, "kv", group)
    held.map(0, PIECES)

    def move() -> None:
        nonlocal moves, tried, at
        at = tried % PIECES
        moves += held.move(at, "device")
        tried += 1

    def until(count: int) -> None:
        deadline = time.monotonic() + 600
        while tried < count and time.monotonic() < deadline:
            time.sleep(0.0001)

    with meanwhile(move):
        for step in range(100):
            until(tried + 1)
            piece, before = at, tried  # which has just begun to move
            time.sleep(step % 10 * 0.0003)
            held.retire(piece, 1)
            until(before + 2)  # what was being moved has been
            assert held.leads_to(piece) in ("pending_free", "none"), "a page that was given up is back"
            held.map(piece, 1)
            lease = Lease()
            lease.enter(group)
            bytes_there = from_dlpack(held.tensor(piece * place.page, (place.page,), (1,), *UINT8))
            bytes_there.fill_(step % 251)
            assert bytes_there.eq(step % 251).all().item()
            del bytes_there
            lease.close()
    assert moves
