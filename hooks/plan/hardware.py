"""The device that a plan is for, and its speed: as measured, by the table, or by a file.

Note [Which figures]
    Times that `profile` has measured of this model on this machine come first. For a device of the table
    (policy/planner/hardware.py), or of a file, times are computed from its data sheet and the forward's work. There are
    no such data sheets of CPUs, so without a record their times are not known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch

from ...allocator import defaults, device_choice, ram
from ...allocator.config import Config, cache_dir, parse_bandwidth, parse_size
from ...allocator.errors import BallonetError, ConfigError
from ...offload.policy.planner.answer import Question
from ...offload.policy.planner.hardware import DEVICES, Hardware, Size, by_device, interpolated, named
from ...offload.policy.planner.memory import Judged
from ...offload.record import record
from ...offload.record.record import Phase, Point
from ..device.key import key_for
from .moments import Sizing

_FIELDS: Final = {
    "memory": "bytes, '24GiB'",
    "bandwidth": "of its memory, '3.35TB/s'",
    "link": "from the host, '55GB/s'",
}
_FIELDS_ALL: Final = (*_FIELDS, "flops")


@dataclass(frozen=True, slots=True)
class Device:
    """A device to plan for. `kind`: of its pages. `hardware`: None where it is in no table. `memory`: bytes that a pool
    may have. `here`: is it this machine's, so that records of it count? `ordinal`: its number then."""

    kind: Literal["cuda", "standin"]
    hardware: Hardware | None
    memory: int
    here: bool = False
    ordinal: int = 0

    @property
    def name(self) -> str:
        """The name for people."""
        return "this CPU" if self.hardware is None else self.hardware.name


@dataclass(frozen=True, slots=True)
class Speed:
    """The times of a model's iterations on a device, with every layer resident. `source`: of the figures. `link`: bytes
    per second. `known`: the measured record."""

    device: Device
    source: str
    link: float | None
    known: record.Record | None = None

    def seconds(self, sizing: Sizing, asked: Question) -> tuple[float | None, float | None]:
        """Returns the seconds of the prefill and of the decode step; None where they are not known."""
        if self.known is not None and asked.bits is None:
            return (
                interpolated("prefill", self._by_size("prefill"), asked.batch, asked.prompt),
                interpolated("decode", self._by_size(self.known.decoding), asked.batch, max(1, asked.context - 1)),
            )
        hardware = self.device.hardware
        if hardware is None:
            return None, None
        forwards = sizing.seen(asked.batch, asked.prompt, asked.context)
        less = sizing.saved(asked.bits)
        first, last = (by_device(forward.work.reading(less), hardware) for forward in forwards)
        return first, last

    def beside(self) -> tuple[float, float]:
        """Returns the seconds that `generate()` takes beside the first forward, and beside each later one, as far as
        measured."""
        known: Mapping[Phase, float] = {} if self.known is None else self.known.beside
        return known.get("prefill", 0.0), known.get("decode", 0.0)

    def judged(self, asked: Question) -> Judged | None:
        """Returns the basis of a run's decisions, which uses the same record; None without one."""
        if self.known is None:
            return None
        decoding = self.known.decoding
        points = (
            Point(decoding, 1, 1),
            Point("prefill", asked.batch, asked.prompt),
            Point(decoding, asked.batch, max(1, asked.context - 1)),
        )
        return Judged(*(self.known.time(*point.corner) for point in points))

    def _by_size(self, phase: Phase) -> dict[Size, float]:
        assert self.known is not None
        return {(at.batch, at.length): seconds for at, seconds in self.known.seconds.items() if at.phase == phase}


