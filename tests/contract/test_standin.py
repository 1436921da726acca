"""Where the host stand-in promises more than CUDA does, or is stricter.

Its memory can be seen from outside, it refuses what CUDA lets pass, and its copies show whoever does not wait.
"""

import ctypes
import os
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ..core import maps
from .driver import (
    DEVICE,
    HOST,
    ILLEGAL_ADDRESS,
    ILLEGAL_STATE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NOT_INITIALIZED,
    NOT_READY,
    OUT_OF_MEMORY,
    POISON,
    SUCCESS,
    Driver,
    properties,
)

PAGE = 4096
MIB = 1 << 20


def memfd(driver: Driver, location: int = DEVICE) -> int:
    device, host, peer = (ctypes.c_int() for _ in range(3))
    driver.ok("ballonet_standin_memfds", *map(ctypes.byref, (device, host, peer)))
    return device.value if location == DEVICE else host.value


def existing(driver: Driver, location: int = DEVICE) -> int:
    """Bytes that exist, as the kernel counts them."""
    return os.fstat(memfd(driver, location)).st_blocks * 512


# -- life of the driver ------------------------------------------------------------------------------------------------


def test_no_call_works_before_init(standin_library: Path) -> None:
    driver = Driver(standin_library)
    assert driver.result("cuDeviceGetCount", ctypes.byref(ctypes.c_int())) == NOT_INITIALIZED
    assert "cuInit" in driver.violation()
    driver.configure(device=10 * MIB)  # but it may be configured
    driver.start()
    assert driver.memory() == (10 * MIB, 10 * MIB)
    driver.finish()


def test_a_context_that_was_released_is_no_context(standin: Driver) -> None:
    stream = ctypes.c_void_p()
    standin.ok("cuStreamCreate", ctypes.byref(stream), 1)
    standin.finish()
    old = standin.context
    assert standin.result("cuCtxSetCurrent", old) != SUCCESS
    standin.start()
    assert standin.context.value != old.value
    assert standin.result("cuStreamSynchronize", stream) == INVALID_HANDLE  # its streams went with it


def test_handles_that_were_never_made_are_refused(standin: Driver) -> None:
    made_up = 0x1234560
    assert standin.result("cuStreamSynchronize", made_up) == INVALID_HANDLE
    assert standin.result("cuEventQuery", made_up) == INVALID_HANDLE
    assert standin.result("cuEventRecord", made_up, 0) == INVALID_HANDLE
    assert standin.result("cuMemRelease", made_up) == INVALID_VALUE
    assert "0x1234560" in standin.violation()
    with standin.stream() as first:
        pass
    with standin.stream() as second:
        assert first != second, "no stream is ever handed out twice"
        assert standin.result("cuStreamDestroy", first) == INVALID_HANDLE


# -- physical memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("location", "name"), [(DEVICE, "ballonet-device"), (HOST, "ballonet-host")])
def test_the_bytes_that_exist_are_the_created_handles(standin: Driver, location: int, name: str) -> None:
    assert name in os.readlink(f"/proc/self/fd/{memfd(standin, location)}")
    before = existing(standin, location)
    handles = [standin.create(64 * PAGE, location) for _ in range(5)]
    assert existing(standin, location) == before + 5 * 64 * PAGE
    for left, handle in zip(range(4, -1, -1), handles, strict=True):
        standin.ok("cuMemRelease", handle)
        assert existing(standin, location) == before + left * 64 * PAGE


def test_the_lowest_free_offset_is_taken(standin: Driver) -> None:
    handles = [standin.create(2 * PAGE) for _ in range(4)]
    address = standin.reserve(2 * PAGE)

    def offset_of(handle: int) -> int:
        standin.map(address, 2 * PAGE, handle)
        offset = maps(address, 2 * PAGE)[0].offset
        standin.unmap(address, 2 * PAGE)
        return offset

    first, third = offset_of(handles[0]), offset_of(handles[2])
    standin.ok("cuMemRelease", handles[2])
    standin.ok("cuMemRelease", handles[0])
    handles[2], handles[0] = standin.create(2 * PAGE), standin.create(2 * PAGE)
    assert (offset_of(handles[2]), offset_of(handles[0])) == (first, third)


def test_the_device_is_full_when_it_is_full(standin: Driver) -> None:
    standin.configure(device=4 * PAGE)
    handles = [standin.create(2 * PAGE), standin.create(PAGE)]
    assert standin.memory() == (PAGE, 4 * PAGE)
    handle = ctypes.c_uint64()
    wanted = properties(DEVICE)
    assert standin.result("cuMemCreate", ctypes.byref(handle), 2 * PAGE, ctypes.byref(wanted), 0) == OUT_OF_MEMORY
    handles += [standin.create(PAGE), standin.create(8 * PAGE, HOST)]  # host pages are not the device's


