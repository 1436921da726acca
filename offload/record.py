"""The performance record (Select-N §4.4): how long an iteration takes and how fast the link is, measured once and kept.

Iterations are measured with every layer resident, prefill and decode apart, at powers of two of batch and length. What
interval meets an SLO follows from that by arithmetic (interval.py), so one record serves every SLO and every budget.

Note [Never under]
    For a batch and length that were not measured the time of a listed point counts that is smaller in neither; of a
    point, the longest time of any that is larger in neither, should a measurement have been disturbed. So a looked-up
    time is never below what was measured for less work, and grows with batch and length.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

Phase = Literal["prefill", "decode"]
FORMAT: Final = 1  # of the file


class Point(NamedTuple):
    """What an iteration worked on: sequences, and tokens of each, held (decode) or new (prefill)."""

    phase: Phase
    batch: int
    length: int


@dataclass(frozen=True, slots=True)
class Record:
    """`key`: what it was measured for and on (model, device, driver, link, versions). `bandwidth`: bytes per second to
    the device. `seconds`: of one iteration, by point."""

    key: Mapping[str, str]
    bandwidth: float
    seconds: Mapping[Point, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        times = (self.bandwidth, *self.seconds.values())
        if not all(isinstance(each, int | float) and 0 < each < math.inf for each in times):
            raise ValueError("a bandwidth or a time is not a positive number")
        if not all(point.phase in get_args(Phase) and min(point[1:]) >= 1 for point in self.seconds):
            raise ValueError("a point has no known phase, or no sequences or tokens")

    def time(self, phase: Phase, batch: int, length: int) -> float | None:
        """Seconds that such an iteration takes at most; None where no point listed is as large. See Note [Never
        under]."""
        ceilings = [
            each for each in self.seconds if each.phase == phase and each.batch >= batch and each.length >= length
        ]
        return min(map(self._at_most, ceilings), default=None)

    def _at_most(self, point: Point) -> float:
        return max(
            seconds
            for each, seconds in self.seconds.items()
            if each.phase == point.phase and each.batch <= point.batch and each.length <= point.length
        )


class Unusable(Exception):
    """A file that holds no record for what is wanted, and why: it is measured anew."""


def path_of(folder: Path, key: Mapping[str, str]) -> Path:
    """Where the record for `key` is kept."""
    return folder / f"record-{hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:16]}.json"


def save(record: Record, path: Path) -> None:
    """Writes the file, as a whole or not at all. OSError."""
    content = {
        "key": dict(record.key),
        "bandwidth": record.bandwidth,
        "points": [[*point, seconds] for point, seconds in sorted(record.seconds.items())],
    }
    text = json.dumps({"format": FORMAT, "checksum": _checksum(content), **content}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".record-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def load(path: Path, key: Mapping[str, str]) -> Record:
    """The record in the file. Unusable where it is missing, damaged, of another version, or for something else."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise Unusable(f"there is none yet in {path}") from None
    except (OSError, ValueError) as error:
        raise Unusable(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise Unusable(f"{path} was written by another version of ballonet")
    content: dict[str, Any] = {name: found.get(name) for name in ("key", "bandwidth", "points")}
    if found.get("checksum") != _checksum(content):
        raise Unusable(f"{path} is damaged: its checksum is wrong")
    if content["key"] != dict(key):
        differ = sorted(name for name in {*key, *content["key"]} if content["key"].get(name) != key.get(name))
        raise Unusable(f"{path} was measured for another {', '.join(differ)}")
    try:
        points = {Point(phase, batch, length): seconds for phase, batch, length, seconds in content["points"]}
        return Record(content["key"], content["bandwidth"], points)
    except (TypeError, ValueError) as error:
        raise Unusable(f"{path} is damaged: {error}") from error


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
