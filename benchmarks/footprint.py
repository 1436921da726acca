"""What a process holds in memory, as the kernel says: on the host, and on the stand-in's device."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

EVERY = 0.01  # seconds between looks


def resident() -> int:
    """Bytes of the host that this process holds for itself or as pages of files. What is shared (the stand-in's pages
    among it) is not counted."""
    found = re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return sum(map(int, found)) * 1024


def standin(name: str) -> int:
    """Bytes of the stand-in's pages: `name` is "device" or "host"; 0 where there are none."""
    sizes = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            if f"memfd:ballonet-{name}" in os.readlink(link):
                status = os.stat(link)
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


class Peaks:
    """Within it: the most that was held of the host beyond what it was at first, and of the stand-in's device."""

    def __init__(self) -> None:
        self.host = 0
        self.device = 0
        self._first = resident() + standin("host")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(EVERY):
            self._look()

    def _look(self) -> None:
        self.host = max(self.host, resident() + standin("host") - self._first)
        self.device = max(self.device, standin("device"))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._look()
