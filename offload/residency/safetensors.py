"""The safetensors format: which bytes of a file are which tensor's. Reads the header, never the data.

A file is the length of the header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, first and last
byte), and the data, which begins wherever the header ends: a tensor may lie at any byte of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ...allocator.errors import WeightsFileError

Read = Callable[[int, int], bytes]  # (offset, bytes) -> as many as there are

METADATA: Final = "__metadata__"  # not a tensor's name
LONGEST_HEADER: Final = 100_000_000  # bytes; the format's own bound
BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: its dtype in the format's words, its shape, and its bytes [start, end) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: str, size: int, read: Read) -> dict[str, TensorEntry]:
    """Returns the tensors of a file of `size` bytes, by name. WeightsFileError where it is not whole, or not of this
    format."""
    header, first = _header(path, size, read)
    header.pop(METADATA, None)
    entries = {name: _entry(path, name, row, first) for name, row in header.items()}
    reached = first
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != reached:
            raise WeightsFileError(path, f"the bytes of {name} begin at {entry.start}, not at {reached}")
        reached = entry.end
    if reached != size:
        raise WeightsFileError(path, f"it has {size} bytes but its header speaks of {reached}: it is not whole")
    return entries


def read_metadata(path: str, size: int, read: Read) -> dict[str, str]:
    """Returns the texts that a file has beside its tensors. WeightsFileError where its header cannot be read."""
    metadata = _header(path, size, read)[0].get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise WeightsFileError(path, f"its metadata are no texts: {metadata!r:.200}")
    return metadata


def _header(path: str, size: int, read: Read) -> tuple[dict[str, Any], int]:
    """Returns (the header, the first byte of the data)."""
    length = int.from_bytes(read(0, 8), "little")
    first = 8 + length
    if size < 8 or not 2 <= length <= LONGEST_HEADER or first > size:
        raise WeightsFileError(path, f"it is no safetensors file, or cut off: {size} bytes with a header of {length}")
    text = read(8, length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise WeightsFileError(path, f"its header cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise WeightsFileError(path, "its header is not an object")
    return header, first


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ValueError("a name is given twice")
    return named


def _entry(path: str, name: str, row: Any, first: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = row["dtype"], row["shape"], row["data_offsets"]
        bits = BITS[dtype] * math.prod(shape)
        good = all(type(number) is int and number >= 0 for number in (start, end, *shape))
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsFileError(path, f"its header says of {name} what cannot be understood: {row!r:.200}") from error
    if not good or end - start != -(-bits // 8):
        raise WeightsFileError(path, f"its header gives {name}, {dtype} {shape!r:.100}, the bytes {start!r} to {end!r}")
    return TensorEntry(dtype, tuple(shape), first + start, first + end)
