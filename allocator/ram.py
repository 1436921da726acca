"""Free memory of the machine, or of the container that this process is in, from which host defaults are made.

Note [Limits of a container]
    A control group limits the memory of all processes in it and in the groups below it, so the least limit on the way
    from the process's own group to the root counts. Version 2 has one tree of groups, version 1 one for memory. In a
    container the root of the tree that is mounted may be the container's own group, whatever `/proc/self/cgroup` calls
    it: groups that are not there are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")
_SELF: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """The memory tree of a version of control groups, and the names of its files."""

    tree: str
    limit: str
    used: str
    reclaimable: str  # a row of memory.stat


_VERSIONS: Final = (
    _Version("", "memory.max", "memory.current", "inactive_file"),
    _Version("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _table(path: Path) -> dict[str, int]:
    """Returns the `name value` lines of a file of the kernel."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdecimal()}


def _limits(cgroup: Path, membership: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, rest of it) in bytes, of each control group that limits this process."""
    try:
        rows = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:  # no such file system: the root of what is mounted may still have a limit
        rows = []
    for version in _VERSIONS:
        mine = [row[2] for row in rows if len(row) == 3 and version.tree in row[1].split(",")]
        own = Path("/", *mine[:1]).relative_to("/")
        for group in (own, *own.parents) if own != Path() else (own,):
            folder = cgroup / version.tree / group
            try:
                text = (folder / version.limit).read_text().strip()
                if not text.isdecimal():
                    continue
                used = int((folder / version.used).read_text())
                reclaimable = _table(folder / "memory.stat").get(version.reclaimable, 0)
            except OSError:
                continue
            yield int(text), max(0, int(text) - used + reclaimable)


def total(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, membership: Path = _SELF) -> int:
    """Returns the bytes of memory in the machine; in a container no more than its limit."""
    return min([_table(meminfo)["MemTotal"] * 1024, *(limit for limit, _ in _limits(cgroup, membership))])


def available(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, membership: Path = _SELF) -> int:
    """Returns the bytes that a program can take without swapping; in a container no more than its limit leaves."""
    return min([_table(meminfo)["MemAvailable"] * 1024, *(left for _, left in _limits(cgroup, membership))])
