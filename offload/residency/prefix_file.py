"""The KV of a run of prompt blocks as one file: safetensors, with the run's chain of keys in the header.

    8 bytes | header: the format, the salt, the keys | ids | the tensors | checksum

Note [Checked as a whole]
    The last tensor, of 32 bytes, is a checksum of every byte before it. So one rule covers header and data: what
    differs from what was written in any bit, or is longer or shorter, is refused. The bytes are hashed in pieces, by
    several threads that read (or write) their piece as well, and then the pieces' hashes: one core hashes slower than a
    disk reads. They are read where the caller wants them (`preadv`), never through a mapping: see Note [What a change
    is] in weights_file.py. So until all is read and has been compared the caller's memory holds what must not be used.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...allocator.errors import WeightsFileError
from ..policy.stored import StoredPart
from .safetensors import METADATA, TensorEntry, read_header, read_metadata

FORMAT: Final = "ballonet prefix 1"
IDS, CHECKSUM = "ids", "checksum"  # the first tensor and the last; no other is called so
PIECE: Final = 4 * 2**20  # bytes that are hashed, and read or written, at once
_DIGEST: Final = 32  # bytes
_THREADS: Final = min(8, len(os.sched_getaffinity(0)))


class PrefixDamaged(Exception):
    """Raised for a file that is not what was written."""


class OtherFormat(Exception):
    """Raised for a file that another version of this module wrote."""


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor: its dtype in the words of safetensors ("BF16"), its shape, and its bytes (format "B", contiguous)."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


# (name, dtype, shape, bytes) -> memory for them, None where no such tensor is expected: nothing was compared yet
Room = Callable[[str, str, tuple[int, ...], int], memoryview | None]


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of a file. `ids`: the tokens of its blocks: keys are hashes, so compare them with the prompt's."""

    part: StoredPart
    ids: Sequence[int]
    tensors: Mapping[str, Array]


