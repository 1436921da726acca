"""Drives allocators with a recorded trace, and says how much memory each needed: this one, and torch's own with and
without expandable segments. Imports torch only where a GPU is used.

Note [Without memory]
    Nobody reads or writes what a trace allocates. So where there is no GPU, or the trace is larger than it, pages are
    those of the stand-in, which then keeps books of them and takes no memory: a trace of a large GPU is replayed on a
    small machine. The addresses, the blocks and the calls of the driver are those of a run.

Note [Whose figures]
    Figures of torch's allocator are its own: the same operations given to it on a GPU, or what the recorded program's
    segments were (allocation_trace.py, Note [What the recording had]), which also counts what it had kept from before.
    Nothing here imitates it, so without either there are none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from . import _native, defaults, device_choice
from .allocation_trace import AllocationOp, AllocationTrace, AllocatorKind, peaks, read
from .config import Config, format_size
from .errors import InvariantBroken, PoolExhausted

_ROW: Final = struct.Struct("<B7xQQQ")  # op (1: an allocation, 2: a free), id, size, stream: what the core reads
_WORD: Final = 2**64  # values of a word of the core
_UNBACKED: Final = "run here, without memory"
TORCHS: Final[tuple[AllocatorKind, ...]] = ("native", "expandable segments")


@dataclass(frozen=True, slots=True)
class AllocatorRun:
    """What an allocator needed for a trace. `source`: where the figures are from, or why there are none; `peak`: bytes
    that it had of the driver at most, and `series`, in each of some equal parts of the operations; `driver_calls`, and
    nanoseconds of an operation, where they are known."""

    name: AllocatorKind
    source: str
    peak: int | None = None
    driver_calls: int | None = None
    ns_per_op: float | None = None
    series: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Replay:
    """A replayed trace. Bytes: `peak_live`, the most that was allocated at once, `budget` that was to be enough, None
    where none was given, `needed` by this allocator; `live`: as `AllocatorRun.series`."""

    trace: AllocationTrace
    page_size: int
    budget: int | None
    needed: int
    peak_live: int
    live: Sequence[int]
    runs: Sequence[AllocatorRun]

    @property
    def many_calls(self) -> bool:
        """Would larger pages be faster, as the driver is called for many operations?"""
        calls = sum(run.driver_calls or 0 for run in self.runs if run.name == "ballonet")
        return calls > defaults.REPLAY_CALLS * len(self.trace.ops)

    @property
    def fits(self) -> bool:
        """Was the budget enough?"""
        return self.budget is None or self.needed <= self.budget

    def facts(self) -> dict[str, Any]:
        """Returns plain values, ready for JSON: ops, older (blocks from before the recording, which are the first of
        them), device (its number in the recording); bytes: peak_live, page_size, budget, needed; fits; many_calls;
        allocators: a list of {name, source, peak, driver_calls, ns_per_op}, None where not known."""
        return {
            "ops": len(self.trace.ops),
            "older": self.trace.older,
            "device": self.trace.ordinal,
            "peak_live": self.peak_live,
            "page_size": self.page_size,
            "budget": self.budget,
            "needed": self.needed,
            "fits": self.fits,
            "many_calls": self.many_calls,
            "allocators": [
                {
                    "name": run.name,
                    "source": run.source,
                    "peak": run.peak,
                    "driver_calls": run.driver_calls,
                    "ns_per_op": run.ns_per_op,
                }
                for run in self.runs
            ],
        }


def replay(path: str | Path, config: Config) -> Replay:
    """Replays the trace by each allocator that can be had here. Pages are 8 MiB where the settings do not say, as on a
    GPU. TraceError, ConfigError, DriverError, DriverUnavailable."""
    trace = read(path)
    target = device_choice.choose(config)
    config = replace(config, page_size=config.page_size or defaults.PAGE_SIZE["cuda"])
    page, parts = device_choice.page_size(config, target.kind), defaults.REPLAY_PARTS
    levels = trace.levels()
    peak = max((level for _, level in levels), default=0)
    room = (defaults.REPLAY_ROOM * peak // page + defaults.REPLAY_PAGES) * page
    if target.kind == "cuda":
        device = device_choice.open_device(config, spill=False)
        budget: int | None = device.budget
        run = _run(trace, device, "run here")
    else:
        budget = None if config.budget is None else device_choice.whole_pages(config.budget, page, "the budget")
        run = _run(trace, device_choice.open_unbacked(config, page, budget or room), _UNBACKED)
    run = run or _run(trace, device_choice.open_unbacked(config, page, room), _UNBACKED)
    if run is None or run.peak is None:
        raise InvariantBroken(f"a trace of {format_size(peak)} found no room in {format_size(room)}")
    runs = [*_torchs(trace, target, parts), run]
    return Replay(trace, page, budget, run.peak, peak, peaks(levels, len(levels), parts), runs)


def _run(trace: AllocationTrace, device: _native.Device, source: str) -> AllocatorRun | None:
    """Runs this allocator on the device, and closes it; None where it is too small."""
    rows = b"".join(_ROW.pack(1 if op.is_alloc else 2, op.block % _WORD, op.size, op.stream) for op in trace.ops)
    try:
        numbers = _native.replay(device, rows, defaults.REPLAY_PARTS)
    except PoolExhausted:
        return None
    finally:
        device.close()
    return AllocatorRun(
        "ballonet",
        source,
        numbers["peak_physical"],
        numbers["driver_calls"],
        numbers["ns_per_op"],
        numbers["physical"],
    )


def _torchs(trace: AllocationTrace, target: device_choice.Target, parts: int) -> Iterator[AllocatorRun]:
    """Yields the runs of torch's allocator. See Note [Whose figures]."""
    for kind in TORCHS:
        run, why = None, "no GPU is here"
        if target.kind == "cuda":
            run, why = _by_torch(trace, kind, target.ordinal, parts)
        reserve = trace.reserve
        if run is None and reserve is not None and reserve.kind == kind:
            series = peaks(reserve.levels, len(trace.ops), parts)
            calls = reserve.calls if kind == "native" else None  # an expandable segment takes several calls at once
            kept = series[0] > max(series[1:], default=series[0])
            before = ", with what it had kept from before" if kept else ""
            run = AllocatorRun(kind, f"as recorded{before}", max(series), calls, None, series)
        recorded = trace.without if reserve is None else f"the recording is of {reserve.kind}"
        yield run or AllocatorRun(kind, f"none: {why}, and {recorded}")


