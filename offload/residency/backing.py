"""Backings: where the bytes of a range's pieces are beside the device.

    host page   read and written at the range's own addresses, copied from into slots and pages of the device
    peer page   the same, on another device, which is nearer
    file        registered with the device: copied from only

A file in which weights lie as they lie in memory is mapped and registered with the device, which then copies from the
page cache at the speed of the link: no second copy of the weights in memory. Where it cannot be mapped, or the driver
does not register it, pages of the host serve instead.

Note [Alignment]
    Kernels are chosen by the alignment of their pointers, so every tensor keeps its 512 bytes on the device. In the
    file it may lie at any byte (the data begins where the header ends; 240 and 96 mod 512 were seen): only the copy
    engine looks there, and it takes any. So what decides whether neighbours come over in one copy is not where they lie
    but that they are equally far apart on both sides. What is between them then, less than 512 bytes, belongs to
    nothing on the device and may be overwritten with whatever the file has there. A gap of 512 bytes or more could hold
    another tensor.

Note [Pieces]
    A file is registered in pieces of one size, each when something in it is first needed: registering pins its pages,
    two registrations must not share one, and two layers' tensors do. A copy lies in one piece.

Note [File backings]
    A file cannot be shown at a range's addresses: there tensors lie at multiples of 512 bytes, in the file anywhere,
    and the file must not be written. So a layer has a file backing only for as long as its own forward alone can read
    its weights (hooks/streaming/bound.py). At the first other read, host pages are filled from the file and are the
    backing for good. Until then all of the range's addresses lead to one blank page. Of a model that sleeps the file
    may have some pieces only (`hide`): the others have host pages, which their addresses lead to.

Note [From the peer to the host]
    A piece gets a page of the peer while that has one, else of the host. Where the peer runs short a page of the host
    is filled beside it, at the same place of a third range (`demote`). Once the bytes are there it takes the
    first one's place, under the backing's own address and under the range's (`demoted`); until then everything is as
    it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...allocator._native import Device, Done, Group, HostMemory, Range, Transfer
from ...allocator.errors import DriverError, ManageError, PoolExhausted, WeightsFileError
from ..policy.layout import ALIGNMENT
from .pieces import runs_of
from .slots import Copies
from .weights_file import FileSpan, WeightsFile

if TYPE_CHECKING:
    from ...allocator._native import Owner


Place = tuple[int, FileSpan]  # the offset in a range of what is there, and the same bytes in a file


@dataclass(frozen=True, slots=True)
class FileRun:
    """Bytes that come over in one copy: `offset` in the range, [start, start + nbytes) in the file."""

    file: WeightsFile
    offset: int
    start: int
    nbytes: int


def runs(places: Iterable[Place], piece: int) -> list[FileRun]:
    """Returns the fewest copies that bring everything to its place, in order of the offsets; none crosses a piece of
    the file.

    ValueError for places that overlap, or that are not at a multiple of 512 bytes.
    """
    return [part for whole in _joined(places) for part in _cut(whole, piece)]


def _joined(places: Iterable[Place]) -> list[FileRun]:
    file_runs: list[FileRun] = []
    for offset, span in sorted(places, key=lambda place: place[0]):
        if offset % ALIGNMENT:
            raise ValueError(f"a tensor at offset {offset}, which is no multiple of {ALIGNMENT}")
        if file_runs:
            last = file_runs[-1]
            gap = offset - (last.offset + last.nbytes)
            if gap < 0:
                raise ValueError(f"tensors overlap at offset {offset}")
            if last.file is span.file and span.start - last.start == offset - last.offset and gap < ALIGNMENT:
                file_runs[-1] = FileRun(last.file, last.offset, last.start, offset + span.nbytes - last.offset)
                continue
        file_runs.append(FileRun(span.file, offset, span.start, span.nbytes))
    return file_runs


def _cut(run: FileRun, piece: int) -> Iterator[FileRun]:
    start, end = run.start, run.start + run.nbytes
    while start < end:
        reached = min(end, (start // piece + 1) * piece)
        yield FileRun(run.file, run.offset + start - run.start, start, reached - start)
        start = reached


@dataclass(frozen=True, slots=True)
class FileBacking:
    """The file backing of one range. Where it is not `registered`, `reason` says why: it needs host pages then."""

    registered: bool
    reason: str
    files: tuple[WeightsFile, ...]
    places: tuple[Place, ...]
    copies: Sequence[tuple[int, int, int]]  # (offset in the range, address, bytes)

    def check(self) -> None:
        """Raises WeightsFileChanged unless every file is what it was.

        A file that changes under a copy is not seen by the copy: look before it begins and, before its bytes are relied
        on for good, after it.
        """
        for file in self.files:
            file.check()

    def parts(self, address: int) -> list[tuple[int, int, int]]:
        """Returns the copies that fill the range, or a slot for it, at `address`, for `Transfer.copy`.
        WeightsFileChanged.

        ValueError for an address that is no multiple of 512.
        """
        if address % ALIGNMENT:
            raise ValueError(f"{address:#x} is no multiple of {ALIGNMENT}")
        self.check()
        return [(address + offset, source, nbytes) for offset, source, nbytes in self.copies]


class FileBackings:
    """The parts of weights files that are registered with one device, for its file backings. Not thread-safe."""

    def __init__(self, device: Device, piece: int = 64 * 2**20) -> None:
        """`piece`: bytes that are registered together, whole pages of the machine. Chosen: far more than a copy needs
        to run at the full speed of the link (record/link.py); a layer of 400 MiB is cut six times."""
        self._device = device
        self._piece = piece
        self._pieces: dict[WeightsFile, dict[int, HostMemory]] = {}

    @property
    def registered(self) -> int:
        """Bytes of files that are registered, and so cannot leave memory."""
        return sum(memory.nbytes for pieces in self._pieces.values() for memory in pieces.values())

    def twin(self, places: Iterable[Place]) -> FileBacking:
        """Returns the file backing of a range from what lies where in it. All that it needs of the files is registered,
        or nothing.

        WeightsFileChanged; ValueError as `runs`.
        """
        places = tuple(places)
        copies = runs(places, self._piece)
        files = tuple(dict.fromkeys(run.file for run in copies))
        for file in files:
            file.check()
        try:
            with ExitStack() as undo:
                sources = [(run.offset, self._address(run, undo), run.nbytes) for run in copies]
                undo.pop_all()
        except (DriverError, WeightsFileError) as error:
            for file in files:
                file.check()
            return FileBacking(False, str(error), files, places, ())
        return FileBacking(True, "", files, places, sources)

    def keep(self, twins: Iterable[FileBacking]) -> None:
        """Unregisters what no backing of `twins` copies from. DriverError."""
        used = [source for twin in twins for _, source, _ in twin.copies]
        for file, pieces in list(self._pieces.items()):
            for index, memory in list(pieces.items()):
                if not any(memory.address <= source < memory.address + memory.nbytes for source in used):
                    memory.close()
                    del pieces[index]
            if not pieces:
                del self._pieces[file]

    def close(self) -> None:
        """Unregisters everything, once the copies from it are done: the backings are worth nothing any more.
        DriverError, and what could not be unregistered still is."""
        for file in list(self._pieces):
            pieces = self._pieces[file]
            for index in list(pieces):
                pieces[index].close()
                del pieces[index]
            del self._pieces[file]

    def _address(self, run: FileRun, undo: ExitStack) -> int:
        """Returns the address of the run's first byte, registering its piece if need be."""
        index, inside = divmod(run.start, self._piece)
        pieces = self._pieces.setdefault(run.file, {})
        if index not in pieces:
            first = index * self._piece
            nbytes = min(self._piece, run.file.nbytes - first)
            pieces[index] = HostMemory(self._device, run.file.mapping, first, nbytes)
            undo.callback(pieces.pop, index)
        return pieces[index].address + inside


