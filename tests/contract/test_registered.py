"""Host memory that the driver knows of: a mapped file that is copied from.

What is asked of `driver` holds for NVIDIA's and for the host stand-in; what is asked of `standin` is where it is
stricter, or where CUDA would be silent.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .driver import (
    ALREADY_REGISTERED,
    ILLEGAL_ADDRESS,
    ILLEGAL_STATE,
    INVALID_VALUE,
    NOT_READY,
    NOT_REGISTERED,
    POISON,
    READ_ONLY,
    READ_ONLY_REGISTER_ATTRIBUTE,
    Driver,
)

PAGE = mmap.PAGESIZE
PROT_NONE = 0


def pattern(nbytes: int) -> bytes:
    return bytes(i % 251 for i in range(nbytes))


@contextmanager
def mapped_file(path: Path, nbytes: int, protection: int = mmap.PROT_READ) -> Iterator[int]:
    """The address of a shared mapping of the file's first bytes, which outlives what the file holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with path.open("rb") as file:
        address = libc.mmap(None, nbytes, protection, mmap.MAP_SHARED, file.fileno(), 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    yield address
    assert libc.munmap(address, nbytes) == 0


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(pattern(4 * PAGE))
    return path


@pytest.fixture
def supported(driver: Driver) -> None:
    if not driver.attribute(READ_ONLY_REGISTER_ATTRIBUTE):
        pytest.skip("this device registers nothing as read-only")


@pytest.mark.usefixtures("supported")
def test_a_mapped_file_is_copied_from(driver: Driver, weights: Path) -> None:
    """From any byte on, and wholly."""
    size = driver.granularity()
    with mapped_file(weights, 4 * PAGE) as file, driver.mapped(size) as target, driver.stream() as stream:
        driver.ok("cuMemHostRegister", file, 4 * PAGE, READ_ONLY)
        for start, nbytes in ((0, min(size, 4 * PAGE)), (96, PAGE), (PAGE - 1, 2)):
            driver.ok("cuMemcpyAsync", target, file + start, nbytes, stream)
            driver.ok("cuStreamSynchronize", stream)
            assert driver.read(target, nbytes) == pattern(4 * PAGE)[start : start + nbytes]
        driver.ok("cuMemHostUnregister", file)


@pytest.mark.usefixtures("supported")
def test_memory_is_registered_once(driver: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file:
        driver.ok("cuMemHostRegister", file + PAGE, 2 * PAGE, READ_ONLY)
        for start, nbytes in ((1, 1), (0, 4), (2, 2), (0, 2)):
            again = driver.result("cuMemHostRegister", file + start * PAGE, nbytes * PAGE, READ_ONLY)
            assert again == ALREADY_REGISTERED
        driver.ok("cuMemHostRegister", file + 3 * PAGE, PAGE, READ_ONLY)  # what lies beside it may be
        assert driver.result("cuMemHostUnregister", file + 2 * PAGE) in (NOT_REGISTERED, INVALID_VALUE)
        driver.ok("cuMemHostUnregister", file + PAGE)
        driver.ok("cuMemHostUnregister", file + 3 * PAGE)
        assert driver.result("cuMemHostUnregister", file + PAGE) == NOT_REGISTERED
        driver.ok("cuMemHostRegister", file, 4 * PAGE, READ_ONLY)
        driver.ok("cuMemHostUnregister", file)


def test_registration_that_makes_no_sense_is_refused(driver: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file:
        assert driver.result("cuMemHostRegister", file, 0, READ_ONLY) == INVALID_VALUE
        assert driver.result("cuMemHostRegister", file, PAGE, 0x100) == INVALID_VALUE
        assert driver.result("cuMemHostUnregister", file) == NOT_REGISTERED


# -- where the stand-in is stricter ------------------------------------------------------------------------------------


def test_ranges_that_share_a_page_overlap(standin: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file:
        standin.ok("cuMemHostRegister", file + 100, PAGE, READ_ONLY)
        assert standin.result("cuMemHostRegister", file, 50, READ_ONLY) == ALREADY_REGISTERED
        assert standin.result("cuMemHostRegister", file + PAGE + 200, 50, READ_ONLY) == ALREADY_REGISTERED
        assert "shares a page" in standin.violation()
        standin.ok("cuMemHostRegister", file + 2 * PAGE, 50, READ_ONLY)
        standin.ok("cuMemHostUnregister", file + 100)
        standin.ok("cuMemHostUnregister", file + 2 * PAGE)


def test_a_copy_lies_in_one_range_or_outside_of_all(standin: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file, standin.mapped(4 * PAGE) as target:
        standin.ok("cuMemHostRegister", file + PAGE, PAGE, READ_ONLY)
        standin.ok("cuMemHostRegister", file + 2 * PAGE, PAGE, READ_ONLY)
        for start, nbytes in ((0, 2), (1, 2), (2, 2), (0, 4)):
            assert standin.result("cuMemcpyHtoD", target, file + start * PAGE, nbytes * PAGE) == INVALID_VALUE
            assert "lies partly in the registered memory" in standin.violation()
        for start in range(4):
            standin.ok("cuMemcpyHtoD", target, file + start * PAGE, PAGE)
            assert standin.read(target, PAGE) == pattern(4 * PAGE)[start * PAGE : (start + 1) * PAGE]
        standin.ok("cuMemHostUnregister", file + PAGE)
        standin.ok("cuMemHostUnregister", file + 2 * PAGE)


def test_read_only_is_not_written(standin: Driver) -> None:
    memory = mmap.mmap(-1, 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with standin.mapped(PAGE) as source:
        standin.write(source, b"s" * PAGE)
        standin.ok("cuMemHostRegister", address, PAGE, READ_ONLY)
        standin.ok("cuMemHostRegister", address + PAGE, PAGE, 0)
        assert standin.result("cuMemcpyDtoH", address, source, PAGE) == INVALID_VALUE
        assert "registered as read-only" in standin.violation()
        standin.ok("cuMemcpyDtoH", address + PAGE, source, PAGE)
        assert memory[:] == bytes(PAGE) + b"s" * PAGE
        standin.ok("cuMemHostUnregister", address)
        standin.ok("cuMemHostUnregister", address + PAGE)


def test_memory_that_may_not_be_written_has_to_be_registered_as_such(standin: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file:
        assert standin.result("cuMemHostRegister", file, PAGE, 0) == INVALID_VALUE
        assert "register it as read-only" in standin.violation()
    with mapped_file(weights, 4 * PAGE, PROT_NONE) as file:
        assert standin.result("cuMemHostRegister", file, PAGE, READ_ONLY) == INVALID_VALUE
    assert standin.result("cuMemHostRegister", file, PAGE, READ_ONLY) == INVALID_VALUE  # not mapped any more
    with standin.mapped(PAGE) as device:
        assert standin.result("cuMemHostRegister", device, PAGE, READ_ONLY) == INVALID_VALUE
        assert "address of the device" in standin.violation()


def test_bytes_that_a_file_no_longer_has_are_not_registered(standin: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file:
        with weights.open("r+b") as shorter:
            shorter.truncate(PAGE + 1)
        assert standin.result("cuMemHostRegister", file, 4 * PAGE, READ_ONLY) == INVALID_VALUE
        assert f"{file + 2 * PAGE:#x}" in standin.violation()
        standin.ok("cuMemHostRegister", file, 2 * PAGE, READ_ONLY)
        standin.ok("cuMemHostUnregister", file)


def test_the_context_takes_what_is_registered_with_it(standin: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file:
        standin.ok("cuMemHostRegister", file, PAGE, READ_ONLY)
        standin.finish()
        standin.start()
        assert standin.result("cuMemHostUnregister", file) == NOT_REGISTERED


def test_registration_stays_while_a_copy_reads_it(standin: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file, standin.mapped(PAGE) as target, standin.stream() as stream:
        standin.ok("cuMemHostRegister", file, 2 * PAGE, READ_ONLY)
        with standin.held():
            standin.ok("cuMemcpyAsync", target, file + PAGE, PAGE, stream)
            assert standin.result("cuMemHostUnregister", file) == ILLEGAL_STATE
            assert "wait for it" in standin.violation()
        standin.ok("cuStreamSynchronize", stream)
        standin.ok("cuMemHostUnregister", file)


# -- a file that becomes shorter under a copy: CUDA copies the old bytes, the stand-in says so, nothing faults ---------


@contextmanager
def cut_short(standin: Driver, weights: Path, target: int, stream: int) -> Iterator[None]:
    """A copy of four pages is submitted, and before it begins, as `configure` lets it, the file loses two of them."""
    with mapped_file(weights, 4 * PAGE) as file:
        standin.ok("cuMemHostRegister", file, 4 * PAGE, READ_ONLY)
        with standin.held():
            standin.ok("cuMemcpyAsync", target, file, 4 * PAGE, stream)
            with weights.open("r+b") as shorter:
                shorter.truncate(2 * PAGE)
            yield
        standin.ok("cuMemHostUnregister", file)


def test_bytes_that_are_gone_are_an_error_where_they_are_waited_for(standin: Driver, weights: Path) -> None:
    target, (stream,) = standin.page(4 * PAGE), standin.streams(1)
    with cut_short(standin, weights, target, stream):
        standin.configure()
        assert standin.result("cuStreamSynchronize", stream) == ILLEGAL_ADDRESS
        assert "found part of it gone" in standin.violation()
        assert ctypes.string_at(target, 4 * PAGE) == bytes([POISON]) * 4 * PAGE
        standin.ok("cuStreamSynchronize", stream)  # it was said
        standin.write(target, b"w" * PAGE)  # and the device works on
        assert standin.read(target, PAGE) == b"w" * PAGE


def test_the_first_event_behind_says_so_each_time(standin: Driver, weights: Path) -> None:
    target, (stream,), (first, second) = standin.page(4 * PAGE), standin.streams(1), standin.events(2)
    with cut_short(standin, weights, target, stream):
        standin.ok("cuEventRecord", first, stream)
        standin.ok("cuEventRecord", second, stream)
        assert standin.result("cuEventQuery", first) == NOT_READY
        standin.configure()
        standin.ok("cuEventSynchronize", second)
        for _ in range(2):
            assert standin.result("cuEventSynchronize", first) == ILLEGAL_ADDRESS
            assert standin.result("cuEventQuery", first) == ILLEGAL_ADDRESS
            assert standin.result("cuStreamWaitEvent", 0, first, 0) == ILLEGAL_ADDRESS


@pytest.mark.parametrize("late", [False, True])
def test_stream_that_waits_for_a_failed_copy_has_failed_too(standin: Driver, weights: Path, late: bool) -> None:
    target, (stream, waiter), (event,) = standin.page(4 * PAGE), standin.streams(2), standin.events(1)
    with cut_short(standin, weights, target, stream):
        standin.ok("cuEventRecord", event, stream)
        if late:
            standin.configure()
            standin.result("cuEventSynchronize", event)
        standin.ok("cuStreamWaitEvent", waiter, event, 0)
        standin.configure()
        assert standin.result("cuStreamSynchronize", waiter) == ILLEGAL_ADDRESS
        standin.ok("cuStreamSynchronize", stream)


@pytest.mark.parametrize("over", [False, True])
def test_nobody_waits_but_the_context_does(standin: Driver, weights: Path, over: bool) -> None:
    other, target, (stream, behind) = ctypes.create_string_buffer(PAGE), standin.page(5 * PAGE), standin.streams(2)
    with cut_short(standin, weights, target, stream):
        if over:  # what shares the link with the copy is done after it
            standin.ok("cuMemcpyAsync", target + 4 * PAGE, ctypes.addressof(other), PAGE, behind)
        standin.configure()
        if over:
            standin.ok("cuStreamSynchronize", behind)
        assert standin.result("cuCtxSynchronize") == ILLEGAL_ADDRESS
        standin.ok("cuCtxSynchronize")


def test_a_copy_of_the_calling_thread_fails_at_once(standin: Driver, weights: Path) -> None:
    with mapped_file(weights, 4 * PAGE) as file, standin.mapped(4 * PAGE) as target:
        standin.ok("cuMemHostRegister", file, 4 * PAGE, READ_ONLY)
        with weights.open("r+b") as shorter:
            shorter.truncate(0)
        assert standin.result("cuMemcpyAsync", target, file, PAGE, 0) == ILLEGAL_ADDRESS
        assert standin.result("cuMemcpyHtoD", target, file, 4 * PAGE) == ILLEGAL_ADDRESS
        standin.ok("cuCtxSynchronize")
        standin.ok("cuMemHostUnregister", file)