@pytest.mark.parametrize("location", [DEVICE, HOST])
def test_more_than_the_machine_has_is_an_error_and_no_killer(standin: Driver, location: int) -> None:
    standin.configure(device=1 << 50)
    handle = ctypes.c_uint64()
    wanted = properties(location)
    before = existing(standin, location)
    assert standin.result("cuMemCreate", ctypes.byref(handle), 1 << 45, ctypes.byref(wanted), 0) == OUT_OF_MEMORY
    assert "RAM" in standin.violation()
    assert existing(standin, location) == before


def test_releasing_what_is_mapped_or_gone_is_refused(standin: Driver) -> None:
    address, handle = standin.reserve(2 * PAGE), standin.create(PAGE)
    for alias in (address, address + PAGE):
        standin.map(alias, PAGE, handle)
    assert standin.result("cuMemRelease", handle) == ILLEGAL_STATE
    assert "mapped at 2" in standin.violation()
    standin.unmap(address, PAGE)
    assert standin.result("cuMemRelease", handle) == ILLEGAL_STATE
    standin.unmap(address + PAGE, PAGE)
    standin.ok("cuMemRelease", handle)
    assert standin.result("cuMemRelease", handle) == INVALID_VALUE
    assert standin.result("cuMemMap", address, PAGE, 0, handle, 0) == INVALID_VALUE


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_neighbours_are_one_map_of_the_kernel(standin: Driver) -> None:
    count = 300
    address, handles = standin.reserve(count * PAGE), [standin.create(PAGE) for _ in range(count)]
    for i, handle in enumerate(handles):
        standin.map(address + i * PAGE, PAGE, handle)
    (one,) = maps(address, count * PAGE)
    assert one.access == "rw-s"
    assert "memfd:ballonet-device" in one.name
    standin.unmap(address, count * PAGE)
    (one,) = maps(address, count * PAGE)
    assert (one.access, one.name) == ("---p", "")


def test_mapped_without_access_is_inaccessible(standin: Driver) -> None:
    address, handle = standin.reserve(PAGE), standin.create(PAGE)
    standin.place(address, PAGE, handle)
    assert maps(address, PAGE)[0].access == "---s"
    data = ctypes.create_string_buffer(8)
    assert standin.result("cuMemcpyDtoH", data, address, 8) == INVALID_VALUE
    assert "cuMemSetAccess" in standin.violation()
    standin.access(address, PAGE)
    assert maps(address, PAGE)[0].access == "rw-s"
    standin.read(address, 8)


def test_unmapped_is_never_a_hole(standin: Driver) -> None:
    address = standin.reserve(5 * PAGE)
    handles = [standin.create(PAGE) for _ in range(5)]
    for i, handle in enumerate(handles):
        standin.map(address + i * PAGE, PAGE, handle)
    for i in (1, 3, 2):
        standin.unmap(address + i * PAGE, PAGE)
        rows = maps(address, 5 * PAGE)
        assert (rows[0].begin, rows[-1].end) == (address, address + 5 * PAGE)
        assert all(left.end == right.begin for left, right in pairwise(rows))
        (cell,) = maps(address + i * PAGE, PAGE)
        assert (cell.access, cell.name) == ("---p", "")


def test_a_copy_from_host_to_host_needs_both_open_to_the_cpu(standin: Driver) -> None:
    """Where nothing says which address is the device's a driver may have the CPU copy."""
    with standin.mapped(PAGE, HOST) as opened:
        address, handle = standin.reserve(PAGE), standin.create(PAGE, HOST)
        standin.map(address, PAGE, handle)  # for the device alone
        for to, source in ((address, opened), (opened, address)):
            assert standin.result("cuMemcpyAsync", to, source, PAGE, 0) == ILLEGAL_ADDRESS
        assert "access" in standin.violation()
        standin.write(address, b"w" * PAGE)  # this function says it
        standin.access(address, PAGE, HOST)
        standin.ok("cuMemcpyAsync", opened, address, PAGE, 0)
        assert standin.read(opened, PAGE) == b"w" * PAGE
        standin.unmap(address, PAGE)
        standin.ok("cuMemRelease", handle)
        standin.ok("cuMemAddressFree", address, PAGE)


@pytest.mark.parametrize("first", [DEVICE, HOST])
def test_a_copy_does_not_span_pages_of_both_places(standin: Driver, first: int) -> None:
    """A driver tells from the address where it begins what it is a copy of."""
    places = (first, HOST if first == DEVICE else DEVICE)
    handles = [standin.create(PAGE, place) for place in places]
    address = standin.reserve(2 * PAGE)
    with standin.mapped(2 * PAGE, HOST) as other:
        for piece, (place, handle) in enumerate(zip(places, handles, strict=True)):
            standin.map(address + piece * PAGE, PAGE, handle)
            standin.access(address + piece * PAGE, PAGE, place)
        for to, source in ((address, other), (other, address)):
            assert standin.result("cuMemcpyAsync", to, source, 2 * PAGE, 0) == INVALID_VALUE
            for offset in (0, PAGE):
                standin.ok("cuMemcpyAsync", to + offset, source + offset, PAGE, 0)
        standin.ok("cuCtxSynchronize")
        standin.unmap(address, 2 * PAGE)


