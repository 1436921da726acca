"""Fills new pages with the bytes of a layer that is restored.

Note [Where a layer is restored from]
    The bytes are copied to new pages while forwards run, and the pages are mapped at the layer's addresses between two
    forwards. A peer's bytes are used only if their checksum equals that of the layer's backing. Bytes from a file need
    no check, as only the layer can have been mapped to it; host pages may have been written to meanwhile, so they are
    copied, or compared with a peer's, between the forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ...allocator._native import Range
from ...allocator.errors import ManageError
from ...offload.residency.layer_parts import StreamedLayer
from ..weights.moving import flat_over
from ..weights.ranges import Weights
from ..weights.storages import like_over
from .checksum import checksum
from .piecewise import Piecewise
from .ready_layers import lying_in, sums

# How new pages were filled: checksums of a peer's bytes, by range and offset; empty: from a file; None: not yet
Filled = dict[int, dict[int, bytes]] | None


class LayerBytes:
    """Fills pages of restored layers. Used under the lock of HeldLayers. See Note [Where a layer is restored from]."""

    def __init__(self, weights: Weights, name: str, module: Callable[[int], nn.Module], pieces: Piecewise) -> None:
        """`name`: of the model; `module(layer)`: returns a decoder layer's module."""
        self._weights = weights
        self._name = name
        self._module = module
        self._pieces = pieces

    def fill(self, each: StreamedLayer, filled: Range, given: Mapping[str, torch.Tensor] | None) -> Filled:
        """Copies a layer's bytes to the pages `filled` while forwards run: those that a peer has `given`, else those of
        its file, if it has one. WeightsFileChanged, DriverError; ManageError where `given` does not fit the layer."""
        if given is not None:
            return self._fill_from(each, filled, given)
        if not _in_files(each):
            return None
        self._copy(each, filled, self._weights.stream())
        return {}

    def _fill_from(
        self, each: StreamedLayer, filled: Range, given: Mapping[str, torch.Tensor]
    ) -> dict[int, dict[int, bytes]]:
        """Copies a peer's bytes. Returns their checksums, by range and offset. ManageError."""
        lying = lying_in({part.range: None for part in each.parts}, self._module(each.layer))
        if wrong := sorted(
            name
            for name, (_, tensor) in lying.items()
            if name not in given or (given[name].dtype, given[name].shape) != (tensor.dtype, tensor.shape)
        ):
            raise ManageError(
                f"what a peer gave for layer {each.layer} of {self._name} lacks, or has in other shapes or "
                f"dtypes: {', '.join(wrong)}"
            )
        found: dict[int, dict[int, bytes]] = {part.range.address: {} for part in each.parts}
        flat = flat_over(filled, 0, filled.nbytes)
        with torch.no_grad():
            for name, (opened, tensor) in lying.items():
                new = like_over(tensor, flat, _place(each, tensor.data_ptr(), self._weights.device.page_size))
                new.copy_(given[name])
                found[opened.address][tensor.data_ptr() - opened.address] = checksum(new)
                self._pieces.done()
        return found

    def complete(self, each: StreamedLayer, filled: Range, came: Filled) -> bool:
        """Fills the pages between two forwards, unless they have the right bytes already. Returns whether these are a
        peer's. WeightsFileChanged, DriverError."""
        peer = bool(came) and came == self._sums(each)
        if not (peer or (came == {} and _in_files(each))):
            self._copy(each, filled, None)
        return peer

    def _sums(self, each: StreamedLayer) -> dict[int, dict[int, bytes]]:
        """Returns the checksums of a layer's backing, by range and offset; those of files may be missing."""
        if _in_files(each):
            return {part.range.address: dict(part.backing.sums) for part in each.parts}
        lying = lying_in({part.range: None for part in each.parts}, self._module(each.layer))
        return {part.range.address: sums(part.range, lying, self._pieces) for part in each.parts}

    def _copy(self, each: StreamedLayer, filled: Range, after: int | None) -> None:
        """Copies the layer's backing. WeightsFileChanged, DriverError."""
        each.check()
        try:
            self._pieces.copy(each.copies(filled), after, "device")
        finally:
            each.check()


def _in_files(each: StreamedLayer) -> bool:
    """Returns whether all backings of a layer are files, so only the layer can have been mapped to them."""
    return all(part.backing.file is not None for part in each.parts)


def _place(each: StreamedLayer, address: int, page: int) -> int:
    """Returns the offset in the layer's slot of the byte at an address of the layer."""
    for part in each.parts:
        offset = address - part.range.address - part.first * page
        if 0 <= offset < part.count * page:
            return offset + part.offset * page
    raise AssertionError(f"{address:#x} is no address of layer {each.layer}")
