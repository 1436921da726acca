"""The streamed layers of a managed model: when they fly, and what keeps anyone from reading a slot by mistake.

Note [At rest or flying]
    A streamed layer's weights are on the host, in its twin. At rest its addresses lead there: whoever reads or writes
    them gets the weights, slowly. While the model runs its layers fly (offload/move/ring.py): their addresses lead to
    slots, which hold a layer's weights only while that layer runs. So a layer may fly only while nobody but the layer
    itself can look. There are two ways to look, and both are watched (watched.py).
    Through the module: an access to the parameters and buffers of a streamed layer that is not its own forward's brings
    all layers to rest first. State dicts, saving, copies, conversions, adapters that are merged, submodules that are
    called by themselves: all come this way.
    Through a reference: a weight, or a view of one, that someone holds (an optimizer, autograd, `params =
    list(model.parameters())`, the memory that a weight had before `weight.data = ...`) could be read at any time. So
    layers fly only while nobody holds one; that is looked at when a layer has run, after each forward, and before the
    next one where someone came the first way in between, or gradients were enabled.
    With gradients enabled layers do not fly at all: backward would read them later.
    A layer that comes home leads to nothing in particular for a moment, so that is for layers that nobody holds, too
    (`Elastic._change`).

Note [Streaming and torch.compile]
    A compiled graph reads parameters without asking anyone. So the compiler's graph is broken at the hooks of streamed
    layers and wherever one of their weights is read; with `fullgraph=True` it says why it cannot go on.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Set
from typing import Final

import torch
from torch import nn

from ...allocator.errors import ManageError
from ...allocator.interrupts import Guarded
from ...offload.move.ring import Ring
from ..forwards import call_frame
from ..weights.held import STRANGERS, held
from .captured import CAPTURED
from .stacks import Call, identity
from .turns import Turns
from .watched import Census, holders, watch


class Streaming:
    """Who looks at the layers of one model that stream, or may at any moment: its passes (`turns.Passes`)."""

    def __init__(
        self,
        ring: Ring,
        turns: Turns,
        strangers: Callable[[], bool],
        stream: Callable[[], int],
        seen_at_home: Callable[[int], None],
        away: Callable[[], Collection[int]],
        captured: Callable[[int], None],
        capturing: Callable[[], bool],
    ) -> None:
        """`strangers`: is there memory over the model's ranges that it does not use? `stream`: returns this thread's
        current one. `seen_at_home`: told of a watched layer that someone looks at while it does not stream.
        `away`: the layers that have no pages of their own. `captured`: told before a layer is read while what this
        thread does is captured (`capturing`); ManageError where it cannot be."""
        self._ring = ring
        self._turns = turns
        self._stream = stream
        self._strangers = strangers
        self._seen_at_home = seen_at_home
        self._away = away
        self._captured = captured
        self._capturing = capturing
        self._inside: tuple[int, Call] | None = None  # the layer that runs, and its call
        self._touched = True
        self.leaving = False  # may layers be about to fly, or to come home?
        self._versions = 0  # of the weights of that layer, when it began to run
        self._looked = object()  # another one each time somebody looks
        self._known: dict[int, tuple[object, int]] = {}  # who had looked when a layer had run, and versions
        self._blind = _Blind()
        self._census: dict[int, Census] = {}
        self._watches: dict[int, Callable[[], None]] = {}  # what ends each

    @property
    def watched(self) -> frozenset[int]:
        """The layers that are watched."""
        return frozenset(self._watches)

    def watch(self, layer: int, module: nn.Module, tensors: Set[int]) -> None:
        """From now on whoever looks at the layer is seen. `tensors`: the ids of what lies in its ranges."""
        if not self._watches and "torch._dynamo" in sys.modules:
            # What was compiled before reads weights and asks nobody. Not torch.compiler.reset(): that also resets
            # inductor's graph trees, which belong to the thread that has them, and this may be another.
            torch._dynamo.reset_code_caches()
        held = holders(module, tensors)
        self._looked = object()
        self._census[layer] = Census(held, tensors)
        self._watches[layer] = watch(held, functools.partial(self._look, layer))
        self._touched = True

    def unseen(self) -> Guarded[None]:
        """Within it this thread may look and nobody is told. It keeps nothing of what it sees."""
        return Guarded(_Unseen(self._blind))

    def unwatch(self, layer: int) -> None:
        """No more. It is at home, or at rest for good."""
        self._watches.pop(layer, _nothing)()
        self._census.pop(layer, None)

    def fly(self) -> None:
        """A pass begins: layers fly, unless someone else could look. ManageError while a graph is being captured, whose
        replays would read slots at any time; DriverError, WeightsFileChanged."""
        if self._capturing() and self._away():
            raise ManageError(CAPTURED)
        if not self._ring.streamed:
            return
        self._inside = None
        self.leaving = True  # from here on whoever looks waits, and what anyone held before is found
        try:
            if self._may_fly():
                self._ring.begin(self._stream())
            else:
                self._ring.rest()
        finally:
            self.leaving = False

    def land(self) -> None:
        """It has ended. Layers fly on, with the copies for the next pass on their way, unless someone could look.
        WeightsFileChanged where what they computed with may not have been the weights."""
        left, self._inside = self._inside, None
        if left is not None and left[0] in self._watches and left[0] not in self._ring.streamed:
            self._look(left[0])  # an exception ended it, and whoever has that may hold what it refers to
        if self._ring.flying:
            if self.others():
                self._touched = True
                self._ring.rest()
            self._ring.check()

    def rest(self) -> None:
        """Every layer is at rest. The caller has the turn. ManageError, DriverError."""
        self._ring.rest()

    def close(self) -> None:
        """Watches no layer any more; they stay where they are."""
        for layer in self.watched:
            self.unwatch(layer)

    def held(self, model: nn.Module) -> dict[str, str]:
        """Why layers do not fly: tensor that streams -> who holds it, as far as that can be told."""
        streamed = [census for layer, census in self._census.items() if layer in self._ring.streamed]
        with self.unseen():
            found = held(model, streamed)
        return found | ({"": STRANGERS} if not found and streamed and self._strangers() else {})

    def others(self, layers: Iterable[int] | None = None) -> bool:
        """Does anyone but the layers hold what lies in them? `layers`: in these only."""
        chosen = self._census.values() if layers is None else (self._census[layer] for layer in layers)
        return self._strangers() or any(each.others() for each in chosen)

    def enter(self, layer: int) -> None:
        """A layer is about to run. WeightsFileChanged, DriverError; ManageError where it is captured, and cannot be."""
        if self._capturing():
            self._captured(layer)
        if layer in self._watches and self._turns.running():
            self._ring.enter(layer, self._stream())
            self._inside = layer, identity(call_frame())
            looked, self._versions = self._known.get(layer, (None, 0))
            if looked is not self._looked and (census := self._census.get(layer)) is not None:
                self._versions = census.versions()  # None where it is watched no more

    def leave(self, layer: int) -> None:
        """It has run. WeightsFileChanged, DriverError."""
        if self._inside is None or self._inside[0] != layer or not self._turns.mine():
            return  # others have run inside of it
        self._inside = None
        census, looked = self._census.get(layer), self._looked
        others, versions = (False, self._versions) if census is None else census.look()
        written = versions != self._versions
        if written and layer in self._ring.flying:
            self._touched = True
            self._ring.rest()
            raise ManageError(_WRITTEN.format(layer))
        if written or others:
            self._look(layer)
            if written and layer not in self._ring.streamed and layer in self._away():
                raise ManageError(_TAKEN.format(layer))
        else:
            self._known[layer] = looked, versions
            self._ring.leave(layer, self._stream())

    def _look(self, layer: int) -> None:
        """Someone is about to look at what the modules of the layer hold."""
        inside = self._inside
        if self._blind.now:
            self._looked = object()
            return
        if inside and inside[0] == layer and (turn := self._turns.inside(inside[1])) is not None:
            if turn.thread != threading.get_ident():  # a thread of the layer's own
                if self._capturing():
                    self._captured(layer)
                self._ring.join(layer, self._stream())
            return
        self._looked = object()
        if self._capturing():
            self._captured(layer)
        self._touched = True
        while True:
            if self._ring.show(layer):
                if self.leaving or self._ring.flying:
                    with self._turns.at_rest():
                        pass
                return
            self._ring.settle(layer)
            self._seen_at_home(layer)
            if layer not in self._ring.streamed:  # it may have begun to meanwhile, or may just have come home
                self._ring.settle(layer)
                return

    def _may_fly(self) -> bool:
        if self._turns.sections or torch.is_grad_enabled():
            self._touched = True  # a graph may hold weights
            return False
        if self._touched:
            self._touched = False  # before the census: whoever comes now is seen next time
            self._touched |= self.others(self._ring.streamed)
        return not self._touched


_WRITTEN: Final = (
    "decoder layer {0} has written to its own weights while it ran without gradients, but it streams, so that what it "
    "wrote is lost: write in `with managed.editable():`, or give a budget in which it does not stream (interval=None)"
)
_TAKEN: Final = (
    "decoder layer {0} has written to its own weights while it ran without gradients, and gave its pages for something "
    "else meanwhile, so that some of what it wrote may be lost: write in `with managed.editable():`"
)


class _Blind(threading.local):
    now = False


class _Unseen:
    def __init__(self, blind: _Blind) -> None:
        self._blind = blind
        self._before = blind.now

    def begin(self) -> None:
        self._blind.now = True

    def end(self, failed: bool) -> None:
        self._blind.now = self._before


def _nothing() -> None:
    """Ends a watch that there is none of."""