# -- copies ------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_copy_are_poison_until_they_are_due(standin: Driver) -> None:
    with standin.mapped(PAGE, HOST) as source, standin.mapped(PAGE) as target, standin.stream() as stream:
        standin.write(source, b"s" * PAGE)
        standin.write(target, b"t" * PAGE)
        standin.ok("cuCtxSynchronize")
        with standin.held():
            standin.ok("cuMemcpyAsync", target, source, PAGE, stream)
            assert ctypes.string_at(target, PAGE) == bytes([POISON]) * PAGE
            ctypes.memset(source, ord("S"), 1)  # the source is read when the bytes cross, as DMA would
        standin.ok("cuStreamSynchronize", stream)
        assert ctypes.string_at(target, PAGE) == b"S" + b"s" * (PAGE - 1)


def test_poison_spares_what_earlier_work_still_reads(standin: Driver) -> None:
    with standin.mapped(PAGE, HOST) as twin, standin.mapped(PAGE) as page, standin.stream() as stream:
        standin.write(page, b"p" * PAGE)
        new = ctypes.create_string_buffer(b"n" * PAGE, PAGE)
        standin.ok("cuCtxSynchronize")
        with standin.held():
            standin.ok("cuMemcpyAsync", twin, page, PAGE, stream)  # write back, then load over it
            standin.ok("cuMemcpyAsync", page, ctypes.addressof(new), PAGE, stream)
        standin.ok("cuStreamSynchronize", stream)
        assert ctypes.string_at(twin, PAGE) == b"p" * PAGE
        assert ctypes.string_at(page, PAGE) == b"n" * PAGE


def test_one_direction_is_shared_and_two_are_not(standin: Driver) -> None:
    there, here = standin.page(MIB, HOST), standin.page(MIB)
    one, two, three = standin.streams(3)
    large, behind, beside = standin.events(3)
    half = MIB // 2
    standin.configure(bandwidth=10 * MIB)  # the large one takes 50 ms

    def overtaken() -> bool:
        """Was the large one under way when what went the other way had arrived?"""
        standin.ok("cuMemcpyAsync", here, there, half, one)
        standin.ok("cuEventRecord", large, one)
        standin.ok("cuMemcpyAsync", here + half, there + half, PAGE, two)
        standin.ok("cuEventRecord", behind, two)
        standin.ok("cuMemcpyAsync", there + half + PAGE, here + half + PAGE, PAGE, three)
        standin.ok("cuEventRecord", beside, three)
        standin.ok("cuEventSynchronize", beside)
        unfinished = standin.result("cuEventQuery", large) == NOT_READY
        standin.ok("cuEventSynchronize", behind)
        assert standin.result("cuEventQuery", large) == SUCCESS
        standin.ok("cuCtxSynchronize")
        return unfinished

    assert any(overtaken() for _ in range(1000))  # on a loaded machine one may look too late


def test_only_the_link_is_slow(standin: Driver) -> None:
    there, here = standin.page(PAGE, HOST), standin.page(PAGE)
    (fast, slow), (crossed,) = standin.streams(2), standin.events(1)
    pairs = [(standin.page(PAGE, place), standin.page(PAGE, place)) for place in (DEVICE, HOST)]
    with standin.held():
        standin.ok("cuMemcpyAsync", here, there, PAGE, slow)
        standin.ok("cuEventRecord", crossed, slow)
        for left, right in pairs:
            standin.ok("cuMemcpyAsync", right, left, PAGE, fast)
        standin.ok("cuStreamSynchronize", fast)
        assert standin.result("cuEventQuery", crossed) == NOT_READY


def test_the_calling_threads_copies_are_complete_on_return(standin: Driver) -> None:
    data = ctypes.create_string_buffer(b"d" * PAGE, PAGE)
    with standin.mapped(PAGE) as address:
        standin.configure(latency_ns=1_000_000)
        before = time.monotonic_ns()
        standin.ok("cuMemcpyAsync", address, ctypes.addressof(data), PAGE, 0)
        assert time.monotonic_ns() - before >= 1_000_000
        assert ctypes.string_at(address, PAGE) == b"d" * PAGE
        standin.ok("cuMemsetD8Async", address, 5, PAGE, 0)
        assert ctypes.string_at(address, PAGE) == b"\5" * PAGE


def test_a_copy_between_shared_bytes_is_refused(standin: Driver) -> None:
    address, handle = standin.reserve(2 * PAGE), standin.create(PAGE)
    for alias in (address, address + PAGE):
        standin.map(alias, PAGE, handle)
    assert standin.result("cuMemcpyAsync", address, address + PAGE, PAGE, 0) == INVALID_VALUE
    assert re.search("share bytes", standin.violation())
