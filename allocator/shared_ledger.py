"""The ledger of a budget that several processes of a user share on a device: a small file in a folder that only its
user can enter (trusted.py), and that follows from the user alone.

Note [Never too much]
    The ledger holds a total and the part of each process. Under its lock a part is raised by what is free at most, and
    only then does its process raise its own budget; a process that gives has lowered its budget, and its pages are back
    with the driver, before its part is lowered here. So at every moment what exists is no more than the parts, and
    those are no more than the total. A lower total is written as `target`: no part grows beyond that, and it becomes
    the total once the parts are below it.

Note [A process that dies]
    The kernel drops the lock of a process that dies (`lockf`; it is not inherited by a fork). The file is replaced as a
    whole, so a process that dies in the middle leaves the one before. A part belongs to a pid and the moment at which
    that started; the next reader removes those that are gone. A zombie counts as gone once its last thread has ended,
    which is after its memory was given back.

Note [A ledger that goes]
    Somebody may remove the file, its lock or their folder. Whoever has the lock sees that its path still leads to it,
    or looks for the new one: two processes never hold two of them. A process whose part the ledger lacks joins again
    (hooks/device/shared.py). systemd, which removes old files of /tmp, leaves a folder alone that somebody has locked
    (`flock`), as each process that shares a budget has.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TextIO

from .config import ledger_dir
from .defaults import LEDGER_LONGEST, LEDGER_PATIENCE
from .errors import LedgerDamaged, SharedBudgetError
from .trusted import TrustedFolder
from .units import format_size

_here = threading.Lock()  # file locks belong to a process; this one excludes its threads
os.register_at_fork(after_in_child=lambda: globals().update(_here=threading.Lock()))


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a process, in bytes, and the `floor` that it keeps. `start`: of the process, in ticks of the kernel;
    `number`: of its runtime."""

    start: int
    number: int
    nbytes: int
    floor: int


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The content of a ledger. `total`: bytes, None where not set; `target`: its next value."""

    total: int | None = None
    target: int | None = None
    parts: Mapping[int, Part] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def free(self) -> int:
        """Bytes that a part may be raised by."""
        return max(0, min(self.total or 0, self.target or 0) - self.taken)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values: total, target, and of each pid [start, number, bytes, floor]."""
        rows = {str(pid): [part.start, part.number, part.nbytes, part.floor] for pid, part in self.parts.items()}
        return {"total": self.total, "target": self.target, "parts": rows}