def device_of(gpu: str | None, settings: Config) -> Device:
    """Returns the device of `--gpu`: a name of the table or a file; None: this machine's. ConfigError."""
    if gpu is not None:
        hardware = DEVICES.get(gpu.lower()) or (None if _is_file(gpu) else named(gpu))
        described = _of_file(Path(gpu)) if hardware is None else hardware
        try:
            here = device_of(None, settings)
        except BallonetError:
            here = None
        if here is not None and here.hardware == described:
            return here
        return Device("cuda", described, _without_outside(described.memory))
    target = device_choice.choose(settings, torch.cuda.is_available())
    if target.kind == "standin":
        return Device("standin", None, ram.available() // defaults.STANDIN_BUDGET, True, target.ordinal)
    memory = int(target.facts["total_memory"])
    return Device("cuda", named(target.facts["name"]), _without_outside(memory), True, target.ordinal)


def host_pages(device: Device, settings: Config, page: int) -> int | None:
    """Returns the host pages of a run: the given budget, or a run's default on this machine; None for another machine,
    where they are not known."""
    if settings.host_budget is None and not device.here:
        return None
    return device_choice.host_budget(settings, device.kind, page) // page


def speed_of(device: Device, sizing: Sizing, settings: Config) -> Speed:
    """Returns the speed of the model on the device. See Note [Which figures]."""
    known, why = _recorded(device, sizing, settings) if device.here else (None, "")
    if known is not None:
        return Speed(device, "measured on this machine", known.bandwidth, known)
    if device.hardware is not None:
        return Speed(device, f"by the {device.hardware.source}", device.hardware.link)
    return Speed(device, f"not known{why}: python -m ballonet profile {sizing.shape.name}, or --gpu", None)


def _recorded(device: Device, sizing: Sizing, settings: Config) -> tuple[record.Record | None, str]:
    """Returns the record of the model on this machine, or None and how the key of an existing one differs. ConfigError
    where it is damaged."""
    key = key_for(sizing.shape.model, device.kind, device.ordinal, settings)
    path = record.path_of(cache_dir(settings), key)
    try:
        return record.load(path, key), ""
    except record.RecordMissing:
        return None, ""
    except record.RecordDamaged as error:
        raise ConfigError(
            f"the performance record of {sizing.shape.name} cannot be used: {error}. Delete the file, or measure anew "
            f"with python -m ballonet profile {sizing.shape.name}"
        ) from error
    except record.Unusable as error:
        return None, f", as {error}"


def _without_outside(memory: int) -> int:
    return max(1, memory - max(defaults.OUTSIDE_BYTES, int(defaults.OUTSIDE_SHARE * memory)))


def _is_file(text: str) -> bool:
    return text.endswith(".json") or "/" in text or Path(text).is_file()


def _of_file(path: Path) -> Hardware:
    """Reads the description of a device from a file. ConfigError."""
    if not path.is_file():
        known = ", ".join(sorted(DEVICES))
        raise ConfigError(
            f"gpu is {str(path)!r}, which is neither a device of the table ({known}) nor a file: a file of JSON has "
            f"{', '.join(_FIELDS_ALL)}"
        )
    try:
        description = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(description, dict):
        raise ConfigError(f"{path} holds no object of JSON with {', '.join(_FIELDS_ALL)}")
    if missing := [name for name in _FIELDS_ALL if name not in description]:
        told = [f"{name} ({_FIELDS.get(name, 'operations per second')})" for name in missing]
        raise ConfigError(f"{path} lacks {', '.join(told)}: add what its data sheet says")
    sizes = {name: parse_bandwidth(description[name], f"{name} in {path}") for name in ("bandwidth", "link")}
    return Hardware(
        str(description.get("name", path.stem)),
        parse_size(description["memory"], f"memory in {path}"),
        sizes["bandwidth"],
        _flops(description["flops"], path),
        sizes["link"],
        f"file {path}",
    )


def _flops(given: Any, path: Path) -> dict[int, float]:
    """Reads operations per second by bytes of an element: a number, or an object such as {"2": 989e12, "4": 67e12}."""
    numbers = given if isinstance(given, dict) else {"2": given}
    try:
        flops = {int(size): float(number) for size, number in numbers.items()}
        if flops and all(number > 0 for number in flops.values()):
            return flops
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"flops in {path} is {given!r}: give operations per second, or those by bytes of an element, such as "
        '{"2": 989e12, "4": 67e12}'
    )
