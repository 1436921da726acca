"""The needs of a model that a plan is made of, its pages at the prompt and at the last token, and the device that a
plan is for, with its speed: as measured, by the table, or by a file.

Note [Which figures]
    Times that `profile` has measured of this model on this machine come first. For a device of the table
    (policy/planner/hardware.py), or of a file, times are computed from its data sheet and the forward's work. There are
    no such data sheets of CPUs, so without a record their times are not known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import torch

from ...allocator import defaults, device_choice, ram
from ...allocator.config import Config, cache_dir, parse_bandwidth, parse_size
from ...allocator.errors import BallonetError, ConfigError
from ...offload.policy.geometry import Geometry
from ...offload.policy.layout import place
from ...offload.policy.planner.answer import Question
from ...offload.policy.planner.hardware import DEVICES, Hardware, Size, by_device, interpolated, named
from ...offload.policy.planner.memory import Judged, Moment, Needs
from ...offload.record import record
from ...offload.record.record import Phase, Point
from ..compat import one_shape
from ..device import managers
from ..device.key import key_for
from ..kv.ranges import CacheSizes, geometry_for
from ..programs.model_info import Widths
from ..weights.model_parts import decoder_layers
from ..weights.ranges import SMALL_BLOCKS, working_pages
from .forward import ModelShape, SeenForward, seen

_INDEX = 8  # bytes of a token's number
_FIELDS: Final = {
    "memory": "bytes, '24GiB'",
    "bandwidth": "of its memory, '3.35TB/s'",
    "link": "from the host, '55GB/s'",
}
_FIELDS_ALL: Final = (*_FIELDS, "flops")
# Times that bytes of operators are more than was seen without values, as kernels allocate inside of themselves.
# Measured: 8 architectures on the stand-in, 1.00 to 1.10 (tests/test_planner_pages.py).
_UNSEEN: Final = 1.1


@dataclass(frozen=True, slots=True)
class Spread:
    """A range: its geometry, and the numbers of the `first` and the `last` layer in it, in the order of appending."""

    geometry: Geometry
    first: int
    last: int

    def pages(self, tokens: int) -> int:
        """Returns the pages under so many tokens of each sequence."""
        return self.geometry.parts * self.geometry.pieces(tokens)

    def full(self, tokens: int) -> int:
        """Returns the pages among these that are full."""
        return self.geometry.parts * self.geometry.full(tokens)

    def takes(self, after: int, until: int) -> Iterator[int]:
        """Yields the lengths after `after`, up to `until`, at which one more page is taken."""
        page, token = self.geometry.page, self.geometry.token_bytes
        for piece in range(self.geometry.pieces(after), self.geometry.pieces(until)):
            yield piece * page // token + 1


@dataclass(frozen=True, slots=True)
class Sizing:
    """Computes the needs of one model. `page`: bytes."""

    shape: ModelShape
    page: int

    def seen(self, batch: int, prompt: int, context: int) -> tuple[SeenForward, SeenForward]:
        """Runs the model without values, see `forward.seen`."""
        return seen(self.shape, batch, prompt, context)

    def saved(self, bits: int | None) -> int:
        """Returns the bytes of weights that quantization to so many bits saves."""
        before, after = (sum(block.nbytes for block in self.shape.blocks(how)) for how in (None, bits))
        return before - after

    def needs(
        self,
        name: str,
        asked: Question,
        seconds: tuple[float | None, float | None],
        judged: Judged | None = None,
        aside: tuple[float, float] = (0.0, 0.0),
    ) -> Needs:
        """Returns the model's pages. `seconds`: of a prefill and of a decode step; `judged`, `aside`: see Needs.
        ConfigError."""
        shape, tuning = self.shape, managers.composed_with().tuning.weights
        layout = place(shape.blocks(asked.bits), self.page, tuning.large)
        layers = layout.layer_pages(shape.layers)
        working = working_pages(shape.model, decoder_layers(shape.model), self.page)
        first, last = self.seen(asked.batch, asked.prompt, asked.context)
        ranges = list(self._spread(asked))
        return Needs(
            name,
            layers,
            layout.pages - sum(layers),
            layout.spare(sources=False, working=working),
            self._moment(ranges, asked.prompt, asked.batch, first.peak),
            self._moment(ranges, asked.context, asked.batch, last.peak),
            asked.prompt,
            *seconds,
            tuple(self._stages(ranges, asked, first)),
            tuple(self._growth(ranges, asked, last)),
            judged,
            aside,
        )

    def _stages(self, ranges: Sequence[Spread], asked: Question, forward: SeenForward) -> Iterator[Moment]:
        """Yields the moments of the prompt: after each layer's append, the pages, and which of them may leave."""
        for stage, peak in enumerate(forward.stages):
            opened = [range_ for range_ in ranges if range_.first < stage]
            full = sum(range_.full(asked.prompt) for range_ in opened if range_.last < stage)
            yield replace(self._moment(opened, asked.prompt, asked.batch, peak), movable=full)

    def _growth(self, ranges: Sequence[Spread], asked: Question, forward: SeenForward) -> Iterator[Moment]:
        """Yields the moments of the answer, at each token that takes a page."""
        ends = {tokens for range_ in ranges for tokens in range_.takes(asked.prompt, asked.context)}
        for tokens in sorted({*ends, asked.context}):
            moment = self._moment(ranges, tokens, asked.batch, forward.peak)
            yield replace(moment, movable=sum(range_.full(tokens - 1) for range_ in ranges))

    def _moment(self, ranges: Sequence[Spread], tokens: int, batch: int, peak: int) -> Moment:
        """Makes the moment with so many tokens, while operators use `peak` bytes."""
        prompts = 2 * (2 * batch * tokens * _INDEX)  # `generate()` appends to the tokens and their mask by a copy
        most = -(-(int(peak * _UNSEEN) + prompts) // self.page) + SMALL_BLOCKS
        kv = tuple(range_.pages(tokens) for range_ in ranges)
        return Moment(kv, sum(range_.full(tokens) for range_ in ranges), most, -(-peak // self.page))

    def _spread(self, asked: Question) -> Iterator[Spread]:
        """Yields the ranges of the cache in the order in which layers append, each with its layers: the first layer
        that finds no place in one makes the next (ranges.py)."""
        geometries = dict(self._geometries(asked))
        places: dict[Widths, list[int]] = {}
        for turn, (_, widths) in enumerate(sorted(self.shape.widths.items())):
            places.setdefault(widths, []).append(turn)
        spreads = [
            Spread(geometry, turns[at], turns[min(at + geometry.layers, len(turns)) - 1])
            for widths, turns in places.items()
            for geometry in (geometries[widths],)
            for at in range(0, len(turns), geometry.layers)
        ]
        yield from sorted(spreads, key=lambda spread: spread.first)

    def _geometries(self, asked: Question) -> Iterator[tuple[Widths, Geometry]]:
        shape = self.shape
        together = len(shape.widths) if one_shape(shape.config) else 1
        for widths in dict.fromkeys(shape.widths.values()):
            sizes = CacheSizes(asked.batch, *widths, shape.dtype.itemsize)
            geometry = geometry_for(
                sizes,
                together,
                asked.prompt,
                self.page,
                asked.pages * self.page,
                longest_known=asked.context,
                expected=asked.context,
                alone=False,
            )
            if geometry is None or geometry.tokens < asked.context:
                raise ConfigError(
                    f"{shape.name}: {asked.batch} sequences of {asked.context} tokens are more than attention kernels "
                    "can index in 32 bits: give a smaller --batch or --context"
                )
            yield widths, geometry


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
    return Speed(device, f"not known{why}: ballonet profile {sizing.shape.name}, or --gpu", None)


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
            f"with ballonet profile {sizing.shape.name}"
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
