"""Backings: where the bytes of a range's pieces are beside the device.

    host page   read and written at the range's own addresses, copied from into slots and pages of the device
    peer page   the same, on another device, which is nearer
    file        registered with the device: copied from only

Note [File backings]
    A file cannot be shown at a range's addresses: there tensors lie at multiples of 512 bytes, in the file anywhere,
    and the file must not be written. So a layer has a file backing only for as long as its own forward alone can read
    its weights (hooks/streaming/bound.py). At the first other read, host pages are filled from the file and are the
    backing for good. Until then all of the range's addresses lead to one blank page.

Note [From the peer to the host]
    A piece gets a page of the peer while that has one, else of the host. Where the peer runs short a page of the host
    is filled beside it, at the same place of a third range (`demote`). Once the bytes are there it takes the
    first one's place, under the backing's own address and under the range's (`demoted`); until then everything is as
    it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

from ...allocator._native import Device, Done, Group, Range, Transfer
from ...allocator.errors import DriverError, ManageError, PoolExhausted
from .file_backing import FileBacking
from .pieces import runs_of
from .slots import Copies

if TYPE_CHECKING:
    from ...allocator._native import Owner

Spans = Sequence[tuple[int, int]]  # (first, count) of pieces

NO_PAGE: Final = ("none", "retiring", "kept")
FAR: Final = ("host", "peer")


class Backing:
    """The backing of `range_`: a range of as many pieces, each of which has a page of the host or the peer, or
    none; or a file, while that serves."""

    def __init__(
        self,
        device: Device,
        group: Group,
        range_: Range,
        owner: Owner,
        *,
        file: FileBacking | None = None,
        blank: Range | None = None,
    ) -> None:
        """`group`: of its own range, which is made when it is first needed. `owner`: of the bytes; weights have no
        pages of the peer. `blank`: a page that addresses lead to while a file serves."""
        self.range = range_
        self.file = file  # None where pages serve
        self.closed = False
        self.ready = False  # does it have the bytes, although the range has pages of its own?
        self.sums: Mapping[int, bytes] = {}  # checksums of tensors that it got, by offset, where they are kept
        self._blank = blank
        self._device = device
        self._group = group
        self._owner: Owner = owner
        self._page = device.page_size
        self._made: dict[str, Range] = {}
        self.going: dict[int, Done | None] = {}  # pieces on their way from the peer to the host

    @property
    def pages(self) -> Range:
        """The pages, each at the place of its piece."""
        return self._made.get("pages") or self._range("pages")

    @property
    def _spare(self) -> Range:
        """The host pages beside those of the peer: see Note [From the peer to the host]."""
        return self._range("spare")

    def _range(self, name: str) -> Range:
        made = self._made.get(name)
        # Two threads may get here at once; they keep one.
        return made or self._made.setdefault(
            name, self._device.reserve(self.range.nbytes, self._owner, self._group, reuse=False)
        )

    @property
    def backed(self) -> int:
        """Pieces that have a page."""
        return self.pages.backed if "pages" in self._made else 0

    def has(self, piece: int) -> bool:
        """Has the piece a page?"""
        return self.pages.leads_to(piece) in FAR

    def map(self, piece: int) -> None:
        """Gives the piece a page: of the peer, else of the host. PoolExhausted, DriverError."""
        if self._device.peer is not None and self._owner == "kv":
            with suppress(PoolExhausted, DriverError):  # a peer that fails is as one that is full
                self.pages.map_peer(piece, 1)
                return
        self.pages.map_host(piece, 1)

    def map_all(self, spans: Spans, undo: ExitStack) -> None:
        """Gives all pieces of the spans a page. PoolExhausted, DriverError: `undo` takes them away again."""
        for first, count in spans:
            undo.callback(self.pages.retire, first, count)
            for piece in range(first, first + count):
                self.map(piece)  # a new page takes ms, and the forward thread waits for no more

    def copies(self, first: int, count: int, to: int) -> Copies:
        """Returns the copies that bring `count` pieces to the address `to`."""
        if self.file is None:
            pages = self._made.get("pages") or self.pages  # for each layer of each token: in one call
            return [(to, pages.address + first * self._page, count * self._page)]
        return list(_clipped(self.file.copies, first * self._page, count * self._page, to))

    def saves(self, pieces: Iterable[int]) -> Copies:
        """Returns the copies that bring pieces from the device here. No copy goes to two places."""
        near = self._device.peer is not None
        runs = [(piece, piece + 1) for piece in pieces] if near else runs_of(pieces)
        here, there, page = self.pages.address, self.range.address, self._page
        return [(here + first * page, there + first * page, (end - first) * page) for first, end in runs]

    def lead(self, first: int, count: int) -> bool:
        """Leads the range's addresses here. False where that cannot be now, as `Range.alias`."""
        if self.file is None or self._blank is None:
            return self.range.alias(first, self.pages, first, count)
        return all(self.range.alias(piece, self._blank, 0, 1) for piece in range(first, first + count))

    def check(self) -> None:
        """Raises WeightsFileChanged unless its files are what they were."""
        if self.file is not None:
            self.file.check()

    def reveal(self, spans: Spans) -> None:
        """Replaces the file by host pages with its bytes, which the range leads to from then on. PoolExhausted where
        the host has too few, ManageError where addresses cannot be exchanged now, WeightsFileChanged, DriverError:
        nothing has changed then."""
        file = self.file
        if file is None:
            return
        self.check()
        with ExitStack() as undo:
            self.map_all(spans, undo)
            copies = [
                copy
                for first, count in spans
                for copy in self.copies(first, count, self.pages.address + first * self._page)
            ]
            try:
                Transfer(self._device).copy(copies, after=0, owner=self._owner, to="device").wait()
            except DriverError:
                self.check()
                raise
            self.check()
            try:
                self.file = None
                if not all(self.lead(first, count) for first, count in spans):
                    raise not_now()
            except BaseException:
                self.file = file
                with suppress(DriverError):  # then it is done again at the next look
                    all(self.lead(first, count) for first, count in spans)
                raise
            undo.pop_all()

    # -- giving pages back

    def release(self, first: int, end: int) -> None:
        """Gives back the pages of [first, end), but for those that addresses of the range lead to."""
        for pages in self._made.values():
            for at, count, backing in pages.runs(first, end - first) if end > first else ():
                for here, pieces, shown in self.range.runs(at, count) if backing not in NO_PAGE else ():
                    if shown != "alias":
                        pages.retire(here, pieces)

    def trim(self, spans: Spans) -> None:
        """Gives back the pages of all pieces outside of the spans: nothing is left of what lay there."""
        if self.backed:
            needed = {first + n for first, count in spans for n in range(count)}
            for first, end in runs_of(piece for piece in range(self.pages.pieces) if piece not in needed):
                self.pages.retire(first, end - first)

    def drop(self) -> None:
        """Gives all pages back: the range has its own again."""
        if self.backed:
            self.pages.retire(0, self.pages.pieces)

    def close(self) -> None:
        """Closes its ranges. Pages that tensors show stay until those are gone."""
        self.closed = True
        for pages in self._made.values():
            pages.close()

    # -- from the peer to the host

    @property
    def leaving(self) -> frozenset[int]:
        """Pieces that are on their way from the peer to the host."""
        return frozenset(tuple(self.going))

    def demote(self, pieces: Iterable[int]) -> tuple[list[int], Copies]:
        """Maps host pages beside the peer pages of pieces, as many as there are. Returns the pieces that got one, and
        the copies to submit before `demoting` is called. DriverError."""
        ready: list[int] = []
        for piece in pieces:
            if piece in self.going or self.pages.leads_to(piece) != "peer":
                continue
            self.going[piece] = None
            try:
                self._spare.map_host(piece, 1)
            except PoolExhausted:
                del self.going[piece]
                break
            ready.append(piece)
        return ready, [
            (self._spare.address + piece * self._page, self.pages.address + piece * self._page, self._page)
            for piece in ready
        ]

    def demoting(self, pieces: Iterable[int], done: Done) -> None:
        """Notes that the copies of these pieces have been submitted."""
        self.going.update(dict.fromkeys(pieces, done))

    def demoted(self) -> None:
        """Puts host pages whose bytes have arrived in the places of peer pages, if that can be now, and undoes what was
        interrupted. DriverError."""
        if not self.going:
            return
        self.stay([piece for piece, done in self.going.items() if done is None or not self._goes(piece)])
        passed = [piece for piece, done in self.going.items() if done is not None and done.passed()]
        for first, end in runs_of(passed):
            if self.pages.take_over(first, self._spare, first, end - first, self.range):
                for piece in range(first, end):
                    del self.going[piece]

    def stay(self, pieces: Iterable[int], stream: int | None = None) -> None:
        """Keeps pieces from going to the host; what `stream` is given from now on may write where they are."""
        for piece in pieces:
            if (done := self.going[piece]) is not None and stream is not None:
                done.before(stream)
            self._spare.retire(piece, 1)
            del self.going[piece]

    def _goes(self, piece: int) -> bool:
        return self.pages.leads_to(piece) == "peer" and self._spare.leads_to(piece) == "host"


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
