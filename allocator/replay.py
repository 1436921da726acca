"""Drives the allocator with a recorded trace and returns how much memory it needed. Imports no torch.

A trace is a CSV file with the columns `time_us,op,id,size,stream` in any order, others besides them ignored. Of the ops
only `alloc` and `free` count. A free whose id was never allocated is skipped: its block is older than the recording.
"""

from __future__ import annotations

import csv
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from . import _native, device_choice
from .config import Config
from .errors import TraceError

COLUMNS: Final = ("time_us", "op", "id", "size", "stream")
_ROW: Final = struct.Struct("<B7xQQQ")  # op, id, size, stream: what `_native.replay` reads
_INTEGER: Final = re.compile(r"\s*-?[0-9]{1,19}\s*")
_ALLOC: Final = 1
_FREE: Final = 2
_LARGEST: Final = 2**63 - 1
_WORD: Final = 2**64


def replay(path: str | Path, config: Config) -> dict[str, int | float]:
    """Replays the trace on a device of its own.

    Returns bytes `peak_live` (the sum of the requested sizes) and `peak_physical`, `driver_calls`, `ns_per_op` and
    `ops`, which counts allocations and the frees that match one. Raises TraceError, ConfigError, DriverError,
    PoolExhausted.
    """
    ops = pack(path)
    device = device_choice.open_device(config, spill=False)
    result = _native.replay(device, ops)
    device.close()
    return result


def pack(path: str | Path) -> bytes:
    """Packs the allocations and matching frees of a trace for `_native.replay`. TraceError names the line."""
    return b"".join(_ops(str(path)))


def _ops(path: str) -> Iterator[bytes]:
    live: dict[int, bool] = {}  # id → whether it is allocated now
    for line, row in _rows(path):
        op = row["op"].strip()
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
            yield _ROW.pack(_ALLOC, block % _WORD, size, stream)
        elif block in live:
            if not live[block]:
                raise TraceError(path, line, f"id {block} is freed a second time")
            live[block] = False
            yield _ROW.pack(_FREE, block % _WORD, 0, stream)


def _rows(path: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (line, column → text) of every row that is not empty."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in header]:
                raise TraceError(
                    path, 1, f"no column {', '.join(missing)}: a trace has the columns {','.join(COLUMNS)}"
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
