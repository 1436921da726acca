"""Giving tensors other memory: objects stay, bytes move.

Note [Moving a model]
    A tensor keeps its identity, its names, its gradient and its hooks, and `tensor.data` is pointed at other bytes, as
    `Module.to` does. A model moves step by step (a layer, or one block of no layer): map the pages, copy, swap, free
    the source, and give the source's pages back before the next step, so that at most one step exists twice even where
    the sources lie in the same pool. A step that fails changes nothing, and those before it are undone in reverse.
    Moving out is the same with the sides exchanged.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch.utils.dlpack import from_dlpack

from ...allocator._native import Device, Range
from ...allocator.errors import DriverError, ManageError, PoolExhausted, WeightsFileChanged
from ...allocator.interrupts import Guarded, guarded
from ...offload.policy.layout import ALIGNMENT
from ...offload.residency.backing import FileLoader
from ...offload.residency.weights_file import FileSpan
from ..device.streams import torch_memory
from .model_parts import TensorMember, TensorSpan, has_bytes, spans

_UINT8 = (1, 8)  # DLPack's code and bits

Step = list[tuple[Range, int, TensorSpan]]  # (range, offset in it, span to move there or from there), moved together
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def run(
    device: Device,
    steps: Iterable[Step],
    do: Callable[[Step], None],
    undo: Callable[[Step], None],
    plenty: float = math.inf,
) -> None:
    """Runs all steps or none. While so many pages are free or idle, none go back to the driver between two: `plenty`.
    torch.OutOfMemoryError, and errors of `do`. See Note [Moving a model]."""
    done: list[Step] = []
    try:
        for step in steps:
            do(step)
            done.append(step)
            # The freed source's pages serve the next step once the copies from them are done.
            if device.available + device.idle < plenty:
                device.trim()
                device.reap(wait=True)
    except BaseException as error:
        with _noted(error):
            for step in reversed(done):
                undo([(opened, offset, next(spans(span.tensors, {}))) for opened, offset, span in step])
        if isinstance(error, PoolExhausted):
            raise torch.OutOfMemoryError(f"ballonet found no room to move a model's weights: {error}") from error
        raise


def flat_over(opened: Range, offset: int, nbytes: int) -> torch.Tensor:
    """Makes a uint8[nbytes] over mapped pages of the range, at `offset`."""
    flat: torch.Tensor = from_dlpack(opened.tensor(offset, (nbytes,), (1,), *_UINT8))
    return flat


class MoveIn:
    """Steps that move a model's tensors into ranges."""

    def __init__(
        self,
        back: Callable[[Range, int, int], bool],
        note: Callable[[int, int, bool], None],
        known: Mapping[int, FileSpan],
        loader: FileLoader,
        progress: Callable[[int], object],
        read: int = 16 * 2**20,  # chosen: little beside a layer
    ) -> None:
        """`back(range, first, count)` maps pages to pieces and returns whether they are to be filled. `known`: id of a
        tensor whose bytes are read from a file, not from its memory -> those bytes. `progress` is called with the bytes
        of each step. `read`: bytes read at once from a file that cannot be copied from."""
        self._back = back
        self._note = note
        self._known = known
        self._loader = loader
        self._progress = progress
        self._read = read
        self._before: dict[int, torch.Tensor] = {}  # id of a tensor in a file -> its old view of that file

    def do(self, step: Step) -> None:
        page = step[0][0].nbytes // step[0][0].pieces
        running = len(step)
        with swapping() as pairs:
            for opened, offset, span in step:
                first = offset // page
                fill = self._back(opened, first, -(-(offset + span.nbytes) // page) - first)
                self._note(opened.address + offset, span.nbytes, True)
                flat = flat_over(opened, offset, span.nbytes)
                if fill:
                    self._fill(span, flat)
                for tensor in span.tensors:
                    if id(tensor) in self._known:
                        self._before[id(tensor)] = tensor.data
                pairs.extend(zip(span.tensors, span.over(flat), strict=True))
                del flat
        self._loader.wait(but=running)  # the step before this one is copied
        self._progress(sum(span.nbytes for _, _, span in step))

    def undo(self, step: Step, out: Callable[[Step], None]) -> None:
        """Undoes a step. `out` moves its tensors to torch's memory."""
        with suppress(DriverError, WeightsFileChanged):
            self._loader.wait()
        from_files = [move for move in step if all(id(tensor) in self._before for tensor in move[2].tensors)]
        for _, _, span in from_files:
            for tensor in span.tensors:
                tensor.data = self._before[id(tensor)]
        if rest := [move for move in step if move not in from_files]:
            out(rest)

    def _fill(self, span: TensorSpan, flat: torch.Tensor) -> None:
        if not all(id(tensor) in self._known for tensor in span.tensors):
            copy(span, flat)
            return
        for tensor in span.tensors:
            place = self._known[id(tensor)]
            offset = tensor.data_ptr() - span.start
            part = flat[offset : offset + place.nbytes]
            if offset % ALIGNMENT or not self._loader.load(part.data_ptr(), place):
                most = self._read
                for first in range(0, place.nbytes, most):
                    data = place.file.read(place.start + first, min(most, place.nbytes - first))
                    part[first : first + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def out(device: Device, step: Step, note: Callable[[int, int, bool], None], home: torch.device) -> None:
    """Moves the tensors of a step to torch's memory of `home`."""
    with swapping() as pairs:
        for _, _, span in step:
            note(span.start, span.nbytes, False)
            with torch_memory(device):
                flat = torch.empty(span.nbytes, dtype=torch.uint8, device=home)
            copy(span, flat)
            pairs.extend(zip(span.tensors, span.over(flat), strict=True))
            del flat


def bring(tensors: Iterable[TensorMember], device: torch.device) -> None:
    """Moves tensors that lie in no range, such as empty ones, to the device where the others are."""
    for member in tensors:
        if member.tensor.device != device:
            member.tensor.data = member.tensor.data.to(device)


def copy(span: TensorSpan, flat: torch.Tensor) -> None:
    """Copies the span's bytes to `flat`."""
    for offset, source in span.sources():
        flat[offset : offset + source.numel()].copy_(source)


def tenants_of(ranges: Iterable[Range], tensors: Iterable[TensorMember]) -> list[tuple[TensorMember, Range]]:
    """Returns the members that lie in one of the ranges, each with its range."""
    ordered = sorted(ranges, key=lambda opened: opened.address)
    bounds = [(opened.address, opened.address + opened.nbytes) for opened in ordered]
    result = []
    for member in tensors:
        if has_bytes(member.tensor):
            address = member.tensor.data_ptr()
            n = bisect_right(bounds, address, key=lambda bound: bound[0]) - 1
            if n >= 0 and address < bounds[n][1]:
                result.append((member, ordered[n]))
    return result


def swapping() -> Guarded[Pairs]:
    """Yields a list of pairs; at the end each first tensor gets the memory of the second, all or none, whatever
    interrupts it.

    The list is emptied in any case: a traceback must not keep the memory of a failed move.
    """
    pairs: Pairs = []
    before: Pairs = []

    def end(failed: bool) -> None:
        if failed or before:  # repeats an interrupted call
            for tensor, old in before:
                tensor.data = old
        else:
            for tensor, new in pairs:
                _exchange(tensor, new, before)
        pairs[:] = ()  # one assignment: after an interrupt this runs again
        before[:] = ()

    return guarded(lambda: pairs, end)


def _exchange(tensor: torch.Tensor, new: torch.Tensor, before: Pairs) -> None:
    """Gives the tensor the memory of the other and notes its old memory. ManageError where its class forbids that."""
    try:
        before.append((tensor, tensor.data))
        tensor.data = new
    except Exception as error:
        raise ManageError(
            f"a {type(tensor).__module__}.{type(tensor).__qualname__} of shape {tuple(tensor.shape)} does not let its "
            f"memory be exchanged ({error}): a model with such weights cannot be managed"
        ) from error


@contextmanager
def _noted(error: BaseException) -> Iterator[None]:
    """A `with` block for undoing after `error`: if undoing fails too, `error` is still raised, with a note of that."""
    try:
        yield
    except Exception as second:
        error.add_note(f"and some weights could not be moved back, they are whole where they are: {second}")