def packed(part: StoredPart, ids: Sequence[int], tensors: Mapping[str, Array]) -> list[memoryview]:
    """Returns all bytes of the file but for its checksum. ValueError where there are no keys, or a name or a size is
    wrong."""
    if not part.keys or not tensors.keys().isdisjoint({IDS, CHECKSUM, METADATA}):
        raise ValueError(f"there have to be keys, and no tensor may be called {IDS}, {CHECKSUM} or {METADATA}")
    text = {"format": FORMAT, "salt": part.salt.hex(), "after": part.after.hex()}
    header: dict[str, object] = {METADATA: text | {"keys": " ".join(key.hex() for key in part.keys)}}
    numbers = Array("I64", (len(ids),), memoryview(array("q", ids)).cast("B"))
    checksum = Array("U8", (_DIGEST,), memoryview(bytes(_DIGEST)))
    all_of_it = {IDS: numbers, **tensors, CHECKSUM: checksum}
    reached = 0
    for name, tensor in all_of_it.items():
        end = reached + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (reached, end)}
        reached = end
    written = json.dumps(header, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    begin = len(written).to_bytes(8, "little") + written
    try:
        read_header("", len(begin) + reached, lambda offset, size: begin[offset : offset + size])
    except WeightsFileError as error:
        raise ValueError(error.reason) from None
    return [memoryview(begin), *(values.data for name, values in all_of_it.items() if name != CHECKSUM)]


def size_of(packing: Iterable[memoryview]) -> int:
    """Bytes of the file."""
    return sum(buffer.nbytes for buffer in packing) + _DIGEST


def write(fd: int, packing: Sequence[memoryview]) -> None:
    """Writes the file from its beginning. OSError."""

    def one(offset: int, piece: memoryview) -> None:
        while piece.nbytes:
            done = os.pwrite(fd, piece, offset)
            offset, piece = offset + done, piece[done:]

    digest = _digest(packing, one)
    one(size_of(packing) - _DIGEST, memoryview(digest))


def read_part(path: str, fd: int) -> StoredPart:
    """Reads what the header says, without looking at the checksum. PrefixDamaged, OtherFormat, OSError."""
    return _part(path, os.fstat(fd).st_size, _reader(fd))


def read(path: str, fd: int, room: Room | None = None) -> Saved:
    """Reads all of the file. `room`: gives the memory that a tensor's bytes are read into. PrefixDamaged, OtherFormat,
    OSError.

    See Note [Checked as a whole].
    """
    size, reader = os.fstat(fd).st_size, _reader(fd)
    part = _part(path, size, reader)
    try:
        entries = read_header(path, size, reader)
    except WeightsFileError as error:
        raise PrefixDamaged(error.reason) from None
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].end))
    if len(ordered) < 2 or ordered[0][0] != IDS or ordered[-1][0] != CHECKSUM or ordered[-1][1].end != size:
        raise PrefixDamaged("it has no ids or no checksum")
    ids = array("q", bytes(_length(entries[IDS]) // 8 * 8))
    tensors = {
        name: Array(entry.dtype, entry.shape, _room(room, name, entry)) for name, entry in ordered if name != CHECKSUM
    }
    tensors[IDS] = Array("I64", (len(ids),), memoryview(ids).cast("B"))
    begin = memoryview(bytearray(entries[IDS].start))
    digest = _digest([begin, *(tensor.data for tensor in tensors.values())], _filler(fd))
    if digest != reader(size - _DIGEST, _DIGEST):
        raise PrefixDamaged("its checksum is wrong")
    del tensors[IDS]
    return Saved(part, ids, tensors)


def _part(path: str, size: int, reader: Callable[[int, int], bytes]) -> StoredPart:
    try:
        text = read_metadata(path, size, reader)
        if not text.get("format", "").startswith(FORMAT.rpartition(" ")[0]):
            raise PrefixDamaged("it is not what ballonet wrote")
        if text["format"] != FORMAT:
            raise OtherFormat(text["format"])
        keys = tuple(map(bytes.fromhex, text["keys"].split()))
        return StoredPart(bytes.fromhex(text["salt"]), bytes.fromhex(text["after"]), keys)
    except WeightsFileError as error:
        raise PrefixDamaged(error.reason) from None
    except (KeyError, ValueError) as error:
        raise PrefixDamaged(f"its metadata cannot be understood: {error}") from None


def _reader(fd: int) -> Callable[[int, int], bytes]:
    return lambda offset, size: os.pread(fd, size, offset)


def _filler(fd: int) -> Callable[[int, memoryview], None]:
    def one(offset: int, piece: memoryview) -> None:
        while piece.nbytes:
            done = os.preadv(fd, [piece], offset)
            if not done:
                raise PrefixDamaged("it became shorter")
            offset, piece = offset + done, piece[done:]

    return one


def _length(entry: TensorEntry) -> int:
    return entry.end - entry.start


def _room(room: Room | None, name: str, entry: TensorEntry) -> memoryview:
    if room is None or name == IDS:
        return np.empty(_length(entry), np.uint8).data
    memory = room(name, entry.dtype, entry.shape, _length(entry))
    if memory is None or memory.nbytes != _length(entry):
        raise PrefixDamaged(f"it has {name}, {entry.dtype} {entry.shape}, which is not what is kept of this model")
    return memory


def _digest(segments: Iterable[memoryview], work: Callable[[int, memoryview], None]) -> bytes:
    """Does the `work` for each piece, at its offset, and hashes what is in its memory then."""
    pieces, offset = [], 0
    for segment in segments:
        for first in range(0, segment.nbytes, PIECE):
            piece = segment[first : first + PIECE]
            pieces.append((offset, piece))
            offset += piece.nbytes

    def one(place: tuple[int, memoryview]) -> bytes:
        work(*place)
        return hashlib.blake2b(place[1], digest_size=_DIGEST).digest()

    return hashlib.blake2b(b"".join(_of_all(one, pieces, offset)), digest_size=_DIGEST).digest()


def _of_all(
    one: Callable[[tuple[int, memoryview]], bytes], pieces: Sequence[tuple[int, memoryview]], size: int
) -> list[bytes]:
    if size >= PIECE:  # else no thread is worth it
        with suppress(RuntimeError), ThreadPoolExecutor(_THREADS) as threads:  # while Python ends none can be begun
            return list(threads.map(one, pieces))
    return list(map(one, pieces))
