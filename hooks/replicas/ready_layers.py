"""Prepares layers to be dropped: fills their backings before the pages are needed.

Note [What a checksum sees]
    torch cannot tell whether a weight was written to: writes through `weight.data` are not counted. So the bytes are
    read where they lie: 8-byte words are added up, modulo 2**64, in three ways, by their index modulo two primes and by
    blocks of neighbours. The sums do not depend on the order of additions, and need next to no memory, of which there
    may be none when a layer is to be dropped. They detect any word that differs, and any two that changed places,
    except those that are a multiple of 251 * 257 words apart in one block. They do not detect deliberate manipulation.

Note [A layer takes seconds]
    The main loop of a replica prepares, drops or restores a layer in one iteration. A large layer takes seconds over a
    slow link, or from a slow file, and a replica whose count of iterations stands still for a second counts as dead
    (policy/replicas/heartbeat.py). So a layer is copied, compared and summed piece by piece, and the count grows after
    each piece. If a copy hangs, the count stops.

Note [What a drop would wait for]
    An unprepared layer is copied to the host at the drop, or compared with the weights' file byte by byte. Both take as
    long as the link or the file, in the middle of a burst. So both are done once, before an epoch is committed. At the
    drop a checksum on the device shows whether the layer has changed since, and the file's inode, size and
    time whether the file has.

Note [The file, or the host]
    Where all of a layer lies in the weights' file, the file is its backing: it takes no host page, and all replicas of
    a machine share the page cache. That needs that only the layer's modules refer to its tensors
    (offload/residency/backing.py, Note [File backings]). Other layers get host pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...allocator._native import Device, Lease, Range, Transfer
from ...allocator.errors import DropRefused, PoolExhausted, WeightsFileChanged
from ...offload.residency.backing import Backing
from ...offload.residency.file_backing import FileBacking
from ...offload.residency.layer_parts import live
from ...offload.residency.slots import Copies
from ...offload.residency.weights_file import FileSpan
from ..device.references import THIS, Interpreter, perhaps_referenced
from ..weights.backings import is_away
from ..weights.files import compared, possible_places
from ..weights.ranges import Weights
from ..weights.storages import held, spans

# Replicas compare sums: these have to be the same on all of them
_PRIMES: Final = (251, 257)
_BLOCKS: Final = 256
_WORD: Final = 8


def checksum(tensor: torch.Tensor) -> bytes:
    """Returns 16 bytes that depend on the dtype, the shape and every byte of a tensor, not on its device."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() // _WORD * _WORD
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for part in (*_sums(flat[:whole].view(torch.int64)), flat[whole:]):
        found.update(part.cpu().numpy().tobytes())
    return found.digest()


