"""What ballonet relies on, true of every driver: NVIDIA's and the host stand-in.

Sizes are in pages of the driver's own granularity. Only refusals that leave a CUDA context usable are asked for here;
where the stand-in is stricter than CUDA is told in test_standin.py.
"""

import ctypes
import threading

import pytest

from .driver import (
    ACCESSES,
    DEVICE,
    HOST,
    HOST_PAGES_ATTRIBUTE,
    INVALID_CONTEXT,
    INVALID_VALUE,
    NOT_READY,
    NOT_SUPPORTED,
    SUCCESS,
    Driver,
    properties,
)


def pattern(seed: int, nbytes: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(251)) * (nbytes // 251) + bytes(nbytes % 251)


@pytest.fixture
def page(driver: Driver) -> int:
    return driver.granularity()


def test_says_what_it_is(driver: Driver) -> None:
    version, name, total = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    driver.ok("cuDriverGetVersion", ctypes.byref(version))
    driver.ok("cuDeviceGetName", name, len(name), 0)
    driver.ok("cuDeviceTotalMem", ctypes.byref(total), 0)
    assert version.value >= 11020
    assert name.value
    free, seen = driver.memory()
    assert 0 < free <= seen <= total.value
    flags, active = ctypes.c_uint(), ctypes.c_int()
    driver.ok("cuDevicePrimaryCtxGetState", 0, ctypes.byref(flags), ctypes.byref(active))
    assert active.value == 1, "it is retained"
    text = ctypes.c_char_p()
    for function, said in (("cuGetErrorName", b"CUDA_ERROR_OUT_OF_MEMORY"), ("cuGetErrorString", b"out of memory")):
        driver.ok(function, 2, ctypes.byref(text))
        assert text.value == said
    assert driver.result("cuGetErrorName", 12345, ctypes.byref(text)) == INVALID_VALUE


def test_thread_without_a_context_is_refused(driver: Driver) -> None:
    seen = {}

    def other_thread() -> None:
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        driver.ok("cuCtxGetCurrent", ctypes.byref(context))
        seen["context"] = context.value
        seen["refused"] = driver.result("cuStreamCreate", ctypes.byref(stream), 1)
        driver.enter()
        seen["entered"] = driver.result("cuStreamCreate", ctypes.byref(stream), 1)
        driver.ok("cuStreamDestroy", stream)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen == {"context": None, "refused": INVALID_CONTEXT, "entered": SUCCESS}


def test_memory_that_is_no_page_no_address_or_not_mapped_is_refused(driver: Driver, page: int) -> None:
    number, wanted = ctypes.c_uint64(), properties(DEVICE)
    assert driver.result("cuMemAddressReserve", ctypes.byref(number), page, 0, 0, 1) == INVALID_VALUE  # flags
    for nbytes in (0, 1, 512):
        assert driver.result("cuMemCreate", ctypes.byref(number), nbytes, ctypes.byref(wanted), 0) == INVALID_VALUE
    address, handle = driver.reserve(2 * page, 16 * page), driver.create(2 * page)
    assert address % (16 * page) == 0
    assert driver.result("cuMemMap", address, page, page, handle, 0) != SUCCESS  # an offset
    driver.map(address, 2 * page, handle)  # and nothing was left behind
    driver.unmap(address, 2 * page)
    assert driver.result("cuMemAddressFree", address, page) != SUCCESS
    driver.ok("cuMemAddressFree", address, 2 * page)
    assert driver.result("cuMemAddressFree", address, 2 * page) != SUCCESS
    assert driver.result("cuMemMap", address, 2 * page, 0, handle, 0) != SUCCESS


def test_mapping_onto_a_mapping_is_refused_and_harms_nothing(driver: Driver, page: int) -> None:
    with driver.mapped(page) as address:
        driver.write(address, pattern(2, page))
        other = driver.create(page)
        assert driver.result("cuMemMap", address, page, 0, other, 0) != SUCCESS
        assert driver.read(address, page) == pattern(2, page)
        driver.ok("cuMemRelease", other)


def test_unmapping_part_of_a_mapping_is_refused_and_harms_nothing(driver: Driver, page: int) -> None:
    with driver.mapped(2 * page) as address:
        driver.write(address, pattern(3, 2 * page))
        driver.ok("cuCtxSynchronize")
        assert driver.result("cuMemUnmap", address, page) != SUCCESS
        assert driver.result("cuMemUnmap", address + page, page) != SUCCESS
        assert driver.read(address, 2 * page) == pattern(3, 2 * page)


def test_access_is_given_to_many_pages_at_once(driver: Driver, page: int) -> None:
    address, handles = driver.reserve(4 * page), [driver.create(page) for _ in range(4)]
    for i, handle in enumerate(handles):
        driver.place(address + i * page, page, handle)
    driver.access(address, 4 * page)
    driver.write(address, pattern(4, 4 * page))
    assert driver.read(address, 4 * page) == pattern(4, 4 * page)


def test_aliases_see_each_other_once_the_writer_is_done(driver: Driver, page: int) -> None:
    address, handle = driver.reserve(2 * page), driver.create(page)
    for alias in (address, address + page):
        driver.map(alias, page, handle)
    for seed in range(8):
        writer, reader = (address, address + page) if seed % 2 else (address + page, address)
        driver.write(writer, pattern(seed, page))
        driver.ok("cuCtxSynchronize")
        assert driver.read(reader, page) == pattern(seed, page)


def test_a_host_page_takes_the_place_of_a_device_page(driver: Driver, page: int) -> None:
    if not driver.attribute(HOST_PAGES_ATTRIBUTE):
        pytest.skip("this device cannot map host pages")
    address = driver.reserve(page)
    for location in (DEVICE, HOST, DEVICE):
        handle = driver.create(page, location)
        driver.map(address, page, handle, location)
        driver.write(address, pattern(6 + location, page))
        assert driver.read(address, page) == pattern(6 + location, page)
        driver.ok("cuCtxSynchronize")
        driver.unmap(address, page)
        driver.ok("cuMemRelease", handle)


def test_a_host_page_is_open_to_the_cpu_and_takes_copies_from_the_host(driver: Driver, page: int) -> None:
    """A copy from the host to it may be made by the CPU."""
    if not driver.attribute(HOST_PAGES_ATTRIBUTE):
        pytest.skip("this device cannot map host pages")
    source = ctypes.create_string_buffer(pattern(3, page), page)
    with driver.mapped(page, HOST) as one, driver.mapped(page, HOST) as other, driver.stream() as stream:
        for before, after in ((ctypes.addressof(source), one), (one, other)):
            driver.ok("cuMemcpyAsync", after, before, page, stream)
            driver.ok("cuStreamSynchronize", stream)
            assert driver.read(after, page) == pattern(3, page)
            assert ctypes.string_at(after, page) == pattern(3, page)
        ctypes.memset(one, 5, page)
        assert driver.read(one, page) == b"\5" * page


def test_only_one_page_of_the_host_is_filled_at_once(driver: Driver, page: int) -> None:
    if not driver.attribute(HOST_PAGES_ATTRIBUTE):
        pytest.skip("this device cannot map host pages")
    for location, whole in ((DEVICE, SUCCESS), (HOST, INVALID_VALUE)):
        address, handles = driver.reserve(2 * page), [driver.create(page, location) for _ in range(2)]
        for index, handle in enumerate(handles):
            driver.map(address + index * page, page, handle, location)
        with driver.stream() as stream:
            driver.ok("cuMemsetD8Async", address + page, 5, page, stream)
            assert driver.result("cuMemsetD8Async", address, 5, 2 * page, stream) == whole
            driver.ok("cuStreamSynchronize", stream)
        assert driver.read(address + page, page) == b"\5" * page


def test_device_memory_cannot_be_opened_to_the_cpu(driver: Driver, page: int) -> None:
    address, handle = driver.reserve(page), driver.create(page)
    driver.map(address, page, handle)
    assert driver.result("cuMemSetAccess", address, page, ACCESSES, 2) in (INVALID_VALUE, NOT_SUPPORTED)
    driver.write(address, pattern(2, page))
    assert driver.read(address, page) == pattern(2, page)


def test_a_stream_keeps_its_order(driver: Driver, page: int) -> None:
    with driver.mapped(page) as source, driver.mapped(page) as target, driver.stream() as stream:
        driver.write(source, pattern(9, page))
        driver.ok("cuCtxSynchronize")
        driver.ok("cuMemcpyAsync", target, source, page, stream)
        driver.ok("cuMemsetD8Async", source, 7, page, stream)
        driver.ok("cuMemcpyAsync", target, source, page // 2, stream)
        driver.ok("cuStreamSynchronize", stream)
        assert driver.read(target, page) == b"\7" * (page // 2) + pattern(9, page)[page // 2 :]


def test_a_stream_waits_for_the_event_of_another(driver: Driver, page: int) -> None:
    source, middle, target = driver.page(4 * page), driver.page(4 * page), driver.page(4 * page)
    first, second = driver.streams(2)
    (event,) = driver.events(1)
    for seed in range(5):
        driver.write(source, pattern(seed, 4 * page))
        driver.ok("cuCtxSynchronize")
        driver.ok("cuMemcpyAsync", middle, source, 4 * page, first)
        driver.ok("cuEventRecord", event, first)
        driver.ok("cuStreamWaitEvent", second, event, 0)
        driver.ok("cuMemcpyAsync", target, middle, 4 * page, second)
        driver.ok("cuStreamSynchronize", second)
        assert driver.read(target, 4 * page) == pattern(seed, 4 * page)


def test_an_event_stands_for_its_newest_record(driver: Driver, page: int) -> None:
    address, (stream,), (event,) = driver.page(page), driver.streams(1), driver.events(1)
    assert driver.result("cuEventQuery", event) == SUCCESS  # one that was never recorded has passed
    driver.ok("cuEventSynchronize", event)
    driver.ok("cuStreamWaitEvent", stream, event, 0)
    for value in (2, 3):
        driver.ok("cuMemsetD8Async", address, value, page, stream)
        driver.ok("cuEventRecord", event, stream)
        assert driver.result("cuEventQuery", event) in (SUCCESS, NOT_READY)
        driver.ok("cuEventSynchronize", event)
        assert driver.result("cuEventQuery", event) == SUCCESS
        assert driver.read(address, page) == bytes([value]) * page


def test_no_stream_is_captured_and_the_mode_is_the_threads_own(driver: Driver) -> None:
    with driver.stream() as stream:
        status = ctypes.c_int(-1)
        driver.ok("cuStreamIsCapturing", stream, ctypes.byref(status))
        assert status.value == 0
    mode = ctypes.c_int(2)
    driver.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    before = mode.value
    driver.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert (before, mode.value) == (0, 2)
