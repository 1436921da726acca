"""The CUDA driver's interface through ctypes, for any library that exports it.

Names, symbols and parameter types are read from `driver_abi.h`, so that the suite calls what the core calls. Sizes are
bytes, addresses and handles are ints; stream 0 is the calling thread's.
"""

import ctypes
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ballonet.allocator

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "allocator" / "csrc" / "driver" / "driver_abi.h"

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_CONTEXT = 0, 1, 2, 3, 201
INVALID_HANDLE, ILLEGAL_STATE, NOT_READY, ILLEGAL_ADDRESS, NOT_PERMITTED, NOT_SUPPORTED = 400, 401, 600, 700, 800, 801
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
GIVES_BACK = ("cuEventDestroy", "cuStreamDestroy", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree")
HELD = 2**64 - 1  # a latency with which no copy between host and device begins
READ_ONLY = 8  # a flag of cuMemHostRegister
DEVICE, HOST = 1, 3  # kinds of location
HOST_PAGES_ATTRIBUTE, READ_ONLY_REGISTER_ATTRIBUTE = 141, 113
POISON = 0xFF

_TYPES = {
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned char": ctypes.c_ubyte,
    "unsigned long long": ctypes.c_uint64,
    "std::size_t": ctypes.c_size_t,
    "CUresult": ctypes.c_int,
    "CUdevice": ctypes.c_int,
    "CUdeviceptr": ctypes.c_uint64,
    "CUmemGenericAllocationHandle": ctypes.c_uint64,
    "CUcontext": ctypes.c_void_p,
    "CUstream": ctypes.c_void_p,
    "CUevent": ctypes.c_void_p,
}


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDesc(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class StandinConfig(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_uint64),
        ("bandwidth", ctypes.c_uint64),
        ("latency_ns", ctypes.c_uint64),
        ("peer_bandwidth", ctypes.c_uint64),
        ("unbacked", ctypes.c_int),
    )


def declared(table: str) -> dict[str, tuple[str, list[type]]]:
    """The functions of one X-macro table of the header: name -> (symbol, parameter types)."""
    body = re.search(rf"#define {table}\(X\)(.*?)// clang-format on", HEADER.read_text(), re.S)
    assert body is not None, f"{table} is not in {HEADER}"
    functions = {}
    for name, symbol, parameters in re.findall(r'X\((\w+),\s*"(\w+)"((?:,[^()]*)?)\)', body[1]):
        kinds = [kind.strip() for kind in parameters.split(",")[1:]]
        functions[name] = (symbol, [ctypes.c_void_p if "*" in kind else _TYPES[kind] for kind in kinds])
    return functions


def standin_library() -> Path:
    """The stand-in that was built next to the native core."""
    for folder in ballonet.allocator.__path__:
        if (library := Path(folder) / "_standin.so").exists():
            return library
    raise FileNotFoundError(f"no _standin.so in {list(ballonet.allocator.__path__)}: build the package first")


def private_copy(library: Path, folder: Path) -> Path:
    """A copy of a library: loaded from there it has a state of its own, apart from the one the core may be using."""
    copy = folder / library.name
    shutil.copy(library, copy)
    return copy


def private_standin(folder: Path) -> Path:
    return private_copy(standin_library(), folder)


class Driver:
    """One loaded driver library. `ok` demands success, `result` hands the driver's result back.

    `clear` gives back what `create`, `reserve`, `map`, `streams` and `events` have made.
    """

    def __init__(self, path: str | Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.is_standin = hasattr(self.library, "ballonet_standin_configure")
        self._functions = {}
        self._left: dict[str, dict[int, int]] = {name: {} for name in GIVES_BACK}
        functions = declared("BALLONET_DRIVER_FUNCTIONS")
        if self.is_standin:
            functions |= declared("BALLONET_STANDIN_FUNCTIONS")
        for name, (symbol, parameters) in functions.items():
            function = getattr(self.library, symbol)
            function.argtypes, function.restype = parameters, ctypes.c_int
            self._functions[name] = function

    def result(self, name: str, *arguments: object) -> int:
        result = self._functions[name](*arguments)
        if result == SUCCESS and name in self._left:
            self._forget(name, *arguments)
        return result

    def _forget(self, name: str, first: int | ctypes.c_void_p, nbytes: int = 0) -> None:
        left = self._left[name]
        begin = first if isinstance(first, int) else first.value or 0
        left.pop(begin, None)
        if name == "cuMemUnmap":
            for inside in [address for address in left if begin <= address < begin + nbytes]:
                del left[inside]

    def clear(self) -> None:
        """Gives back what is left of what was made."""
        self.ok("cuCtxSynchronize")
        for name, left in self._left.items():
            for first, nbytes in list(left.items()):
                self.ok(name, first, *([nbytes] if nbytes else []))

    def ok(self, name: str, *arguments: object) -> None:
        result = self.result(name, *arguments)
        assert result == SUCCESS, f"{name} = {result}: {self.violation() if self.is_standin else ''}"

    def violation(self) -> str:
        """The stand-in's newest message on this thread."""
        text = ctypes.create_string_buffer(1024)
        self._functions["ballonet_standin_violation"](text, len(text))
        return text.value.decode()

    def start(self) -> None:
        """cuInit and the primary context of device 0, current on this thread."""
        self.ok("cuInit", 0)
        self.retain()
        self.enter()

    def retain(self) -> None:
        context = ctypes.c_void_p()
        self.ok("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.context = context

    def enter(self) -> None:
        self.ok("cuCtxSetCurrent", self.context)

    def finish(self) -> None:
        self.ok("cuCtxSynchronize")
        self.ok("cuCtxSetCurrent", None)
        self.ok("cuDevicePrimaryCtxRelease", 0)

    def configure(self, device: int = 0, bandwidth: int = 0, latency_ns: int = 0, peer_bandwidth: int = 0) -> None:
        config = StandinConfig(device, bandwidth, latency_ns, peer_bandwidth)
        self.ok("ballonet_standin_configure", ctypes.byref(config))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within it no copy between host and device begins."""
        self.configure(latency_ns=HELD)
        try:
            yield
        finally:
            self.configure()

    def attribute(self, number: int) -> int:
        value = ctypes.c_int(-1)
        self.ok("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def granularity(self) -> int:
        value = ctypes.c_size_t()
        self.ok("cuMemGetAllocationGranularity", ctypes.byref(value), ctypes.byref(properties(DEVICE)), 0)
        return value.value

    def memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.ok("cuMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def create(self, nbytes: int, location: int = DEVICE) -> int:
        handle = ctypes.c_uint64()
        self.ok("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(properties(location)), 0)
        self._left["cuMemRelease"][handle.value] = 0
        return handle.value

    def reserve(self, nbytes: int, alignment: int = 0) -> int:
        address = ctypes.c_uint64()
        self.ok("cuMemAddressReserve", ctypes.byref(address), nbytes, alignment, 0, 0)
        self._left["cuMemAddressFree"][address.value] = nbytes
        return address.value

    def map(self, address: int, nbytes: int, handle: int, location: int = DEVICE) -> None:
        """Maps and gives access."""
        self.place(address, nbytes, handle)
        self.access(address, nbytes, location)

    def place(self, address: int, nbytes: int, handle: int) -> None:
        """Maps, without access."""
        self.ok("cuMemMap", address, nbytes, 0, handle, 0)
        self._left["cuMemUnmap"][address] = nbytes

    def page(self, nbytes: int, location: int = DEVICE) -> int:
        """An address with a page of its own behind it, until `clear`."""
        handle, address = self.create(nbytes, location), self.reserve(nbytes)
        self.map(address, nbytes, handle, location)
        return address

    def access(self, address: int, nbytes: int, location: int = DEVICE) -> None:
        """For the device; to what is on the host for the CPU, too."""
        self.ok("cuMemSetAccess", address, nbytes, ACCESSES, 2 if location == HOST else 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self.ok("cuMemUnmap", address, nbytes)

    @contextmanager
    def mapped(self, nbytes: int, location: int = DEVICE) -> Iterator[int]:
        """An address with a page of its own behind it."""
        handle, address = self.create(nbytes, location), self.reserve(nbytes)
        self.map(address, nbytes, handle, location)
        yield address
        self.ok("cuCtxSynchronize")
        self.unmap(address, nbytes)
        self.ok("cuMemAddressFree", address, nbytes)
        self.ok("cuMemRelease", handle)

    def write(self, address: int, data: bytes) -> None:
        self.ok("cuMemcpyHtoD", address, data, len(data))

    def read(self, address: int, nbytes: int) -> bytes:
        data = ctypes.create_string_buffer(nbytes)
        self.ok("cuMemcpyDtoH", data, address, nbytes)
        return data.raw

    def streams(self, count: int) -> list[int]:
        return [self._made("cuStreamCreate", 1, "cuStreamDestroy") for _ in range(count)]

    def events(self, count: int) -> list[int]:
        return [self._made("cuEventCreate", 2, "cuEventDestroy") for _ in range(count)]

    def _made(self, name: str, flags: int, gives_back: str) -> int:
        made = ctypes.c_void_p()
        self.ok(name, ctypes.byref(made), flags)
        assert made.value is not None
        self._left[gives_back][made.value] = 0
        return made.value

    @contextmanager
    def stream(self) -> Iterator[int]:
        (made,) = self.streams(1)
        yield made
        self.ok("cuStreamSynchronize", made)
        self.ok("cuStreamDestroy", made)

    @contextmanager
    def event(self) -> Iterator[int]:
        (made,) = self.events(1)
        yield made
        self.ok("cuEventDestroy", made)


ACCESS = AccessDesc(Location(DEVICE, 0), 3)
ACCESSES = (AccessDesc * 2)(ACCESS, AccessDesc(Location(HOST, 0), 3))


def properties(location: int) -> AllocationProp:
    """Pinned memory of device 0 or of host NUMA node 0."""
    return AllocationProp(type=1, location=Location(location, 0))
