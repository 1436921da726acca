"""Recorded allocations of a GPU, read from the files that people have. Imports no torch.

Files, told apart by their first bytes
    PyTorch's memory snapshot, of `torch.cuda.memory._dump_snapshot`: a pickle
    the page of PyTorch's memory viewer, of `torch.cuda._memory_viz`: HTML, which has a snapshot inside
    CSV with the columns `time_us,op,id,size,stream` in any order, others besides them ignored

Note [No class at all]
    A pickle is a program, which may call whatever it can name. A snapshot is made of dicts, lists, tuples, texts and
    numbers, which need no names: so every name is refused, before anything is called.

Note [Older than the recording]
    A snapshot says what lies in memory at its end, and the events before that. What was there at the beginning is what
    is left of the end when the events are taken back; those blocks are allocated first, in the order of their
    addresses. A CSV file does not say: a free whose id was never allocated is skipped there.

Note [What the recording had]
    Segments are the memory that the allocator of the recorded program had of the driver. Their events, and in a
    snapshot their sum at the end, say how many bytes those were at each moment: a measurement of that allocator. They
    do not count where they are less than the blocks in them, as then a part of them is missing.
"""

from __future__ import annotations

import base64
import csv
import io
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, NoReturn

from .errors import TraceError

COLUMNS: Final = ("time_us", "op", "id", "size", "stream")
_INTEGER: Final = re.compile(r"\s*-?[0-9]{1,19}\s*")
_EMBEDDED: Final = re.compile(rb'"base64": *"([A-Za-z0-9+/=]*)"')
_LARGEST: Final = 2**63 - 1  # of int64
_SEGMENTS: Final = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}

AllocatorKind = Literal["native", "expandable segments", "ballonet"]


class AllocationOp(NamedTuple):
    """An allocation of a block, by its number, or its free. `size`: bytes, 0 for a free; `stream`: as recorded."""

    is_alloc: bool
    block: int
    size: int
    stream: int


@dataclass(frozen=True, slots=True)
class RecordedReserve:
    """The bytes that the recorded program's allocator had of the driver. `kind`: which allocator it was; `levels`:
    (operations before it, bytes) of each change, the first at 0; `calls`: events of segments."""

    kind: AllocatorKind
    levels: Sequence[tuple[int, int]]
    calls: int


@dataclass(frozen=True, slots=True)
class AllocationTrace:
    """The allocations of one device. `ops`: in their order, with no free of a block that is not allocated; `older`: how
    many of them, at the beginning, are blocks from before the recording; `ordinal`: the device's number there, None
    where it has none; `reserve`: None where `without` says why."""

    ops: Sequence[AllocationOp]
    older: int = 0
    ordinal: int | None = None
    reserve: RecordedReserve | None = None
    without: str = ""

    def levels(self) -> list[tuple[int, int]]:
        """Returns (operations before it, bytes that are allocated from it on) of each operation."""
        sizes: dict[int, int] = {}
        changes = [sizes.setdefault(op.block, op.size) if op.is_alloc else -sizes.pop(op.block, 0) for op in self.ops]
        return list(enumerate(accumulate(changes)))


def read(path: str | Path) -> AllocationTrace:
    """Reads a file. TraceError where it cannot be read, or is none."""
    try:
        with open(path, "rb") as file:
            begins = file.read(64)
            file.seek(0)
            if begins.startswith(b"\x80"):
                return _of_snapshot(str(path), _plain(str(path), file))
            if begins.lstrip().startswith(b"<"):
                return _of_snapshot(str(path), _plain(str(path), io.BytesIO(_embedded(str(path), file.read()))))
    except OSError as error:
        raise TraceError(str(path), 0, f"cannot be read: {error.strerror}") from error
    return _of_csv(str(path))


def peaks(levels: Sequence[tuple[int, int]], operations: int, parts: int) -> list[int]:
    """Returns the highest level in each of `parts` equal parts of so many operations, fewer where there are fewer of
    these; a level lasts until the next one."""
    parts = min(max(parts, 1), max(operations, 1))
    tops, current, index = list[int](), 0, 0
    for part in range(1, parts + 1):
        end = operations * part // parts if part < parts else operations + 1
        top = current
        while index < len(levels) and levels[index][0] < end:
            current = levels[index][1]
            top, index = max(top, current), index + 1
        tops.append(top)
    return tops


# -- snapshots


