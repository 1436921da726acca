"""A safetensors file of weights that is used long after it was opened, and may have become another one meanwhile.

Such a file is the length of the header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, first and last
byte), and the data, which begins wherever the header ends: a tensor may lie at any byte of the file.

Note [What a change is]
    Bytes are read as far as they are there (`pread`), never through a mapping: a process that touches a page that a
    mapped file has lost is killed by SIGBUS. And before anything is taken from the file its path is looked at: does it
    still lead to the same inode, of the same size, last written at the same time? A file whose last write is so young
    that another in the same tick of the file system's clock would go unseen is waited for first. Two things go unseen:
    a writer that sets the time back, and a file system whose clock is coarser than a tick of the machine's.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ...allocator.errors import WeightsFileChanged, WeightsFileError

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


TICK: Final = 20_000_000  # ns, more than between two times that a kernel gives to files


class WeightsFile:
    """A safetensors file, open for as long as this is. Two are equal if they were the same file in the same state when
    they were opened. Raises WeightsFileError where it is none, or not whole."""

    tensors: Mapping[str, TensorEntry]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsFileError(self.path, f"it cannot be opened: {error.strerror}") from error
        self.close = weakref.finalize(self, os.close, self._fd)
        try:
            status = _settled(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise WeightsFileError(self.path, "it is no file")
            self._identity = _identity(status)
            self.nbytes = status.st_size
            self.tensors = read_header(self.path, self.nbytes, lambda offset, size: os.pread(self._fd, size, offset))
            self.check()
        except BaseException:
            self.close()
            raise

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WeightsFile) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def check(self) -> None:
        """Raises WeightsFileChanged unless the file is what it was."""
        try:
            now = _identity(os.stat(self.path))
        except OSError as error:
            raise self._changed(f"is gone ({error.strerror})") from error
        if now[:2] != self._identity[:2]:
            raise self._changed("was replaced by another")
        if now != self._identity:
            sizes = "" if now[2] == self.nbytes else f" (it had {self.nbytes} bytes and has {now[2]})"
            raise self._changed(f"was written to{sizes}")

    def read(self, offset: int, nbytes: int) -> bytes:
        """Returns these bytes of the file. WeightsFileChanged."""
        self.check()
        try:
            data = os.pread(self._fd, nbytes, offset)
        except OSError as error:
            raise WeightsFileError(self.path, f"it cannot be read: {error.strerror}") from error
        if len(data) < nbytes:
            raise self._changed("became shorter")
        return data

    def span(self, name: str) -> FileSpan:
        """The bytes of the tensor of that name. KeyError."""
        entry = self.tensors[name]
        return FileSpan(self, entry.start, entry.end - entry.start)

    @cached_property
    def mapping(self) -> mmap.mmap:
        """Maps the file as memory that must not be touched, for the device to copy from. WeightsFileChanged.

        Shared: of a private mapping the kernel would copy each page that is pinned into memory of the process.
        """
        self.check()
        try:
            return mmap.mmap(self._fd, self.nbytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            self.check()
            raise WeightsFileError(self.path, f"it cannot be mapped: {error}") from error

    def _changed(self, what: str) -> WeightsFileChanged:
        return WeightsFileChanged(
            self.path, f"the file {what} while weights of a model were being taken from it: load the model again"
        )


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes [start, start + nbytes) of a weights file: those of one tensor."""

    file: WeightsFile
    start: int
    nbytes: int


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _settled(fd: int) -> os.stat_result:
    """Waits until any further write would give the file another time; returns its status."""
    while 0 <= time.time_ns() - (status := os.fstat(fd)).st_mtime_ns < TICK:
        time.sleep(1e-3)
    return status
