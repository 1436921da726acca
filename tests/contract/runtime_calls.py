"""Scenes of the simulated libcudart, each a process of its own: `python -m tests.contract.runtime_calls NAME DIR`."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, NO_KERNEL, NOT_READY, ILLEGAL = 0, 1, 2, 101, 209, 600, 700
TO_DEVICE, TO_HOST = 1, 2
PAGE = 64 << 10
PROPERTIES = 1008  # bytes of cudaDeviceProp
PROPERTY_VALUES: dict[str, object] = {
    "totalGlobalMem": 16 << 20,
    "major": 8,
    "minor": 0,
    "multiProcessorCount": 108,
    "warpSize": 32,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerMultiProcessor": 2048,
    "regsPerBlock": 65536,
    "sharedMemPerBlock": 49152,
    "sharedMemPerMultiprocessor": 167936,
    "sharedMemPerBlockOptin": 166912,
    "totalConstMem": 65536,
    "maxThreadsDim": [1024, 1024, 64],
    "maxGridSize": [2147483647, 65535, 65535],
    "l2CacheSize": 41943040,
    "memoryBusWidth": 5120,
    "pciDeviceID": 2,
    "asyncEngineCount": 3,
    "unifiedAddressing": 1,
    "integrated": 0,
    "hostRegisterSupported": 1,
}
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Runtime:
    """cudart and, under it, libcuda."""

    def __init__(self, folder: str) -> None:
        self.driver = ctypes.CDLL(str(Path(folder) / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(Path(folder) / "libcudart.so.13"))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: getattr(self.library, name)(
            *(ctypes.c_uint64(value) if type(value) is int else value for value in arguments)
        )

    def made(self, name: str, *arguments: Any) -> int:
        """Calls a function whose first argument is what it makes."""
        value = ctypes.c_void_p()
        assert getattr(self, name)(ctypes.byref(value), *arguments) == SUCCESS, name
        return value.value or 0

    def integers(self, name: str, count: int, *arguments: Any) -> list[int]:
        values = [ctypes.c_uint64() for _ in range(count)]
        assert getattr(self, name)(*map(ctypes.byref, values), *arguments) == SUCCESS, name
        return [value.value for value in values]


def errors_are_remembered_once(cuda: Runtime) -> None:
    assert cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1 << 40) == OUT_OF_MEMORY
    assert [cuda.cudaPeekAtLastError(), cuda.cudaGetLastError(), cuda.cudaGetLastError()] == [2, 2, 0]
    for function, text in (
        ("cudaGetErrorName", b"cudaErrorMemoryAllocation"),
        ("cudaGetErrorString", b"out of memory"),
    ):
        getattr(cuda.library, function).restype = ctypes.c_char_p
        assert getattr(cuda, function)(OUT_OF_MEMORY) == text
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(cuda.cudaGetLastError()))
    cuda.cudaSetDevice(7)
    thread.start()
    thread.join()
    assert (seen, cuda.cudaGetLastError()) == ([0], INVALID_DEVICE)


def allocations_and_the_driver_share_the_memory(cuda: Runtime) -> None:
    free, total = cuda.integers("cudaMemGetInfo", 2)
    address = cuda.made("cudaMalloc", PAGE + 1)
    seen = [ctypes.c_size_t(), ctypes.c_size_t()]
    assert cuda.driver.cuMemGetInfo_v2(*map(ctypes.byref, seen)) == SUCCESS
    assert [value.value for value in seen] == [free - 2 * PAGE, total]
    assert cuda.cudaFree(address) == SUCCESS
    assert cuda.integers("cudaMemGetInfo", 2) == [free, total]
    assert cuda.cudaFree(address) == INVALID_VALUE


def each_device_has_a_context_of_its_own(cuda: Runtime) -> None:
    assert cuda.integers("cudaGetDeviceCount", 1) == [2]
    free, _ = cuda.integers("cudaMemGetInfo", 2)
    assert cuda.cudaSetDevice(1) == SUCCESS
    there = cuda.made("cudaMalloc", PAGE)
    assert cuda.integers("cudaGetDevice", 1) == [1]
    assert cuda.cudaSetDevice(0) == SUCCESS
    assert cuda.integers("cudaMemGetInfo", 2)[0] == free
    here = cuda.made("cudaMalloc", PAGE)
    for address, device in ((here, 0), (there, 1)):
        attributes = (ctypes.c_int * 22)()
        assert cuda.cudaPointerGetAttributes(ctypes.byref(attributes), address) == SUCCESS
        assert list(attributes[:2]) == [2, device]
    stream = cuda.made("cudaStreamCreateWithFlags", 1)
    assert cuda.cudaMemsetAsync(here, 5, PAGE, stream) == SUCCESS
    assert cuda.cudaMemcpyPeerAsync(there, 1, here, 0, PAGE, stream) == SUCCESS
    assert cuda.cudaStreamSynchronize(stream) == SUCCESS
    assert ctypes.string_at(there, 2) == b"\5\5"


def memory_says_of_which_kind_it_is(cuda: Runtime) -> None:
    pageable = ctypes.create_string_buffer(PAGE)
    pinned = cuda.made("cudaHostAlloc", PAGE, 0)
    for address, kind in ((pinned, 1), (ctypes.addressof(pageable), 0)):
        attributes = (ctypes.c_int * 22)()
        assert cuda.cudaPointerGetAttributes(ctypes.byref(attributes), address) == SUCCESS
        assert attributes[0] == kind
    assert cuda.cudaFreeHost(pinned) == SUCCESS


def copies_go_both_ways(cuda: Runtime) -> None:
    rows = b"".join(bytes([row]) * 32 for row in range(8))
    address, host = cuda.made("cudaMalloc", len(rows)), ctypes.create_string_buffer(rows, len(rows))
    assert cuda.cudaMemcpy(address, host, len(rows), TO_DEVICE) == SUCCESS
    ctypes.memset(host, 0xFF, len(rows))
    assert cuda.cudaMemcpy2DAsync(host, 16, address, 32, 16, 4, TO_HOST, 0) == SUCCESS
    assert host.raw[:80] == b"".join(bytes([row]) * 16 for row in range(4)) + b"\xff" * 16


def host_functions_and_events_follow_the_stream(cuda: Runtime) -> None:
    seen: list[str] = []
    stream, event = cuda.made("cudaStreamCreate"), cuda.made("cudaEventCreate")
    gate = threading.Event()
    hold = _CALLBACK(lambda _: gate.wait(600) and None)
    added = _CALLBACK(lambda _: seen.append("called"))
    assert cuda.cudaLaunchHostFunc(stream, hold, None) == SUCCESS
    assert cuda.cudaLaunchHostFunc(stream, added, None) == SUCCESS
    assert cuda.cudaEventRecord(event, stream) == SUCCESS
    assert [cuda.cudaEventQuery(event), cuda.cudaGetLastError()] == [NOT_READY, NOT_READY]
    gate.set()
    assert cuda.cudaEventSynchronize(event) == SUCCESS
    assert seen == ["called"]


def a_kernel_of_a_gpu_is_named_and_refused(cuda: Runtime) -> None:
    """The runner looks for the name in what is written to stderr."""
    function = ctypes.c_char(0)
    cuda.library.__cudaRegisterFunction(None, ctypes.byref(function), None, b"some_kernel", 0, *[None] * 5)
    arguments = [*[ctypes.c_uint(1)] * 6, None, ctypes.c_size_t(0), None]
    assert cuda.library.cudaLaunchKernel(ctypes.byref(function), *arguments) == NO_KERNEL
    assert cuda.cudaGetLastError() == NO_KERNEL
    assert cuda.cudaDeviceSynchronize() == SUCCESS  # which is no harm to the device


def entry_points_are_the_drivers(cuda: Runtime) -> None:
    for name, symbol in ((b"cuMemCreate", "cuMemCreate"), (b"cuMemGetInfo", "cuMemGetInfo_v2")):
        address, status = ctypes.c_void_p(), ctypes.c_int(-1)
        assert cuda.cudaGetDriverEntryPointByVersion(name, ctypes.byref(address), 13000, 0, ctypes.byref(status)) == 0
        assert (address.value, status.value) == (ctypes.cast(getattr(cuda.driver, symbol), ctypes.c_void_p).value, 0)


def structures_are_those_of_cuda_13(cuda: Runtime) -> None:
    """As NVIDIA's bindings read them; and nothing is written behind them."""
    from cuda.bindings import runtime

    properties, raw = runtime.cudaDeviceProp(), ctypes.create_string_buffer(b"Z" * (PROPERTIES + 8), PROPERTIES + 8)
    assert cuda.cudaGetDeviceProperties(raw, ctypes.c_int(1)) == SUCCESS
    assert raw.raw[PROPERTIES:] == b"Z" * 8
    ctypes.memmove(properties.getPtr(), raw, PROPERTIES)
    assert properties.name.rstrip(b"\0").split(b"\0")[0] == b"ballonet simulated device"
    assert bytes(properties.uuid.bytes)[15] == 2
    assert {name: getattr(properties, name) for name in PROPERTY_VALUES} == PROPERTY_VALUES
    pointer, attributes, function = (
        cuda.made("cudaMalloc", 64),
        runtime.cudaPointerAttributes(),
        runtime.cudaFuncAttributes(),
    )
    assert cuda.cudaPointerGetAttributes(ctypes.c_void_p(attributes.getPtr()), pointer) == SUCCESS
    assert (attributes.type, attributes.device) == (runtime.cudaMemoryType.cudaMemoryTypeDevice, 0)
    assert (attributes.devicePointer, attributes.hostPointer) == (pointer, 0)
    assert cuda.cudaFuncGetAttributes(ctypes.c_void_p(function.getPtr()), None) == SUCCESS
    assert function.maxThreadsPerBlock == 1024


def an_error_that_stays_is_told_by_everything(cuda: Runtime) -> None:
    """SIMGPU_FAULT=sticky:1."""
    address = cuda.made("cudaMalloc", PAGE)
    assert cuda.cudaMemsetAsync(address, 0, PAGE, 0) == SUCCESS  # asynchronous: it is not known yet
    assert [cuda.cudaDeviceSynchronize() for _ in range(2)] == [ILLEGAL] * 2
    assert [cuda.cudaGetLastError() for _ in range(2)] == [ILLEGAL] * 2
    assert cuda.cudaMalloc(ctypes.byref(ctypes.c_void_p()), 1) == ILLEGAL


if __name__ == "__main__":
    globals()[sys.argv[1]](Runtime(sys.argv[2]))
    print("done")
