"""`driver_abi.h` against the cuda.h of a toolkit, where the machine has one.

Two programs, one per header, print what they see line by line: sizes, offsets, constants, symbols, sizes of parameters.
"""

import glob
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .driver import HEADER, declared

# What cuda.h calls it -> what driver_abi.h calls it.
CONSTANTS = {
    "CUDA_SUCCESS": "kSuccess",
    "CUDA_ERROR_INVALID_VALUE": "kInvalidValue",
    "CUDA_ERROR_OUT_OF_MEMORY": "kOutOfMemory",
    "CUDA_ERROR_NOT_INITIALIZED": "kNotInitialized",
    "CUDA_ERROR_NO_DEVICE": "kNoDevice",
    "CUDA_ERROR_INVALID_DEVICE": "kInvalidDevice",
    "CUDA_ERROR_INVALID_CONTEXT": "kInvalidContext",
    "CUDA_ERROR_ALREADY_MAPPED": "kAlreadyMapped",
    "CUDA_ERROR_NOT_MAPPED": "kNotMapped",
    "CUDA_ERROR_OPERATING_SYSTEM": "kOperatingSystem",
    "CUDA_ERROR_INVALID_HANDLE": "kInvalidHandle",
    "CUDA_ERROR_ILLEGAL_STATE": "kIllegalState",
    "CUDA_ERROR_NOT_READY": "kNotReady",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "kIllegalAddress",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": "kContextIsDestroyed",
    "CUDA_ERROR_NOT_PERMITTED": "kNotPermitted",
    "CUDA_ERROR_NOT_SUPPORTED": "kNotSupported",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "kSystemDriverMismatch",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "kCompatNotSupported",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "kStreamCaptureUnsupported",
    "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT": "kStreamCaptureImplicit",
    "CUDA_ERROR_CAPTURED_EVENT": "kCapturedEvent",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "kAlreadyRegistered",
    "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED": "kNotRegistered",
    "CUDA_ERROR_UNKNOWN": "kUnknown",
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
TYPES = ["CUresult", "CUdevice", "CUdeviceptr", "CUmemGenericAllocationHandle", "CUcontext", "CUstream", "CUevent"]
FIELDS = {
    "CUmemLocation": ["type", "id"],
    "CUmemAllocationProp": ["type", "requestedHandleTypes", "location", "win32HandleMetaData"]
    + [f"allocFlags.{name}" for name in ("compressionType", "gpuDirectRDMACapable", "usage", "reserved")],
    "CUmemAccessDesc": ["location", "flags"],
}


def cuda_header() -> Path | None:
    homes = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), *sorted(glob.glob("/usr/local/cuda*"))]
    return next((found for home in homes if home and (found := Path(home) / "include" / "cuda.h").exists()), None)


def layout_lines() -> list[str]:
    """C++ statements that print layouts; the same text serves both headers."""
    lines = [f'show("sizeof {name}", sizeof({name}));' for name in [*TYPES, *FIELDS]]
    for struct, fields in FIELDS.items():
        for name in fields:
            lines.append(
                f'show("{struct}.{name}", offsetof({struct}, {name}), sizeof({struct}::{name.split(".")[0]}));'
            )
    return lines


def printed(folder: Path, name: str, header: Path, statements: list[str]) -> list[str]:
    """Compiles a program that includes `header` and runs the statements; returns the lines that it prints."""
    source = folder / f"{name}.cpp"
    source.write_text(
        f'#include "{header}"\n'
        "#include <cstddef>\n#include <iostream>\n"
        "#define TEXT_(x) #x\n#define TEXT(x) TEXT_(x)\n"
        "template <class... N> void show(const char* what, N... numbers) {\n"
        '  std::cout << what; ((std::cout << " " << static_cast<long long>(numbers)), ...); std::cout << "\\n";\n}\n'
        "template <class R, class... A> void show_parameters(const char* what, R (*)(A...)) {\n"
        "  show(what, sizeof(A)...);\n}\n"
        "int main() {\n  " + "\n  ".join(statements) + "\n}\n"
    )
    program = folder / name
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-std=c++17", "-o", str(program), str(source)], check=True, timeout=120)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()


def test_the_abi_is_that_of_cuda_h(tmp_path: Path) -> None:
    header = cuda_header()
    if header is None:
        pytest.skip("no cuda.h in CUDA_HOME, CUDA_PATH or /usr/local/cuda*/include")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    assert set(CONSTANTS.values()) == set(re.findall(r"\b(k[A-Z]\w+) = ", HEADER.read_text()))
    functions = declared("BALLONET_DRIVER_FUNCTIONS")
    theirs = layout_lines() + [f'show("{name}", {name});' for name in CONSTANTS]
    theirs += [f"show_parameters(TEXT({name}), static_cast<decltype(&{name})>(nullptr));" for name in functions]
    ours = layout_lines() + [f'show("{name}", ballonet::cuda::{mine});' for name, mine in CONSTANTS.items()]
    ours.append(
        "#define X(name, symbol, ...) show_parameters(symbol, static_cast<CUresult (*)(__VA_ARGS__)>(nullptr));"
    )
    ours.append("BALLONET_DRIVER_FUNCTIONS(X)")
    expected = printed(tmp_path, "theirs", header, theirs)
    assert len(expected) > len(CONSTANTS) + len(functions)
    assert printed(tmp_path, "ours", HEADER, ours) == expected
