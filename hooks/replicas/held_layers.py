"""Layers of a replica: prepared to be dropped, dropped, which serves KV, and restored (KunServe §4).

Note [Where a layer is restored from]
    The bytes are copied to new pages while forwards run, and the pages are mapped at the layer's addresses between two
    forwards. A peer's bytes are used only if their checksum equals that of the layer's backing. Bytes from a file need
    no check, as only the layer can have been mapped to it; host pages may have been written to meanwhile, so they are
    copied, or compared with a peer's, between the forwards.

Note [A drop is a plan with a pinned span]
    Dropped layers stream, through one slot that they share, and no plan of the manager has them
    (hooks/streaming/arrangement.py, Note [Dropped layers]). So a replica that has to run alone goes on at once, though
    slowly, where the paper restores first. A drop happens between two forwards, and copies nothing to the host where
    the layers were made ready before (`ReadyLayers`).

Note [What a checksum sees]
    torch cannot tell whether a weight was written to: writes through `weight.data` are not counted. So the bytes are
    read where they lie: 8-byte words are added up, modulo 2**64, in three ways, by their index modulo two primes and by
    blocks of neighbours. The sums do not depend on the order of additions, and need next to no memory, of which there
    may be none when a layer is to be dropped. They detect any word that differs, and any two that changed places,
    except those that are a multiple of 251 * 257 words apart in one block. They do not detect deliberate manipulation.

Note [A layer takes seconds]
    The main loop of a replica prepares, drops or restores a layer in one iteration. A large layer takes seconds over a
    slow link, or from a slow file, and a replica whose count of iterations stands still for a second counts as dead
    (policy/replicas/cluster.py). So a layer is copied, compared and summed piece by piece, and the count grows after
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
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...allocator._native import Device, Lease, Range, Transfer
from ...allocator.errors import DropRefused, ManageError, PoolExhausted, WeightsFileChanged
from ...offload.policy.reclaim_order import PageSource
from ...offload.policy.replicas.groups import Span
from ...offload.residency.backing import Backing, FileBacking
from ...offload.residency.ring import StreamedLayer, live
from ...offload.residency.slots import Copies, open_pages
from ...offload.residency.weights_file import FileSpan
from ..device import managers
from ..device.references import THIS, Interpreter, perhaps_referenced
from ..managed import Managed, between_forwards, managed_as, residency_of, weights_of
from ..streaming.arrangement import Arrangement
from ..weights.files import compared, possible_places
from ..weights.model_parts import decoder_layers, held, like_over, spans
from ..weights.moving import flat_over
from ..weights.ranges import Weights, is_away

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
    hashed = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    for part in (*_sums(flat[:whole].view(torch.int64)), flat[whole:]):
        hashed.update(part.cpu().numpy().tobytes())
    return hashed.digest()


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
    from ...offload.residency.weights_file import TensorEntry

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
        for layer in [known for known in self._weights.ranges if known is not None]:
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
        places_of: dict[int, FileSpan] = {}
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            for tensor in tensors:
                places = (self._places or {}).get(id(tensor), ())
                span = compared(tensor, places, memory, self._pieces.done)
                if isinstance(span, str):
                    return None
                places_of[id(tensor)] = span
        return self._weights.backings.file(opened, spans(tensors, {}), places_of)

    def _alone(self, module: nn.Module) -> bool:
        """Returns whether only the layer's modules refer to their tensors."""
        tensors: list[Any] = []
        for part in module.modules():
            for kind in ("_parameters", "_buffers"):
                tensors.extend(filter(torch.is_tensor, dict.values(part.__dict__[kind])))
        wraps = any(map(is_traceable_wrapper_subclass, tensors))
        return not wraps and not perhaps_referenced(tensors, self._interpreter)

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
    by_offset: dict[int, bytes] = {}
    for its, tensor in lying.values():
        if its is opened:
            by_offset[tensor.data_ptr() - opened.address] = checksum(tensor)
            pieces.done()
    return by_offset


