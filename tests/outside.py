"""Another process that watches how much memory of the pool exists, by what the kernel says of this one's memfds.

    python tests/outside.py PID FILE    watches until its input ends; prints one JSON object

FILE holds the bytes that the device and the host may have now, as two native 64-bit numbers. Whoever changes them
writes a higher limit before it is in force, and a lower one after.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import struct
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

PLACES = ("device", "host")
LIMITS = struct.Struct("=2q")
EVERY = 0.001  # seconds between two looks


class Watcher:
    """Watches this process from another one. A context manager: whether there was ever too much is known after it."""

    def __init__(self, folder: Path, device: int, host: int) -> None:
        """`device`, `host`: bytes that may exist; `folder`: for a small file."""
        self._limits = [device, host]
        self.seen: Mapping[str, int] = {}  # looks; most_device and most_host, in bytes; over_device, over_host: looks
        path = folder / "limits"
        path.write_bytes(LIMITS.pack(device, host))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), LIMITS.size)
        command = [sys.executable, __file__, str(os.getpid()), str(path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "watching\n"

    def allow(self, device: int) -> None:
        """The device may have so many bytes: before that is in force if it is more, after if it is less."""
        self._limits[0] = device
        self._shared[:] = LIMITS.pack(*self._limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        said, _ = self._process.communicate()
        self.seen = json.loads(said)
        self._shared.close()


def memfd_bytes(process: int, where: str) -> int:
    """Bytes that the kernel holds for the pool of a process, `where`: on the device or the host."""
    sizes = {}
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if f"memfd:ballonet-{where}" in os.readlink(path):
                status = os.stat(path)
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def watch(pid: int, path: Path) -> dict[str, int]:
    """Looks until the input ends. A budget that changes during a look counts as the larger of the two."""
    with path.open("rb") as file:
        limits = mmap.mmap(file.fileno(), LIMITS.size, prot=mmap.PROT_READ)
    counts = {"looks": 0, **{f"{what}_{place}": 0 for what in ("most", "over") for place in PLACES}}
    files = {place: descriptors(pid, place) for place in PLACES}
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], EVERY)[0]:
        before = LIMITS.unpack(limits[:])
        there = {place: sum(os.stat(fd).st_blocks * 512 for fd in them) for place, them in files.items()}
        allowed = dict(zip(PLACES, map(max, before, LIMITS.unpack(limits[:])), strict=True))
        counts["looks"] += 1
        for place in PLACES:
            counts[f"most_{place}"] = max(counts[f"most_{place}"], there[place])
            counts[f"over_{place}"] += there[place] > allowed[place]
    return counts


def descriptors(pid: int, place: str) -> list[Path]:
    """One of each memfd: a process that has loaded several copies of the stand-in has one of each."""
    paths = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            if f"memfd:ballonet-{place}" in os.readlink(path):
                paths[os.stat(path).st_ino] = path
    return list(paths.values())


if __name__ == "__main__":
    print(json.dumps(watch(int(sys.argv[1]), Path(sys.argv[2]))))