def _by_torch(trace: AllocationTrace, kind: AllocatorKind, ordinal: int, parts: int) -> tuple[AllocatorRun | None, str]:
    """Gives the operations to torch's allocator on the GPU. Returns what it needed, or None and why there is none."""
    import torch

    if not torch.cuda.is_available():
        return None, "this torch cannot use the GPU"
    if (backend := torch.cuda.memory.get_allocator_backend()) != "native":
        return None, f"the allocator of this torch is {backend}"
    blocks: dict[int, int] = {}
    with torch.cuda.device(ordinal):
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{kind == 'expandable segments'}")
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        try:
            series = list(_peaks_of_torch(trace.ops, parts, blocks))
        except torch.OutOfMemoryError:
            free = format_size(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())
            return None, f"it does not fit into the {free} that are free on this GPU"
        finally:
            for address in blocks.values():
                torch.cuda.caching_allocator_delete(address)
            stats = torch.cuda.memory_stats()
            torch.cuda.empty_cache()
    calls = sum(stats.get(name, 0) - before.get(name, 0) for name in ("num_device_alloc", "num_device_free"))
    known = calls if kind == "native" else None
    return AllocatorRun(kind, "run here", max(series, default=0), known, None, series), ""


def _peaks_of_torch(ops: Sequence[AllocationOp], parts: int, blocks: dict[int, int]) -> Iterator[int]:
    """Allocates and frees; yields the most bytes that torch had reserved in each part. `blocks`: the addresses of those
    that are allocated, by number."""
    import torch

    streams: dict[int, Any] = {0: torch.cuda.default_stream()}
    parts = min(parts, max(1, len(ops)))
    for part in range(parts):
        for op in ops[len(ops) * part // parts : len(ops) * (part + 1) // parts]:
            if op.is_alloc:
                stream = streams.get(op.stream) or streams.setdefault(op.stream, torch.cuda.Stream())
                blocks[op.block] = torch.cuda.caching_allocator_alloc(op.size, stream=stream)
            else:
                torch.cuda.caching_allocator_delete(blocks.pop(op.block))
        yield torch.cuda.max_memory_reserved()
        torch.cuda.reset_peak_memory_stats()