class RestorePages:
    """Pages for layers that are restored. Used under the lock of HeldLayers."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._kept: dict[int, Range] = {}  # reserved pages, by layer

    def keep(self, layers: Iterable[int]) -> None:
        """Reserves pages for these dropped layers, as far as there are free ones."""
        for layer in layers:
            streamed = self._weights.ring.layer(layer)
            if streamed is None or layer in self._kept:
                continue
            try:
                self._kept[layer] = self._open(layer, streamed.pages)
            except torch.OutOfMemoryError:
                return

    def give_back(self) -> None:
        """Frees the reserved pages. Idempotent."""
        while self._kept:
            self._kept.popitem()[1].close()

    def take(self, layer: int, pages: int) -> Range:
        """Returns the pages reserved for a layer, or else allocates so many. torch.OutOfMemoryError."""
        return self._kept.pop(layer, None) or self._open(layer, pages)

    def _open(self, layer: int, pages: int) -> Range:
        """Allocates free pages, without reclaiming any. torch.OutOfMemoryError."""
        device = self._weights.device
        if device.available < pages:
            device.trim()
            device.reap(wait=True)
        try:
            if device.available < pages:
                raise PoolExhausted(f"it has {pages} pages, and {device.available} are free")
            return open_pages(device, self._weights.group, "weights", pages)
        except PoolExhausted as error:
            raise torch.OutOfMemoryError(f"no room for layer {layer}, which is dropped: {error}") from error


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

    def fill(self, streamed: StreamedLayer, filled: Range, given: Mapping[str, torch.Tensor] | None) -> Filled:
        """Copies a layer's bytes to the pages `filled` while forwards run: those that a peer has `given`, else those of
        its file, if it has one. WeightsFileChanged, DriverError; ManageError where `given` does not fit the layer."""
        if given is not None:
            return self._fill_from(streamed, filled, given)
        if not _in_files(streamed):
            return None
        self._copy(streamed, filled, self._weights.stream())
        return {}

    def _fill_from(
        self, streamed: StreamedLayer, filled: Range, given: Mapping[str, torch.Tensor]
    ) -> dict[int, dict[int, bytes]]:
        """Copies a peer's bytes. Returns their checksums, by range and offset. ManageError."""
        lying = lying_in({part.range: None for part in streamed.parts}, self._module(streamed.layer))
        if wrong := sorted(
            name
            for name, (_, tensor) in lying.items()
            if name not in given or (given[name].dtype, given[name].shape) != (tensor.dtype, tensor.shape)
        ):
            raise ManageError(
                f"what a peer gave for layer {streamed.layer} of {self._name} lacks, or has in other shapes or "
                f"dtypes: {', '.join(wrong)}"
            )
        by_range: dict[int, dict[int, bytes]] = {part.range.address: {} for part in streamed.parts}
        flat = flat_over(filled, 0, filled.nbytes)
        with torch.no_grad():
            for name, (opened, tensor) in lying.items():
                new = like_over(tensor, flat, _place(streamed, tensor.data_ptr(), self._weights.device.page_size))
                new.copy_(given[name])
                by_range[opened.address][tensor.data_ptr() - opened.address] = checksum(new)
                self._pieces.done()
        return by_range

    def complete(self, streamed: StreamedLayer, filled: Range, came: Filled) -> bool:
        """Fills the pages between two forwards, unless they have the right bytes already. Returns whether these are a
        peer's. WeightsFileChanged, DriverError."""
        peer = bool(came) and came == self._sums(streamed)
        if not (peer or (came == {} and _in_files(streamed))):
            self._copy(streamed, filled, None)
        return peer

    def _sums(self, streamed: StreamedLayer) -> dict[int, dict[int, bytes]]:
        """Returns the checksums of a layer's backing, by range and offset; those of files may be missing."""
        if _in_files(streamed):
            return {part.range.address: dict(part.backing.sums) for part in streamed.parts}
        lying = lying_in({part.range: None for part in streamed.parts}, self._module(streamed.layer))
        return {part.range.address: sums(part.range, lying, self._pieces) for part in streamed.parts}

    def _copy(self, streamed: StreamedLayer, filled: Range, after: int | None) -> None:
        """Copies the layer's backing. WeightsFileChanged, DriverError."""
        streamed.check()
        try:
            self._pieces.copy(streamed.copies(filled), after, "device")
        finally:
            streamed.check()


def _in_files(streamed: StreamedLayer) -> bool:
    """Returns whether all backings of a layer are files, so only the layer can have been mapped to them."""
    return all(part.backing.file is not None for part in streamed.parts)


def _place(streamed: StreamedLayer, address: int, page: int) -> int:
    """Returns the offset in the layer's slot of the byte at an address of the layer."""
    for part in streamed.parts:
        offset = address - part.range.address - part.first * page
        if 0 <= offset < part.count * page:
            return offset + part.offset * page
    raise AssertionError(f"{address:#x} is no address of layer {streamed.layer}")


Source = Callable[[int], Mapping[str, torch.Tensor] | None]


class RestoredLayer(NamedTuple):
    """A step of `restore`: the layer that is resident again, its pages, and whether a peer's bytes were used."""

    layer: int
    pages: int
    from_peer: bool


