"""The performance record of a model, measured by running it (Select-N §4.4): kept in a file, and reused.

Note [How it is measured]
    `generate()` is called for random prompts of each size: it makes one prefill, and then decode steps at the length
    of the prompt and a little above. The first call is to warm up; of the others the median counts. The model is
    measured as it is; waits for streamed layers are subtracted (pace.py). Small sizes come first, so that sizes that
    take too long, or do not fit in memory, are left out; the record has no time for them. Prefixes are not reused: the
    prefill of a prompt that was seen before would be one of a single token. Decode steps are those that the model
    makes: where it decodes by pieces of CUDA graphs, only the steps by these count.
    What the host takes for each layer that streams is what decode steps of the smallest size take longer while some
    more do, without their waits: of either the shortest counts, as it is little beside what disturbs a measurement.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from torch import nn

from ..allocator import devices
from ..allocator._native import Device
from ..allocator.config import cache_dir
from ..allocator.errors import ManageError, PoolExhausted
from ..allocator.notices import warn
from ..allocator.units import steps
from ..offload.policy.plan import streaming
from ..offload.record import link, record
from ..offload.record.record import Phase, Point, Record
from . import compat
from .device.key import key_of
from .measure.pace import Measured, Pace
from .prefix import sessions
from .streaming.model_residency import ModelResidency
from .weights.model_parts import text_config

Size = tuple[int, int]  # sequences, tokens of each


@dataclass(frozen=True, slots=True)
class Grid:
    """The sizes to measure: powers of two up to `batch` sequences and `length` tokens, from `shortest` on, as far as
    `seconds` allow; each `rounds` times, generating `tokens`."""

    batch: int = 8
    length: int = 2048
    seconds: float = 60.0
    shortest: int = 64  # chosen, as those below: a default grid is measured within a minute
    tokens: int = 5  # one of them by the prefill
    rounds: int = 3  # the median counts

    def sizes(self, longest: int = 0) -> list[Size]:
        """Returns (batch, length), the least work first. `longest`: the model's longest sequence, 0: not known."""
        length = min(self.length, longest - self.tokens) if longest else self.length
        lengths = [power for power in _powers(length) if power >= min(self.shortest, _powers(length)[-1])]
        return sorted(
            ((b, n) for b in _powers(self.batch) for n in lengths), key=lambda size: (size[0] * size[1], size)
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A model's `record` and its file. `reused`: was nothing measured? `left`: requested sizes that are not in it, and
    why."""

    record: Record
    path: Path
    reused: bool
    left: Mapping[Size, str]


def load_or_measure(
    model: nn.Module,
    pace: Pace,
    device: Device,
    grid: Grid | None = None,
    *,
    force: bool = False,
    residency: ModelResidency | None = None,
) -> Profile:
    """Returns the record of a managed model: from its file, or measured and written there, which takes up to a minute
    and shows a progress bar. Where the file cannot be used it measures anew, with a warning that says why.

    `grid`: sizes to measure where the file lacks them; `force`: measures all; `residency`: of the model, to
    measure what the host takes for each layer that streams. The folder is that of
    `BALLONET_CACHE_DIR`. ManageError where the model, or the link, cannot be measured.
    """
    key = key_of(model, device)
    path = record.path_of(cache_dir(devices.holding(device).settings), key)
    known = None if force else _known(path, key, model)
    if known is not None and not (grid and _missing(model, grid, known)):
        return Profile(known, path, True, {})
    bandwidth, copying = measured_link(device)
    if bandwidth is None:
        raise ManageError(
            "the link to the host cannot be measured: no page is free, or this device has no host pages (ballonet "
            "info). Give a larger budget, or a larger host budget"
        )
    made = replace((known or Record(key, bandwidth)).with_bandwidth(bandwidth), copying=copying)
    made, left = measured(model, pace, made, grid or Grid())
    if residency is not None and not made.entering:
        more = streaming_some(residency, 4)  # every fourth: several, and few to copy. Chosen
        made = replace(made, entering=measured_entering(model, pace, made, grid or Grid(), more))
    try:
        record.save(made, path)
    except OSError as error:
        warn(f"the performance record cannot be kept in {path}: {error}")
    return Profile(made, path, False, left)


def measured_link(device: Device) -> tuple[float | None, float]:
    """Returns (bytes per second of the link, None where it cannot be measured; seconds that operators lose per second
    of copies). On the stand-in copies take a core, which operators that use all cores lack."""
    bandwidth = link.measure(device)
    if bandwidth is None or device.kind != "standin" or torch.get_num_threads() < (os.cpu_count() or 1):
        return bandwidth, 0.0
    # Like layers of a small model: a millisecond each, and together larger than CPU caches.
    rows, layers = torch.ones(128, 512), itertools.cycle(torch.ones(16, 512, 1024))
    return bandwidth, link.lost(device, bandwidth, lambda: torch.mm(rows, next(layers)))


def kept(model: nn.Module, device: Device) -> Record | None:
    """Returns the record of a model in its file; None where there is none for it. Warns where the file is damaged."""
    key = key_of(model, device)
    path = record.path_of(cache_dir(devices.holding(device).settings), key)
    try:
        return record.load(path, key)
    except record.RecordDamaged as why:
        warn(f"the performance record of {type(model).__name__} is not used: {why}")
    except record.Unusable:
        pass
    return None


def measured(
    model: nn.Module, pace: Pace, known: Record, grid: Grid, clock: Callable[[], float] = time.monotonic
) -> tuple[Record, dict[Size, str]]:
    """Returns `known` with times of the grid's missing sizes, and the sizes that were left out, with the reasons. See
    Note [How it is measured]. ManageError where the model generates no text from tokens, or no size could be
    measured."""
    if not isinstance(model, compat.GenerationMixin) or getattr(model, "main_input_name", "") != "input_ids":
        raise ManageError(f"{type(model).__name__} cannot be profiled: it generates no text from tokens")
    left: dict[Size, str] = {}
    missing = _missing(model, grid, known)
    end, token_seconds = clock() + grid.seconds, 0.0  # seconds for each token of each sequence, as it went last
    beside: dict[Phase, list[float]] = {"prefill": [], "decode": []}
    with steps(f"Measuring {type(model).__name__}", len(missing)) as step:
        for size in missing:
            step(f"{size[0]} x {size[1]}")
            larger = next((why for other, why in left.items() if other[0] <= size[0] and other[1] <= size[1]), "")
            begun, work = clock(), size[0] * size[1]
            if larger or (known.seconds and begun + work * token_seconds > end):
                left[size] = larger or f"it takes longer than the {grid.seconds:.4g} seconds in all"
                continue
            try:
                times = _times(model, pace, size, grid, beside)
            except torch.OutOfMemoryError:
                left[size] = "it does not fit in memory"
            else:
                known = replace(known, seconds={**known.seconds, **times})
                token_seconds = (clock() - begun) / work
            if size in left:
                gc.collect()
    if not known.seconds:
        raise ManageError(
            f"{type(model).__name__} cannot be profiled: {next(iter(left.values()), 'nothing was asked')}"
        )
    return replace(
        known, beside={**known.beside, **{phase: median(seconds) for phase, seconds in beside.items() if seconds}}
    ), left


def measured_entering(
    model: nn.Module, pace: Pace, known: Record, grid: Grid, more: AbstractContextManager[int]
) -> float:
    """Returns the seconds that the host takes for each layer that streams; 0 where none more can. `more`: has so many
    more stream within. See Note [How it is measured]."""
    size = min(
        (point[1:] for point in known.seconds if point.phase == known.decoding), key=lambda size: size[0] * size[1]
    )

    def shortest() -> float:
        forwards = (forward for heard, _ in _rounds(model, pace, size, grid) for forward in heard)
        return min((forward.seconds for forward in forwards if _phase(forward) == known.decoding), default=0.0)

    with more as count:
        if not count:
            return 0.0
        with_more = shortest()
    return max(0.0, with_more - shortest()) / count


@contextmanager
def streaming_some(residency: ModelResidency, interval: int) -> Iterator[int]:
    """Has every `interval`-th layer stream too, for a measurement, and yields how many more do so: 0 where there is no
    room for that on the host, or too few layers are resident."""
    before, pages = residency.plan, residency.plan.pages
    more = {layer for layer in range(interval - 1, len(pages), interval) if pages[layer]}
    residency.stop()  # the manager would take it back
    try:
        with suppress(PoolExhausted, ManageError):  # the arrangement is valid as it is
            residency.rearrange(streaming(pages, sorted({*before.streamed, *more}), max(1, len(before.slot_pages))))
        yield len({*residency.plan.streamed}.difference(before.streamed))
    finally:
        with suppress(PoolExhausted, ManageError):
            residency.rearrange(before)
        residency.resume()


def _known(path: Path, key: Mapping[str, str], model: nn.Module) -> Record | None:
    try:
        return record.load(path, key)
    except record.RecordMissing:
        return None
    except record.Unusable as why:
        text = f"the performance record of {type(model).__name__} is measured anew: {why}"
        warn(text)
        return None


def _missing(model: Any, grid: Grid, known: Record) -> list[Size]:
    sizes = grid.sizes(compat.longest_sequence(model.config) if hasattr(model, "config") else 0)
    there = {phase: {point[1:] for point in known.seconds if point.phase == phase} for phase in get_args(Phase)}
    return [size for size in sizes if size not in there["prefill"] or size not in there["decode"] | there["pieces"]]


def _times(model: Any, pace: Pace, size: Size, grid: Grid, beside: Mapping[Phase, list[float]]) -> dict[Point, float]:
    """Returns the seconds of a prefill, and of a decode step, of this size; adds the rest of `generate()`'s time to
    `beside`. torch.OutOfMemoryError."""
    seen: list[Measured] = []
    for heard, took in _rounds(model, pace, size, grid):
        seen += heard
        gaps = [forward.between - forward.total for forward in heard if forward.between is not None]
        if gaps:
            beside["decode"].append(max(0.0, gap := median(gaps)))
            once = took - sum(forward.total for forward in heard) - gap * len(heard)
            beside["prefill"].append(max(0.0, once) + max(0.0, gap))
    decoding: Phase = "pieces" if any(forward.pieces for forward in seen) else "decode"
    times = {
        Point(phase, *size): [forward.seconds for forward in seen if _phase(forward) == phase]
        for phase in ("prefill", decoding)
    }
    if not all(times.values()):
        raise ManageError(f"{type(model).__name__} cannot be profiled: its forwards are not those of a known kind")
    return {point: median(time_) for point, time_ in times.items()}


def _rounds(model: Any, pace: Pace, size: Size, grid: Grid) -> Iterator[tuple[list[Measured], float]]:
    """Iterates over the rounds of a size that count: the forwards of each, and its seconds. torch.OutOfMemoryError."""
    prompt = _prompt(model, size)
    settings = {"max_new_tokens": grid.tokens, "min_new_tokens": grid.tokens, "do_sample": False, "num_beams": 1}
    for round_ in range(1 + grid.rounds):
        with sessions.without_stores(), pace.listening() as heard:
            began = time.perf_counter()
            model.generate(**prompt, **settings, use_cache=True, pad_token_id=0)
            if prompt["input_ids"].is_cuda:
                torch.cuda.synchronize(prompt["input_ids"].device)
            took = time.perf_counter() - began
            pace.drain()
        if round_:
            yield heard, took


def _phase(measured: Measured) -> Phase | None:
    return "pieces" if measured.pieces else None if measured.point is None else measured.point.phase


def _prompt(model: Any, size: Size) -> dict[str, torch.Tensor]:
    """Returns a prompt of random tokens, without special tokens if those are the last ones; does not change the state
    of the caller's random numbers."""
    generator = torch.Generator().manual_seed(0)
    words = max(2, getattr(text_config(model), "vocab_size", 2) // 2)
    ids = torch.randint(words, size, generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`; 1 where that is less."""
    return [1 << n for n in range(max(1, most).bit_length())]
