"""What really goes over the host link of a GPU: asked of NVML, where there is one."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any


def received(uuid: str) -> int | None:
    """Bytes per second that a GPU received from the host, whoever sent them; the ledger's `traffic` is that less what
    is known to be ballonet's. None where nobody knows: no NVIDIA driver, a virtual GPU, part of one. `uuid` as NVML
    writes it, "GPU-…". The counter is watched for 20 ms, and the caller waits: not for the thread that runs a model.
    """
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        kilobytes: int = nvml.nvmlDeviceGetPcieThroughput(_gpu(nvml, uuid), nvml.NVML_PCIE_UTIL_RX_BYTES)
    except nvml.NVMLError:
        return None
    return kilobytes * 1024  # NVML does not say which kilo; the larger one leaves less to us


@cache
def _gpu(nvml: ModuleType, uuid: str) -> Any:
    """NVML stays open once it is: to open it takes longer than to ask."""
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByUUID(uuid)