class FileLoader:
    """Copies bytes of files to the device: those of one step while the next is prepared."""

    def __init__(self, device: Device, twins: FileBackings, stream: int) -> None:
        """`twins`: registers what is read; `stream`: what it was given has passed before bytes are overwritten.
        DriverError."""
        self._twins = twins
        self._stream = stream
        self._transfer = Transfer(device)
        self._files: dict[WeightsFile, None] = {}
        self._running: list[Done] = []

    def load(self, address: int, span: FileSpan) -> bool:
        """Starts the copy to `address`, a multiple of 512; False where the file cannot be registered.
        WeightsFileChanged, DriverError."""
        self._files[span.file] = None
        twin = self._twins.twin([(0, span)])
        if twin.registered:
            copies = twin.parts(address)
            self._running.append(self._transfer.copy(copies, after=self._stream, owner="weights", to="device"))
        return twin.registered

    def wait(self, but: int = 0) -> None:
        """Waits for all copies but the last `but`. WeightsFileChanged, DriverError."""
        done = self._running[: len(self._running) - but]
        del self._running[: len(done)]
        try:
            for copy in done:
                copy.wait()
        except DriverError:
            self._check()
            raise

    def finish(self, keep: Iterable[FileBacking]) -> None:
        """Waits for all copies, checks that the files are what they were at the beginning, and unregisters what `keep`
        does not copy from. WeightsFileChanged, DriverError."""
        self.wait()
        self._check()
        self._twins.keep(keep)

    def _check(self) -> None:
        for file in self._files:
            file.check()