class SharedLedger:
    """The ledger of one device. Every method raises LedgerDamaged where the file is none, and SharedBudgetError where
    its lock is not to be had in time."""

    def __init__(self, device: str, folder: Path | None = None, patience: float = LEDGER_PATIENCE) -> None:
        """`device`: a name that is the same in all processes; `folder`: of the file, made where there is none;
        `patience`: seconds that its lock is waited for. NotTrusted, OSError where the folder cannot be used."""
        self.device: Final = device
        self.path: Final = (ledger_dir() if folder is None else folder) / f"shared-{device}.json"
        self._lock_name = f"shared-{device}.lock"
        self._patience = patience
        self._folder = self._opened()

    def read(self) -> SharedParts:
        """Reads the ledger, without processes that are gone."""
        with self._changing() as change:
            return change(lambda now: now)

    @property
    def stamp(self) -> tuple[int, int] | None:
        """Returns another value, as a rule, once the ledger has changed: one call of the kernel. None where there is no
        file."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def join(self, pid: int, number: int, total: int | None, floor: int) -> SharedParts:
        """Adds a process, with no bytes yet. `total`: of the shared budget, None for the one that others share.
        SharedBudgetError where that is another one, or floors do not fit in it."""

        def joined(now: SharedParts) -> SharedParts:
            said = now.total if total is None or now.parts else total
            if said is None:
                raise self._nobody()
            if total not in (None, said):
                raise SharedBudgetError(
                    f"the budget that others share on {self.device} is {format_size(said)}, and not "
                    f"{format_size(total or 0)}: leave the size out (shared_budget=True), or change it for all of them "
                    "with `ballonet budget --shared SIZE`"
                )
            target = now.target if now.parts and now.target is not None else said
            floors = floor + sum(part.floor for part in now.parts.values())
            if pid in now.parts:
                raise SharedBudgetError("this process shares a budget already, for another runtime of the same device")
            if floors > min(said, target):
                raise SharedBudgetError(
                    f"what the processes on {self.device} keep in any case is {format_size(floors)}, more than the "
                    f"{format_size(min(said, target))} that they share: give a smaller floor, or raise the total with "
                    "`ballonet budget --shared SIZE`"
                )
            return SharedParts(said, target, {**now.parts, pid: Part(started(pid) or 0, number, 0, floor)})

        with self._changing() as change:
            return change(joined)

    def raise_to(self, pid: int, nbytes: int, page: int) -> int:
        """Raises the part of a process to so many bytes, or as far as bytes are free, in whole pages. Returns the
        part."""

        def raised(now: SharedParts) -> SharedParts:
            mine = self._of(now, pid)
            more = max(0, min(nbytes - mine.nbytes, now.free)) // page * page
            return replace(now, parts={**now.parts, pid: replace(mine, nbytes=mine.nbytes + more)})

        with self._changing() as change:
            return change(raised).parts[pid].nbytes

    def renew(self, pid: int, number: int, floor: int, total: int, nbytes: int, page: int) -> int:
        """Sets the part of a process to so many bytes, or to as many whole pages as are free; adds the process, and the
        total, where the ledger lacks them. Returns the part."""

        def renewed(now: SharedParts) -> SharedParts:
            others = {key: part for key, part in now.parts.items() if key != pid}
            rest = replace(now, total=now.total or total, target=now.target or total, parts=others)
            kept = min(floor, max(0, min(rest.total or 0, rest.target or 0) - sum(it.floor for it in others.values())))
            mine = now.parts.get(pid, Part(started(pid) or 0, number, 0, kept))
            part = replace(mine, nbytes=min(nbytes, max(mine.nbytes, rest.free // page * page)))
            return replace(rest, parts={**others, pid: part})

        with self._changing() as change:
            return change(renewed).parts[pid].nbytes

    def lower_to(self, pid: int, nbytes: int) -> None:
        """Lowers the part of a process to so many bytes at most."""

        def lowered(now: SharedParts) -> SharedParts:
            mine = self._of(now, pid)
            return replace(now, parts={**now.parts, pid: replace(mine, nbytes=min(nbytes, mine.nbytes))})

        with self._changing() as change:
            change(lowered)

    def leave(self, pid: int) -> None:
        """Removes the process. Idempotent."""
        with self._changing() as change:
            change(lambda now: replace(now, parts={key: it for key, it in now.parts.items() if key != pid}))

    def aim(self, total: int) -> SharedParts:
        """Changes the total to so many bytes: at once where the parts are no more than that, else no part grows until
        they are. SharedBudgetError where floors do not fit in it, or there is no total yet."""

        def aimed(now: SharedParts) -> SharedParts:
            floors = sum(part.floor for part in now.parts.values())
            if now.total is None:
                raise self._nobody()
            if floors > total:
                raise SharedBudgetError(
                    f"a total of {format_size(total)} was asked for, but the processes keep {format_size(floors)} in "
                    "any case (their floors, and four pages of each): ask for that or more, or end one of them"
                )
            return replace(now, total=max(now.total, total), target=total)

        with self._changing() as change:
            return change(aimed)

    def give_up(self) -> SharedParts:
        """Cancels `aim`: the total stays."""
        with self._changing() as change:
            return change(lambda now: replace(now, target=now.total))

    def _of(self, now: SharedParts, pid: int) -> Part:
        if pid not in now.parts:
            raise LedgerDamaged(str(self.path), f"it does not know process {pid}, which shares the budget")
        return now.parts[pid]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Callable[[Callable[[SharedParts], SharedParts]], SharedParts]]:
        """Locks the ledger, and yields a function that replaces the content by a function of it."""
        deadline = time.monotonic() + self._patience
        if not _here.acquire(timeout=self._patience):
            raise self._busy()
        try:
            with self._locked(deadline):
                yield self._change
        finally:
            _here.release()

    def _locked(self, deadline: float) -> TextIO:
        """Opens and locks the lock file, which is the one that others find: see Note [A ledger that goes]."""
        while True:
            if not self._folder.is_in_place:
                self._folder = self._opened()
            lock = open(self._folder.open(self._lock_name, os.O_RDWR | os.O_CREAT), "r+")  # noqa: SIM115 (returned)
            with contextlib.suppress(OSError):
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock.fileno()), os.lstat(self.path.with_name(self._lock_name))):
                    return lock
            lock.close()
            if time.monotonic() >= deadline:
                raise self._busy()
            time.sleep(0.002)

    def _opened(self) -> TrustedFolder:
        """Opens the folder, made where there is none. NotTrusted, OSError."""
        folder = TrustedFolder(self.path.parent)
        with contextlib.suppress(OSError):
            fcntl.flock(folder.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return folder

    def _change(self, act: Callable[[SharedParts], SharedParts]) -> SharedParts:
        before = self._read()
        now = act(replace(before, parts={pid: it for pid, it in before.parts.items() if started(pid) == it.start}))
        if now.target is not None and now.taken <= now.target:
            now = replace(now, total=now.target)
        if now != before:
            self._folder.write(self.path.name, json.dumps(now.to_dict()).encode())
        return now

    def _read(self) -> SharedParts:
        try:
            with open(self._folder.open(self.path.name), "rb") as file:
                text = file.read(LEDGER_LONGEST)
        except FileNotFoundError:
            return SharedParts()
        try:
            said = json.loads(text)
            parts = {int(pid): Part(*map(_size, row)) for pid, row in said["parts"].items()}
            shared = SharedParts(_size(said["total"]), _size(said["target"]), parts)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LedgerDamaged(str(self.path), f"it cannot be read ({error!r})") from None
        if shared.taken > (shared.total or 0):
            raise LedgerDamaged(str(self.path), "its parts are more than its total")
        return shared

    def _nobody(self) -> SharedBudgetError:
        return SharedBudgetError(
            f"nobody shares a budget on {self.device} yet: give the first process its size, as shared_budget='24GiB'"
        )

    def _busy(self) -> SharedBudgetError:
        return SharedBudgetError(
            f"the ledger {self.path} is locked for longer than {self._patience:g} s: a process that shares the budget "
            "was stopped in the middle of a change; let it go on (kill -CONT), or end it"
        )


def ledgers(folder: Path | None = None) -> list[SharedLedger]:
    """Returns the existing ledgers, by device. NotTrusted."""
    folder = ledger_dir() if folder is None else folder
    if not folder.is_dir():
        return []
    names = fnmatch.filter(TrustedFolder(folder).names(), "shared-*.json")
    return [SharedLedger(name.removeprefix("shared-").removesuffix(".json"), folder) for name in names]


def started(pid: int) -> int | None:
    """Returns when a process started, in ticks of the kernel since boot; None where it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state, *rest = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    threads, start = int(rest[16]), int(rest[18])
    return None if state in "ZX" and threads <= 1 else start


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no number of bytes")
    return value
