"""Nobody waits with a lock that others need: while one thread waits for a stream, for a copy or for memory that is
being pinned, held there by a gate in the driver, others note streams, map, allocate, copy and ask.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch.utils.dlpack import from_dlpack

from ballonet.allocator import _native

from .core import (
    COPIES,
    EVENTS,
    HOST,
    PAGE,
    Core,
    Gate,
    current_context,
    entry,
    eventually,
    opened,
)
from .entries import Layer

LOWER = "lower the budget"


def weights(core: Core, pieces: int = 2, group: _native.Group | None = None) -> _native.Range:
    return core.range(pieces, "weights", group, mapped=pieces, value=1)


def led_elsewhere(core: Core) -> tuple[_native.Range, _native.Range]:
    one, slot = weights(core), weights(core)
    assert one.alias(0, slot, 0, 2)
    return one, slot


def take_over(core: Core) -> Callable[[], object]:
    group = core.device.group()
    range_, twin, spare = (core.range(1, "kv", group) for _ in range(3))
    twin.map_peer(0, 1)
    spare.map_host(0, 1)
    range_.alias(0, twin, 0, 1)
    return lambda: twin.take_over(0, spare, 0, 1, range_)


def published(core: Core) -> None:
    group = core.device.group()
    range_, twin = weights(core, 2, group), core.range(2, "weights", group)
    core.device.publish([Layer(core, group, range_, twin, 1).entry(7)])


def retired(core: Core, pieces: int, then: Callable[[], object]) -> Callable[[], object]:
    old = weights(core, pieces)
    return lambda: (old.retire(0, pieces), then())


def copies(core: Core) -> Callable[[], object]:
    (target, source), transfer = (weights(core), weights(core)), _native.Transfer(core.device)
    return transfer.copy([(target.address, source.address, PAGE)], after=0, owner="weights", to="device").wait


def forget_memory(core: Core) -> Callable[[], object]:
    held = _native.HostMemory(core.device, bytearray(PAGE), 0, PAGE)
    _native.Transfer(core.device)
    return held.close


# What a device is prepared for, and then does; and where it is kept.
HELD: dict[str, tuple[Callable[[Core], Callable[[], object]], tuple[int, ...]]] = {
    "alias": (lambda core: partial(weights(core).alias, 0, weights(core), 0, 2), (EVENTS,)),
    "own": (lambda core: partial(led_elsewhere(core)[0].own, 0, 2), (EVENTS,)),
    "move": (lambda core: partial(weights(core).move, 0, "device"), (EVENTS, COPIES)),
    "take over": (take_over, (EVENTS,)),
    "take": (lambda core: (published(core), partial(core.device.take, [7]))[1], (EVENTS, COPIES, HOST)),
    "reap": (lambda core: retired(core, 2, lambda: core.device.reap(wait=True)), (EVENTS,)),
    "map what retires": (lambda core: retired(core, 8, partial(core.range(20, "weights").map, 0, 20)), (EVENTS,)),
    "map on the host": (lambda core: partial(core.range(2, "weights").map_host, 0, 2), (HOST,)),
    "allocate what retires": (
        lambda core: retired(core, 12, lambda: core.device.deallocate(core.device.allocate(16 * PAGE))),
        (EVENTS,),
    ),
    LOWER: (lambda core: retired(core, 20, lambda: core.device.set_budget(20 * PAGE, 10**11)), (EVENTS,)),
    "copies": (copies, (EVENTS,)),
    "forget memory": (forget_memory, (COPIES,)),
}


@pytest.mark.parametrize(("held", "which"), [(held, which) for held in HELD for which in HELD[held][1]])
def test_others_go_on_while_one_thread_waits(held: str, which: int, gate: Gate) -> None:
    with opened(budget=24, path=gate.path, peer=1, peer_budget=4 * PAGE) as core, ThreadPoolExecutor(2) as pool:
        block = core.device.allocate(100)  # there is room beside it
        kv, seen = core.range(4), weights(core, 1)
        kv.map(0, 1)
        transfer = _native.Transfer(core.device)
        made = ctypes.c_void_p()
        with current_context() as it:
            it.ok("cuStreamCreate", ctypes.byref(made), 1)
        work = HELD[held][0](core)
        gate.close(which)
        waiter = pool.submit(work)
        eventually(gate.waiting)

        def others() -> None:
            core.device.note_stream(made.value or 0)
            core.device.deallocate(core.device.allocate(100))
            if held != LOWER:
                kv.map(1, 1)
            tensor = from_dlpack(kv.tensor(0, (PAGE,), (1,), 1, 8))
            tensor.fill_(3)
            transfer.copy([(seen.address, kv.address, PAGE)], after=0, owner="kv", to="device")
            del tensor
            kv.retire(0, 2)
            core.range(1).close()
            group = core.device.group()
            group.enter()
            group.leave()
            core.device.snapshot()

        other = pool.submit(others)
        try:
            other.result(timeout=600)
            assert gate.waiting()
        finally:
            gate.open()
        waiter.result()
        core.device.deallocate(block)
        core.device.reap(wait=True)


def test_page_retired_while_it_is_copied_is_not_moved(gate: Gate) -> None:
    with opened(path=gate.path) as core, ThreadPoolExecutor(1) as pool:
        one = weights(core)
        gate.close(COPIES)
        mover = pool.submit(one.move, 0, "host")
        eventually(gate.waiting)
        one.retire(0, 1)
        core.device.check()
        gate.open()
        assert not mover.result()
        core.device.reap(wait=True)
        assert one.leads_to(0) == "none"
        assert core.pages()["pending_free"] == 0


def test_a_page_that_is_copied_from_meanwhile_is_not_moved(gate: Gate) -> None:
    """The move has waited for the streams by then, and the copy was submitted after that."""
    with opened(path=gate.path) as core, ThreadPoolExecutor(1) as pool:
        one, twin = weights(core), core.range(2, "weights")
        twin.map_host(0, 1)
        transfer = _native.Transfer(core.device)
        gate.close(COPIES)
        mover = pool.submit(one.move, 0, "device")
        eventually(gate.waiting)
        copied = transfer.copy([(twin.address, one.address, PAGE)], after=0, owner="weights", to="host")
        gate.open()
        assert not mover.result()
        copied.wait()
        assert one.move(0, "device")


@pytest.mark.parametrize("what", ["range", "twin"])
def test_range_closed_while_its_twin_is_filled_is_not_taken(what: str, gate: Gate) -> None:
    with opened(path=gate.path) as core, ThreadPoolExecutor(1) as pool:
        group = core.device.group()
        range_, twin = weights(core, 2, group), core.range(2, "weights", group)
        core.device.publish([Layer(core, group, range_, twin, 1).entry(7)])
        gate.close(COPIES)
        taker = pool.submit(core.device.take, [7])
        eventually(gate.waiting)
        {"range": range_, "twin": twin}[what].close()
        gate.open()
        assert taker.result() == 0
        assert core.device.published == []
        core.device.reap(wait=True)
        other = {"range": twin, "twin": range_}[what]
        assert other.leads_to(0) == ("none" if what == "range" else "device")


def test_two_who_map_the_same_pieces_wait_for_the_same_pages(gate: Gate) -> None:
    """Each looks again after it has waited: neither maps over the other."""
    with opened(budget=8, path=gate.path) as core, ThreadPoolExecutor(2) as pool:
        old, new = weights(core, 6), core.range(8, "weights")
        gate.close(EVENTS)  # first: the mapper's thread is not to find that the streams have passed
        old.retire(0, 6)
        both = [pool.submit(new.map, first, 6) for first in (0, 2)]
        eventually(lambda: gate.waiting() == 2)
        gate.open()
        for future in both:
            future.result()
        assert [new.leads_to(piece) for piece in range(8)] == ["device"] * 8


# The stream that is waited for has a host function, which needs the interpreter's lock.
DEADLOCK = """
import threading, time
gate = ctypes.PyDLL(library)
# These keep the interpreter's lock, as torch does where a tensor dies.
free = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(ctypes.cast(core.deallocate, ctypes.c_void_p).value)
used = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(core.record_stream, ctypes.c_void_p).value)

