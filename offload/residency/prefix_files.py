"""Prefix KV on disk: a folder of files that several processes may share, used last kept longest.

A file has the KV of a run of prompt blocks. It is a safetensors file, with the run's chain of keys in the header:

    8 bytes | header: the format, the salt, the keys | ids | the tensors | checksum

Note [Checked as a whole]
    The last tensor, of 32 bytes, is a checksum of every byte before it. So one rule covers header and data: what
    differs from what was written in any bit, or is longer or shorter, is refused. The bytes are hashed in pieces, by
    several threads that read (or write) their piece as well, and then the pieces' hashes: one core hashes slower than a
    disk reads. They are read where the caller wants them (`preadv`), never through a mapping: see Note [What a change
    is] in weights_file.py. So until all is read and has been compared the caller's memory holds what must not be used.

Note [Crash-safe without a lock]
    A file is written aside, made durable, and then renamed to its name, which says what is in it: every writer of the
    same run of blocks writes the same file. So each name leads to a whole file or to none, at any moment, and what is
    in memory here is only a cache of the folder: it is read again when the folder has changed, and a file that is gone
    is a miss. What a writer that died left behind is known by its lock, which goes with the process.

Note [Used last]
    The time of a file's last use is its modification time: it outlives the process, and others see it. What that means
    for the limit is worked out in policy/prefixes.py.

Note [Warned once]
    No error here fails a request. A folder that cannot be written to, as on a full disk, gets one warning, and is tried
    again after a while; a file that is damaged gets one, is removed where that is possible, and never looked at again.
    Folder and files that another user may have written get one, too, and are neither read nor written (trusted.py).
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import math
import os
import re
import stat
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from ...allocator.errors import NotTrusted, WeightsFileError
from ...allocator.notices import warn
from ...allocator.trusted import TrustedFolder, tell
from ..policy.prefixes import Stored, StoredPart, before, leaving
from ..policy.tuning import DEFAULT
from .weights_file import METADATA, TICK, TensorEntry, read_header, read_metadata

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


_NAME: Final = re.compile(r"prefix-[0-9a-f]{32}\.safetensors")
_ASIDE: Final = re.compile(r"\.prefix-[0-9a-f]{32}\.[0-9]+\.[0-9]+\.part")


class PrefixFiles:
    """The files of one folder, for one `salt` (model, dtype, adapter, ...). Safe to use from several threads.

    The folder is made if need be; only its user may read it and its files. `limit`: bytes that all prefix files in it
    may have together, those of other models too (beside one that is just being written by another process); None: any.
    Nothing is raised for what is wrong with the folder or in it: a RuntimeWarning says it once.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        limit: int | None,
        salt: bytes,
        clock: Callable[[], float] = time.monotonic,
        rest: float = DEFAULT.prefixes.rest,
    ) -> None:
        """`clock`: seconds; `rest`: until a folder that could not be written to is tried again."""
        self.directory: Final = Path(directory)
        self.limit: Final = limit
        self._salt = salt
        self._lock = threading.Lock()  # of what is remembered of the folder; never held while data is read or written
        self._files: dict[str, Stored] = {}
        self._holders: dict[bytes, str] = {}  # by key: the file that holds the block
        self._seen = -1  # the folder's time when it was looked through, -1: it has to be
        self._bad: set[tuple[str, int, int]] = set()  # that are not to be looked at: name, inode, last use
        self._clock = clock
        self._pause = rest
        self._writing = -math.inf  # the time from which on it is written
        self._told = False  # that it cannot be written to
        self._number = 0
        self._folder: TrustedFolder | None = None
        try:
            self._opened_folder()
        except OSError as error:
            self._rest(error)

    def keys(self) -> set[bytes]:
        """The keys of the blocks that are in files."""
        with self._lock:
            self._look()
            return set(self._holders)

    def match(self, keys: Iterable[bytes]) -> int:
        """How many of the keys lead to blocks that are in files, before the first that does not."""
        with self._lock:
            self._look()
            return sum(1 for _ in itertools.takewhile(self._holders.__contains__, keys))

    def size_of(self, keys: Iterable[bytes]) -> int:
        """Bytes of the files that hold these blocks."""
        with self._lock:
            names = {name for key in keys if (name := self._holders.get(key)) is not None}
            return sum(self._files[name].nbytes for name in names)

    def nbytes(self) -> int:
        """The bytes of all prefix files in the folder."""
        with self._lock:
            self._look()
            return sum(file.nbytes for file in self._files.values())

    def save(self, keys: Sequence[bytes], ids: Sequence[int], tensors: Mapping[str, Array], after: bytes = b"") -> bool:
        """Writes a run of blocks. Returns whether it is in the folder now. `keys`, `ids`: of its blocks and their
        tokens; `after`: the key of the block before the run. ValueError where a tensor's name or size is wrong."""
        part = StoredPart(self._salt, after, tuple(keys))
        packing = packed(part, ids, tensors)
        size, name = size_of(packing), _name(part)
        with self._lock:
            self._seen = -1  # the folder is read anew: others may have used files since
            self._look()
            if self._clock() < self._writing or (self.limit is not None and size > self.limit):
                return False
            there = name in self._files
            if not (there or self._make_room(size, {file.name for file in before(self._files.values(), part)})):
                return False
        try:
            if not there:
                self._write(self._opened_folder(), name, packing)
                self._told = False
        except OSError as error:
            self._rest(error)
            return False
        with suppress(OSError):  # it may be gone already, or be another user's
            self._use(name)
        with self._lock:
            self._seen = -1
            self._look()
            self._make_room(0)
            return name in self._files

    def load(self, key: bytes, room: Room | None = None) -> Saved | None:
        """Reads the run that has the block of this key; None where no file has it, or the one that does is damaged.
        `room`: gives the memory that a tensor's bytes are read into; where None is returned they may be anything."""
        with self._lock:
            self._look()
            file = self._files.get(self._holders.get(key, ""))
        if file is None:
            return None
        path = self.directory / file.name
        try:
            with _opened(self._opened_folder(), file.name) as fd:
                saved = read(str(path), fd, room)
            if saved.part.salt != self._salt or key not in saved.part.keys:
                raise PrefixDamaged("it does not hold what it seemed to hold")
            with suppress(OSError):  # the folder may only be read
                self._use(file.name)
            return saved
        except PrefixDamaged as damage:
            with self._lock:
                self._discard(file.name, file.inode, file.used, str(damage))
        except (OtherFormat, FileNotFoundError):
            self._forget(file)
        except NotTrusted as error:
            self._forget(file)
            tell(str(error))
        except OSError as error:
            self._forget(file)
            with self._lock:
                self._bad.add((file.name, file.inode, file.used))
            warn(f"stored prefix {path} cannot be read: {error.strerror}")
        return None

    def clear(self) -> None:
        """Removes all files of this salt."""
        with self._lock:
            self._look()
            for file in list(self._files.values()):
                if file.part is not None and file.part.salt == self._salt:
                    self._remove(file.name)

    # -- what is in the folder

    def _look(self) -> None:
        """Reads the folder unless it is as it was. See Note [Crash-safe without a lock]."""
        files = dict[str, Stored]()
        try:
            folder = self._opened_folder()
            now, when = time.time_ns(), os.fstat(folder.fd).st_mtime_ns
            if when == self._seen:
                return
            with os.scandir(folder.here) as entries:
                for entry in entries:
                    if _ASIDE.fullmatch(entry.name):
                        self._clean(folder, entry.name)
                    elif _NAME.fullmatch(entry.name) and (file := self._found(folder, entry)) is not None:
                        files[entry.name] = file
        except OSError:  # what it had is gone with it
            files, now, when = {}, 0, -1
        self._files = files
        self._index()
        # a change in the same tick of the file system's clock would go unseen
        self._seen = when if now - when > TICK else -1

    def _opened_folder(self) -> TrustedFolder:
        """Opens the folder, unless it is open; one that was never there is made. NotTrusted, OSError."""
        if self._folder is None or not self._folder.is_in_place:
            self._folder = TrustedFolder(self.directory, make=self._folder is None, private=False)
            self._seen = -1
        return self._folder

    def _found(self, folder: TrustedFolder, entry: os.DirEntry[str]) -> Stored | None:
        name = entry.name
        try:
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or (name, status.st_ino, status.st_mtime_ns) in self._bad:
                return None
            known = self._files.get(name)
            part = known.part if known is not None and known.inode == status.st_ino else self._part(folder, name)
            return Stored(name, status.st_ino, status.st_size, status.st_mtime_ns, part)
        except PrefixDamaged as damage:
            self._discard(name, status.st_ino, status.st_mtime_ns, str(damage))
        except NotTrusted as error:
            self._bad.add((name, status.st_ino, status.st_mtime_ns))
            tell(str(error))
        except OSError:  # gone meanwhile, or not for us
            pass
        return None

    def _part(self, folder: TrustedFolder, name: str) -> StoredPart | None:
        with _opened(folder, name) as fd, suppress(OtherFormat):
            return read_part(name, fd)
        return None

    def _index(self) -> None:
        ours = (file for file in self._files.values() if file.part is not None and file.part.salt == self._salt)
        self._holders = {key: file.name for file in ours if file.part is not None for key in file.part.keys}

    def _clean(self, folder: TrustedFolder, name: str) -> None:
        """Removes a file written aside if no process writes it any more."""
        with suppress(OSError), _opened(folder, name) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(folder.here / name)

    def _forget(self, file: Stored) -> None:
        """Forgets a file that is not what it was."""
        with self._lock:
            self._files.pop(file.name, None)
            self._seen = -1
            self._index()

    def _discard(self, name: str, inode: int, used: int, why: str) -> None:
        """Deletes a corrupt prefix file."""
        self._files.pop(name, None)
        self._index()
        try:
            folder = self._opened_folder()
            os.unlink(folder.here / name)
            done = "was removed"
        except OSError as error:
            self._bad.add((name, inode, used))
            done = f"is left alone, as it cannot be removed ({error.strerror})"
        text = f"stored prefix {self.directory / name} is damaged: {why}. It is not used, and {done}."
        warn(text)

    # -- writing

    def _write(self, folder: TrustedFolder, name: str, packing: Sequence[memoryview]) -> None:
        """Writes a file aside and renames it. See Note [Crash-safe without a lock]. OSError."""
        fd, aside = self._aside(folder, name)
        try:
            write(fd, packing)
            os.fsync(fd)
            os.replace(folder.here / aside, folder.here / name)
        except BaseException:
            with suppress(OSError):
                os.unlink(folder.here / aside)
            raise
        finally:
            os.close(fd)
        os.fsync(folder.fd)

    def _aside(self, folder: TrustedFolder, name: str) -> tuple[int, str]:
        """Makes a new file and locks it; makes it again where another process took it for a dead writer's before it was
        locked."""
        while True:
            with self._lock:
                self._number += 1
                number = self._number
            aside = f".{name.removesuffix('.safetensors')}.{os.getpid()}.{number}.part"
            fd = folder.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                with suppress(OSError):  # a file system without locks: what a dead writer leaves there stays
                    fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    return fd, aside
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _use(self, name: str) -> None:
        """Sets the time of the file's last use to now. OSError."""
        now, folder = time.time_ns(), self._opened_folder()
        os.utime(folder.here / name, ns=(now, now))
        with self._lock:
            if name in self._files:
                self._files[name] = replace(self._files[name], used=now)

    def _make_room(self, size: int, kept: Collection[str] = ()) -> bool:
        """Removes files, but none that is `kept`, until so many bytes more keep the limit. Returns whether they do."""
        if self.limit is None:
            return True
        files = self._files.values()
        gone = leaving(files, size + sum(file.nbytes for file in files) - self.limit, kept)
        for old in gone or ():
            self._remove(old.name)
        self._index()
        return gone is not None

    def _remove(self, name: str) -> None:
        self._files.pop(name, None)
        self._seen = -1
        with suppress(OSError):  # then it is found again
            folder = self._opened_folder()
            os.unlink(folder.here / name)

    def _rest(self, error: OSError) -> None:
        """Writes nothing for a while."""
        with self._lock:
            first, self._told = not self._told, True
            self._writing = self._clock() + self._pause
        if isinstance(error, NotTrusted):
            tell(str(error))
        elif first:
            why = error.strerror or str(error)
            text = f"prefixes are not stored in {self.directory} for now ({why}): what is there is still used"
            warn(text)


def _name(part: StoredPart) -> str:
    text = repr((FORMAT, part.salt, part.after, part.keys)).encode()
    return f"prefix-{hashlib.blake2b(text, digest_size=16).hexdigest()}.safetensors"


@contextmanager
def _opened(folder: TrustedFolder, name: str) -> Iterator[int]:
    fd = folder.open(name)
    try:
        yield fd
    finally:
        os.close(fd)
