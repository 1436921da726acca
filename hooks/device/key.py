"""The key of a performance record: the model, the machine and the versions that it was measured with."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import torch
from torch import nn

from ...allocator import devices
from ...allocator._native import Device
from ...allocator.config import Config
from ...allocator.units import format_size, format_time
from ...offload.record import link
from .. import compat

_PACKAGES: Final = ("torch", "transformers", "ballonet")
_CPU: Final = Path("/proc/cpuinfo")


def key_of(model: nn.Module, device: Device) -> dict[str, str]:
    """Keys: model (a hash of its class, configuration and weights' shapes), size (of its weights), device, driver,
    link, torch, transformers, ballonet (versions)."""
    settings = devices.holding(device).settings if device.kind == "standin" else Config()
    return key_for(model, device.kind, device.ordinal, settings)


def key_for(model: nn.Module, kind: Literal["cuda", "standin"], ordinal: int, settings: Config) -> dict[str, str]:
    """Makes the key for a device that need not be open, and a model that need not have values. `settings`: of the
    stand-in's link."""
    config = getattr(model, "config", None)
    weights = {id(tensor): (name, tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    shapes = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in weights.values()]
    facts = [type(model).__name__, compat.settings_of(config), shapes]
    return {
        "model": hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "size": format_size(sum(tensor.numel() * tensor.element_size() for _, tensor in weights.values())),
        **_machine(kind, ordinal, settings),
        **{name: _version(name) for name in _PACKAGES},
    }


def uuid_of(device: Device) -> str:
    """Returns the UUID of a GPU, as NVML writes it."""
    return _uuid(device.ordinal)


def _uuid(ordinal: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(ordinal).uuid}"


def _machine(kind: Literal["cuda", "standin"], ordinal: int, settings: Config) -> dict[str, str]:
    if kind == "standin":
        return {
            "device": f"{_processor()}, {torch.get_num_threads()} threads",
            "driver": "host stand-in",
            "link": _standin_link(settings.link_bandwidth, settings.link_latency),
        }
    uuid = _uuid(ordinal)
    return {
        "device": torch.cuda.get_device_name(ordinal),
        "driver": link.driver(uuid) or f"CUDA {torch.version.cuda}",
        "link": link.described(uuid) or "not known",
    }


def _standin_link(bandwidth: int, latency: float) -> str:
    speed = f"slowed to {bandwidth / 1e9:.9g} GB/s" if bandwidth else "as fast as memory"
    return f"{speed}, {format_time(latency)} later" if latency else speed


def _processor() -> str:
    try:
        lines = _CPU.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # used from its sources
        return "not installed"
