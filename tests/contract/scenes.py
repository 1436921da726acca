"""Scenes that need a process of their own: forks, and the kernel's limit of memory maps.

Run as `scenes.py NAME LIBRARY`; a scene that holds prints `done` as its last line. Every public function is a scene.
"""

import ctypes
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from driver import HOST, NOT_PERMITTED, OUT_OF_MEMORY, SUCCESS, Driver

PAGE = 4096
PARENT_WROTE, CHILD_WROTE, BEFORE = b"P" * PAGE, b"C" * PAGE, b"b" * PAGE


def _in_child(check: Callable[[], None], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Forks; the child runs `check` after the parent ran `meanwhile`."""
    gate, opener = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(gate, 1)
            check()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    meanwhile()
    os.write(opener, b"g")
    _, status = os.waitpid(child, 0)
    os.close(gate)
    os.close(opener)
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed"


def writes_are_not_seen_by_the_other(driver: Driver) -> None:
    """Both ways, on device and on host pages, whoever writes first."""
    with driver.mapped(2 * PAGE) as device, driver.mapped(2 * PAGE, HOST) as host:
        for address in (device, host):
            ctypes.memmove(address, 2 * BEFORE, 2 * PAGE)

        def child() -> None:
            for address in (device, host):
                assert ctypes.string_at(address, 2 * PAGE) == 2 * BEFORE, "the parent's write after the fork is seen"
                ctypes.memmove(address + PAGE, CHILD_WROTE, PAGE)
                assert ctypes.string_at(address, 2 * PAGE) == BEFORE + CHILD_WROTE

        def parent() -> None:
            for address in (device, host):
                ctypes.memmove(address, PARENT_WROTE, PAGE)

        _in_child(child, parent)
        for address in (device, host):
            assert ctypes.string_at(address, 2 * PAGE) == PARENT_WROTE + BEFORE, "the child's write is seen"


def a_child_keeps_nothing_of_the_pool(driver: Driver) -> None:
    """No descriptor and no map of the memfds is left in the child, whatever was accessible."""
    address, handle = driver.reserve(2 * PAGE), driver.create(PAGE)
    driver.map(address, PAGE, handle)
    driver.ok("cuMemMap", address + PAGE, PAGE, 0, handle, 0)  # and no access

    def check() -> None:
        assert "memfd:ballonet" not in Path("/proc/self/maps").read_text()
        for entry in Path("/proc/self/fd").iterdir():
            assert "memfd:ballonet" not in (os.readlink(entry) if entry.is_symlink() else "")

    _in_child(check)
    assert "memfd:ballonet-device" in Path("/proc/self/maps").read_text()


def a_child_is_refused(driver: Driver) -> None:
    """Every call that could touch the device, with a message; and the parent works on."""
    with driver.mapped(PAGE) as address:

        def check() -> None:
            assert driver.result("cuMemUnmap", address, PAGE) == NOT_PERMITTED
            assert "forked" in driver.violation()
            assert driver.result("cuInit", 0) == NOT_PERMITTED
            assert driver.result("cuStreamSynchronize", 0) == NOT_PERMITTED
            assert driver.result("ballonet_standin_use", address, PAGE, 0, 1) == NOT_PERMITTED
            _in_child(lambda: ctypes.memset(address, 1, PAGE))  # a grandchild is one more child
            assert ctypes.string_at(address, 1) == b"p"

        driver.write(address, b"p" * PAGE)
        _in_child(check)
        assert driver.read(address, PAGE) == b"p" * PAGE


def forks_beside_busy_threads(driver: Driver) -> None:
    """Forking while other threads map, copy and synchronise neither hangs nor tears a page that lies still."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def busy() -> None:
        try:
            driver.enter()
            with driver.mapped(64 * PAGE, HOST) as source, driver.stream() as stream:
                while not stop.is_set():
                    with driver.mapped(64 * PAGE) as target:
                        driver.ok("cuMemcpyAsync", target, source, 64 * PAGE, stream)
                        driver.ok("cuStreamSynchronize", stream)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    with driver.mapped(256 * PAGE) as still:
        ctypes.memset(still, 7, 256 * PAGE)
        for thread in threads:
            thread.start()

        def check() -> None:
            assert ctypes.string_at(still, 256 * PAGE) == b"\7" * (256 * PAGE)

        for _ in range(25):
            _in_child(check)
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def too_many_maps(driver: Driver) -> None:
    """ENOMEM of the kernel is an error that names the limit; what was there stays, and memory can be given back."""
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    handle, address = driver.create(PAGE), driver.reserve(2 * limit * PAGE)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_long
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    driver.ok("cuMemMap", address, PAGE, 0, handle, 0)  # each function is looked up while that can be done
    driver.ok("cuMemUnmap", address, PAGE)
    # The interpreter gets no memory of its own either: it lives on what these leave free, their arenas held by a few.
    small = [bytes(480) for _ in range(20_000)]
    small[:] = small[::1000]
    mapped, result = 0, SUCCESS
    while result == SUCCESS:  # every second page: no neighbours that could be one map
        result = driver.result("cuMemMap", address + 2 * mapped * PAGE, PAGE, 0, handle, 0)
        mapped += result == SUCCESS
    message = driver.violation()
    access = itertools.cycle((0, 1))  # unlike neighbours, so that they are not one map either
    while libc.mmap(None, PAGE, next(access), 0x22, -1, 0) != -1:
        pass  # the very last ones: no mmap works any more
    results = {driver.result("cuMemUnmap", address + 2 * i * PAGE, PAGE) for i in range(mapped)}
    assert results == {SUCCESS}, results
    assert (result, "vm.max_map_count" in message) == (OUT_OF_MEMORY, True), message
    assert mapped > limit // 4
    end = address + 2 * limit * PAGE
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    inside = [(int(a, 16), int(b, 16)) for a, b in spans if int(b, 16) > address and int(a, 16) < end]
    assert inside[0][0] <= address
    assert inside[-1][1] >= end
    assert all(left[1] == right[0] for left, right in itertools.pairwise(inside)), "a hole"
    driver.ok("cuMemRelease", handle)
    driver.ok("cuMemAddressFree", address, 2 * limit * PAGE)


if __name__ == "__main__":
    loaded = Driver(sys.argv[2])
    loaded.start()
    globals()[sys.argv[1]](loaded)
    print("done")
