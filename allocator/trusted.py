"""Folders, and files in them, that are trusted: with code that is loaded, with what was measured, with KV of prompts,
with the bytes that processes share, and with control sockets.

Note [What is trusted]
    A folder or file belongs to this user or to root, and nobody else can write to it: no other user, and no group but
    the owner's own, of the same number. Neither is reached by a link in the last part of its path. Checked is what was
    opened, and it is used by its descriptor: whoever can write to a folder further up puts another one in its place in
    vain. A folder of this user that others can write to is narrowed, with one line that says so; what others put there
    before has another owner, and is refused. A volume that several users share is named by BALLONET_TRUST_FOLDER: in
    it, and below, everything is taken.
"""

from __future__ import annotations

import functools
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from .config import trust_folders
from .errors import NotTrusted
from .notices import warn


class TrustedFolder:
    """A folder that was checked, open for as long as this object lives.

    `here`: a path that leads to it whatever has its name by now, in this process alone.
    """

    def __init__(self, path: Path, *, make: bool = True, private: bool = True) -> None:
        """`make`: where there is none. `private`: one of this user's is narrowed until others cannot read it either.
        NotTrusted; OSError."""
        self.path: Final = path
        self._shared = any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in trust_folders())
        follow = 0 if self._shared else os.O_NOFOLLOW
        try:
            if make:
                path.mkdir(0o700, parents=True, exist_ok=True)
            self.fd: Final = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow)
        except OSError as error:
            raise _refusal(path, path, error) from None
        self.here: Final = Path(f"/proc/self/fd/{self.fd}")
        if not self._shared:
            _narrow(self, private)
            _check(path, path, os.fstat(self.fd))

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)

    @property
    def is_in_place(self) -> bool:
        """Whether its path still leads to it."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except OSError:
            return False

    def names(self) -> list[str]:
        """Returns the names of what is in it, in order. OSError."""
        return sorted(os.listdir(self.fd))

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Opens a file, made for this user alone where `flags` make it. Returns the descriptor. NotTrusted; OSError."""
        try:
            fd = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        except OSError as error:
            raise _refusal(self.path / name, self.path, error) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise NotTrusted(f"{self.path / name} is not used: it is no file")
            if not self._shared:
                _check(self.path / name, self.path, status)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read(self, name: str) -> bytes:
        """Returns what a file has. NotTrusted; OSError."""
        with open(self.open(name), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes, mode: int = 0o600) -> None:
        """Replaces a file, as a whole or not at all. OSError."""
        fd, aside = tempfile.mkstemp(prefix=f".{name}-", dir=self.here)
        try:
            with open(fd, "wb") as file:
                file.write(content)
                os.fchmod(fd, mode)
            os.replace(aside, self.here / name)
        finally:
            Path(aside).unlink(missing_ok=True)


@functools.cache
def tell(text: str) -> None:
    """Warns of something once in a process."""
    warn(text)


def _narrow(folder: TrustedFolder, private: bool) -> None:
    status = os.fstat(folder.fd)
    wide = status.st_mode & 0o077 if private else _open_to_others(status)
    if status.st_uid != os.geteuid() or status.st_mode & stat.S_ISVTX or not wide:
        return
    try:
        os.fchmod(folder.fd, stat.S_IMODE(status.st_mode) & ~wide)
    except OSError:
        return
    if os.fstat(folder.fd).st_mode != status.st_mode:
        tell(
            f"{folder.path} could be {'written to' if _open_to_others(status) else 'read'} by others "
            f"({stat.S_IMODE(status.st_mode):o}): it is narrowed to its user"
        )


def _check(path: Path, folder: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        raise _refused(path, folder, f"it belongs to user {status.st_uid}")
    if _open_to_others(status):
        raise _refused(path, folder, "others can write to it")


def _open_to_others(status: os.stat_result) -> int:
    """Returns the bits by which others can write."""
    return status.st_mode & (stat.S_IWOTH if status.st_gid == status.st_uid else stat.S_IWOTH | stat.S_IWGRP)


def _refusal(path: Path, folder: Path, error: OSError) -> OSError:
    """Returns what says more than an error of opening does, where it cannot be used in any case; else the error."""
    try:
        status = path.lstat()
    except OSError:
        return error
    if stat.S_ISLNK(status.st_mode):
        return _refused(path, folder, "it is a link, whose target has to be named itself")
    if status.st_uid not in (os.geteuid(), 0):
        return _refused(path, folder, f"it belongs to user {status.st_uid}")
    return error


def _refused(path: Path, folder: Path, why: str) -> NotTrusted:
    return NotTrusted(
        f"{path} is not used, as another user may have put it there: {why}. Remove it, or make it yours; where all who "
        f"can write there are to be trusted set BALLONET_TRUST_FOLDER={folder}"
    )