def _sums(words: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the sums of int64[n], and the words that fill no row. See Note [What a checksum sees]."""
    for prime in _PRIMES:
        rows = words.numel() // prime * prime
        yield words[:rows].view(-1, prime).sum(0)
        yield words[rows:]
    length = max(1, words.numel() // _BLOCKS)
    blocks = words.numel() // length * length
    yield words[:blocks].view(-1, length).sum(1)


if TYPE_CHECKING:
    from ...allocator._native import Place


def _ignore() -> None:
    """Reports no progress."""


class Piecewise:
    """Copies weights piece by piece. `on_progress`: called after each piece of work on a layer; it must not use the
    model; an error that it raises ends the work, with no copy under way."""

    def __init__(self, device: Device, most: int) -> None:
        """`most`: bytes of a piece."""
        self.on_progress: Callable[[], object] = _ignore
        self._most = most
        self._pages = max(1, most // device.page_size)
        self._transfer = Transfer(device)

    def done(self) -> None:
        """Reports that a piece of work is done."""
        self.on_progress()

    def copy(self, parts: Copies, after: int | None, to: Place) -> None:
        """Copies in pieces, as `Transfer.copy`, and waits. DriverError."""
        for piece in cut(parts, self._most):
            self._transfer.copy(piece, after=after, owner="weights", to=to).wait()
            self.on_progress()

    def end(self) -> None:
        """Stops reporting progress. Idempotent."""
        self.on_progress = _ignore

    def spans(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yields the runs of pages, (first, count), cut to the size of a piece; reports progress after each."""
        for first, count in runs:
            for at in range(first, first + count, self._pages):
                yield at, min(self._pages, first + count - at)
                self.on_progress()


def cut(parts: Copies, most: int) -> Iterator[Copies]:
    """Yields the copies, in order, in lists of `most` bytes each; the last may have fewer."""
    piece: Copies = []
    left = most
    for to, source, nbytes in parts:
        at = 0
        while at < nbytes:
            some = min(left, nbytes - at)
            piece.append((to + at, source + at, some))
            at, left = at + some, left - some
            if not left:
                yield piece
                piece, left = [], most
    if piece:
        yield piece


if TYPE_CHECKING:
    from ...offload.residency.safetensors import TensorEntry

Lying = dict[str, tuple[Range, torch.Tensor]]  # tensors by name, with the range in which each lies


class ReadyLayers:
    """Prepares backings of one model's resident layers. One thread at a time."""

    def __init__(self, model: nn.Module, weights: Weights, pieces: Piecewise, interpreter: Interpreter = THIS) -> None:
        self._weights = weights
        self._interpreter = interpreter
        self._pieces = pieces
        self._places: dict[int, list[tuple[TensorEntry, FileSpan]]] | None = None
        self._name = type(model).__name__

    def look_for_files(self, model: nn.Module) -> None:
        """Finds the weights files that may hold the model's tensors, once. Reads all parameters and buffers of its
        modules."""
        if self._places is None:
            self._places = possible_places(model)

    def is_ready(self, layer: int) -> bool:
        """Returns whether each range of the layer has a backing with its bytes, as far as known."""
        return all(is_away(opened) or opened.address in self._weights.backings.ready for opened in self._ranges(layer))

    def check(self) -> None:
        """Raises WeightsFileChanged where the file of a ready layer has changed; layers in such files are no longer
        ready then."""
        try:
            for backing in list(self._weights.backings.ready.values()):
                backing.check()
        except WeightsFileChanged:
            self._forget_changed()
            raise

    def make(self, layer: int, module: nn.Module) -> None:
        """Makes the layer ready while forwards run; no layer is moved or taken meanwhile. On an error it is not ready:
        DropRefused where there are no host pages for it, or its weights are written to; WeightsFileChanged, and the
        next attempt searches the files anew; DriverError."""
        lease = Lease()
        lease.enter(self._weights.group)
        try:
            self._make(layer, module)
        except WeightsFileChanged:
            self._places = None
            raise
        except PoolExhausted as error:
            raise DropRefused(
                f"layer {layer} of {self._name} cannot be dropped, as there are no host pages for its weights: {error}"
            ) from error
        finally:
            lease.close()

    def still(self, layer: int, module: nn.Module) -> bool:
        """Returns whether the layer still has the bytes of its ready backings, and these can be used; if not, it is no
        longer ready. Called while no forward runs. WeightsFileChanged, DriverError."""
        alone = self._alone(module)  # before anything here refers to its tensors
        ready, lying = self._weights.backings.ready, lying_in(self._ranges(layer), module)
        resident = [opened for opened in self._ranges(layer) if not is_away(opened)]
        backings = [ready.get(opened.address) for opened in resident]
        try:
            for backing in backings:
                if backing is not None:
                    backing.check()
        except WeightsFileChanged:
            self._forget_changed()
            raise
        files = any(backing is not None and backing.file is not None for backing in backings)
        if (files and not alone) or any(
            backing is None or backing.sums != sums(opened, lying, self._pieces)
            for opened, backing in zip(resident, backings, strict=True)
        ):
            self._weights.backings.forget_ready(self._weights.of([layer]))
            return not resident
        return True

    def _forget_changed(self) -> None:
        """Marks layers whose file has changed as not ready."""
        self._places = None
        for layer in [each for each in self._weights.ranges if each is not None]:
            for opened in self._ranges(layer):
                try:
                    if (backing := self._weights.backings.ready.get(opened.address)) is not None:
                        backing.check()
                except WeightsFileChanged:
                    self._weights.backings.forget_ready(self._weights.of([layer]))

    def _make(self, layer: int, module: nn.Module) -> None:
        self._weights.backings.forget_ready(self._weights.of([layer]))
        alone = self._alone(module)  # before anything here refers to its tensors
        lying = lying_in(self._ranges(layer), module)
        resident = [opened for opened in self._ranges(layer) if not is_away(opened)]
        before = {opened.address: sums(opened, lying, self._pieces) for opened in resident}
        with ExitStack() as undo:
            made: dict[int, Backing] = {}
            for opened in resident:
                file = self._file(opened, lying) if alone else None
                made[opened.address] = self._filled(opened, file, undo)
            for opened in resident:
                made[opened.address].sums = before[opened.address]
                if sums(opened, lying, self._pieces) != before[opened.address]:
                    raise DropRefused(
                        f"layer {layer} of {self._name} cannot be dropped, as somebody writes to its weights: drop it "
                        "when that has ended"
                    )
            undo.pop_all()
        self._weights.backings.ready.update(made)

    def _filled(self, opened: Range, file: FileBacking | None, undo: ExitStack) -> Backing:
        backing = self._weights.backings.new(opened, file)
        undo.callback(backing.close)
        if file is None:
            runs = live(opened, 0, opened.pieces)
            for run in self._pieces.spans(runs):
                backing.map_all((run,), undo)
            pieces = [piece for first, count in runs for piece in range(first, first + count)]
            self._pieces.copy(backing.saves(pieces), None, "host")
        return backing

    def _file(self, opened: Range, lying: Lying) -> FileBacking | None:
        """Returns a backing of the file that has all of the range; None where none has."""
        tensors = [tensor for its, tensor in lying.values() if its is opened]
        found: dict[int, FileSpan] = {}
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for tensor in tensors:
                places = (self._places or {}).get(id(tensor), ())
                span = compared(tensor, places, memory, self._pieces.done)
                if isinstance(span, str):
                    return None
                found[id(tensor)] = span
        return self._weights.backings.file(opened, spans(tensors, {}), found)

    def _alone(self, module: nn.Module) -> bool:
        """Returns whether only the layer's modules refer to their tensors."""
        found: list[Any] = []
        for each in module.modules():
            for kind in ("_parameters", "_buffers"):
                found.extend(filter(torch.is_tensor, dict.values(each.__dict__[kind])))
        wraps = any(map(is_traceable_wrapper_subclass, found))
        return not wraps and not perhaps_referenced(found, self._interpreter)

    def _ranges(self, layer: int) -> list[Range]:
        return [opened for opened in self._weights.ranges.get(layer, ()) if opened.backed]


def lying_in(ranges: Iterable[Range], module: nn.Module) -> Lying:
    """Returns the tensors of a module that lie in these ranges, by name, each with its range."""
    bounds = [(opened, opened.address, opened.address + opened.nbytes) for opened in ranges]
    return {
        name: (opened, tensor)
        for name, tensor in held(module)
        if tensor.numel()
        for opened, first, end in bounds
        if first <= tensor.data_ptr() < end
    }


def sums(opened: Range, lying: Lying, pieces: Piecewise) -> dict[int, bytes]:
    """Returns the checksums of the tensors that lie in a range, by their offset in it. `pieces`: reports progress after
    each."""
    found: dict[int, bytes] = {}
    for its, tensor in lying.values():
        if its is opened:
            found[tensor.data_ptr() - opened.address] = checksum(tensor)
            pieces.done()
    return found
