"""One device of the native core on a private stand-in, and what can be seen of it from outside the core.

The library is a copy of the stand-in, loaded by this process alone: what its memfds hold is what the device made.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import PoolExhausted

from .contract.driver import Driver, private_standin

T = TypeVar("T")
PAGE = 4096
PLACES = ("device", "host", "peer")
# Every call that changes what lies behind an address; the others only ask, wait, or choose a context.
PAGE_CALLS = ("cuMemCreate", "cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess")


@functools.cache
def library() -> Path:
    folder = tempfile.mkdtemp(prefix="ballonet-standin-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return private_standin(Path(folder))


def shim(folder: Path, source: str) -> str:
    """The stand-in, but for the functions that this source has."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
    made = folder / "libshim.so"
    (folder / "shim.c").write_text(source)
    flags = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-o", str(made)]
    subprocess.run(["gcc", *flags, str(folder / "shim.c"), str(library()), "-ldl"], check=True)
    return str(made)


def program(code: str, *arguments: str) -> None:
    """Runs code in a process of its own, which must end well."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


ENTRY = """
import ctypes, os, sys
from ballonet.allocator import _native, device_choice

class Core(ctypes.Structure):
    P, I, C = ctypes.c_void_p, ctypes.c_int, ctypes.CFUNCTYPE
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("allocate", C(I, ctypes.c_size_t, I, P, ctypes.POINTER(P))),
        ("deallocate", C(None, P)),
        ("record_stream", C(None, P, P)),
        ("trim", C(None, I)),
        ("owns", C(ctypes.c_bool, P)),
        ("serving", C(ctypes.c_bool)),
        ("last_error", C(ctypes.c_char_p)),
    ]

core = Core.from_address(_native.core_table())
library = sys.argv[1] if sys.argv[1:] else device_choice.standin_library()
device = _native.Device(library=library, ordinal=0, page_size=4096, {options})
assert not core.serving()
device.bind()
assert core.serving()

def allocate(nbytes, stream=None):
    out = ctypes.c_void_p()
    assert core.allocate(nbytes, 0, stream, ctypes.byref(out)) == 0, core.last_error()
    return out.value

"""


def entry(code: str, *arguments: str, options: str = "budget=64 * 4096, host_budget=0") -> None:
    """Runs code against the table of the entry points, in a process of its own: a bound device stays for ever. The
    first argument is the driver, if it is not the stand-in."""
    program(ENTRY.replace("{options}", options) + textwrap.dedent(code), *arguments)


# A closed gate keeps whoever calls one of its functions, and no event has passed. The next event that is recorded may
# become part of a graph until it is recorded again, or until the capture ends that begins with it.
STEERED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <unistd.h>
#define NEXT(name, type) ((type)dlsym(RTLD_NEXT, #name))
typedef int (*OfEvent)(void*);
struct prop { int type, handles, location, id; };
static atomic_int closed, inside, interpreter, capturing, next, looked, slow;
static _Atomic(void*) captured;
void close_gate(int which) { closed = which; }
int waiting(void) { return inside; }
void need_interpreter(void) { interpreter = 1; }
void set_slow(int microseconds) { slow = microseconds; }
void set_capturing(int now) { capturing = now; if (!now) captured = 0; }
void capture_next(int begins) { next = 1 + begins; }
int looks(void) { return looked; }
static void pass(int which) {
  if (closed != which) return;
  ++inside;
  while (closed == which) usleep(200);
  if (atomic_exchange(&interpreter, 0)) {
    int (*ensure)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
    void (*release)(int) = (void (*)(int))dlsym(RTLD_DEFAULT, "PyGILState_Release");
    release(ensure());
  }
  --inside;
}
int cuStreamIsCapturing(void* stream, int* status) { *status = capturing; return 0; }
int cuEventRecord(void* event, void* stream) {
  if (next) {
    captured = event;
    capturing = next - 1;
    next = 0;
    if (!capturing) return 0;
  } else if (event == captured) {
    captured = 0;
  }
  return NEXT(cuEventRecord, int (*)(void*, void*))(event, stream);
}
int cuEventQuery(void* event) {
  if (event == captured && event) { ++looked; return 907; }
  return closed == 1 ? 600 : NEXT(cuEventQuery, OfEvent)(event);
}
int cuEventSynchronize(void* event) {
  if (event == captured && event) return 907;
  pass(1);
  return NEXT(cuEventSynchronize, OfEvent)(event);
}
int cuStreamSynchronize(void* stream) { pass(2); return NEXT(cuStreamSynchronize, OfEvent)(stream); }
int cuMemUnmap(unsigned long long address, unsigned long size) {
  pass(4);
  usleep(slow);
  return NEXT(cuMemUnmap, int (*)(unsigned long long, unsigned long))(address, size);
}
int cuMemCreate(void* handle, unsigned long size, struct prop* place, unsigned long long flags) {
  if (place->location == 3) pass(3);
  usleep(slow);
  return NEXT(cuMemCreate, int (*)(void*, unsigned long, void*, unsigned long long))(handle, size, place, flags);
}
"""
EVENTS, COPIES, HOST, UNMAPS = 1, 2, 3, 4


