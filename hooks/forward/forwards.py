"""What happens around the forwards of a managed model: its lease, its turn at the slots, its hooks, and what an
out-of-memory error of one says beside the core's words: changes with which that forward would have had room.

Note [Leases and interrupts]
    A lease is opened before the outermost forward of the model on a thread and closed after it, also when it raises.
    But torch runs no hook for an exception that is no `Exception`, and Ctrl-C is none. So each lease remembers which
    call of the module it belongs to. A call that is no longer on the stack was interrupted: its lease is closed when
    the same thread next runs the model, or ends. A call within one that is on the stack is nested, and needs nothing.

Note [When help is asked for]
    The core words the error where no Python may run (heap_report.cpp), and most programs that catch one never read it.
    So what would help is worked out when the message is read, from sizes that were noted when it was raised. The
    message is a str whose text grows then; code that looks into it without `str()`, as accelerate does into `args`,
    sees the core's words.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from ...allocator._native import Range
from ...allocator.errors import ForkedProcess, ModelInUse, PoolExhausted
from ..weights.ranges import Weights
from .gate import Gate
from .hook_base import CALL, CallKeywords, Hook, LocalLayers, opaquely, remove_all
from .lease import ForwardLease, Turn, Turns, caches

_NO_KEYWORDS: Final[Mapping[str, Any]] = {}
Ask = Callable[[], Sequence[str]]


class ForwardEvents(NamedTuple):
    """What is called around forwards of a model: `lease` makes the lease of one; `before(args, kwargs)` at the
    beginning of each outermost one, under its lease, `after()` at its end; `yield_pages()` between two layers when
    other threads request pages; `exhausted` with an out-of-memory error of one."""

    lease: Callable[[], ForwardLease]
    before: Callable[[Sequence[Any], Mapping[str, Any]], None]
    after: Callable[[], None]
    yield_pages: Callable[[], None]
    exhausted: Callable[[torch.OutOfMemoryError], None]


class Forwards:
    """The hooks of one model, and the forwards of it that are running."""

    def __init__(
        self,
        weights: Weights,
        events: ForwardEvents,
        turns: Turns,
        layers: Layers,
        local_layers: LocalLayers,
    ) -> None:
        """`layers` is called for each decoder layer that runs. `local_layers`: which layers this process runs."""
        # called before each decoder layer: the one point at which `ballonet.testing` moves pages
        self.at_layer: Callable[[], None] | None = None
        self.count = 0  # decoder layers that are hooked
        self._process = os.getpid()
        self.weights = weights
        self._lease, self._before, self._after, self.yield_pages, self.exhausted = events
        self.local_layers = local_layers
        self._turns = turns
        self.layers = layers
        self.outermost = _Outermost()
        self._gate: Gate | None = None
        self._entry = threading.Lock()  # held while a lease is opened and the gate is read
        self._unhooked = False
        self._handles: list[RemovableHandle] = []
        self._layers: list[weakref.ref[nn.Module]] = []
        self._boundaries: list[RemovableHandle] = []
        self._hooks: dict[int, tuple[EnterLayer, LeaveLayer]] = {}
        self._leaving: dict[int, RemovableHandle] = {}  # only layers that stream need one

    def hook(self, gate: Gate, entries: Iterable[nn.Module], parts: Iterable[nn.Module] = ()) -> None:
        """Hooks `entries`, the modules that a forward may begin with, and `parts`, which may be called by themselves
        without being an iteration of the model. The lease spans their earlier hooks. `gate` is closed, so that no
        forward begins before the model is ready.

        Scripted modules can have no hooks; their forwards hold no lease.
        """
        enter, enter_part, leave = _Enter(self, whole=True), _Enter(self, whole=False), _Leave(self)
        for entry, hook in (*((module, enter) for module in entries), *((part, enter_part) for part in parts)):
            if isinstance(entry, torch.jit.ScriptModule):
                continue
            gate.take(entry, hook, self._handles)
            self._handles.append(entry.register_forward_hook(leave, always_call=True))

    def hook_layers(self, layers: Sequence[nn.Module]) -> None:
        """Hooks `layers`, the decoder layers in order, in place of those that were hooked before."""
        self._remove_boundaries()
        self._hooks.clear()
        self.count = len(layers)
        for index, layer in enumerate(layers):
            if not isinstance(layer, torch.jit.ScriptModule):
                enter, _ = self._hooks[index] = EnterLayer(self, index), LeaveLayer(self, index)
                self._boundaries.append(layer.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        self._layers = [weakref.ref(layer) for layer in layers]

    def streams(self, layer: int, on_host: bool) -> None:
        """Notes whether a layer streams: then it has a hook after it, too, and the compiler's graph breaks at both."""
        if (pair := self._hooks.get(layer)) is None:
            return
        enter, leave = pair
        enter.opaque = on_host
        if not on_host and layer in self._leaving:
            self._leaving.pop(layer).remove()
        elif on_host and layer not in self._leaving and (module := self._layers[layer]()) is not None:
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
        """Raises ModelInUse where a forward of the model runs on any thread. `gate` is closed, so none begins."""
        with self._entry:
            self._gate = gate  # for forwards that have passed it, and have no lease yet
        if self.running():
            raise ModelInUse(f"a forward of {gate.name} is running: release() it afterwards")

    def forget(self) -> None:
        """Gives back what this thread holds for a forward that was interrupted; the model is gone, so none runs."""
        self.forget_interrupted(None)

    def _enter(self, call: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Begins an outermost forward. `call`: the id of its frame. ForkedProcess."""
        if self._process != os.getpid():
            raise ForkedProcess("a managed model was called")
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
            self.leave(ran=False)
            return
        cache = kwargs["cache"] if "cache" in kwargs else None  # noqa: SIM401 (without a call, for each token)
        if cache is None and "past_key_values" in kwargs:
            cache = kwargs["past_key_values"]
        if cache is not None and id(cache) not in caches:
            lease.begin(cache)
        self._before(args, kwargs)
        if layers.bound:
            outermost.turn = outermost.turn or Turn()  # layers have begun to stream in this forward
            layers.begin(outermost.turn)
        if None in self.weights.ranges:
            self.weights.use(None)

    def _open_behind_gate(self, lease: ForwardLease) -> bool:
        """Opens the lease of a forward, but not while the gate is closed: a thread that has closed it and finds no
        lease may rely on that. False where the forward had to wait, as the gate may be closed again."""
        with self._entry:
            gate = self._gate
            if gate is None or not gate.is_closed:
                lease.open(self.weights.group)
                return True
        if gate.wait():
            return False
        lease.open(self.weights.group)
        return True

    def leave(self, *, ran: bool = True) -> None:
        """Ends the outermost forward of this thread, which has returned or was interrupted: gives back what it holds.
        One that has not `ran` was not begun."""
        outermost = self.outermost
        turn = outermost.turn
        try:
            if ran:
                self._after()
                if turn is not None:
                    self.layers.end(turn)
        finally:
            if outermost.lease is not None:
                outermost.lease.close()
            if turn is not None:
                self._turns.end(turn)
            outermost.lease = outermost.turn = None
            outermost.call = 0  # last: an interrupt before this has all of it done again

    def between_layers(self) -> None:
        """Does what is to be done between two layers that no hook runs between."""
        if self.at_layer is not None:
            self.at_layer()
        if self.weights.device.page_request:
            self.yield_pages()

    def forget_interrupted(self, frame: FrameType | None) -> bool:
        """Is `frame`, or one of its callers, the outermost forward of this thread? If not, and there is one, it was
        interrupted: gives back what it holds."""
        call = self.outermost.call
        if not call:
            return False
        while frame is not None:
            if id(frame) == call and frame.f_code is CALL:  # an id may be another frame's by now
                return True
            frame = frame.f_back
        self.leave()
        return False


class Layers(Protocol):
    """Is called at the beginning and end of forwards and of decoder layers. `enter` returns the slot that the layer
    reads, None for its own addresses."""

    @property
    def bound(self) -> Sized:
        """The layers that are read from slots. Without any, `prepare`, `begin` and `end` are not called."""

    @property
    def inside(self) -> int | None:
        """The layer that runs, on this or another thread, and reads the slot that `enter` has returned."""

    def capturing(self) -> bool:
        """Does this thread capture? Then `enter` is called for each layer, else for those that stream."""

    def prepare(self, turn: Turn) -> None: ...
    def begin(self, turn: Turn) -> None: ...
    def end(self, turn: Turn) -> None: ...
    def enter(self, layer: int, call: CallKeywords | None) -> Range | None: ...
    def leave(self, layer: int) -> None: ...


class _Outermost(threading.local):
    """The outermost forward of one model on this thread: the id of its frame, 0 where there is none, and what it holds.
    Ends with the thread, or the model."""

    call = 0
    turn: Turn | None = None
    lease: ForwardLease | None = None


class _Enter(Hook):
    """The hook before a forward, which as a rule is nested: that is found out in one call. `whole`: is it a forward of
    the whole model, whose arguments say what it works on?"""

    def __init__(self, forwards: Forwards, *, whole: bool) -> None:
        self._forwards = forwards
        self._whole = whole

    def __call__(self, module: object, args: Any, kwargs: Any = _NO_KEYWORDS) -> None:
        # torch gives no keywords to a hook that was removed after the call had begun.
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # `is_compiling`, in one call
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not CALL:  # the call that the hook is of
            frame = frame.f_back
        call, forwards = id(frame), self._forwards
        if outermost := forwards.outermost.call:
            caller = frame and frame.f_back
            while caller is not None and not (id(caller) == outermost and caller.f_code is CALL):
                caller = caller.f_back  # inlined `forget_interrupted`
            if caller is not None:
                return
            forwards.leave()
        try:
            forwards._enter(call, *((args, kwargs) if self._whole else ((), {})))
        except PoolExhausted as error:  # a change before the forward needs more pages than there are
            raise torch.OutOfMemoryError(str(error)) from error


class _Leave(Hook):
    """The hook after a forward, however it ended."""

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
                if result is None:  # the forward raised, and torch calls this hook while it handles the error
                    error = sys.exc_info()[1]
                    if isinstance(error, torch.OutOfMemoryError):
                        self._forwards.exhausted(error)


class EnterLayer(Hook):
    """The hook before a decoder layer: gives pages that other threads request, copies a streamed
    layer to its slot, and tells the core which pages the layer reads. Runs for each token, so it is one call, which
    makes others only where they have something to do. `opaque`: the compiler breaks its graph at this hook, see
    hook_base.py, Note [Streaming and torch.compile]."""

    opaque = False

    def __init__(self, forwards: Forwards, layer: int) -> None:
        self._forwards = forwards
        self._layer = layer

    def __call__(self, module: object = None, args: Any = (), kwargs: Any = None) -> Any:
        # There are no keywords from the compiler, nor from torch for a hook that was removed since the call began.
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:  # `is_compiling`, in one call
            if self.opaque:
                opaquely(self)
            return None
        forwards, weights, layer = self._forwards, self._forwards.weights, self._layer
        if (span := forwards.local_layers.span) is not None and layer not in span:  # passes its input through
            return None
        if forwards.at_layer is not None:
            forwards.at_layer()
        # Another thread found no free pages: this one may have some to spare.
        if weights.device.page_request:
            forwards.yield_pages()
        # A resident layer reads its own addresses, but a capture is announced to every layer.
        if not self.opaque and not forwards.layers.capturing():
            if opened := weights.ranges.get(layer):  # `Weights.use`, without its call
                stream = 0 if weights.standin else weights.stream()
                for range_ in opened:
                    range_.note_use(stream, False)
            return None
        call = None if kwargs is None else CallKeywords(kwargs)
        slot = forwards.layers.enter(layer, call)
        if slot is None:
            weights.use(layer)
            return None
        slot.note_use(weights.stream(), False)
        return None if call is None else (args, call)


class LeaveLayer(Hook):
    """The hook after a decoder layer that streams: frees its slot. The compiler breaks its graph at it, too."""

    def __init__(self, forwards: Forwards, layer: int) -> None:
        self._forwards = forwards
        self._layer = layer

    def __call__(self, *_: Any) -> None:
        if is_dynamo_compiling() or torch.compiler._is_compiling_flag:
            opaquely(self)
        elif self._forwards.layers.inside == self._layer:
            self._forwards.layers.leave(self._layer)


class Message(str):
    """The core's words, and after the first `str()` what `ask` returns, too. Pickled as the text."""

    _ask: Ask | None
    _text: str

    def __new__(cls, words: str, ask: Ask) -> Self:
        made = super().__new__(cls, words)
        made._ask, made._text = ask, words
        return made

    def __str__(self) -> str:
        ask, self._ask = self._ask, None
        if ask is not None and (changes := ask()):
            self._text = f"{self._text}. By a plan of this forward it fits with {', or '.join(changes)}"
        return self._text

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


def explain(error: torch.OutOfMemoryError, ask: Ask) -> None:
    """Makes the error's message say what would help. Idempotent."""
    if error.args and isinstance(error.args[0], str) and not isinstance(error.args[0], Message):
        error.args = (Message(error.args[0], ask), *error.args[1:])
