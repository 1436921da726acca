"""The streamed layers of a managed model: when they fly, and what keeps anyone from reading a slot by mistake.

Note [At rest or flying]
    A streamed layer's weights are on the host, in its twin. At rest its addresses lead there: whoever reads or writes
    them gets the weights, slowly. While the model runs its layers fly (offload/ring.py): their addresses lead to slots,
    which hold a layer's weights only while that layer runs. So a layer may fly only while nobody but the layer itself
    can look. There are two ways to look, and both are watched (watched.py).
    Through the module: an access to the parameters and buffers of a streamed layer that is not its own forward's brings
    all layers to rest first. State dicts, saving, copies, conversions, adapters that are merged, submodules that are
    called by themselves: all come this way.
    Through a reference: a weight, or a view of one, that someone holds (an optimizer, autograd, `params =
    list(model.parameters())`) could be read at any time. So layers fly only while nobody holds one; that is looked at
    after each forward, and before the next one where someone came the first way in between.
    With gradients enabled layers do not fly at all: backward would read them later.

Note [Streaming and torch.compile]
    A compiled graph reads parameters without asking anyone. So the compiler's graph is broken at the hooks of streamed
    layers and wherever one of their weights is read; with `fullgraph=True` it says why it cannot go on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..allocator._native import Device, Group
from ..allocator.errors import ManageError
from ..offload.ring import Ring, Streamed
from .forwards import Hook
from .turns import Turns
from .watched import Census, opaquely, watch


class Streaming:
    """The streamed layers of one model: its passes (`turns.Passes`), from when this is made until `close()`."""

    def __init__(
        self,
        device: Device,
        group: Group,
        turns: Turns,
        slot_pages: Sequence[int],
        layers: Sequence[Streamed],
        modules: Mapping[int, nn.Module],
        stream: Callable[[], int],
    ) -> None:
        """Maps the slots, and hooks and watches the modules of `layers`, which are at rest. `modules`: by layer;
        `stream`: returns this thread's current one. PoolExhausted, DriverError."""
        self._cuda = device.kind == "cuda"
        self._turns = turns
        self._stream = stream
        self._inside: int | None = None  # the layer that runs
        self._resident = 0  # sections that are open
        self._touched = True
        with ExitStack() as undo:
            self._ring = Ring(device, group, slot_pages, layers)
            undo.callback(self._ring.close)
            self._census = Census(modules.values())
            for each in layers:
                module = modules[each.layer]
                undo.callback(watch(module, functools.partial(self._look, each.layer)))
                enter, leave = _Opaque(self._enter, each.layer), _Opaque(self._leave, each.layer)
                undo.callback(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True).remove)
                undo.callback(module.register_forward_hook(leave, always_call=True).remove)
            self._undo = undo.pop_all()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # what was compiled before knows nothing of the hooks

    @property
    def flying(self) -> bool:
        """Do the addresses of streamed layers lead to slots now?"""
        return bool(self._ring.flying)

    @property
    def slot_pages(self) -> int:
        """Pages of the slots."""
        return self._ring.pages

    def fly(self) -> None:
        """A pass begins: layers fly, unless someone else could look. ManageError while a graph is being captured, whose
        replays would read slots at any time; DriverError."""
        if self._cuda and torch.cuda.is_current_stream_capturing():
            raise ManageError(
                "layers that stream cannot be captured in a CUDA graph: capture layers that are resident, or give a "
                "budget in which nothing streams"
            )
        self._inside = None
        if not self._may_fly():
            self._ring.rest()
        else:
            self._ring.begin(self._stream())

    def land(self) -> None:
        """It has ended. Layers fly on, with the copies for the next pass on their way, unless someone could look."""
        self._inside = None
        if self._ring.flying and self._census.others():
            self._touched = True
            self._ring.rest()

    def rest(self) -> None:
        """Every layer is at rest. The caller has the turn. ManageError, DriverError."""
        self._ring.rest()

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Within it no layer flies: weights can be read, and written."""
        with self._turns.at_rest():
            self._resident += 1
        try:
            yield
        finally:
            self._resident -= 1

    def close(self) -> None:
        """Brings all layers to rest, takes hooks and watches away and gives the slots back. ManageError, DriverError;
        nothing has changed then."""
        with self._turns.at_rest():
            self.forget()

    def forget(self) -> None:
        """The same for layers that are at rest, or gone."""
        self._undo.close()

    def _enter(self, layer: int) -> None:
        if self._turns.mine():
            self._ring.enter(layer, self._stream())
            self._inside = layer

    def _leave(self, layer: int) -> None:
        if self._turns.mine():
            self._inside = None
            self._ring.leave(layer, self._stream())

    def _look(self, layer: int) -> None:
        """Someone is about to look at what the modules of the layer hold."""
        if self._inside == layer and self._turns.mine():
            return
        self._touched = True
        if self._ring.flying:
            with self._turns.at_rest():
                pass

    def _may_fly(self) -> bool:
        if self._resident or torch.is_grad_enabled():
            return False
        if self._touched:
            self._touched = self._census.others()
        return not self._touched


class _Opaque(Hook):
    """A hook at which the compiler breaks its graph. See Note [Streaming and torch.compile]."""

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            opaquely(self._act, *self._arguments)
        else:
            self._act(*self._arguments)