@functools.cache
def _steered(standin: Path) -> str:
    return shim(standin.parent, STEERED)


class Gate:
    """A stand-in that a test steers."""

    def __init__(self, folder: Path) -> None:
        self.path = str(shutil.copy(_steered(library()), folder))
        self.library = ctypes.CDLL(self.path)

    def close(self, which: int) -> None:
        self.library.close_gate(which)

    def open(self) -> None:
        self.library.close_gate(0)

    def capture(self, now: bool) -> None:
        """Streams are being captured from now on, or not."""
        self.library.set_capturing(now)

    def waiting(self) -> int:
        count: int = self.library.waiting()
        return count


@pytest.fixture(name="gate")
def a_gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path)
    yield made
    made.open()


@functools.cache
def driver() -> Driver:
    """The same library through ctypes, for streams and for its memfds."""
    loaded = Driver(library())
    loaded.ok("cuInit", 0)
    loaded.retain()
    return loaded


@contextlib.contextmanager
def current_context() -> Iterator[Driver]:
    """The device's context is current on this thread; elsewhere in these tests it is not, as under a CPU program."""
    driver().enter()
    try:
        yield driver()
    finally:
        driver().ok("cuCtxSetCurrent", None)


def memfd(place: str) -> os.stat_result:
    descriptors = {name: ctypes.c_int() for name in PLACES}
    driver().ok("ballonet_standin_memfds", *map(ctypes.byref, descriptors.values()))
    return os.fstat(descriptors[place].value)


@functools.cache
def inodes() -> dict[int, str]:
    """The place of each memfd."""
    return {memfd(place).st_ino: place for place in PLACES}


def physical(place: str = "device") -> int:
    """Bytes that exist in the memfd of the place, as the kernel counts them."""
    return memfd(place).st_blocks * 512


@dataclass(frozen=True, slots=True)
class Map:
    """One line of /proc/self/maps, cut to the addresses that were asked for."""

    begin: int
    end: int
    access: str
    offset: int
    inode: int
    name: str

    @property
    def place(self) -> str | None:
        """ "device", "host" or "peer" where it shows this stand-in's memory."""
        return inodes().get(self.inode) if self.name.startswith("/memfd:ballonet-") else None


def maps(address: int, nbytes: int, only: Callable[[str], bool] = bool) -> list[Map]:
    """The process's memory maps that touch [address, address + nbytes), of the lines that `only` is true of."""
    listed = []
    for line in filter(only, Path("/proc/self/maps").read_text().splitlines()):
        bounds, access, start, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in bounds.split("-"))
        if begin < address + nbytes and address < end:
            first, last = max(begin, address), min(end, address + nbytes)
            listed.append(Map(first, last, access, int(start, 16) + (first - begin), int(inode), "".join(name)))
    return listed