def some(pieces, owner="weights"):
    made = device.reserve(pieces * 4096, owner, device.group())
    made.map(0, pieces)
    return made

block, old, one = allocate(512), some(8), some(2)
gate.need_interpreter()
gate.close_gate(1)  # first: the mapper's thread is not to find that the streams have passed
old.retire(0, 8)
waiter = threading.Thread(target={waits})
waiter.start()
while not gate.waiting():
    time.sleep(0.001)
gate.close_gate(0)  # and from here on it needs the interpreter's lock, which this thread keeps
free(block)
used(one.address, 0x7fff0000)
free(0)
device.unbind()
waiter.join()
"""


@pytest.mark.parametrize(
    "waits",
    [
        "lambda: device.deallocate(device.allocate(10 * 4096))",
        "lambda: device.reap(wait=True)",
        "lambda: one.move(0, 'device')",
    ],
)
def test_a_stream_may_need_the_interpreter_to_go_on(waits: str, gate: Gate) -> None:
    entry(DEADLOCK.replace("{waits}", waits), gate.path, options="budget=16 * 4096, host_budget=0")


def own_calls(device: _native.Device, work: Callable[[], object]) -> dict[str, int]:
    """Driver calls that `work` makes, without those of the mapper's thread."""

    def made() -> dict[str, int]:
        now = device.snapshot()
        return {name: count - now["background_calls"][name] for name, count in now["driver_calls"].items()}

    before = made()
    work()
    return {name: count - before[name] for name, count in made().items() if count != before[name]}


