"""A file of weights that is used long after it was opened, and may have become another one meanwhile.

Note [What a change is]
    Bytes are read as far as they are there (`pread`), never through a mapping: a process that touches a page that a
    mapped file has lost is killed by SIGBUS. And before anything is taken from the file its path is looked at: does it
    still lead to the same inode, of the same size, last written at the same time? A file whose last write is so young
    that another in the same tick of the file system's clock would go unseen is waited for first. Two things go unseen:
    a writer that sets the time back, and a file system whose clock is coarser than a tick of the machine's.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from ...allocator.errors import WeightsFileChanged, WeightsFileError
from .safetensors import TensorEntry, read_header

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
