"""The processes of this user that run ballonet, the last two looks at each, and figures that are worked out of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ...allocator import control, devices
from ...allocator.errors import (
    BallonetError,
    ControlError,
    ControlRefused,
    NoSuchProcess,
    NotInstalled,
    NotReachable,
)
from ...allocator.looks import look

Look = Mapping[str, Any]  # of one device (allocator/looks.py)


@dataclass(frozen=True, slots=True)
class SeenProcess:
    """One device of one process. `now`, `before`: its last two looks (allocator/looks.py); `decisions`: the last ones,
    oldest first; `trouble`: why the process did not answer the last time, "" where it did."""

    pid: int
    program: str
    now: dict[str, Any]
    before: dict[str, Any] | None = None
    decisions: tuple[dict[str, Any], ...] = ()
    trouble: str = ""

    @property
    def number(self) -> int:
        """The number of the device's runtime in its process."""
        return int(self.now["device"]["number"])

    @property
    def one_of_several(self) -> bool:
        """Does its process have other devices, too?"""
        return len(self.now["devices"]) > 1

    @property
    def key(self) -> tuple[int, int]:
        """(pid, number of the runtime)."""
        return self.pid, self.number

    def after(self, now: dict[str, Any], most: int) -> SeenProcess:
        """Returns this with one more look, and at most so many decisions."""
        return replace(self, now=now, before=self.now, decisions=last(self.decisions, now, most), trouble="")


def last(before: Sequence[dict[str, Any]], now: dict[str, Any], most: int) -> tuple[dict[str, Any], ...]:
    """The last decisions, those of a look being the newest."""
    return (*before, *now["events"])[-most:]


# Seconds between two looks: less than a thousandth of the process's time, as a look takes 0.4 ms of it. Measured: 2
# shared cores, 32 layers of which 8 stream; tests/test_top.py holds the calls of a look.
PERIOD: Final = 1.0
# Decisions that are shown of a process. Chosen: what a terminal of 24 lines has room for beside the rest.
_DECISIONS: Final = 5


class WatchedProcesses:
    """Looks at one process, or at all that there are, and at all devices of each. One thread may look while others read
    `seen`."""

    def __init__(self, pid: int | None = None, *, folders: Sequence[Path] | None = None, patience: float = 1.0) -> None:
        """`pid`: the one; None: all. `folders`: where their sockets may be; `patience`: seconds
        until one that does not answer counts as busy. Chosen: between two looks."""
        self.pid = pid
        self.seen: tuple[
            SeenProcess, ...
        ] = ()  # this one first, then by pid, and of each its devices, in the order of their start
        self.ended = False  # has the process `pid` ended?
        self._folders = folders
        self._patience = patience

    def look(self) -> None:
        """Looks at each process. NoSuchProcess, NotPermitted, NotReachable, ControlRefused where `pid` cannot be looked
        at the first time; later it has `trouble`, or is `ended`. Without a `pid`, processes that never answered are
        left out."""
        processes = list[SeenProcess]()
        for pid in self._pids():
            known = [process for process in self.seen if process.pid == pid]
            try:
                processes.extend(self._looked(pid, known))
            except NoSuchProcess:
                if self.pid is not None and not known:
                    raise
                self.ended = self.pid is not None
            except BallonetError as error:
                if self.pid is not None and not known:
                    raise
                why = error.reason if isinstance(error, ControlError) else str(error)
                processes.extend(replace(process, trouble=why) for process in known)
        self.seen = tuple(processes)

    def _looked(self, pid: int, known: Sequence[SeenProcess]) -> list[SeenProcess]:
        """Looks at all devices of a process. `known`: earlier looks. Raises as `_ask`."""
        first = self._ask(pid, known[0].now["cursor"] if known else None)
        before, looks = {process.number: process for process in known}, [first]
        for number in first["devices"]:
            if number != first["device"]["number"]:
                earlier = before.get(number)
                with suppress(NotInstalled, ControlRefused):  # the device was stopped in between
                    looks.append(self._ask(pid, None if earlier is None else earlier.now["cursor"], number))
        return [self._seen(pid, before.get(now["device"]["number"]), now) for now in looks]

    def _seen(self, pid: int, before: SeenProcess | None, now: dict[str, Any]) -> SeenProcess:
        most = _DECISIONS
        if before is None:
            return SeenProcess(pid, program_of(pid), now, decisions=last((), now, most))
        return before.after(now, most)

    def _pids(self) -> list[int]:
        if self.pid is not None:
            return [self.pid]
        here = [os.getpid()] if devices.current() is not None else []
        return [*here, *sorted({*control.listening(self._folders)} - {*here})]

    def _ask(self, pid: int, since: int | None, number: int | None = None) -> dict[str, Any]:
        if pid == os.getpid():
            if devices.current() is None:
                raise NotReachable(pid, "is this one, and ballonet is not installed in it: call ballonet.install()")
            return look(since, number)
        return control.look(pid, since, self._folders, self._patience, number)


def whose(pid: int, device: int | None) -> str:
    """Names a process, and the number of its device where it has several, in words."""
    return f"process {pid}" if device is None else f"device {device} of process {pid}"


def program_of(pid: int, read: Callable[[Path], bytes] = Path.read_bytes) -> str:
    """Names the program of a process: its script, or `-m` and its module with the first argument. Other arguments are
    not shown, as some are secret."""
    try:
        words = [word.decode(errors="replace") for word in read(Path(f"/proc/{pid}/cmdline")).split(b"\0")[:-1]]
    except OSError:
        return ""
    if not words or not Path(words[0]).name.startswith("python"):
        return Path(words[0]).name if words else ""
    for place, word in enumerate(words[1:], 1):
        if word == "-m":
            module, *more = words[place + 1 : place + 3]
            return " ".join(["-m", module, *(argument for argument in more if not argument.startswith("-"))])
        if word == "-c":
            return "-c"
        if not word.startswith("-") and words[place - 1] not in ("-W", "-X"):
            return Path(word).name
    return Path(words[0]).name


def copy_rates(before: Look | None, after: Look) -> dict[str, float]:
    """Returns bytes per second between the looks, by direction; empty where no time is between them, or a counter fell,
    as the device was started anew."""
    if before is None or after["when"] <= before["when"]:
        return {}
    seconds = (after["when"] - before["when"]) / 1e9
    grown = {way: nbytes - before["copied"].get(way, 0) for way, nbytes in after["copied"].items()}
    return {way: nbytes / seconds for way, nbytes in grown.items()} if min(grown.values(), default=0) >= 0 else {}


def plain_look(look: Look, before: Look | None) -> dict[str, Any]:
    """Returns a look for scripts, with its `rates` in bytes per second and without the cursor."""
    return {key: value for key, value in look.items() if key != "cursor"} | {"rates": copy_rates(before, look)}


def kv_tiers(look: Look) -> dict[str, int]:
    """Returns bytes on the `device`, the `peer` and the `host`, in whole pages, and on `disk`: all files in the folders
    of its models, of other processes too. A shared folder counts once."""
    page = look["page_size"]
    peer = (look["peer_pages"] - look["peer_free"]) * page
    away = look.get("kv", {}).get("displaced", 0) * page
    stores = [model["prefixes"] for model in look.get("models", ())]
    folders = dict(store["files"] for store in stores if store is not None and store["files"] is not None)
    return {
        "device": look["pages"]["kv"] * page,
        "peer": peer,
        "host": max(0, away - peer),
        "disk": sum(folders.values()),
    }
