"""The streamed layers of one model: which pass has the slots, and what happens when a layer is entered and left.

Note [Streaming]
    A layer that streams is on the host, and its parameters show it there (offload/residency/ring.py). A forward without
    gradients that has the slots (lease.py) copies each layer to a slot before it runs, and the layer's own call reads
    the copy (bound.py). Any other forward, and any other code, reads the host: right, and slower.
    Copies begin before their layers run. A layer that is written to meanwhile, as far as torch counts writes, is copied
    again; a write through `weight.data` that another part of the model makes in the same forward is not counted.

Note [Layers without bytes at their addresses]
    A layer whose backing is a file (offload/residency/backing.py) has nothing at its addresses that could be read. A
    thread that asks its modules for a weight, other than in the layer's own call with the slots, waits until host pages
    are filled from the file. They are not filled while another thread runs the model; a wait that takes too long ends
    with an error.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import monotonic
from types import FrameType
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...allocator._native import Range
from ...allocator.errors import ManageError, PoolExhausted
from ...offload.policy.replicas.groups import Span
from ...offload.residency.ring import LayerPart, Ring
from ..device.references import THIS, Interpreter
from ..forward.hook_base import CALL, CallKeywords, LocalLayers
from ..forward.lease import Turn, Turns
from ..weights.moving import flat_over
from .bound import Bound, Spot

CAPTURED: Final = (
    "layers that stream cannot be captured in a CUDA graph, nor those that gave their pages for something else: "
    "capture layers that are resident, or give a budget in which nothing streams"
)

# Seconds that a reader of a layer which only files have waits for the forward thread, and between looks. Chosen.
_REVEAL: Final = 60.0
_REVEAL_LOOK: Final = 0.02


class Layer(NamedTuple):
    """A layer that streams: its module, the ids of the tensors in its ranges, and the parts of its ranges."""

    module: nn.Module
    tensors: frozenset[int]
    parts: tuple[LayerPart, ...]


class Streaming:
    """The passes over one model's streamed layers."""

    def __init__(
        self,
        ring: Ring,
        turns: Turns,
        stream: Callable[[], int],
        on_host: Callable[[], Collection[int]],
        captured: Callable[[int], None],
        capturing: Callable[[], bool],
        interpreter: Interpreter = THIS,
        local_layers: LocalLayers | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`stream`: returns this thread's current one. `on_host`: returns the layers whose addresses lead to the host.
        `captured`: called before a layer is read while this thread captures (`capturing`); raises ManageError where the
        layer cannot be captured. `local_layers`: which layers this process runs, None for all. `clock`: seconds, for
        timeouts."""
        self._ring = ring
        self._turns = turns
        self._stream = stream
        self._on_host = on_host
        self._captured = captured
        self.capturing = capturing
        self._clock = clock
        self._interpreter = interpreter
        self._local_layers = LocalLayers() if local_layers is None else local_layers
        self._span: Span | None = None  # the span for which the ring's order of slots was made
        self.bound: dict[int, Bound] = {}  # the layers that are read from slots
        self._parts: dict[int, tuple[LayerPart, ...]] = {}
        self._hidden: set[int] = set()  # layers without bytes at their addresses
        self.revealing = threading.RLock()  # held while layers get bytes there, or are arranged anew
        self._turn: Turn | None = None  # the turn of the pass that reads slots
        self.inside: int | None = None  # the layer that runs
        self._page = 0
        # called when code other than a layer's call gets a weight of it; returns whether it reads no bytes
        self.on_asked: Callable[[], object] = int
        self.before_reveal: Callable[[], object] = int  # called before bytes are read from a file
        ring.loading = self._loading
        ring.opened = lambda layer: self._show(layer, {})
        self._versions: dict[int, int] = {}  # versions of layers when their copies began
        self._unseen: set[int] = set()  # layers whose weights no other code has got since
        self._outlived: list[StorageWeakRef] = []  # memory of views that have outlived their calls

    def bind(self, layers: Mapping[int, Layer], page: int) -> None:
        """Makes the calls of these layers, and no others, read the ring's slots. No thread runs them meanwhile."""
        self.close()
        self._page = page
        flats: dict[int, torch.Tensor] = {}
        # at once: another thread may be waiting for a layer to have its bytes
        self._hidden = {n for n, layer in layers.items() if any(part.backing.file is not None for part in layer.parts)}
        for number, layer in layers.items():
            self.bound[number] = Bound(layer.module, layer.tensors, partial(self._asked, number), self._interpreter)
            self._parts[number] = layer.parts
            self._show(number, flats)

    def close(self) -> None:
        """Makes every layer's call read the layer's own addresses."""
        self._turn = self.inside = None
        for bound in self.bound.values():
            bound.release()
        self.bound.clear()
        self._parts.clear()
        self._unseen.clear()

    def check_capture(self) -> None:
        """Raises ManageError where this forward is captured and layers are on the host: replays would read slots at any
        time."""
        if self.capturing() and self._on_host():
            raise ManageError(CAPTURED)

    def prepare(self, turn: Turn) -> None:
        """Gets a forward the slots before it begins and has a lease; without them it reads the host. ManageError,
        torch.OutOfMemoryError, WeightsFileChanged, DriverError."""
        wanted = not (torch.is_grad_enabled() or self._turns.sections)
        if not (wanted and self._turns.take(turn)):
            self._reveal_all()

    def begin(self, turn: Turn) -> None:
        """Begins the pass of a forward that is about to run layers. Raises as `prepare`."""
        wanted = not (torch.is_grad_enabled() or self._turns.sections)
        if wanted and not turn.asked:
            self._turns.take(turn)  # layers have begun to stream in this forward
        if not (wanted and self._turns.has(turn)):
            self._reveal_all()  # those that were hidden since `prepare`
            return
        if self.inside is not None:  # an earlier call was interrupted
            self._end()
        self._turn = turn
        if self._span is not self._local_layers.span:
            self._span = self._local_layers.span
            self._ring.share(self._local_layers.runs)
        if self._hidden:
            self._ring.check()  # nothing is copied from a file that has changed between two passes
        self._ring.begin(self._stream(), self.unchanged)

    def end(self, turn: Turn) -> None:
        """Ends the pass of a forward that has run some or all layers. WeightsFileChanged where the bytes that they read
        may not have been the weights; DriverError."""
        if self._turn is turn:
            if self.inside is not None:
                self._end()
            self._turn = None
            self._ring.check()

    def enter(self, layer: int, call: CallKeywords | None) -> Range | None:
        """Returns the slot that the call of a layer that is about to run reads, None where it reads its own addresses.
        `call`: that call's keywords, None where the compiler made it.
        WeightsFileChanged, DriverError; ManageError where a capture runs that cannot include it."""
        if self.capturing():
            self._captured(layer)
        bound = self.bound.get(layer)
        if bound is None or not self._turns.has(self._turn) or torch.is_grad_enabled():
            return None
        if self.inside is not None:
            if self.bound[self.inside].active(sys._getframe()):
                return None  # a layer that runs another one: its slot is in use
            self._end()
        stream = self._stream()
        self._ring.bring(layer, stream)
        written, fits = bound.look()
        if self._versions.get(layer) != written:
            self._ring.forget(layer)
        slot = self._ring.enter(layer, stream) if fits else None
        if slot is not None:
            self.inside = layer
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code is not CALL:  # the layer's call
                frame = frame.f_back
            bound.enter(id(frame) if frame is not None else 0, call)
        return slot

    def leave(self, layer: int) -> None:
        """Ends the layer's use of its slot. ManageError where it has written to the slot, DriverError."""
        bound = self.bound[layer] if self.inside == layer else None
        if bound is None or not bound.call or bound.thread != threading.get_ident():
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not (frame.f_code is CALL and id(frame) == bound.call):  # inlined `Bound.active`
            frame = frame.f_back
        if frame is not None and self._end():
            raise ManageError(_WRITTEN.format(layer))

    def _reveal_all(self) -> None:
        for layer in filter(self._local_layers.runs, sorted(self._hidden)):
            self.reveal(layer)

    def reveal(self, layer: int) -> None:
        """Fills the layer's addresses from its file, so that any code may read it: see Note [Layers without bytes at
        their addresses]. torch.OutOfMemoryError where the host has no pages for it."""
        end = self._clock() + _REVEAL
        while layer in self._hidden:
            with self.revealing:
                try:
                    if layer in self._hidden:
                        self.before_reveal()
                        self._ring.reveal(layer)
                        self._hidden.discard(layer)
                except ManageError:
                    if self._clock() > end:
                        raise
                except PoolExhausted as error:
                    raise torch.OutOfMemoryError(f"no room on the host for layer {layer}: {error}") from error
            if layer in self._hidden:
                threading.Event().wait(_REVEAL_LOOK)

    def _loading(self, layer: int, first: bool) -> None:
        """Notes that the copy of a layer begins: see bound.py, Note [Written between two passes]."""
        if not first:
            self._versions[layer] = self.bound[layer].written()
            return
        self._unseen.add(layer)  # before the look: `_asked` removes it from now on
        self._versions[layer], unheld = self.bound[layer].examine()
        if not unheld or (self._outlived and self._kept()):
            self._unseen.discard(layer)

    def unchanged(self, layer: int) -> bool:
        """Is the layer what it was when it was last copied to its slot, as far as can be told?"""
        return layer in self._unseen and self.bound[layer].examine() == (self._versions.get(layer), True)

    def _asked(self, layer: int) -> None:
        """Notes that code other than the layer's call gets a weight of it, as it lies on the host."""
        if self.on_asked():
            return
        self._unseen.discard(layer)
        if layer in self._hidden:
            self.reveal(layer)
        if self.capturing():
            self._captured(layer)

    def _end(self) -> bool:
        """Ends the call of the layer that ran, whether it has been left or not. Has it written to its slot?"""
        layer, self.inside = self.inside, None
        if layer is None:
            return False
        written, kept = self.bound[layer].leave()
        if kept:
            self._give_away(layer)
        if written:
            self._ring.forget(layer)
        self._ring.leave(layer, lambda following: self.bound[following].unheld())
        return written

    def _kept(self) -> bool:
        """Does somebody keep a view that has outlived its call, of whatever layer? Then it may be written to."""
        self._outlived = [view for view in self._outlived if not view.expired()]
        return bool(self._outlived)

    def _give_away(self, layer: int) -> None:
        """Leaves the slot's addresses to views that outlive their call: see bound.py, Note [Views that outlive their
        call]."""
        shared = self._ring.slot(layer)
        others = [] if shared is None else [number for number in self.bound if self._ring.slot(number) is shared]
        if layer in self._hidden:
            self.reveal(layer)
        self._outlived += self.bound[layer].memory()
        for other in others:
            self.bound[other].show(None, None)
        try:
            self._ring.give_away(layer)
        except PoolExhausted:
            return  # the layers are read on the host until the arrangement changes
        flats: dict[int, torch.Tensor] = {}
        for other in others:
            self._show(other, flats)

    def _show(self, layer: int, flats: dict[int, torch.Tensor]) -> None:
        """Shows the layer's call its slot. `flats`: the tensors over slots that were made so far, by address."""
        slot = self._ring.slot(layer)
        if slot is None:
            return
        address = slot.range.address
        if address not in flats:
            flats[address] = flat_over(slot.range, 0, slot.range.nbytes)
        self.bound[layer].show(flats[address], _spot(self._parts[layer], self._page))


def _spot(parts: tuple[LayerPart, ...], page: int) -> Spot:
    runs = [(part.range.address + part.first * page, part.count * page, part.offset * page) for part in parts]

    def spot(address: int) -> int | None:
        for start, nbytes, offset in runs:
            if start <= address < start + nbytes:
                return address - start + offset
        return None

    return spot


_WRITTEN: Final = (
    "decoder layer {0} has written to its own weights while it ran without gradients, but it streams, so that what it "
    "wrote is lost: write in `with managed.editable():`, or give a budget in which it does not stream (interval=None)"
)