Spans = Sequence[tuple[int, int]]  # (first, count) of pieces

NO_PAGE: Final = ("none", "pending_free", "kept")
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
        self.mixed = False  # do pages of the host serve beside the file, for pieces that it does not have?
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
        if not self.mixed:
            return list(_clipped(self.file.copies, first * self._page, count * self._page, to))
        copies: Copies = []
        for at, pieces, place in self.pages.runs(first, count):
            there = to + (at - first) * self._page
            if place in FAR:
                copies.append((there, self.pages.address + at * self._page, pieces * self._page))
            else:
                copies += _clipped(self.file.copies, at * self._page, pieces * self._page, there)
        return copies

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
        return all(
            self.range.alias(piece, *((self.pages, piece) if self.mixed and self.has(piece) else (self._blank, 0)), 1)
            for piece in range(first, first + count)
        )

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
        lacking = _without_pages(self.pages, spans)
        with ExitStack() as undo:
            self.map_all(lacking, undo)
            copies = [
                copy
                for first, count in lacking
                for copy in _clipped(
                    file.copies, first * self._page, count * self._page, self.pages.address + first * self._page
                )
            ]
            try:
                Transfer(self._device).copy(copies, after=0, owner=self._owner, to="device").wait()
            except DriverError:
                self.check()
                raise
            self.check()
            try:
                if not all(self.range.alias(first, self.pages, first, count) for first, count in lacking):
                    raise not_now()
            except BaseException:
                with suppress(DriverError):  # then it is done again at the next look
                    all(self._hide(first, count) for first, count in lacking)
                raise
            undo.pop_all()
            self.file, self.mixed = None, False  # until then copies come from the file

    def hide(self, file: FileBacking, blank: Range, pieces: Sequence[int]) -> None:
        """Undoes `reveal` for these pieces, ascending: `file` has the bytes of their host pages, which go back. Others
        keep theirs. ManageError where addresses cannot be exchanged now, DriverError: nothing has changed then."""
        spans = [(first, end - first) for first, end in runs_of(pieces)]
        self._blank = blank
        try:
            if not all(self._hide(first, count) for first, count in spans):
                raise not_now()
        except BaseException:
            all(self.range.alias(first, self.pages, first, count) for first, count in spans)
            raise
        self.file, self.mixed = file, True
        for first, count in spans:
            self.pages.retire(first, count)

    def _hide(self, first: int, count: int) -> bool:
        blank = self._blank
        return blank is not None and all(self.range.alias(piece, blank, 0, 1) for piece in range(first, first + count))

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


def _without_pages(pages: Range, spans: Spans) -> Spans:
    runs = [run for first, count in spans for run in pages.runs(first, count)]
    return [(at, pieces) for at, pieces, place in runs if place not in FAR]


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
