"""What happens around the forwards of a managed model: its lease, and the boundaries of its decoder layers.

Note [Leases and interrupts]
    A lease is opened before the outermost forward of the model on a thread and closed after it, also when it raises.
    But torch runs no hook for an exception that is no `Exception`, and Ctrl-C is none. So each lease remembers which
    call of the module it belongs to; a call that is no longer on the stack was interrupted, and its lease is closed
    when the thread comes by again, or ends. A call within one that is on the stack is nested: nothing is done for it.

Note [Chaos and backward]
    A forward has ended, and so has its lease, when backward reads weights that its graph holds, perhaps on a thread of
    autograd's own. So once threads have run the model with gradients the
    others move its weights only while no graph holds any. Who looks whether that is so, and moves them, has a lock, for
    which forwards wait that have their lease already: nobody gets from there to a backward in the meantime.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from ...allocator._native import Range
from ...allocator.errors import ModelInUse, PoolExhausted
from ...offload.governor.chaos import Chaos
from ...offload.governor.levers import Lever
from ..weights.ranges import Weights
from .gate import Gate
from .hook_base import CALL, Hook, opaquely, remove_all
from .lease import ForwardLease, current
from .local_layers import LocalLayers
from .turns import Turn, Turns

_NO_KEYWORDS: Final[Mapping[str, Any]] = {}


class Forwards:
    """The hooks of one model, and the forwards of it that are running."""

    def __init__(
        self,
        weights: Weights,
        chaos: Chaos | None,
        lease: Callable[[], ForwardLease],
        before: Callable[[Sequence[Any], Mapping[str, Any]], None],
        after: Callable[[], None],
        yield_pages: Callable[[], None],
        turns: Turns,
        layers: Layers,
        levers: Sequence[Lever],
        in_graphs: Callable[[], bool],
        here: LocalLayers,
        exhausted: Callable[[torch.OutOfMemoryError], None],
    ) -> None:
        """`lease` makes that of a forward, which is then opened; `before(args, kwargs)` is called at the beginning of
        each outermost one, under it, and `after()` at its end, `yield_pages()` between two layers when others request
        pages; `layers`: told of each decoder layer that runs; `levers`: that chaos may pull; `in_graphs`: do graphs of
        autograd hold weights? `here`: which decoder layers run here. `exhausted` is told where one found no memory."""
        self.chaos = chaos
        self.count = 0  # decoder layers that are hooked
        self.weights = weights
        self._lease = lease
        self._before = before
        self._after = after
        self.yield_pages = yield_pages
        self._levers = levers
        self._in_graphs = in_graphs
        self.here = here
        self.exhausted = exhausted
        self._moving = threading.Lock()  # weights; see Note [Chaos and backward]
        self._learning: set[int] = set()  # threads that have run it with gradients
        self._turns = turns
        self.layers = layers
        self.outermost = _Outermost()
        self._gate: Gate | None = None
        self._entry = threading.Lock()  # of the gate, while a lease is opened
        self._unhooked = False
        self._handles: list[RemovableHandle] = []
        self._layers: list[weakref.ref[nn.Module]] = []
        self._boundaries: list[RemovableHandle] = []
        self._hooks: dict[int, tuple[_EnterLayer, _LeaveLayer]] = {}
        self._leaving: dict[int, RemovableHandle] = {}  # hooks of layers that stream: others have nothing to say then

    def hook(self, gate: Gate, entries: Iterable[nn.Module], parts: Iterable[nn.Module] = ()) -> None:
        """`entries`: the modules that a forward may begin with; `parts`: others that may be called by themselves, which
        is no iteration of the model. The lease spans the hooks that they have already. `gate`: is closed, so that no
        forward begins before the model is ready.

        Scripted modules can have no hooks; their forwards hold no lease.
        """
        enter, enter_part, leave = _Enter(self, whole=True), _Enter(self, whole=False), _Leave(self)
        for entry, hook in (*((each, enter) for each in entries), *((each, enter_part) for each in parts)):
            if isinstance(entry, torch.jit.ScriptModule):
                continue
            gate.take(entry, hook, self._handles)
            self._handles.append(entry.register_forward_hook(leave, always_call=True))

    def hook_layers(self, layers: Sequence[nn.Module]) -> None:
        """`layers`: the decoder layers, in order; those that were hooked before are no more."""
        self._remove_boundaries()
        self._hooks.clear()
        self.count = len(layers)
        for index, layer in enumerate(layers):
            if not isinstance(layer, torch.jit.ScriptModule):
                enter, _ = self._hooks[index] = _EnterLayer(self, index), _LeaveLayer(self, index)
                self._boundaries.append(layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        self._layers = [weakref.ref(layer) for layer in layers]

    def streams(self, layer: int, here: bool) -> None:
        """Notes whether a layer streams: then it is left, too, and the compiler's graph breaks at both."""
        if (found := self._hooks.get(layer)) is None:
            return
        enter, leave = found
        enter.opaque = here
        if not here and layer in self._leaving:
            self._leaving.pop(layer).remove()
        elif here and layer not in self._leaving and (module := self._layers[layer]()) is not None:
            self._leaving[layer] = module.register_forward_hook(leave)

    def unhook(self) -> None:
        self._unhooked = True
        remove_all(self._handles)
        self._remove_boundaries()

    def _remove_boundaries(self) -> None:
        remove_all(self._boundaries)
        while self._leaving:
            self._leaving.popitem()[1].remove()

    def running(self) -> bool:
        """Whether a forward of the model runs now, on any thread."""
        self.forget_interrupted(sys._getframe())
        return self.weights.group.leases > self._turns.leases

    def check_none_runs(self, gate: Gate) -> None:
        """ModelInUse where a forward of the model runs on any thread. None begins until the gate is opened, which is
        closed now."""
        with self._entry:
            self._gate = gate  # for those that have passed it, and have no lease yet
        if self.running() or gate.users(_ENTER):
            raise ModelInUse(f"a forward of {gate.name} is running: release() it afterwards")

    def forget(self) -> None:
        """The model is gone, so no forward of it runs: what this thread still holds for one was interrupted."""
        self.forget_interrupted(None)

    def _enter(self, call: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before an outermost forward. `call`: the id of its frame."""
        outermost, layers = self.outermost, self.layers
        outermost.call = call  # before it holds anything
        if layers.bound:  # before the lease: layers may have to be moved for it
            outermost.turn = Turn()
            layers.prepare(outermost.turn)
        lease = outermost.lease = self._lease()
        with self._entry:
            if free := self._gate is None:
                lease.open(self.weights.group)
        while not free:
            free = self._open_behind_gate(lease)
        if self._unhooked:  # since this call began
            self._drop()
            return
        if self.chaos is not None:
            with self._moving:
                self._note_gradients()
        self._before(args, kwargs)
        if layers.bound:
            outermost.turn = outermost.turn or Turn()  # layers have begun to stream in this forward
            layers.begin(outermost.turn)
        self.weights.use(None)

    def _open_behind_gate(self, lease: ForwardLease) -> bool:
        """Opens the lease of a forward, never while a gate holds it up: whoever has closed one and finds no lease may
        rely on it. False where it was held up, and one may have been closed again."""
        with self._entry:
            gate = self._gate
            if gate is None or not gate.is_closed:
                lease.open(self.weights.group)
                return True
        if gate.wait():
            return False
        lease.open(self.weights.group)
        return True

    def leave(self) -> None:
        """The outermost forward of this thread has ended, or was interrupted."""
        turn = self.outermost.turn
        try:
            self._after()
            if turn is not None:
                self.layers.end(turn)
        finally:
            self._drop()

    def _drop(self) -> None:
        """Gives back what the outermost forward of this thread holds."""
        outermost = self.outermost
        if outermost.lease is not None:
            outermost.lease.close()
        if outermost.turn is not None:
            self._turns.end(outermost.turn)
        outermost.lease = outermost.turn = None
        outermost.call = 0  # last: what is interrupted before is done again

    def act(self, chaos: Chaos) -> None:
        """Between two layers pages move."""
        lease = current()
        if lease is None:
            return
        self._note_gradients()
        with self._moving:
            others = self._learning - {threading.get_ident()}
            weights = () if others and self._in_graphs() else self.weights.all_ranges()
            chaos.act(weights, lease.ranges)
        chaos.pull(self._levers)

    def _note_gradients(self) -> None:
        if torch.is_grad_enabled():
            self._learning.add(threading.get_ident())

    def forget_interrupted(self, frame: FrameType | None) -> bool:
        """Is `frame`, or one of its callers, the outermost forward of this thread? If it is not, and there is one, that
        was interrupted: what it holds is given back."""
        call = self.outermost.call
        if not call:
            return False
        while frame is not None:
            if id(frame) == call and frame.f_code is CALL:  # another frame may be where that of a call was
                return True
            frame = frame.f_back
        self.leave()
        return False


class Layers(Protocol):
    """What is told of forwards and of decoder layers; `enter` returns what the layer is read from, None for itself."""

    @property
    def bound(self) -> Sized:
        """The layers that are read from slots. `prepare`, `begin` and `end` are called only where there are any."""

    @property
    def inside(self) -> int | None:
        """The layer that runs, by this or another thread, and reads what `enter` has returned."""

    def capturing(self) -> bool:
        """Is what this thread does being captured? Then `enter` is called of each layer, else of those that stream."""

    def prepare(self, turn: Turn) -> None: ...
    def begin(self, turn: Turn) -> None: ...
    def end(self, turn: Turn) -> None: ...
    def enter(self, layer: int) -> Range | None: ...
    def leave(self, layer: int) -> None: ...


class _Outermost(threading.local):
    """The outermost forward of one model that runs on a thread: the id of its frame, 0 where there is none, and what it
    holds. That is gone with the thread, or the model."""

    call = 0
    turn: Turn | None = None
    lease: ForwardLease | None = None


class _Enter(Hook):
    """Before a forward, which as a rule is nested: that is found out here, in one call. `whole`: is it one of the whole
    model, whose arguments say what it works on?"""

    def __init__(self, forwards: Forwards, *, whole: bool) -> None:
        self._forwards = forwards
        self._whole = whole

    def __call__(self, module: object, args: Any, kwargs: Any = _NO_KEYWORDS) -> None:
        # Without keywords where it was removed after the call had begun.
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # as `is_compiling`, in one call
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not CALL:  # the call that the hook is of
            frame = frame.f_back
        call, forwards = id(frame), self._forwards
        if outermost := forwards.outermost.call:
            caller = frame and frame.f_back
            while caller is not None and not (id(caller) == outermost and caller.f_code is CALL):
                caller = caller.f_back  # as `forget_interrupted`
            if caller is not None:
                return
            forwards.leave()
        try:
            forwards._enter(call, *((args, kwargs) if self._whole else ((), {})))
        except PoolExhausted as error:  # what changes before a forward needs more pages than there are
            raise torch.OutOfMemoryError(str(error)) from error


class _Leave(Hook):
    """After a forward, however it ended."""

    def __init__(self, forwards: Forwards) -> None:
        self._forwards = forwards

    def __call__(self, module: object, args: object, result: object = None) -> None:
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            return
        if call := self._forwards.outermost.call:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code is not CALL:
                frame = frame.f_back
            if id(frame) == call:
                self._forwards.leave()
                if result is None:  # where it raised, torch calls this while it handles that
                    error = sys.exc_info()[1]
                    if isinstance(error, torch.OutOfMemoryError):
                        self._forwards.exhausted(error)


class _EnterLayer(Hook):
    """Before a decoder layer: what may change under a running forward changes here. It is called for each token: so
    what it does is here, in one call, and calls what there is to do. `opaque`: the compiler breaks its graph at it, see
    hook_base.py, Note [Streaming and torch.compile]."""

    opaque = False

    def __init__(self, forwards: Forwards, layer: int) -> None:
        self._forwards = forwards
        self._layer = layer

    def __call__(self, *_: Any) -> None:
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # as `is_compiling`, in one call
            if self.opaque:
                opaquely(self)
            return
        forwards, weights, layer = self._forwards, self._forwards.weights, self._layer
        if (span := forwards.here.span) is not None and layer not in span:  # it only passes its input through
            return
        if forwards.chaos is not None:
            forwards.act(forwards.chaos)
        # Did another thread find no pages? This one may have some that it can do without.
        if weights.device.page_request:
            forwards.yield_pages()
        # What does not stream reads its own addresses; where that is captured the layers have a say in it.
        slot = forwards.layers.enter(layer) if self.opaque or forwards.layers.capturing() else None
        if slot is None:
            weights.use(layer)
        else:
            slot.note_use(weights.stream(), False)


class _LeaveLayer(Hook):
    """After a decoder layer that streams, as `_EnterLayer`."""

    def __init__(self, forwards: Forwards, layer: int) -> None:
        self._forwards = forwards
        self._layer = layer

    def __call__(self, *_: Any) -> None:
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            opaquely(self)
        elif self._forwards.layers.inside == self._layer:
            self._forwards.layers.leave(self._layer)


_ENTER: Final = Forwards._enter.__code__