def behind(address: int, nbytes: int = PAGE) -> tuple[str | None, str, int]:
    """(place, access, offset in its memfd) of a page, from the kernel. Pre: one map covers it."""
    (one,) = maps(address, nbytes)
    assert (one.begin, one.end) == (address, address + nbytes)
    return one.place, one.access, one.offset


def write(address: int, value: int, nbytes: int = PAGE) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, value: int, nbytes: int = PAGE) -> bool:
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes


def calls() -> dict[str, int]:
    """Driver calls of this process so far, from a device that makes none by being asked."""
    return dict(any_device().snapshot()["driver_calls"])


@functools.cache
def any_device() -> _native.Device:
    return make(page=PAGE, budget=0)


def make(
    page: int = PAGE, budget: int = 64, host_budget: int = 0, path: str | None = None, **options: Any
) -> _native.Device:
    """A device; budgets are in pages."""
    return _native.Device(
        library=path or str(library()),
        ordinal=0,
        page_size=page,
        budget=budget * page,
        host_budget=host_budget * page,
        **options,
    )


@dataclass
class Core:
    device: _native.Device
    page: int
    _ranges: list[_native.Range] = field(default_factory=list)
    _lanes: list[tuple[int, _native.Range, ctypes.Array[ctypes.c_char]]] = field(default_factory=list)

    def range(
        self,
        pieces: int,
        owner: _native.Owner = "kv",
        group: _native.Group | None = None,
        auto_retire: bool = False,
        mapped: int = 0,
        value: int | None = None,
        **soon: Any,
    ) -> _native.Range:
        """A range that is closed at the end, if it was not before. `mapped`: how many of its pieces have pages, full of
        the byte `value` if there is one. `soon`: expected, reuse, more; see `reserve`."""
        made = self.device.reserve(pieces * self.page, owner, group or self.device.group(), auto_retire, **soon)
        self._ranges.append(made)
        if mapped:
            made.map(0, mapped)
        if value is not None:
            write(made.address, value, mapped * self.page)
        return made

    def pages(self) -> dict[str, int]:
        pages: dict[str, int] = self.device.snapshot()["pages"]
        return pages

    def state(self) -> tuple[dict[str, int], list[list[str]]]:
        """Pages by owner, and what lies behind the addresses of each range."""
        return self.pages(), [backings(range_) for range_ in self._ranges]

    def created(self) -> int:
        created: int = self.device.snapshot()["created"]
        return created

    def ahead(self) -> int:
        """Pages that are mapped before anybody asked for them."""
        pages: int = self.device.snapshot()["ahead"]
        return pages

    def kept(self) -> int:
        """Pages of closed ranges, which still lie behind their addresses."""
        pages: int = self.device.snapshot()["kept"]
        return pages

    def cached_ranges(self, *sizes: tuple[int, int]) -> list[int]:
        """Closes ranges of so many pieces and pages: the addresses at which these stay, the oldest first."""
        ranges = [self.range(pieces, reuse=False) for pieces, _ in sizes]
        for some, (_, mapped) in zip(ranges, sizes, strict=True):
            some.map(0, mapped)
        for some in ranges:
            some.close()
        self.device.reap(wait=True)
        return [some.address for some in ranges]

    def copied(self) -> dict[str, int]:
        """Bytes, of those ways on which there were any."""
        return {way: nbytes for way, nbytes in self.device.snapshot()["copied"].items() if nbytes}

    def stream(self) -> int:
        """A stream of the driver's that the device knows of, with a page of its own to copy to."""
        made = ctypes.c_void_p()
        with current_context() as it:
            it.ok("cuStreamCreate", ctypes.byref(made), 1)
        assert made.value is not None
        lane = self.range(1, "weights")
        lane.map(0, 1)
        self._lanes.append((made.value, lane, ctypes.create_string_buffer(self.page)))
        self.device.note_stream(made.value)
        return made.value

    def occupy(self, stream: int, seconds: float) -> None:
        """Work on the stream that takes this long; so does any other copy between host and device until `finish`."""
        with current_context() as it:
            it.configure(latency_ns=round(seconds * 1e9))
        self._copy(stream)

    @contextlib.contextmanager
    def occupied(self, stream: int) -> Iterator[None]:
        """Within it there is work on the stream, and no copy between host and device begins."""
        with self.held_copies():
            self._copy(stream)
            yield

    @contextlib.contextmanager
    def held_copies(self) -> Iterator[None]:
        """Within it no copy between host and device begins."""
        with driver().held():
            yield

    def _copy(self, stream: int) -> None:
        (lane, source) = next((lane, source) for known, lane, source in self._lanes if known == stream)
        with current_context() as it:
            it.ok("cuMemcpyAsync", lane.address, ctypes.addressof(source), self.page, stream)

    def finish(self) -> None:
        self.device.synchronize()
        with current_context() as it:
            it.configure()
            for stream, _, _ in self._lanes:
                it.ok("cuStreamDestroy", stream)
        self._lanes.clear()
        for one in self._ranges:
            one.close()
        self._ranges.clear()
        for *_, blocks, _, _ in self.device.segments():
            for address, *_ in blocks:
                self.device.deallocate(address)  # what is no block is ignored


