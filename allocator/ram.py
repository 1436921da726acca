"""How much memory the machine can still give: what the defaults on the host are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")


def _table(path: Path) -> dict[str, int]:
    """The `name value` lines of a file of the kernel, as they stand."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}


def total(meminfo: Path = _MEMINFO) -> int:
    """Bytes of memory in the machine."""
    return _table(meminfo)["MemTotal"] * 1024


def available(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that a program can take without swapping; in a container no more than its limit leaves."""
    free = _table(meminfo)["MemAvailable"] * 1024
    limit = cgroup / "memory.max"
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        used = int((cgroup / "memory.current").read_text())
        reclaimable = _table(cgroup / "memory.stat").get("inactive_file", 0)
        free = min(free, max(0, int(text) - used + reclaimable))
    return free
