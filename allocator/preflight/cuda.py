"""The CUDA driver through ctypes, for the probes: each function is looked up at its first call.

The core's own table (driver_abi.h) has no host allocations, no graphs and no copies with a direction; and a probe may
have to go wrong without the core.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

DEVICE, HOST = 1, 3  # CU_MEM_LOCATION_TYPE_DEVICE, _HOST_NUMA
ATTRIBUTES: Final = {
    "posix_handles": 103,
    "read_only_register": 113,
    "host_numa_id": 134,
}
_KINDS: Final = {
    "i": ctypes.c_int,
    "I": ctypes.c_uint,
    "B": ctypes.c_ubyte,
    "z": ctypes.c_size_t,
    "u": ctypes.c_uint64,
    "p": ctypes.c_void_p,
}
# name → parameters, and the version of its symbol: i int, I unsigned, B byte, z size, u address or handle, p pointer
_FUNCTIONS: Final = {
    "cuInit": "I",
    "cuDeviceGet": "pi",
    "cuDeviceGetAttribute": "pii",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxSetCurrent": "p",
    "cuCtxSynchronize": "",
    "cuMemGetAllocationGranularity": "ppi",
    "cuMemAddressReserve": "pzzuu",
    "cuMemAddressFree": "uz",
    "cuMemCreate": "pzpu",
    "cuMemRelease": "u",
    "cuMemMap": "uzzuu",
    "cuMemUnmap": "uz",
    "cuMemSetAccess": "uzpz",
    "cuMemHostAlloc": "pzI",
    "cuMemFreeHost": "p",
    "cuMemHostRegister": "pzI _v2",
    "cuMemHostUnregister": "p",
    "cuMemcpyHtoD": "upz _v2",
    "cuMemcpyDtoH": "puz _v2",
    "cuMemcpyAsync": "uuzp",
    "cuMemsetD8Async": "uBzp",
    "cuStreamCreate": "pI",
    "cuStreamDestroy": "p _v2",
    "cuStreamSynchronize": "p",
    "cuStreamBeginCapture": "pi _v2",
    "cuStreamEndCapture": "pp",
    "cuEventCreate": "pI",
    "cuEventDestroy": "p _v2",
    "cuEventRecord": "pp",
    "cuEventQuery": "p",
    "cuGraphInstantiateWithFlags": "ppu",
    "cuGraphLaunch": "pp",
    "cuGetErrorName": "ip",
}


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("rest", ctypes.c_ubyte * 6),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class DriverRefused(Exception):
    """The driver answered a call with an error."""

    def __init__(self, function: str, code: int, name: str) -> None:
        super().__init__(f"{function} answered {name} ({code})")
        self.code = code


class DriverMissing(Exception):
    """The library has no such function."""


class Cuda:
    """A driver's library with the primary context of a device current on this thread."""

    def __init__(self, library: str, ordinal: int = 0) -> None:
        self._library = ctypes.CDLL(library)
        self._found: dict[str, Callable[..., int]] = {}
        self.is_standin = hasattr(self._library, "ballonet_standin_configure")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), ordinal)
        self.device = device.value
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.context = context
        self.enter()

    def enter(self) -> None:
        """Makes the context current on the calling thread."""
        self("cuCtxSetCurrent", self.context)

    def code(self, name: str, *arguments: object) -> int:
        """Makes a call and returns its code. DriverMissing."""
        if name not in self._found:
            parameters, _, version = _FUNCTIONS[name].partition(" ")
            try:
                function = getattr(self._library, name + version)
            except AttributeError:
                raise DriverMissing(f"this driver has no {name}") from None
            function.argtypes, function.restype = [_KINDS[parameter] for parameter in parameters], ctypes.c_int
            self._found[name] = function
        return self._found[name](*arguments)

    def __call__(self, name: str, *arguments: object) -> None:
        """Makes a call that has to succeed. DriverRefused, DriverMissing."""
        result = self.code(name, *arguments)
        if result:
            text = ctypes.c_char_p()
            known = self.code("cuGetErrorName", result, ctypes.byref(text)) == 0 and text.value
            raise DriverRefused(name, result, known.decode() if known else "an unknown error")

    def attribute(self, number: int) -> int | None:
        """Returns an attribute; None where the driver does not know it."""
        value = ctypes.c_int()
        return value.value if self.code("cuDeviceGetAttribute", ctypes.byref(value), number, self.device) == 0 else None

    def location(self, kind: int) -> Location:
        """Returns a location: the device's own memory, or the NUMA node of the host that is nearest to the device."""
        if kind == DEVICE:
            return Location(DEVICE, self.device)
        nearest = self.attribute(ATTRIBUTES["host_numa_id"])
        return Location(HOST, max(0, nearest or 0))

    def properties(self, kind: int, handle_types: int = 0) -> Properties:
        return Properties(1, handle_types, self.location(kind), None, 0, 0)

    def granularity(self, kind: int, recommended: bool = False) -> int:
        nbytes = ctypes.c_size_t()
        self(
            "cuMemGetAllocationGranularity", ctypes.byref(nbytes), ctypes.byref(self.properties(kind)), int(recommended)
        )
        return nbytes.value

    def create(self, nbytes: int, properties: Properties) -> int:
        handle = ctypes.c_uint64()
        self("cuMemCreate", ctypes.byref(handle), nbytes, ctypes.byref(properties), 0)
        return handle.value

    def reserve(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self("cuMemAddressReserve", ctypes.byref(address), nbytes, 0, 0, 0)
        return address.value

    def open(self, address: int, nbytes: int, kind: int) -> None:
        """Gives the device access, to pages of the host the CPU too."""
        wanted = [Access(self.location(DEVICE), 3)] + ([Access(self.location(HOST), 3)] if kind == HOST else [])
        self("cuMemSetAccess", address, nbytes, (Access * len(wanted))(*wanted), len(wanted))

    def map(self, address: int, handles: Sequence[int], page: int, kind: int) -> None:
        """Puts pages side by side behind an address, and opens them."""
        for index, handle in enumerate(handles):
            self("cuMemMap", address + index * page, page, 0, handle, 0)
        self.open(address, len(handles) * page, kind)

    @contextmanager
    def mapped(self, kind: int, page: int, pages: int = 1) -> Iterator[int]:
        """Yields an address with so many new pages behind it."""
        handles = [self.create(page, self.properties(kind)) for _ in range(pages)]
        address = self.reserve(page * pages)
        try:
            self.map(address, handles, page, kind)
            yield address
        finally:  # as far as possible: an earlier failure is the answer
            self.code("cuCtxSynchronize")
            self.code("cuMemUnmap", address, page * pages)
            self.code("cuMemAddressFree", address, page * pages)
            for handle in handles:
                self.code("cuMemRelease", handle)

    @contextmanager
    def stream(self) -> Iterator[ctypes.c_void_p]:
        """Yields a stream that waits for no other."""
        made = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(made), 1)
        try:
            yield made
        finally:
            self.code("cuStreamSynchronize", made)
            self.code("cuStreamDestroy", made)

    @contextmanager
    def event(self) -> Iterator[ctypes.c_void_p]:
        made = ctypes.c_void_p()
        self("cuEventCreate", ctypes.byref(made), 2)
        try:
            yield made
        finally:
            self.code("cuEventDestroy", made)

    @contextmanager
    def pinned(self, nbytes: int) -> Iterator[int]:
        """Yields memory of the host that the driver allocated."""
        made = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(made), nbytes, 0)
        try:
            yield made.value or 0
        finally:
            self.code("cuCtxSynchronize")
            self.code("cuMemFreeHost", made)

    def write(self, address: int, data: bytes) -> None:
        """Writes to memory at a device address, and waits for it."""
        self("cuMemcpyHtoD", address, data, len(data))
        self("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> bytes:
        self("cuCtxSynchronize")
        data = ctypes.create_string_buffer(nbytes)
        self("cuMemcpyDtoH", data, address, nbytes)
        return data.raw