def clean() -> None:
    """Takes another copy of the stand-in where a test that failed left something in this one."""
    if any(map(physical, PLACES)):
        for cached in (library, driver, inodes, any_device):
            cached.cache_clear()


@contextlib.contextmanager
def opened(page: int = PAGE, budget: int = 64, host_budget: int = 16, **options: Any) -> Iterator[Core]:
    """A device, checked and closed at the end of a test that went well; nothing of it may remain."""
    clean()
    core = Core(make(page, budget, host_budget, **options), page)
    yield core
    core.device.check()
    core.finish()
    core.device.check()
    core.device.close()
    assert not any(map(physical, PLACES))


@pytest.fixture(name="core")
def a_core(request: pytest.FixtureRequest) -> Iterator[Core]:
    """A device, on the stand-in that the test steers if it has one (the fixture `gate`)."""
    gate: Gate | None = request.getfixturevalue("gate") if "gate" in request.fixturenames else None
    with opened(path=gate.path if gate else None) as core:
        yield core
        if gate:
            gate.open()  # where the test has failed, too


class Other:
    """Another thread, which does one thing after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def does(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    def close(self) -> None:
        self._thread.shutdown()


@pytest.fixture(name="other")
def another_thread() -> Iterator[Other]:
    with contextlib.closing(Other()) as made:
        yield made


def backings(some: _native.Range) -> list[str]:
    return [some.leads_to(piece) for piece in range(some.pieces)]


def eventually(holds_now: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits until it does; for what a thread of the core's own does when it comes to it."""
    deadline = time.monotonic() + seconds
    while not holds_now():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def refused(work: Callable[[], object]) -> None:
    """There are no pages for it."""
    with pytest.raises(PoolExhausted):
        work()


def together(core: Core, work: Callable[[Any], None], arguments: Iterable[Any]) -> None:
    """Runs `work` in a thread for each argument, and checks the device meanwhile. It raises what one of them raised."""
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(work, argument) for argument in arguments]
        while not all(future.done() for future in running):
            core.device.check()
            wait(running, timeout=0.01)
        for future in running:
            future.result()


def page_calls(work: Callable[[], object]) -> dict[str, int]:
    """The calls that `work` makes which change what lies behind an address."""
    return {name: count for name, count in all_calls(work).items() if name in PAGE_CALLS}


def all_calls(work: Callable[[], object]) -> dict[str, int]:
    """Every driver call that `work` makes."""
    before = calls()
    work()
    after = calls()
    return {name: count - before[name] for name, count in after.items() if count != before[name]}