class HeldLayers:
    """The decoder layers of a managed model that a replica holds. Thread-safe: one call, or step, at a time; forwards
    may run meanwhile on other threads. Does not keep the model alive. `pieces`: reports progress of work on a layer."""

    def __init__(self, handle: Managed) -> None:
        """`handle`: of a model with `interval="auto"`; ManageError for another, whose dropped layers no manager would
        restore after `release`."""
        residency = residency_of(handle)
        if residency.interval != "auto":
            raise ManageError(
                f"{residency.name} is managed with interval={residency.interval!r}: a replica whose layers are dropped "
                'and restored is managed with interval="auto"'
            )
        self._handle = handle
        self._residency = residency
        self._weights = weights_of(handle)
        self._device = self._weights.device
        self._manager = managers.of(self._device)
        composed = managers.composed_with(self._device)
        self.pieces = Piecewise(self._device, composed.tuning.weights.moved)
        self._ready = ReadyLayers(self._model, self._weights, self.pieces, composed.interpreter)
        self._pages = RestorePages(self._weights)
        name = residency.name
        self._bytes = LayerBytes(
            self._weights, name, lambda layer: decoder_layers(_model_of(handle, name))[layer], self.pieces
        )
        self._lock = threading.RLock()
        self._withdraw: Callable[[], None] | None = None

    @property
    def dropped(self) -> tuple[int, ...]:
        """The dropped layers, ascending; none where the model is no longer managed."""
        model = self._handle.model
        return self._residency.arrangement.dropped if model is not None and managed_as(model) is self._handle else ()

    @property
    def ready(self) -> tuple[int, ...]:
        """The layers whose drop would copy nothing to the host, as far as known."""
        return tuple(layer for layer in self._droppable() if self._ready.is_ready(layer))

    def begin(self, wanted: Callable[[int], object], on_progress: Callable[[], object]) -> None:
        """Until `end`, has `wanted(pages)` called when the reclaim order lacks pages at level 7, see
        offload/manager/overview.py, and `on_progress` as Piecewise does. `wanted` has to return at once; a `drop` may
        follow later."""
        with self._lock:
            self.end()
            self._withdraw = self._manager.duplicates.register(wanted, self._freed_at_most)
            self.pieces.on_progress = on_progress

    def end(self) -> None:
        """Ends what `begin` has begun, and frees the pages that `keep_room` has reserved. Idempotent."""
        with self._lock:
            if self._withdraw is not None:
                self._withdraw()
                self._withdraw = None
            self.pieces.end()
            self.give_back()

    def prepare(self, layers: Iterable[int]) -> Iterator[int]:
        """Makes layers ready to be dropped while forwards run, and yields each once it is. Skips layers that are ready,
        or on the host.

        Raises as `ReadyLayers.check`, at first, and as `ReadyLayers.make`; earlier layers stay ready."""
        with self._lock:
            self._check_managed()
            self._ready.check()
            wanted = [layer for layer in layers if layer in self._droppable() and not self._ready.is_ready(layer)]
            if wanted:
                self._look_for_files()
        for layer in wanted:
            with self._lock:
                if not self._ready.is_ready(layer):
                    self._ready.make(layer, self._module(layer))
            yield layer

    def drop(self, span: Span) -> int:
        """Drops all layers outside of `span`. Returns the number of device pages freed: those of the layers, less the
        slot that they share. They stay dropped until `restore` or `release`.

        Nothing has changed after ManageError (a span that the model does not have, a CUDA graph that has captured one
        of the layers, a model that is no longer managed), DropRefused (no host pages), WeightsFileChanged and
        ModelInUse. After DriverError and PoolExhausted layers that have left stream, and the manager restores them.
        """
        with self._lock:
            self._check_managed()
            self.give_back()
            layers = self._outside(span)
            self._reserve(layers)
            return between_forwards(self._handle, lambda: self._drop(layers))

    def restore(self, order: Iterable[int], source: Source | None = None) -> Iterator[RestoredLayer]:
        """Restores dropped layers, one in each step, in this order; skips those that are resident.

        `source(layer)`: returns a peer's tensors by their names in the layer, on any device; None where no peer
        answers: then the bytes come from the layer's backing. On an error the layer stays dropped, and may be tried
        again: torch.OutOfMemoryError where no pages are free for it, WeightsFileChanged where its file has changed and
        no peer has it, ManageError, ModelInUse, DriverError, and what `source` raises.
        """
        for layer in order:
            with self._lock:
                restored = self._restore(layer, source) if layer in self.dropped else None
            if restored is not None:
                yield restored

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers of a layer, by name. ManageError."""
        module = self._module(layer)
        named = (*module.named_parameters(), *module.named_buffers())
        return {name: tensor.detach() for name, tensor in named}

    def keep_room(self) -> None:
        """Reserves the pages that dropped layers need, as far as there are free ones, until `restore`: else KV would
        take them, and the layers would stream as long as there are requests."""
        with self._lock:
            self._pages.keep(self.dropped)

    def give_back(self) -> None:
        """Frees the pages that `keep_room` has reserved. Idempotent."""
        with self._lock:
            self._pages.give_back()

    def release(self) -> None:
        """Lets the manager decide about all layers again; it restores those for which there are pages. Idempotent.
        ModelInUse, ManageError."""
        with self._lock:
            self.give_back()
            if self.dropped:
                self._change(lambda arrangement: arrangement.release())

    def close(self) -> None:
        """Ends what `begin` has begun, releases all layers, and discards ready backings. Raises as `release`."""
        with self._lock:
            self.end()
            self.release()
            for layer in list(self._weights.ranges):
                if layer is not None:
                    self._weights.backings.forget_ready(self._weights.of([layer]))

    # -- dropping

    def _reserve(self, layers: Iterable[int]) -> None:
        """Makes those layers ready that are not, while forwards run."""
        lacking = [layer for layer in layers if not self._ready.is_ready(layer)]
        if lacking:
            self._look_for_files()
        for layer in lacking:
            self._ready.make(layer, self._module(layer))

    def _drop(self, layers: tuple[int, ...]) -> int:
        for layer in layers:
            if not self._ready.still(layer, self._module(layer)):
                self._ready.make(layer, self._module(layer))
        before = self._weights.pages
        with self._residency.changing() as arrangement:
            arrangement.drop(layers)
        freed = before - self._weights.pages
        self._manager.events.decided(PageSource.DUPLICATES.label, "reclaim", freed, what=self._residency.name)
        self._manager.pages.given()
        return freed

    def _outside(self, span: Span) -> tuple[int, ...]:
        count = len(self._residency.arrangement.pages)
        if not 0 <= span.begin < span.end <= count:
            raise ManageError(
                f"{self._residency.name} has the layers 0 to {count}: layers [{span.begin}, {span.end}) are none of it "
                "that a replica can hold"
            )
        return tuple(layer for layer in self._droppable() if layer not in span and layer not in self.dropped)

    def _droppable(self) -> list[int]:
        return [layer for layer, pages in enumerate(self._residency.arrangement.pages) if pages]

    def _freed_at_most(self) -> int:
        """Returns the pages that a drop of all but one layer would free."""
        pages = sorted(pages for pages in self._residency.plan.pages if pages)
        return sum(pages[1:-1])

    def _look_for_files(self) -> None:
        """Finds the weights files, see ReadyLayers, without mapping layers that stream from files."""
        model = self._model
        self._change(lambda arrangement: arrangement.plainly(lambda: self._ready.look_for_files(model)))

    def _change(self, act: Callable[[Arrangement], None]) -> None:
        """Changes the layers between two forwards."""

        def changed() -> None:
            with self._residency.changing() as arrangement:
                act(arrangement)

        between_forwards(self._handle, changed)

    # -- restoring

    def _restore(self, layer: int, source: Source | None) -> RestoredLayer | None:
        streamed = self._weights.ring.layer(layer)
        if streamed is None:  # an interrupt came in between
            return None
        given = None if source is None else source(layer)
        filled = self._pages.take(layer, streamed.pages)
        try:
            came = self._bytes.fill(streamed, filled, given)
            peer = between_forwards(self._handle, lambda: self._map(layer, filled, came))
        finally:
            filled.close()  # does nothing where its pages were adopted
        self._manager.events.decided(PageSource.DUPLICATES.label, "restore", streamed.pages, what=self._residency.name)
        return RestoredLayer(layer, streamed.pages, peer)

    def _map(self, layer: int, filled: Range, came: Filled) -> bool:
        """Makes the layer resident with those pages, between two forwards. Returns whether they have a peer's bytes."""
        streamed = self._weights.ring.layer(layer)
        if streamed is None or streamed.pages != filled.pieces:
            raise ManageError(f"layer {layer} of {self._residency.name} has changed while it came home: try again")
        peer = self._bytes.complete(streamed, filled, came)
        with self._residency.changing() as arrangement:
            arrangement.restore(layer, filled)
        return peer

    # -- the model

    def _check_managed(self) -> None:
        _ = self._model

    @property
    def _model(self) -> nn.Module:
        return _model_of(self._handle, self._residency.name)

    def _module(self, layer: int) -> nn.Module:
        return decoder_layers(self._model)[layer]


def _model_of(handle: Managed, name: str) -> nn.Module:
    model = handle.model
    if model is None or managed_as(model) is not handle:
        raise ManageError(f"this {name} is managed no more: make HeldLayers of what manage() returns")
    return model
