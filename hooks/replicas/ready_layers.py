"""Prepares layers to be dropped: fills their backings before the pages are needed.

Note [What a drop would wait for]
    An unprepared layer is copied to the host at the drop, or compared with the weights' file byte by byte. Both take as
    long as the link or the file, in the middle of a burst. So both are done once, before an epoch is committed. At the
    drop a checksum on the device shows whether the layer has changed since (checksum.py), and the file's inode, size
    and time whether the file has.

Note [The file, or the host]
    Where all of a layer lies in the weights' file, the file is its backing: it takes no host page, and all replicas of
    a machine share the page cache. That needs that only the layer's modules refer to its tensors
    (offload/residency/backing.py, Note [File backings]). Other layers get host pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...allocator._native import Lease, Range
from ...allocator.errors import DropRefused, PoolExhausted, WeightsFileChanged
from ...offload.residency.backing import Backing
from ...offload.residency.file_backing import FileBacking
from ...offload.residency.layer_parts import live
from ...offload.residency.weights_file import FileSpan
from ..device.references import THIS, Interpreter, perhaps_referenced
from ..weights.backings import is_away
from ..weights.files import compared, possible_places
from ..weights.ranges import Weights
from ..weights.storages import held, spans
from .checksum import checksum
from .piecewise import Piecewise

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
