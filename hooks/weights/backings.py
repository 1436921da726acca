"""The backings of one model's weights beside their ranges: host pages and files, by the address of the range.

Note [Which backing]
    A resident layer has a backing without pages: the addresses to which its weights go when its pages are taken. Where
    all of a range lies in weights files byte for byte, and the model was just loaded and not handed out yet, its
    backing is those files, and there is no second copy in memory until the weights are read. All others have host
    pages.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

from ...allocator._native import Device, Range
from ...allocator.interrupts import Guarded, guarded
from ...offload.policy.layout import Layout
from ...offload.residency.backing import Backing, FileBacking, FileBackings, Place
from ...offload.residency.mover import Mover
from ...offload.residency.ring import live
from ...offload.residency.weights_file import FileSpan
from .storages import TensorSpan

Files = Mapping[int, FileSpan]  # id of a tensor -> its bytes in a file


class WeightBackings:
    """The backings of one model's ranges, and the movers of bytes to and from them. A range has one backing in use, and
    may have another that is ready. See Note [Which backing]."""

    def __init__(self, device: Device) -> None:
        self.files = FileBackings(device)
        # These hold the bytes of layers that may be dropped at once; the core does not know them.
        self.ready: dict[int, Backing] = {}
        self._device = device
        self._group = device.group()  # never leased: backings may move at any time
        self._movers: dict[int, Mover] = {}
        self._moving = threading.Lock()
        self._blank: Range | None = None  # a page, see backing.py, Note [File backings]

    @property
    def host_pages(self) -> int:
        """Host pages that hold weights."""
        return sum(backing.backed for backing in self._all())

    @property
    def file_bytes(self) -> int:
        """Bytes of weights whose backings are files."""
        return sum(nbytes for file in self.in_use() for _, _, nbytes in file.copies)

    def in_use(self) -> list[FileBacking]:
        """The files of all backings."""
        return [backing.file for backing in self._all() if backing.file is not None]

    def _all(self) -> list[Backing]:
        return [*(mover.backing for mover in list(self._movers.values())), *list(self.ready.values())]

    def mover(self, opened: Range) -> Mover:
        """Returns the range's mover, a new one where its backing was closed."""
        mover = self._movers.get(opened.address)
        return self.make(opened) if mover is None or mover.backing.closed else mover

    def make(self, opened: Range, file: FileBacking | None = None) -> Mover:
        """Makes the range's mover, to a backing that has no pages or lies in `file`."""
        made = Mover(self._device, opened, self.new(opened, file), self._moving)
        before = self._movers.get(opened.address)
        if before is not None and before.backing.closed:
            self._movers.pop(opened.address, None)
        return self._movers.setdefault(opened.address, made)  # another thread may have made one

    def new(self, opened: Range, file: FileBacking | None = None) -> Backing:
        """Makes a further backing for a range."""
        if file is not None and self._blank is None:
            blank = self._device.reserve(self._device.page_size, "weights", self._group)
            (blank.map_host if self._device.host_pages else blank.map)(0, 1)
            self._blank = blank
        return Backing(self._device, self._group, opened, "weights", file=file, blank=self._blank)

    def back(self, opened: Range, first: int, count: int) -> bool:
        """Leads pieces to their backing, which gets host pages. False where it is a file, and need not be filled."""
        backing = self._movers[opened.address].backing
        if backing.file is None:
            backing.pages.map_host(first, count)
        backing.lead(first, count)
        return backing.file is None

    def in_files(
        self, layout: Layout, spans: Sequence[TensorSpan], streamed: Collection[int], known: Files
    ) -> dict[int, FileBacking]:
        """Returns the file backings of layers that stream, by layer, where files hold all of it. WeightsFileChanged."""
        ranges = [range_ for range_ in layout.ranges if range_.layer in streamed]
        lying = {range_.layer: [(at.offset, spans[at.block.key]) for at in range_.placements] for range_ in ranges}
        twins = {layer: self._file(at, known) for layer, at in lying.items() if layer is not None}
        return {layer: twin for layer, twin in twins.items() if twin is not None}

    def file(self, opened: Range, spans: Iterable[TensorSpan], files: Files) -> FileBacking | None:
        """The file backing of a range in which these spans lie, all of them in files; else None. WeightsFileChanged."""
        return self._file([(span.start - opened.address, span) for span in spans], files)

    def _file(self, at: Iterable[tuple[int, TensorSpan]], files: Files) -> FileBacking | None:
        """Returns the file backing of a range in which these spans lie; None where not all of them are in files that
        can be registered, or their place there is unknown."""
        places: list[Place] = []
        for offset, span in at:
            place = _in_file(span, files)
            if place is None:
                return None
            places.append((offset, place))
        twin = self.files.twin(places) if places else None
        return twin if twin is not None and twin.registered else None

    def leaving(self, ranges: Sequence[Range]) -> Guarded[None]:
        """A `with` block in which these ranges leave to backings that are ready. At the end backings of ranges that
        have not left are ready again. No page of them is taken meanwhile."""

        def begin() -> None:
            for opened in ranges:
                if (backing := self.ready.get(opened.address)) is not None and not is_away(opened):
                    backing.ready = True
                    self._movers[opened.address] = Mover(self._device, opened, backing, self._moving)
                    del self.ready[opened.address]

        def end(failed: bool) -> None:
            for opened in ranges:
                mover = self._movers.get(opened.address)
                if mover is not None and mover.backing.ready:
                    mover.backing.ready = False
                    if not is_away(opened):
                        self.ready[opened.address] = mover.backing
                        del self._movers[opened.address]

        return guarded(begin, end)

    def set_aside(self, ranges: Iterable[Range]) -> None:
        """Notes that the ranges are resident again: their backings are ready for the next time, if they were before."""
        for opened in ranges:
            if (mover := self._movers.get(opened.address)) is not None and not is_away(opened):
                if mover.backing.sums:
                    self.ready[opened.address] = mover.backing
                else:
                    mover.backing.close()
                del self._movers[opened.address]

    def forget_ready(self, ranges: Iterable[Range]) -> None:
        """Drops their ready backings, which are out of date or not needed."""
        for opened in ranges:
            if (backing := self.ready.pop(opened.address, None)) is not None:
                backing.drop()
                backing.close()
        self.files.keep(self.in_use())

    def trim(self, opened: Range) -> None:
        """Frees the backing of pieces that no tensor lies on any more."""
        if opened.address in self._movers:
            self._movers[opened.address].backing.trim(live(opened, 0, opened.pieces))

    def drop(self, address: int) -> None:
        """Closes the backings of a range. Pages under live tensors stay until those are freed."""
        if (mover := self._movers.pop(address, None)) is not None:
            mover.backing.close()
        if (ready := self.ready.pop(address, None)) is not None:
            ready.close()

    def close(self) -> None:
        """Closes all backings; the ranges are closed already."""
        self._blank = None
        self.files.close()


def is_away(opened: Range) -> bool:
    """Do the range's addresses lead to pages of another range?"""
    return any(opened.leads_to(first) == "alias" for first, _ in live(opened, 0, opened.pieces)[:1])


def _in_file(span: TensorSpan, files: Files) -> FileSpan | None:
    """Returns the span's bytes in a file, None where the file does not hold them in the order of memory."""
    joined: FileSpan | None = None
    for tensor in sorted(span.tensors, key=lambda tensor: tensor.data_ptr()):
        of_tensor = files.get(id(tensor))
        if of_tensor is None:
            return None
        start = of_tensor.start - (tensor.data_ptr() - span.start)  # the span's first byte in the file
        end = of_tensor.start + of_tensor.nbytes
        if joined is None:
            joined = FileSpan(of_tensor.file, start, end - start)
        elif joined.file is not of_tensor.file or joined.start != start:
            return None
        else:
            joined = FileSpan(joined.file, start, max(joined.start + joined.nbytes, end) - start)
    return joined if joined is not None and joined.nbytes == span.nbytes else None
