"""Twins: where the bytes of a range of weights are on the host.

Words
    page twin   host pages: copied from, or mapped in the place of the device's
    file twin   a registered file: copied from only

Note [At rest in a file]
    Whoever looks at a layer whose twin is a file is shown host pages, which are filled from the file first and may be
    written. Before they are given back they are compared with the file: where they differ they are the twin from then
    on. So a second copy of the weights is in memory only while someone looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ...allocator._native import Device, Group, Range, Transfer
from ...allocator.errors import DriverError
from .file_twin import FileTwin, Place

Copies = list[tuple[int, int, int]]  # (to, from, bytes)
Spans = Sequence[tuple[int, int]]  # (first, count) of pieces


class Twin:
    """That of the range `home`."""

    def __init__(self, device: Device, group: Group, home: Range, file: FileTwin | None = None) -> None:
        """Without a file its pages are to be mapped and filled by who makes it."""
        self.home = home
        self.pages = device.reserve(home.nbytes, "weights", group)
        self._device = device
        self._page = device.page_size
        self.shown = False  # to someone who may have written it
        self._file = file

    @property
    def file(self) -> FileTwin | None:
        """What it is copied from, None for a page twin."""
        return self._file

    @property
    def places(self) -> Sequence[Place]:
        """What of a file it consists of; empty for a page twin."""
        return () if self._file is None else self._file.places

    def copies(self, first: int, count: int, to: int) -> Copies:
        """What brings `count` pieces to the address `to`: from its pages where it has some, which somebody may have
        written. WeightsFileChanged."""
        if self._file is None or self.pages.backed:
            return [(to, self.pages.address + first * self._page, count * self._page)]
        return self._from_file(self._file, first, count, to)

    def sources(self, first: int, count: int) -> Copies:
        """(offset, address, bytes) of what fills `count` pieces from the file; empty for a page twin."""
        return [] if self._file is None else self._from_file(self._file, first, count, 0)

    def check(self) -> None:
        """WeightsFileChanged unless its files are what they were."""
        if self._file is not None:
            self._file.check()

    def copy_home(self, spans: Spans) -> None:
        """Fills the pages of a page twin with what the range holds, once every stream has passed that may have written
        there: the only time that weights go to the host. PoolExhausted, DriverError: it has no pages then."""
        with ExitStack() as undo:
            for first, count in spans:
                undo.callback(self.pages.retire, first, count)
                for piece in range(first, first + count):
                    self.pages.map_host(piece, 1)  # a new one takes ms, and who runs the model waits for no more
            copies = [
                (self.pages.address + first * self._page, self.home.address + first * self._page, count * self._page)
                for first, count in spans
            ]
            Transfer(self._device).copy(copies, after=None, owner="weights", to="host").wait()
            undo.pop_all()

    def ground(self, spans: Spans, transfer: Transfer, stream: int) -> None:
        """Has its pages hold these pieces, all there are, if none are there. PoolExhausted where the host has too few,
        WeightsFileChanged, DriverError."""
        file = self._file
        if file is None or self.pages.backed:
            return
        with ExitStack() as undo:
            for first, count in spans:
                self.pages.map_host(first, count)
                undo.callback(self.pages.retire, first, count)
            copies = [
                copy
                for first, count in spans
                for copy in self._from_file(file, first, count, self.pages.address + first * self._page)
            ]
            try:
                transfer.copy(copies, after=stream, owner="weights", to="device").wait()
            except DriverError:
                self.check()
                raise
            self.check()
            undo.pop_all()

    def lift(self, unchanged: Callable[[Twin], bool]) -> None:
        """Nobody looks any more: gives the pages back, if a file has what they hold. See Note [At rest in a file]."""
        if self._file is not None and self.pages.backed:
            if not self.shown or unchanged(self):
                self.pages.retire(0, self.pages.pieces)
            else:
                self._file = None
        self.shown = False

    def trim(self, spans: Spans) -> None:
        """Gives the pages of all other pieces back: nothing is left of what lay there."""
        if self.pages.backed:
            needed = {first + n for first, count in spans for n in range(count)}
            for piece in range(self.pages.pieces):
                if piece not in needed:
                    self.pages.retire(piece, 1)

    def _from_file(self, file: FileTwin, first: int, count: int, to: int) -> Copies:
        return list(_clipped(file.parts(0), first * self._page, count * self._page, to))

    def close(self) -> None:
        """Pages that tensors show stay until those are gone."""
        self.pages.close()


def _clipped(copies: Copies, start: int, nbytes: int, to: int) -> Iterator[tuple[int, int, int]]:
    """Of copies to offsets in a range those that fill [start, start + nbytes) of it, now at the address `to`."""
    for offset, source, length in copies:
        first, last = max(offset, start), min(offset + length, start + nbytes)
        if first < last:
            yield to + first - start, source + first - offset, last - first
