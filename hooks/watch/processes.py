"""The processes of this user that run ballonet, as they are seen from here: what each said last, and before that."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...allocator import control, runtime
from ...allocator.errors import BallonetError, ControlError, NoSuchProcess, NotReachable
from ...allocator.looks import look
from ...offload.policy.tuning import DEFAULT, Watching


@dataclass(frozen=True, slots=True)
class Seen:
    """One process. `now`, `before`: its last two looks (allocator/looks.py); `decisions`: the last ones, oldest first;
    `trouble`: why it did not answer the last time, "" where it did."""

    pid: int
    program: str
    now: dict[str, Any]
    before: dict[str, Any] | None = None
    decisions: tuple[dict[str, Any], ...] = ()
    trouble: str = ""

    def after(self, now: dict[str, Any], most: int) -> Seen:
        """The same with one look more, and so many decisions at most."""
        return replace(self, now=now, before=self.now, decisions=last(self.decisions, now, most), trouble="")


def last(before: Sequence[dict[str, Any]], now: dict[str, Any], most: int) -> tuple[dict[str, Any], ...]:
    """The last decisions, those of a look being the newest."""
    return (*before, *now["events"])[-most:]


class Processes:
    """Looks at one process, or at all that there are. One thread may look while others read `seen`."""

    def __init__(
        self, pid: int | None = None, *, folders: Sequence[Path] | None = None, tuning: Watching = DEFAULT.watching
    ) -> None:
        """`pid`: the one; None: all. `folders`: where their sockets may be."""
        self.pid = pid
        self.seen: tuple[Seen, ...] = ()  # by pid, ascending
        self.ended = False  # is the one gone?
        self._folders = folders
        self._tuning = tuning

    def look(self) -> None:
        """Looks at each. The first time NoSuchProcess, NotPermitted, NotReachable, ControlRefused where the one that is
        wanted cannot be looked at; later it has `trouble`, or is `ended`. Of all, those that never answered are left
        out."""
        known, found = {each.pid: each for each in self.seen}, list[Seen]()
        for pid in self._pids():
            each = known.get(pid)
            try:
                now = self._ask(pid, None if each is None else each.now["cursor"])
            except NoSuchProcess:
                if self.pid is not None and each is None:
                    raise
                self.ended = self.pid is not None
            except BallonetError as error:
                if each is not None:
                    why = error.reason if isinstance(error, ControlError) else str(error)
                    found.append(replace(each, trouble=why))
                elif self.pid is not None:
                    raise
            else:
                most = self._tuning.decisions
                if each is None:
                    found.append(Seen(pid, program_of(pid), now, decisions=last((), now, most)))
                else:
                    found.append(each.after(now, most))
        self.seen = tuple(found)

    def _pids(self) -> list[int]:
        if self.pid is not None:
            return [self.pid]
        here = [os.getpid()] if runtime.current() is not None else []
        return sorted({*control.listening(self._folders), *here})

    def _ask(self, pid: int, since: int | None) -> dict[str, Any]:
        if pid == os.getpid():
            if runtime.current() is None:
                raise NotReachable(pid, "is this one, and ballonet is not installed in it: call ballonet.install()")
            return look(since)
        return control.look(pid, since, self._folders, self._tuning.patience)


def program_of(pid: int, read: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """What a process runs, in a word or two: its script, or `-m` and its module with the first argument. Other
    arguments are not shown, as some are secret."""
    try:
        words = [word.decode(errors="replace") for word in read(Path(f"/proc/{pid}/cmdline")).split(b"\0")[:-1]]
    except OSError:
        return ""
    if not words or not Path(words[0]).name.startswith("python"):
        return Path(words[0]).name if words else ""
    for place, word in enumerate(words[1:], 1):
        if word == "-m":
            module, *more = words[place + 1 : place + 3]
            return " ".join(["-m", module, *(each for each in more if not each.startswith("-"))])
        if word == "-c":
            return "-c"
        if not word.startswith("-") and words[place - 1] not in ("-W", "-X"):
            return Path(word).name
    return Path(words[0]).name
