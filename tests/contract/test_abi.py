"""`driver_abi.h` against NVIDIA's Python bindings."""

import ctypes
import re
from pathlib import Path

import pytest

from .driver import HEADER, AccessDesc, AllocationProp, Location, declared

# What NVIDIA calls it -> what driver_abi.h calls it; the others are errors of the same name.
NAMES = {
    "CUDA_SUCCESS": "kSuccess",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "kCompatNotSupported",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "kAlreadyRegistered",
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": "kNotRegistered",
    "CU_MEM_ALLOCATION_TYPE_PINNED": "kAllocationPinned",
    "CU_MEM_HANDLE_TYPE_NONE": "kHandleNone",
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": "kHandlePosixFd",
    "CU_MEM_LOCATION_TYPE_DEVICE": "kLocationDevice",
    "CU_MEM_LOCATION_TYPE_HOST_NUMA": "kLocationHostNuma",
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": "kAccessReadWrite",
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": "kGranularityMinimum",
    "CU_EVENT_DISABLE_TIMING": "kEventDisableTiming",
    "CU_STREAM_NON_BLOCKING": "kStreamNonBlocking",
    "CU_MEMHOSTREGISTER_READ_ONLY": "kRegisterReadOnly",
    "CU_STREAM_CAPTURE_STATUS_NONE": "kCaptureNone",
    "CU_STREAM_CAPTURE_MODE_RELAXED": "kCaptureModeRelaxed",
    "CU_DEVICE_ATTRIBUTE_INTEGRATED": "kAttributeIntegrated",
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": "kAttributeComputeMajor",
    "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": "kAttributeComputeMinor",
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "kAttributeVirtualMemory",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "kAttributePosixFd",
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": "kAttributeRdmaVirtualMemory",
    "CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED": "kAttributeReadOnlyRegister",
    "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID": "kAttributeHostNumaId",
    "CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "kAttributeHostNumaVirtualMemory",
}


WIDE = (
    "size_t",
    "unsigned long long",
    "CUdeviceptr",
    "CUmemGenericAllocationHandle",
    "CUcontext",
    "CUstream",
    "CUevent",
)


def size_of(parameter: str) -> int:
    """Bytes of a parameter as the bindings declare it: "size_t bytes". Enumerations and flags have four."""
    kind = parameter.strip().rpartition(" ")[0]
    return 8 if "*" in kind or kind in WIDE else 1 if kind == "unsigned char" else 4


def test_the_abi_is_that_of_nvidia_s_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings are not installed")
    enums = [kind for kind in vars(driver).values() if hasattr(kind, "__members__")]
    theirs = {name: int(value) for enum in enums for name, value in enum.__members__.items()}
    theirs |= {name: value for name, value in vars(driver).items() if name.startswith("CU") and isinstance(value, int)}
    ours = {name: int(value) for name, value in re.findall(r"\b(k[A-Z]\w+) = (\d+)", HEADER.read_text())}
    del ours["kDLPackDevice"]  # DLPack's word, not the driver's
    errors = {f"CUDA_ERROR_{re.sub('(?<=[a-z])(?=[A-Z])', '_', name[1:]).upper()}": name for name in ours}
    names = NAMES | {theirs: mine for theirs, mine in errors.items() if mine not in NAMES.values()}
    assert {name: ours[mine] for name, mine in names.items()} == {name: theirs[name] for name in names}

    declarations = (Path(driver.__file__).parent / "cydriver.pxd").read_text()
    told = dict(re.findall(r"^cdef CUresult (cu\w+)\((.*)\) except", declarations, re.MULTILINE))
    for name, (_, parameters) in declared("BALLONET_DRIVER_FUNCTIONS").items():
        wanted = [size_of(kind) for kind in told[name].split(",") if kind]
        assert [ctypes.sizeof(parameter) for parameter in parameters] == wanted, name

    place = driver.CUmemLocation()
    place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA, 5
    made, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    made.location = access.location = place
    made.allocFlags.usage = 258
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    prop = AllocationProp.from_buffer_copy(ctypes.string_at(made.getPtr(), ctypes.sizeof(AllocationProp)))
    assert ctypes.sizeof(AllocationProp) == 32, "as driver_abi.h asserts"
    assert (prop.type, prop.requested_handle_types, prop.location.type, prop.location.id) == (1, 1, 3, 5)
    assert (bytes(prop.flags), prop.win32) == (bytes([0, 0, 2, 1, 0, 0, 0, 0]), None)
    desc = AccessDesc.from_buffer_copy(ctypes.string_at(access.getPtr(), ctypes.sizeof(AccessDesc)))
    assert (ctypes.sizeof(Location), desc.location.type, desc.location.id, desc.flags) == (8, 3, 5, 3)
