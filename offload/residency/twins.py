"""Twins: where the bytes of a range of weights are on the host while its layer streams.

Words
    page twin   host pages behind the range's own addresses: read and written there, copied from into slots
    file twin   a registered file: copied from only

Note [File twins]
    A file cannot be shown at a range's addresses: there tensors lie at multiples of 512 bytes, in the file anywhere,
    and the file must not be written. So a layer has a file twin only for as long as nobody but its own forward can
    look at its weights (hooks/streaming/bound.py). Once somebody does, host pages are filled from the file and are
    the twin for good. Until then all of the range's addresses lead to one blank page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from ...allocator._native import Device, Group, Range, Transfer
from ...allocator.errors import DriverError, ManageError
from .file_twin import FileTwin

Copies = list[tuple[int, int, int]]  # (to, from, bytes)
Spans = Sequence[tuple[int, int]]  # (first, count) of pieces


class Twin:
    """The twin of the range `home`: `pages`, of which none are backed while a file serves."""

    def __init__(
        self, device: Device, group: Group, home: Range, file: FileTwin | None = None, blank: Range | None = None
    ) -> None:
        """`blank`: a page that addresses lead to while a file serves."""
        self.home = home
        self.pages = device.reserve(home.nbytes, "weights", group)
        self.file = file  # None for a page twin
        self._blank = blank
        self._device = device
        self._page = device.page_size

    def copies(self, first: int, count: int, to: int) -> Copies:
        """What brings `count` pieces to the address `to`."""
        if self.file is None:
            return [(to, self.pages.address + first * self._page, count * self._page)]
        return list(_clipped(self.file.copies, first * self._page, count * self._page, to))

    def lead(self, first: int, count: int) -> bool:
        """The range's addresses lead here. False where that cannot be now, as `Range.alias`."""
        if self.file is None or self._blank is None:
            return self.home.alias(first, self.pages, first, count)
        return all(self.home.alias(piece, self._blank, 0, 1) for piece in range(first, first + count))

    def check(self) -> None:
        """WeightsFileChanged unless its files are what they were."""
        if self.file is not None:
            self.file.check()

    def copy_home(self, spans: Spans) -> None:
        """Fills the pages of a page twin with what the range holds, once every stream has passed that may have written
        there: the only time that weights go to the host. PoolExhausted, DriverError: it has no pages then."""
        with ExitStack() as undo:
            self._map(spans, undo)
            copies = [
                (self.pages.address + first * self._page, self.home.address + first * self._page, count * self._page)
                for first, count in spans
            ]
            Transfer(self._device).copy(copies, after=None, owner="weights", to="host").wait()
            undo.pop_all()

    def reveal(self, spans: Spans) -> None:
        """Host pages hold what the file does, and are what the range leads to and the twin from now on. PoolExhausted
        where the host has too few, ManageError where addresses cannot be exchanged now, WeightsFileChanged,
        DriverError: nothing has changed then."""
        file = self.file
        if file is None:
            return
        with ExitStack() as undo:
            self._map(spans, undo)
            copies = [
                copy
                for first, count in spans
                for copy in self.copies(first, count, self.pages.address + first * self._page)
            ]
            try:
                Transfer(self._device).copy(copies, after=0, owner="weights", to="device").wait()
            except DriverError:
                self.check()
                raise
            self.check()
            self.file = None
            if not all(self.lead(first, count) for first, count in spans):
                self.file = file
                raise not_now()
            undo.pop_all()

    def drop(self) -> None:
        """Gives all pages back: the range has its own again."""
        if self.pages.backed:
            self.pages.retire(0, self.pages.pieces)

    def trim(self, spans: Spans) -> None:
        """Gives the pages of all other pieces back: nothing is left of what lay there."""
        if self.pages.backed:
            needed = {first + n for first, count in spans for n in range(count)}
            for piece in range(self.pages.pieces):
                if piece not in needed:
                    self.pages.retire(piece, 1)

    @property
    def closed(self) -> bool:
        return self.pages.closed

    def close(self) -> None:
        """Pages that tensors show stay until those are gone."""
        self.pages.close()

    def _map(self, spans: Spans, undo: ExitStack) -> None:
        for first, count in spans:
            undo.callback(self.pages.retire, first, count)
            for piece in range(first, first + count):
                self.pages.map_host(piece, 1)  # a new one takes ms, and who runs the model waits for no more


def not_now() -> ManageError:
    return ManageError(
        "streamed layers cannot be exchanged while another thread runs the model or a CUDA graph is being captured: "
        "run the model once before the capture, and do not capture its streamed layers"
    )


def _clipped(
    copies: Sequence[tuple[int, int, int]], start: int, nbytes: int, to: int
) -> Iterator[tuple[int, int, int]]:
    """Returns, of copies to offsets in a range, those that fill [start, start + nbytes) of it, now at the address
    `to`."""
    for offset, source, length in copies:
        first, last = max(offset, start), min(offset + length, start + nbytes)
        if first < last:
            yield to + first - start, source + first - offset, last - first