def test_a_snapshot_calls_no_driver(core: Core, gate: Gate) -> None:
    some = weights(core, 8)
    gate.close(EVENTS)
    some.retire(0, 8)
    assert own_calls(core.device, core.device.snapshot) == {}
    assert core.pages()["pending_free"] == 8
    gate.open()

    def all_gone() -> bool:
        return core.pages()["pending_free"] == 0

    assert own_calls(core.device, lambda: eventually(all_gone)) == {}  # the mapper's thread unmaps them


def test_all_copies_share_two_streams(core: Core) -> None:
    source, target = weights(core), weights(core)

    def forty() -> None:
        for _ in range(40):
            transfer = _native.Transfer(core.device)
            for to in ("device", "host"):
                transfer.copy([(target.address, source.address, PAGE)], after=0, owner="weights", to=to).before(0)
            del transfer

    calls = own_calls(core.device, forty)
    assert calls["cuStreamCreate"] == 2
    assert not calls.keys() & {"cuStreamDestroy", "cuStreamSynchronize", "cuCtxSynchronize"}
    assert calls["cuMemcpyAsync"] == 80


def test_a_stream_that_was_destroyed_costs_one_synchronisation(core: Core) -> None:
    stream = ctypes.c_void_p()
    with current_context() as it:
        it.ok("cuStreamCreate", ctypes.byref(stream), 1)
        core.device.note_stream(stream.value or 0)
        it.ok("cuStreamDestroy", stream)

    def retire() -> None:
        weights(core).retire(0, 2)
        core.device.reap(wait=True)
        eventually(lambda: core.pages()["pending_free"] == 0)

    def synchronisations() -> int:
        count: int = core.device.snapshot()["driver_calls"]["cuCtxSynchronize"]
        return count

    before = synchronisations()
    for _ in range(5):
        retire()
    assert synchronisations() - before in (1, 2)  # who waits, and the background at the same moment
    before = synchronisations()
    core.device.note_stream(stream.value or 0)  # the same handle is another stream's by now
    retire()
    assert synchronisations() - before in (1, 2)


