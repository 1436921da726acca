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
    list(model.parameters())`, the memory that a weight had before `weight.data = ...`) could be read at any time. So
    layers fly only while nobody holds one; that is looked at when a layer has run, after each forward, and before the
    next one where someone came the first way in between, or gradients were enabled.
    With gradients enabled layers do not fly at all: backward would read them later.

Note [Streaming and torch.compile]
    A compiled graph reads parameters without asking anyone. So the compiler's graph is broken at the hooks of streamed
    layers and wherever one of their weights is read; with `fullgraph=True` it says why it cannot go on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..allocator._native import Device, Group
from ..allocator.errors import ManageError
from ..offload.ring import Ring, Streamed
from .forwards import Hook, call_frame
from .turns import Call, Turns, identity, on_stack
from .watched import Census, holders, opaquely, watch


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
        tensors: Set[int],
        strangers: Callable[[], bool],
        stream: Callable[[], int],
    ) -> None:
        """Maps the slots, and hooks and watches the modules of `layers`, which are at rest. `modules`: by layer;
        `tensors`: the ids of what streams; `strangers`: is there memory over the ranges that the model does not use?
        `stream`: returns this thread's current one. PoolExhausted, DriverError."""
        self._cuda = device.kind == "cuda"
        self._turns = turns
        self._stream = stream
        self._strangers = strangers
        self._inside: tuple[int, Call] | None = None  # the layer that runs, and its call
        self._touched = True
        self._leaving = False  # may layers be about to fly?
        self._census: dict[int, Census] = {}
        with ExitStack() as undo:
            self._ring = Ring(device, group, slot_pages, layers)
            undo.callback(self._ring.close)
            for each in layers:
                module = modules[each.layer]
                held = holders(module, tensors)
                self._census[each.layer] = Census(held, tensors)
                undo.callback(watch(held, functools.partial(self._look, each.layer)))
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
        self._refuse_captures()
        self._inside = None
        self._leaving = True  # from here on whoever looks waits, and what anyone held before is found
        try:
            if self._may_fly():
                self._ring.begin(self._stream())
            else:
                self._ring.rest()
        finally:
            self._leaving = False

    def land(self) -> None:
        """It has ended. Layers fly on, with the copies for the next pass on their way, unless someone could look."""
        self._inside = None
        if self._ring.flying and self._others():
            self._touched = True
            self._ring.rest()

    def rest(self) -> None:
        """Every layer is at rest. The caller has the turn. ManageError, DriverError."""
        self._ring.rest()

    def close(self) -> None:
        """Takes hooks and watches away and gives the slots back. Every layer is at rest."""
        self._undo.close()

    def _enter(self, layer: int) -> None:
        if self._turns.running():
            self._ring.enter(layer, self._stream())
            self._inside = layer, identity(call_frame())

    def _leave(self, layer: int) -> None:
        if self._inside is None or self._inside[0] != layer or not self._turns.mine():
            return  # others have run inside of it
        self._inside = None
        if self._ring.flying and self._census[layer].others():
            self._touched = True
            self._ring.rest()
        else:
            self._ring.leave(layer, self._stream())

    def _look(self, layer: int) -> None:
        """Someone is about to look at what the modules of the layer hold."""
        inside = self._inside
        if inside and inside[0] == layer and self._turns.mine() and on_stack(inside[1], sys._getframe()):
            return
        self._refuse_captures()
        self._touched = True
        if self._leaving or self._ring.flying:
            with self._turns.at_rest():
                pass

    def _may_fly(self) -> bool:
        if self._turns.sections or torch.is_grad_enabled():
            self._touched = True  # a graph may hold weights
            return False
        if self._touched:
            self._touched = False  # before the census: whoever comes now is seen next time
            self._touched |= self._others()
        return not self._touched

    def _others(self) -> bool:
        """Does anyone but the layers hold what streams?"""
        return self._strangers() or any(each.others() for each in self._census.values())

    def _refuse_captures(self) -> None:
        """ManageError while a graph is being captured."""
        if self._cuda and torch.cuda.is_current_stream_capturing():
            raise ManageError(
                "layers that stream cannot be captured in a CUDA graph: capture layers that are resident, or give a "
                "budget in which nothing streams"
            )


class _Opaque(Hook):
    """A hook at which the compiler breaks its graph. See Note [Streaming and torch.compile]."""

    def __call__(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            opaquely(self._act, *self._arguments)
        else:
            self._act(*self._arguments)
