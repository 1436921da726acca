"""A gate in front of a model: calls of its modules wait while its weights change memory.

Note [Forwards without a lease]
    `release()` and all that acts on a managed model find a forward by its lease. `manage()` and `release()` first close
    a gate: every module gets a pre-hook, at which calls on other threads wait. A forward that began before there were
    hooks has no lease, nor has a compiled one: nobody sees it, so a program must not manage or release a model that
    another thread runs so (docs/limits.md). Its calls of inner modules pass the gate, so that it ends.
    `generate()` between two forwards is not inside. Its next forward waits at the gate, then runs as any forward of a
    managed model, with the cache that it has.

Note [The gate and the hooks of a model]
    torch copies the list of a module's pre-hooks when a call begins. A call that waits at the gate would therefore miss
    hooks that are registered meanwhile. So the hooks of a managed model take the place of the gate's (`take`), which
    calls them for the calls that waited.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...allocator import _native
from ...allocator.errors import ModelInUse
from ...allocator.interrupts import Guarded, guarded

_CALL: Final = "_call_impl"  # nn.Module's, and the name of code that the compiler makes of it


class Gate:
    """Holds up calls of a model's modules on all threads but the one that closes it."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self._modules = {id(module): module for module in model.modules()}
        self._doors: dict[int, tuple[_Door, RemovableHandle]] = {}  # by the id of the module
        self._owner = threading.get_ident()
        self._process = os.getpid()
        self._closed = False
        self._opened = threading.Event()
        self._waiting: set[int] = set()  # threads

    def closed(self) -> Guarded[Gate]:
        """Closes the gate within a `with` block."""
        return guarded(self._close, self._open)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def take(self, module: nn.Module, hook: Callable[..., None], handles: list[RemovableHandle]) -> None:
        """Makes `hook(module, args, kwargs)` a forward pre-hook of the module, the first one, and appends what removes
        it to `handles`. The gate is closed; see Note [The gate and the hooks of a model]."""
        door, handle = self._doors[id(module)]
        handles.append(handle)  # first, so that it is removed after an interrupt
        door.then = hook

    def check_outside(self) -> None:
        """Raises ModelInUse where this thread is inside of a forward."""
        if self.inside(sys._getframe()):
            raise ModelInUse(
                f"manage() was called within a forward of {self.name}, which reads its weights: call it before or "
                "after the forward"
            )

    def inside(self, frame: FrameType | None) -> bool:
        """Is one of the callers of this frame a forward?"""
        while frame is not None:
            if self._is_call(frame):
                return True
            frame = frame.f_back
        return False

    def wait(self) -> bool:
        """Waits, in a pre-hook, until the gate is open; not at all where a forward of the model calls the module.
        Returns whether it is open."""
        thread = threading.get_ident()
        if not self._closed or thread == self._owner or self.inside(_caller(sys._getframe())):
            return not self._closed
        self._waiting.add(thread)
        try:
            while self._closed and self._process == os.getpid():  # the child of a fork lacks the thread that opens it
                self._opened.wait(1)
        finally:
            self._waiting.discard(thread)
        return not self._closed

    def _close(self) -> Gate:
        self._closed = True
        for module in self._modules.values():
            if not isinstance(module, torch.jit.ScriptModule):  # scripted modules can have no hooks
                door = _Door(self)
                handle = module.register_forward_pre_hook(door, prepend=True, with_kwargs=True)
                self._doors[id(module)] = door, handle
        return self

    def _open(self, failed: bool) -> None:
        """Opens the gate. Idempotent."""
        self._closed = False
        self._opened.set()
        for module in self._modules.values():
            for key, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, _Door) and hook.gate is self:
                    if hook.then is not None:
                        module._forward_pre_hooks[key] = hook.then
                    else:
                        module._forward_pre_hooks_with_kwargs.pop(key, None)
                        del module._forward_pre_hooks[key]
        self._modules.clear()
        self._doors.clear()

    def _is_call(self, frame: FrameType) -> bool:
        """Is the frame the call, or the `forward`, of a module of the model?"""
        code = frame.f_code
        if code.co_name not in (_CALL, "forward") or not code.co_argcount:
            return False
        return id(_native.first_argument(frame)) in self._modules


class _Door:
    """The gate's hook of one module, which calls what took its place meanwhile."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.then: Callable[..., None] | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any] = MappingProxyType({})) -> None:
        # torch gives no keywords to a hook that was removed after the call had begun.
        if not torch.compiler.is_compiling():
            self.gate.wait()
            if self.then is not None:
                self.then(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # does nothing; see hook_base.py, Note [Copies of a managed model]


def _caller(frame: FrameType | None) -> FrameType | None:
    """The frame that has called the module whose hook is running."""
    while frame is not None and frame.f_code.co_name != _CALL:
        frame = frame.f_back
    return frame and frame.f_back