class _PlainUnpickler(pickle.Unpickler):
    """Reads values that need no class. See Note [No class at all]."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        """Refuses. TraceError."""
        raise TraceError(
            self._path,
            0,
            f"is a pickle that asks for {module_name}.{global_name}, and a memory snapshot has no classes and calls "
            "nothing: it was not read further. Trust it only if you made it; a snapshot is written by "
            "torch.cuda.memory._dump_snapshot()",
        )


def _plain(path: str, file: BinaryIO) -> Any:
    try:
        return _PlainUnpickler(path, file).load()
    except TraceError:
        raise
    except Exception as error:  # whatever damaged bytes come to
        raise TraceError(path, 0, f"is a damaged pickle: {error!r}") from error


def _embedded(path: str, page: bytes) -> bytes:
    """Returns the pickle inside of a page."""
    match = _EMBEDDED.search(page)
    if match is None:
        raise TraceError(
            path, 0, "is a page without a snapshot in it: torch.cuda._memory_viz and the viewer's own files have one"
        )
    try:
        return base64.b64decode(match[1], validate=True)
    except ValueError as error:
        raise TraceError(path, 0, f"is a page whose snapshot is damaged: {error}") from error


@dataclass(slots=True)
class _Walk:
    """The events of a device, as they are walked along. By address: `live`, blocks of the recording; `older`: blocks
    from before it. `changes`: (operations before it, bytes) of segments."""

    ops: list[AllocationOp] = field(default_factory=list)
    live: dict[int, AllocationOp] = field(default_factory=dict)
    older: dict[int, AllocationOp] = field(default_factory=dict)
    changes: list[tuple[int, int]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=count)

    def take(self, event: Mapping[str, Any]) -> None:
        """Takes in an event. LookupError, TypeError, ValueError where it is none."""
        action = event["action"]
        if action in _SEGMENTS:
            self.kinds.add(action)
            self.changes.append((len(self.ops), _SEGMENTS[action] * _bytes(event["size"])))
        elif action in ("alloc", "free_completed"):
            address, size = event["addr"], _bytes(event["size"])
            if (before := self.live.pop(address, None)) is not None:  # where it is allocated, its free was not recorded
                self.ops.append(before._replace(is_alloc=False, size=0))
            if action == "alloc" and size:
                self.live[address] = AllocationOp(True, next(self.numbers), size, _stream(event))
                self.ops.append(self.live[address])
            elif action == "free_completed" and before is None and address not in self.older and size:
                self.older[address] = AllocationOp(True, next(self.numbers), size, _stream(event))
                self.ops.append(self.older[address]._replace(is_alloc=False, size=0))

    def take_end(self, segments: Iterable[Mapping[str, Any]]) -> None:
        """Takes in what is there at the end. Errors as `take`."""
        for segment in segments:
            address = segment["address"]
            for block in segment["blocks"]:
                address = block.get("address", address)
                size = _bytes(block.get("requested_size", block["size"]))
                if block["state"].startswith("active") and address not in self.live and address not in self.older:
                    self.older[address] = AllocationOp(True, next(self.numbers), size, _stream(segment))
                address += block["size"]


def _of_snapshot(path: str, snapshot: Any) -> AllocationTrace:
    """Returns the trace of the device with the most events."""
    walk, place = _Walk(), "it"
    try:
        traces = snapshot["device_traces"]
        ordinal = max(range(len(traces)), key=lambda device: len(traces[device]), default=0)
        if not traces or not traces[ordinal]:
            raise TraceError(
                path,
                0,
                "has no events: call torch.cuda.memory._record_memory_history() before the work that it is about, and "
                "_dump_snapshot() behind it",
            )
        for number, event in enumerate(traces[ordinal]):
            place = f"event {number} of device {ordinal}"
            walk.take(event)
        place = "a segment"
        segments = [segment for segment in snapshot.get("segments", ()) if segment.get("device", ordinal) == ordinal]
        walk.take_end(segments)
        older = [walk.older[address] for address in sorted(walk.older)]
        trace = AllocationTrace([*older, *walk.ops], len(older), ordinal)
        reserved = sum(_bytes(segment["total_size"]) for segment in segments)
        if not walk.changes and not all("segment_type" in segment for segment in segments):
            return _without(trace, "the recording says nothing of segments")
        start = reserved - sum(change for _, change in walk.changes)
        changes = [(len(older) + at, change) for at, change in walk.changes]
        return _with_reserve(trace, _kind(snapshot, segments, walk.kinds), start, changes)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"is no memory snapshot of PyTorch: {place} is not as it writes them: {error!r}"
        raise TraceError(path, 0, why) from error


def _kind(snapshot: Mapping[str, Any], segments: Iterable[Mapping[str, Any]], events: set[str]) -> AllocatorKind:
    settings = snapshot.get("allocator_settings") or {}
    if "ballonet" in snapshot or "ballonet" in settings.values():  # csrc/torch/cuda_allocator.cpp says so
        return "ballonet"
    expands = "segment_map" in events or any(segment.get("is_expandable") for segment in segments)
    return "expandable segments" if expands else "native"


def _bytes(given: Any) -> int:
    if not isinstance(given, int) or not 0 <= given <= _LARGEST:
        raise ValueError(f"{given!r} is no number of bytes")
    return given


def _stream(given: Mapping[str, Any]) -> int:
    return _bytes(given.get("stream", 0))


# -- what the recorded allocator had


def _with_reserve(
    trace: AllocationTrace, kind: AllocatorKind, start: int, changes: Sequence[tuple[int, int]]
) -> AllocationTrace:
    """Adds what the recording had: `start`, bytes at its beginning, and `changes`, (operations before it, bytes). See
    Note [What the recording had]."""
    sums = accumulate((change for _, change in changes), initial=start)
    levels = list(zip([0, *(at for at, _ in changes)], sums, strict=True))
    index = 0
    for at, live in trace.levels():
        while index + 1 < len(levels) and levels[index + 1][0] <= at:
            index += 1
        if levels[index][1] < live:
            return _without(trace, "the segments of the recording are fewer than its blocks")
    return AllocationTrace(trace.ops, trace.older, trace.ordinal, RecordedReserve(kind, levels, len(changes)))


def _without(trace: AllocationTrace, why: str) -> AllocationTrace:
    return AllocationTrace(trace.ops, trace.older, trace.ordinal, without=why)


# -- CSV


def _of_csv(path: str) -> AllocationTrace:
    ops: list[AllocationOp] = []
    live: dict[int, bool] = {}  # id → whether it is allocated now
    changes: list[tuple[int, int]] = []
    mapped = False
    for line, row in _rows(path):
        op = row["op"].strip()
        if op in _SEGMENTS and _INTEGER.fullmatch(row["size"]):
            mapped |= op == "segment_map"
            changes.append((len(ops), _SEGMENTS[op] * _integer(path, line, "size", row["size"])))
        if op not in ("alloc", "free"):
            continue
        block = _integer(
            path, line, "id", row["id"], smallest=-_LARGEST
        )  # some recorders write -1 for a block they missed
        stream = _integer(path, line, "stream", row["stream"])
        _time(path, line, row["time_us"])
        if op == "alloc":
            size = _integer(path, line, "size", row["size"])
            if size == 0:
                raise TraceError(path, line, "size is 0: an allocation has at least one byte")
            if live.get(block):
                raise TraceError(path, line, f"id {block} is allocated again before it was freed")
            live[block] = True
            ops.append(AllocationOp(True, block, size, stream))
        elif block in live:
            if not live[block]:
                raise TraceError(path, line, f"id {block} is freed a second time")
            live[block] = False
            ops.append(AllocationOp(False, block, 0, stream))
    if not changes:
        return AllocationTrace(ops, without="the recording says nothing of segments")
    return _with_reserve(AllocationTrace(ops), "expandable segments" if mapped else "native", 0, changes)


def _rows(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (line, column → text) of every row that is not empty."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in header]:
                raise TraceError(
                    path,
                    1,
                    f"no column {', '.join(missing)}: a trace has the columns {','.join(COLUMNS)}, or is a memory "
                    "snapshot of PyTorch or a page of its viewer",
                )
            for row in reader:
                if row and len(row) != len(header):
                    raise TraceError(path, reader.line_num, f"{len(row)} fields where the header has {len(header)}")
                if row:
                    yield reader.line_num, dict(zip(header, row, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        line = 0 if isinstance(error, UnicodeDecodeError) else reader.line_num
        raise TraceError(path, line, f"not a CSV file in UTF-8: {error}") from error
    except OSError as error:
        raise TraceError(path, 0, f"cannot be read: {error.strerror}") from error


def _integer(path: str, line: int, column: str, text: str, smallest: int = 0) -> int:
    number = int(text) if _INTEGER.fullmatch(text) else None
    if number is None or not smallest <= number <= _LARGEST:
        raise TraceError(path, line, f"{column} is {text!r}: it must be a whole number from {smallest} to {_LARGEST}")
    return number


def _time(path: str, line: int, text: str) -> None:
    try:
        float(text)
    except ValueError:
        raise TraceError(path, line, f"time_us is {text!r}: it must be a number") from None
