"""File backings: what a layer is copied from when its weights lie in a file as they lie in memory.

The file is mapped and registered with the device, which then copies from the page cache at the speed of the link: no
second copy of the weights in memory. Where it cannot be mapped, or the driver does not register it, pages of the host
serve instead.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from ...allocator._native import Device, Done, HostMemory, Transfer
from ...allocator.errors import DriverError, WeightsFileError
from ..policy.layout import ALIGNMENT
from ..policy.tuning import DEFAULT
from .weights_file import FileSpan, WeightsFile

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

    def __init__(self, device: Device, piece: int = DEFAULT.files.registered) -> None:
        """`piece`: bytes that are registered together, whole pages of the machine."""
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
