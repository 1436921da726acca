"""Who owned how many pages when: recorded from a device while it runs, and resampled to evenly spaced times."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

OWNERS = ("free", "weights", "activations", "kv", "retiring")

Row = tuple[int, int, int, int, int, int]  # time in ns (CLOCK_MONOTONIC), then pages of each of OWNERS


class Source(Protocol):
    """What is recorded: a `Device`."""

    def timeline(self) -> list[Row]:
        """Hands over the rows since the last call, one per change."""


@dataclass(frozen=True, slots=True)
class Series:
    """Pages of each owner at evenly spaced times. `seconds[i]`, from the start, belongs to `pages[owner][i]`."""

    seconds: tuple[float, ...]
    pages: dict[str, tuple[int, ...]]

    def in_use(self) -> tuple[int, ...]:
        """Pages that were not free."""
        used = (self.pages[owner] for owner in OWNERS if owner != "free")
        return tuple(map(sum, zip(*used, strict=True)))


def resample(rows: Sequence[Row], start: int, stop: int, points: int) -> Series:
    """The rows, in order of time, as `points` equal intervals of [start, stop) in ns; before the first row nothing
    existed.

    Each interval is shown by one row, so that its owners add up to what existed at one moment: of those in force
    during it, the one with the most pages in use, so that a peak is never lost between two points. ValueError where
    there is no interval.
    """
    if points < 1 or stop <= start:
        raise ValueError(f"{points} points between {start} and {stop} ns: the end must come after the start")
    chosen: list[Row] = []
    in_force: Row = (start, 0, 0, 0, 0, 0)
    position = 0
    for point in range(points):
        end = start + (stop - start) * (point + 1) // points
        begin = start + (stop - start) * point // points
        while position < len(rows) and rows[position][0] <= begin:
            in_force = rows[position]
            position += 1
        fullest = in_force
        while position < len(rows) and rows[position][0] < end:
            in_force = rows[position]
            fullest = max(fullest, in_force, key=_in_use)
            position += 1
        chosen.append(fullest)
    return Series(
        tuple((stop - start) * point / points / 1e9 for point in range(points)),
        {owner: tuple(row[index] for row in chosen) for index, owner in enumerate(OWNERS, start=1)},
    )


def _in_use(row: Row) -> int:
    return sum(row[2:])


class Recorder:
    """Collects a device's rows in a thread until `stop()`. A context manager; the rows stay readable after it."""

    def __init__(self, source: Source, interval: float = 0.05) -> None:
        """`interval`: seconds between two collections, so that the device's own log stays short."""
        self._source = source
        self._interval = interval
        self._rows: list[Row] = []
        self._done = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ballonet-timeline", daemon=True)
        self._thread.start()

    @property
    def rows(self) -> tuple[Row, ...]:
        """What has been collected so far, in order of time."""
        return tuple(self._rows)

    def stop(self) -> tuple[Row, ...]:
        """Collects what is left and ends. Raises what the device raised meanwhile."""
        self._done.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.rows

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            while not self._done.wait(self._interval):
                self._rows += self._source.timeline()
            self._rows += self._source.timeline()
        except Exception as error:
            self._error = error
