"""What only an asynchronous device shows, on the simulated one: order, captures, peers, exhaustion.

Operations that a test has to see unfinished are held or wait for a gate; nothing is timed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..simgpu.build import build_device
from .driver import (
    DEVICE,
    HOST,
    NOT_READY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    SUCCESS,
    AllocationProp,
    Location,
    private_copy,
    properties,
)
from .simulated import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_ISOLATION,
    CAPTURE_UNJOINED,
    CAPTURE_UNSUPPORTED,
    CAPTURED_EVENT,
    GLOBAL,
    LEGACY,
    PER_THREAD,
    RELAXED,
    THREAD_LOCAL,
    Simulated,
)

PAGE = 64 << 10


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Simulated]:
    """Starts a device with a state of its own; keywords are settings without their prefix."""

    def started(**settings: object) -> Simulated:
        for name, value in {"GRANULARITY": PAGE, "MEMORY": "16MiB", **settings}.items():
            monkeypatch.setenv(f"SIMGPU_{name}", str(value))
        return Simulated(private_copy(build_device() / "libcuda.so.1", tmp_path))

    return started


@pytest.fixture
def gpu(start: Callable[..., Simulated]) -> Iterator[Simulated]:
    device = start()
    yield device
    device.clear()
    free, total = device.memory()
    assert (free, device.counts().reports, device.failures) == (total, 0, [])
    device.finish()


class Gate:
    """A kernel that does not end before it is opened."""

    def __init__(self) -> None:
        self.opened, self.entered = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.opened.wait(600), "nobody opened the gate"


# -- order -----------------------------------------------------------------------------------------------------------


def test_the_host_runs_ahead(gpu: Simulated) -> None:
    with gpu.mapped(PAGE) as page, gpu.stream() as stream, gpu.event() as event:
        gpu.ok("cuMemsetD8Async", page, 1, PAGE, stream)
        gpu.ok("cuStreamSynchronize", stream)
        with gpu.held():
            gpu.ok("cuMemsetD8Async", page, 2, PAGE, stream)
            gpu.ok("cuEventRecord", event, stream)
            assert gpu.result("cuEventQuery", event) == NOT_READY
            assert gpu.call("cuStreamQuery", stream) == NOT_READY
            assert ctypes.string_at(page, 2) == b"\1\1"
        gpu.ok("cuEventSynchronize", event)
        assert ctypes.string_at(page, 2) == b"\2\2"
        assert gpu.call("cuStreamQuery", stream) == SUCCESS


def test_streams_run_side_by_side_and_events_order_them(gpu: Simulated) -> None:
    seen: list[str] = []
    gate = Gate()
    with gpu.stream() as one, gpu.stream() as other, gpu.stream() as third, gpu.event() as event:
        assert gpu.launch(one, gate) == SUCCESS
        gpu.launch(one, lambda: seen.append("one"))
        gpu.ok("cuEventRecord", event, one)
        gpu.ok("cuStreamWaitEvent", other, event, 0)
        gpu.launch(other, lambda: seen.append("other"))
        gpu.launch(third, lambda: seen.append("third"))
        gpu.ok("cuStreamSynchronize", third)
        assert seen == ["third"]
        gate.opened.set()
        gpu.ok("cuStreamSynchronize", other)
        assert seen == ["third", "one", "other"]


@pytest.mark.parametrize("legacy_first", [False, True])
def test_the_legacy_stream_and_blocking_streams_wait_for_each_other(gpu: Simulated, legacy_first: bool) -> None:
    seen: list[str] = []
    gate = Gate()
    with gpu.blocking_stream() as blocking, gpu.stream() as free:
        first, second = (LEGACY, blocking) if legacy_first else (blocking, LEGACY)
        gpu.launch(first, gate)
        gpu.launch(second, lambda: seen.append("second"))
        gpu.launch(first, lambda: seen.append("first"))
        gpu.launch(free, lambda: seen.append("free"))
        gpu.ok("cuStreamSynchronize", free)
        assert (seen, gpu.call("cuStreamQuery", second)) == (["free"], NOT_READY)
        gate.opened.set()
        gpu.ok("cuStreamSynchronize", first)
        assert seen == ["free", "second", "first"]


def test_each_thread_has_a_default_stream_of_its_own(gpu: Simulated) -> None:
    seen: list[str] = []
    gate = Gate()

    def other_thread() -> None:
        gpu.enter()
        gpu.launch(PER_THREAD, lambda: seen.append("other"))
        gpu.ok("cuStreamSynchronize", PER_THREAD)

    gpu.launch(PER_THREAD, gate)
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == ["other"]
    gpu.launch(LEGACY, lambda: seen.append("legacy"))
    gate.opened.set()
    gpu.ok("cuStreamSynchronize", LEGACY)
    assert seen == ["other", "legacy"]


# -- copies ----------------------------------------------------------------------------------------------------------


def test_pageable_bytes_are_staged_and_pinned_ones_are_read_late(gpu: Simulated) -> None:
    with gpu.mapped(2 * PAGE) as pages, gpu.pinned(PAGE) as pinned, gpu.stream() as stream:
        pageable = ctypes.create_string_buffer(b"a" * PAGE, PAGE)
        ctypes.memset(pinned, ord("a"), PAGE)
        with gpu.held():
            gpu.ok("cuMemcpyAsync", pages, ctypes.addressof(pageable), PAGE, stream)
            gpu.ok("cuMemcpyAsync", pages + PAGE, pinned, PAGE, stream)
            ctypes.memset(pageable, ord("b"), PAGE)
            ctypes.memset(pinned, ord("b"), PAGE)
        gpu.ok("cuStreamSynchronize", stream)
        assert ctypes.string_at(pages, PAGE) == b"a" * PAGE
        assert ctypes.string_at(pages + PAGE, PAGE) == b"b" * PAGE


def test_a_copy_to_pageable_memory_waits_and_one_to_pinned_memory_does_not(gpu: Simulated) -> None:
    with gpu.mapped(PAGE) as page, gpu.pinned(PAGE) as pinned, gpu.stream() as stream:
        target = ctypes.create_string_buffer(PAGE)
        gate = Gate()
        gpu.launch(stream, lambda: (gate(), ctypes.memset(page, 7, PAGE)), (page, PAGE, True))
        gpu.ok("cuMemcpyAsync", pinned, page, PAGE, stream)  # returns
        assert ctypes.string_at(pinned, 1) == b"\0"
        threading.Timer(0.05, gate.opened.set).start()
        gpu.ok("cuMemcpyAsync", ctypes.addressof(target), page, PAGE, stream)
        assert target.raw == ctypes.string_at(pinned, PAGE) == b"\7" * PAGE


# -- captures --------------------------------------------------------------------------------------------------------


def test_a_capture_runs_nothing_and_each_replay_runs_all(gpu: Simulated) -> None:
    with gpu.mapped(2 * PAGE) as page, gpu.stream() as stream:
        seen: list[bytes] = []
        dropped: list[bool] = []
        gpu.must("cuStreamBeginCapture_v2", stream, GLOBAL)
        gpu.ok("cuMemcpyAsync", page + PAGE, page, PAGE, stream)
        keep = lambda: seen.append(ctypes.string_at(page + PAGE, 1))  # noqa: E731
        gpu.launch(stream, keep, (page, 2 * PAGE, False), drop=lambda: dropped.append(True))
        status = ctypes.c_int()
        gpu.ok("cuStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == 1
        result, graph = gpu.end_capture(stream)
        assert (result, seen) == (SUCCESS, [])
        with gpu.executable(graph) as executable:
            for value in (3, 4):
                gpu.ok("cuMemsetD8Async", page, value, PAGE, stream)
                gpu.must("cuGraphLaunch", executable, stream)
            gpu.ok("cuStreamSynchronize", stream)
            assert (seen, dropped) == ([b"\3", b"\4"], [])
        gpu.ok("cuStreamSynchronize", stream)
        assert dropped == [True]


def fork_and_join(gpu: Simulated, one: int, other: int, seen: list[str]) -> None:
    """Captures a; then b beside c; then d."""
    with gpu.event() as forked, gpu.event() as joined:
        gpu.must("cuStreamBeginCapture_v2", one, GLOBAL)
        gpu.launch(one, lambda: seen.append("a"))
        gpu.ok("cuEventRecord", forked, one)
        gpu.ok("cuStreamWaitEvent", other, forked, 0)
        gpu.launch(other, lambda: seen.append("b"))
        gpu.launch(one, lambda: seen.append("c"))
        gpu.ok("cuEventRecord", joined, other)
        gpu.ok("cuStreamWaitEvent", one, joined, 0)
        gpu.launch(one, lambda: seen.append("d"))


def test_a_graph_keeps_the_order_of_its_events_and_no_more(start: Callable[..., Simulated]) -> None:
    gpu = start(SEED=5)
    orders = set()
    with gpu.stream() as one, gpu.stream() as other:
        seen: list[str] = []
        fork_and_join(gpu, one, other, seen)
        result, graph = gpu.end_capture(one)
        assert result == SUCCESS
        with gpu.executable(graph) as executable:
            for _ in range(20):
                gpu.must("cuGraphLaunch", executable, other)
                gpu.ok("cuStreamSynchronize", other)
                orders.add("".join(seen))
                seen.clear()
    assert orders == {"abcd", "acbd"}


def test_an_external_event_is_recorded_by_each_replay(gpu: Simulated) -> None:
    gate = Gate()
    with gpu.stream() as stream, gpu.stream() as other, gpu.event() as event:
        gpu.must("cuStreamBeginCapture_v2", stream, GLOBAL)
        gpu.launch(stream, gate)
        gpu.must("cuEventRecordWithFlags", event, stream, ctypes.c_uint(1))
        result, graph = gpu.end_capture(stream)
        assert (result, gpu.result("cuEventQuery", event)) == (SUCCESS, SUCCESS)  # never recorded
        with gpu.executable(graph) as executable:
            gpu.must("cuGraphLaunch", executable, stream)
            assert gpu.result("cuEventQuery", event) == NOT_READY
            gpu.ok("cuStreamWaitEvent", other, event, 0)
            assert gpu.call("cuStreamQuery", other) == NOT_READY
            gate.opened.set()
            gpu.ok("cuStreamSynchronize", other)
            assert gpu.result("cuEventQuery", event) == SUCCESS


def test_forked_work_has_to_be_joined(gpu: Simulated) -> None:
    with gpu.stream() as one, gpu.stream() as other, gpu.event() as event:
        gpu.must("cuStreamBeginCapture_v2", one, GLOBAL)
        gpu.ok("cuEventRecord", event, one)
        gpu.ok("cuStreamWaitEvent", other, event, 0)
        gpu.launch(other, lambda: None)
        assert gpu.end_capture(one) == (CAPTURE_UNJOINED, 0)
        gpu.launch(other, lambda: None)  # an ordinary stream again


def test_a_captured_event_is_not_asked(gpu: Simulated) -> None:
    for ask in ("cuEventQuery", "cuEventSynchronize"):
        with gpu.stream() as stream, gpu.event() as event:
            gpu.must("cuStreamBeginCapture_v2", stream, RELAXED)
            gpu.ok("cuEventRecord", event, stream)
            assert gpu.result(ask, event) == CAPTURED_EVENT
            assert gpu.end_capture(stream) == (CAPTURE_INVALIDATED, 0)


def wait_for_another(gpu: Simulated, stream: int) -> int:
    with gpu.blocking_stream() as other, gpu.event() as event:
        gpu.ok("cuEventRecord", event, other)
        result = gpu.result("cuStreamWaitEvent", stream, event, 0)
        gpu.end_capture(stream)  # what follows would be unsafe
        return result


PAGEABLE = ctypes.create_string_buffer(16)
ILLEGAL: dict[str, tuple[Callable[[Simulated, int], int], int]] = {
    "synchronize": (lambda gpu, stream: gpu.result("cuStreamSynchronize", stream), CAPTURE_UNSUPPORTED),
    "legacy": (lambda gpu, _: gpu.launch(LEGACY, lambda: None), CAPTURE_IMPLICIT),
    "pageable": (
        lambda gpu, stream: gpu.result("cuMemcpyAsync", *[ctypes.addressof(PAGEABLE)] * 2, 16, stream),
        CAPTURE_UNSUPPORTED,
    ),
    "wait": (wait_for_another, CAPTURE_ISOLATION),
    "allocate": (lambda gpu, _: gpu.call("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), PAGE), CAPTURE_UNSUPPORTED),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_illegal_call_breaks_the_capture(gpu: Simulated, what: str) -> None:
    illegal, expected = ILLEGAL[what]
    with gpu.blocking_stream() as stream:
        gpu.must("cuStreamBeginCapture_v2", stream, GLOBAL)
        assert illegal(gpu, stream) == expected
        result, graph = gpu.end_capture(stream)
        assert (graph, result != SUCCESS) == (0, True)


@pytest.mark.parametrize(
    ("captured", "mine", "own_thread", "allowed"),
    [
        (GLOBAL, GLOBAL, False, False),
        (GLOBAL, THREAD_LOCAL, False, True),
        (GLOBAL, RELAXED, True, True),
        (THREAD_LOCAL, GLOBAL, False, True),
        (THREAD_LOCAL, THREAD_LOCAL, True, False),
        (RELAXED, GLOBAL, True, True),
    ],
)
def test_the_modes_say_whom_a_capture_stops(
    gpu: Simulated, captured: int, mine: int, own_thread: bool, allowed: bool
) -> None:
    results: list[int] = []

    def ask() -> None:
        gpu.enter()
        mode = ctypes.c_int(mine)
        gpu.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        results.append(gpu.call("cuMemAlloc_v2", ctypes.byref(address := ctypes.c_uint64()), PAGE))
        if results[0] == SUCCESS:
            gpu.must("cuMemFree_v2", address.value)
        gpu.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    with gpu.stream() as stream:
        gpu.must("cuStreamBeginCapture_v2", stream, captured)
        if own_thread:
            ask()
        else:
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        result, graph = gpu.end_capture(stream)
        assert results == [SUCCESS if allowed else CAPTURE_UNSUPPORTED]
        assert result == (SUCCESS if allowed else CAPTURE_INVALIDATED)
        if graph:
            gpu.must("cuGraphDestroy", graph)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_freeing_waits_for_what_is_queued(gpu: Simulated) -> None:
    address, written = ctypes.c_uint64(), []
    gpu.must("cuMemAlloc_v2", ctypes.byref(address), PAGE)
    gate = Gate()
    with gpu.stream() as stream:
        gpu.launch(stream, lambda: (gate(), written.append(ctypes.memset(address.value or 0, 1, PAGE))),
                   (address.value, PAGE, True))  # fmt: skip
        threading.Timer(0.05, gate.opened.set).start()
        gpu.must("cuMemFree_v2", address.value)
        assert len(written) == 1


def test_a_creation_can_be_made_to_fail(start: Callable[..., Simulated]) -> None:
    gpu = start(FAULT="create:2,hostnuma")
    handles = [ctypes.c_uint64() for _ in range(3)]
    results = [
        gpu.result("cuMemCreate", ctypes.byref(handle), PAGE, ctypes.byref(properties(DEVICE)), 0) for handle in handles
    ]
    assert results == [SUCCESS, OUT_OF_MEMORY, SUCCESS]
    for handle in (handles[0], handles[2]):
        gpu.ok("cuMemRelease", handle)
    host = AllocationProp(type=1, location=Location(HOST, 0))
    assert gpu.result("cuMemCreate", ctypes.byref(ctypes.c_uint64()), PAGE, ctypes.byref(host), 0) == NOT_SUPPORTED
    assert gpu.attribute(141) == 1  # although it says that it can


def test_counts_tell_what_happened(gpu: Simulated) -> None:
    before = gpu.counts()
    gate = Gate()
    with gpu.stream() as stream:
        with gpu.mapped(PAGE), gpu.mapped(PAGE):
            pass
        idle = gpu.counts()
        gpu.launch(stream, gate)
        handle, address = gpu.create(PAGE), gpu.reserve(PAGE)
        gpu.map(address, PAGE, handle)
        gpu.unmap(address, PAGE)
        gate.opened.set()
        gpu.ok("cuStreamSynchronize", stream)
    gpu.ok("cuMemRelease", handle)
    gpu.ok("cuMemAddressFree", address, PAGE)
    after = gpu.counts()
    assert (idle.maps - before.maps, idle.unmaps - before.unmaps, idle.unmaps_busy) == (2, 2, before.unmaps_busy)
    assert (after.maps - idle.maps, after.unmaps_busy - idle.unmaps_busy, after.kernels - before.kernels) == (1, 1, 1)
    assert after.synchronizations > idle.synchronizations