def test_ranges_that_are_closed_together_share_a_fence(gate: Gate) -> None:
    with opened(budget=64, path=gate.path) as core:
        for _ in range(12):
            core.stream()
        ranges = [weights(core, 1) for _ in range(32)]
        core.device.reap(wait=True)
        gate.close(EVENTS)
        weights(core, 1).retire(0, 1)
        held = core.device.snapshot()
        for range_ in ranges:
            range_.close()
        gate.open()
        eventually(lambda: core.pages()["pending_free"] == 0)
        after = core.device.snapshot()["driver_calls"]
        # One fence over 12 streams, the legacy one and that of copies; perhaps the first one's as well.
        assert after["cuEventRecord"] - held["driver_calls"]["cuEventRecord"] <= 2 * 14


def test_a_tensor_over_a_range_is_used_on_another_stream() -> None:
    """record_stream on weights, or KV: their pages do not leave before the stream has passed."""
    entry(
        """
        lib = ctypes.CDLL(library)
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        lib.cuCtxSetCurrent(context)
        lib.cuStreamCreate(ctypes.byref(stream), 1)
        kv = device.reserve(4 * 4096, "kv", device.group())
        def recorded():
            kv.map(0, 1)
            before = device.snapshot()["driver_calls"]["cuEventRecord"]
            kv.retire(0, 1)
            device.reap(wait=True)
            return device.snapshot()["driver_calls"]["cuEventRecord"] - before
        assert recorded() == 2  # on the legacy stream, and that of copies
        core.record_stream(kv.address + 4 * 4096, stream)  # no address of it
        assert recorded() == 2
        core.record_stream(kv.address + 100, stream)
        core.record_stream(kv.address + 100, stream)
        assert recorded() == 3
        device.unbind()
        """
    )


def test_the_default_streams_of_threads_share_a_handle_and_no_block(core: Core, gate: Gate) -> None:
    legacy, per_thread, device = 0, 2, core.device
    device.note_stream(per_thread)
    some = weights(core)
    calls = own_calls(device, lambda: (some.retire(0, 2), device.reap(wait=True)))
    assert "cuCtxSynchronize" not in calls
    block = device.allocate(4096, per_thread)
    gate.close(EVENTS)
    device.deallocate(block)  # another thread's stream of this handle may not have it yet
    other = device.allocate(4096, per_thread)
    assert other != block
    gate.open()
    device.deallocate(other)
    plain = device.allocate(8192, legacy)
    device.record_stream(plain, per_thread)
    gate.close(EVENTS)
    device.deallocate(plain)
    assert device.allocate(8192, legacy) != plain
    gate.open()


def test_a_capture_that_begins_meanwhile_is_not_looked_at(core: Core, gate: Gate) -> None:
    """The capture begins on another thread while an event is being recorded."""
    some = weights(core)
    gate.library.capture_next(1)
    some.retire(0, 2)
    before = core.device.snapshot()["driver_calls"]["cuStreamIsCapturing"]
    eventually(lambda: core.device.snapshot()["driver_calls"]["cuStreamIsCapturing"] > before + 8)
    core.device.reap()
    assert some.leads_to(0) == "pending_free"
    gate.capture(False)
    eventually(lambda: some.leads_to(0) == "none")
    assert gate.library.looks() == 0


def test_no_event_is_recorded_while_a_graph_may_be_captured() -> None:
    """Between torch's first word of a capture and its last, unless somebody needs the pages."""
    with opened(budget=4) as core:
        device = core.device
        device.deallocate(device.allocate(100))
        some = weights(core)
        pool = (1, 1)
        device.begin_pool(pool)
        before = device.snapshot()["driver_calls"]["cuEventRecord"]
        some.retire(0, 2)
        device.reap()
        asked = device.snapshot()["driver_calls"]["cuStreamIsCapturing"]
        eventually(lambda: device.snapshot()["driver_calls"]["cuStreamIsCapturing"] > asked + 8)
        assert device.snapshot()["driver_calls"]["cuEventRecord"] == before
        assert some.leads_to(0) == "pending_free"
        core.range(3).map(0, 3)  # no capture has begun: they are waited for
        assert some.leads_to(0) == "none"
        other = core.range(1, "weights")
        device.reap(wait=True)
        device.end_pool(pool)
        device.release_pool(pool)
        del other
        eventually(lambda: core.pages()["pending_free"] == 0)
