"""A gate in front of a model: calls of its modules wait while its weights change memory.

Note [Forwards without a lease]
    `release()` and all that acts on a managed model find a forward by its lease. A forward that began before there were
    hooks has none, nor has a compiled one, nor the call of a single layer. So `manage()` and `release()` first close a
    gate: every module gets a pre-hook, at which calls on other threads wait. Calls that were inside already are found
    on the stacks of all threads. They go on, through calls of inner modules too, and `manage()` waits until they have
    returned. It waits for a while: a call may itself wait for one that waits at the gate.
    `generate()` between two forwards is not inside. Its next forward waits at the gate, then runs as any forward of a
    managed model, with the cache that it has.

Note [The gate and the hooks of a model]
    torch copies the list of a module's pre-hooks when a call begins. A call that waits at the gate would therefore miss
    hooks that are registered meanwhile. So the hooks of a managed model take the place of the gate's (`take`), which
    calls them on behalf of whoever waited.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from types import CodeType, FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...allocator import _native
from ...allocator.errors import ModelInUse
from ...allocator.interrupts import Guarded, guarded
from ...offload.policy.tuning import DEFAULT, Waiting
from .stacks import stack_of, threads

_CALL: Final = "_call_impl"  # of nn.Module, as code that the compiler made of it is called, too


class Gate:
    """Holds up calls of a model's modules on all threads but the one that closes it."""

    def __init__(
        self, model: nn.Module, waiting: Waiting = DEFAULT.waiting, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: by which it is waited for forwards no longer."""
        self._patience = waiting
        self._clock = clock
        self.name = type(model).__name__
        self._modules = {id(module): module for module in model.modules()}
        self._doors: dict[int, tuple[_Door, RemovableHandle]] = {}  # by the id of the module
        self._owner = threading.get_ident()
        self._process = os.getpid()
        self._closed = False
        self._opened = threading.Event()
        self._waiting: set[int] = set()  # threads

    def closed(self) -> Guarded[Gate]:
        """Within it the gate is closed."""
        return guarded(self._close, self._open)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def take(self, module: nn.Module, hook: Callable[..., None], handles: list[RemovableHandle]) -> None:
        """Makes `hook(module, args, kwargs)` a forward pre-hook of the module, the first one, and appends what removes
        it to `handles`. The gate is closed; see Note [The gate and the hooks of a model]."""
        door, handle = self._doors[id(module)]
        handles.append(handle)  # first: whoever is interrupted removes it
        door.then = hook

    def wait_until_unused(self) -> None:
        """Returns when no thread is inside of a forward. ModelInUse where this thread is, or where another one still is
        after a while (`Waiting.gate`)."""
        if self.inside(sys._getframe()):
            raise ModelInUse(
                f"manage() was called within a forward of {self.name}, which reads its weights: call it before or "
                "after the forward"
            )
        patience = self._patience.gate
        deadline = self._clock() + patience
        while users := self.users():
            if self._clock() > deadline:
                raise ModelInUse(
                    f"thread {users[0]} has been running a forward of {self.name} for the {patience:.0f} s that "
                    "manage() waited: call manage() again when it has ended. If that forward waits for another one of "
                    "the same model, call manage() before both"
                )
            time.sleep(self._patience.gate_look)

    def users(self, entering: CodeType | None = None) -> list[int]:
        """The threads that run a forward now, this one too, and do not wait at the gate. What has called only
        `entering`, a hook, has not begun."""
        return [
            thread
            for thread in threads()
            if thread not in self._waiting and any(map(self._is_call, _begun(stack_of(thread), entering)))
        ]

    def inside(self, frame: FrameType | None) -> bool:
        """Is one of the callers of this frame a forward?"""
        while frame is not None:
            if self._is_call(frame):
                return True
            frame = frame.f_back
        return False

    def wait(self) -> bool:
        """For a pre-hook: returns when the gate is open, at once where the module is called by a forward of the model.
        Is it open?"""
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
            if not isinstance(module, torch.jit.ScriptModule):  # which can have no hooks
                door = _Door(self)
                handle = module.register_forward_pre_hook(door, prepend=True, with_kwargs=True)
                self._doors[id(module)] = door, handle
        return self

    def _open(self, failed: bool) -> None:
        """May be called twice."""
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
        """Is it the call, or the `forward`, of a module of the model?"""
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
    """Who has called the module whose hook is running."""
    while frame is not None and frame.f_code.co_name != _CALL:
        frame = frame.f_back
    return frame and frame.f_back


def _begun(stack: Iterable[FrameType], entering: CodeType | None) -> Iterator[FrameType]:
    """The frames of a stack, the innermost first, without the calls of modules that have reached only that hook."""
    at_hook = False
    for frame in stack:
        if frame.f_code is entering:
            at_hook = True
        elif at_hook and frame.f_code.co_name == _CALL:
            at_hook = False
        else:
            yield frame
