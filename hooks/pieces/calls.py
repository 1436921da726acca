"""Where a managed model's forwards within `generate()` and in loops go to its pieces; cuDNN's attention is off
meanwhile.

Note [Forward of a class]
    The `forward` of the model's class is wrapped, not that of the model, so that a copy or a pickle takes nothing
    along; the hooks of the model stay around it. A direct call of the model is passed on: a program may keep what that
    returns, and may look at modules on its way. With the last model the wrapper is removed; if another one has been put
    around it meanwhile, it stays below and passes calls on.

Note [A switch of the process]
    cuDNN's attention compiles a plan for each new length, 30 to 46 ms of the host, and does not repeat its bits; torch
    prefers it on Hopper. torch's switch is the process's: turned around a call it would change attention that other
    threads compute. So it is off from the first `manage()` with pieces on a GPU to the end of the last, prefill too.
    `torch.backends.cuda.enable_cudnn_sdp` is wrapped meanwhile: what the user sets is obeyed at once, and stays.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.backends import cuda

from ...allocator.interrupts import Finalizer
from ...allocator.patches import SharedPatch, Undo
from ..compat import tokens_of_prompt
from ..kv import generation
from .plans import sets_between
from .runner import PieceRunner


class PiecesCall:
    """One call of `generate()` of a model that runs by pieces: a `generation.GenerateCall`."""

    def __init__(self, runner: PieceRunner, model: Any, args: Any, kwargs: Any) -> None:
        self.model = model
        self.runner = runner
        self.eager = False  # is all of the call, as something watches the model's modules?
        self.runs = True  # until it ends
        self.settable = sets_between(args, kwargs)  # may code of the user change the model between two tokens?
        self.forwards = 0  # so far
        # Tokens that are likely to be made of each sequence: a model that makes its own cache tells `prepared` nothing.
        self._new = kwargs.get("max_new_tokens") or LoopCall.left
        runner.calls[id(self)] = self

    def prepared(self, given: dict[str, Any]) -> None:
        config = given["generation_config"]
        self._new = config.max_new_tokens or given["max_cache_length"] + 1 - tokens_of_prompt(
            config, given["model_kwargs"]
        )

    def ended(self, result: Any) -> None:
        self.broken_off()

    def broken_off(self) -> None:
        self.runs = False
        self.model = None  # what was recorded last is known by this object, which must not keep the model

    @property
    def left(self) -> int:
        """Forwards that are likely to come, with the present one."""
        return self._new - self.forwards + 1


class LoopCall:
    """A generation loop of a model that runs by pieces."""

    left = 1 << 30  # forwards that are likely to come
    settable = True  # a program goes on beside it

    def __init__(self, runner: PieceRunner, cache: Any) -> None:
        self.cache = weakref.proxy(cache)
        self.eager = False  # are all steps, as something watches the model's modules, or they cannot be cut?
        runner.calls[id(self)] = self

    @property
    def runs(self) -> bool:
        """Has any request of it begun, and not ended?"""
        try:
            return bool(getattr(self.cache.user(), "runs", False))
        except ReferenceError:  # its cache is gone
            return False


def attach(model: nn.Module, runner: PieceRunner) -> Callable[[], object]:
    """Has forwards of the model within `generate()` run by pieces, until the returned idempotent function is called or
    the model is collected."""
    _runners.add(id(model), runner)
    owner = next(kind for kind in type(model).__mro__ if "forward" in vars(kind))
    _runners.also(owner, functools.partial(_patch_forward, owner))
    detach = generation.follow(model, functools.partial(PiecesCall, runner))
    return Finalizer(model, detach, functools.partial(_runners.remove, id(model)), runner.close)


_runners: Final = SharedPatch[PieceRunner](lambda: iter(()))  # by the id of a live model


def _patch_forward(owner: Any) -> Undo:
    stock = vars(owner)["forward"]

    @functools.wraps(stock)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if args or torch.compiler.is_compiling():
            return stock(model, *args, **kwargs)
        if (cache := kwargs.get("cache")) is not None and getattr(cache, "decodes_by_request", False):
            runner = _runners.get(id(model))
            if runner is None:
                return stock(model, **kwargs)
            return runner.step(stock, model, kwargs, _loop_of(runner, cache))
        if (call := _call_of(model)) is None:
            return stock(model, **kwargs)
        call.forwards += 1
        return call.runner.forward(stock, model, kwargs, call)

    def undo() -> None:
        if vars(owner).get("forward") is forward:
            owner.forward = stock

    owner.forward = forward
    return undo


_loops: Final = weakref.WeakKeyDictionary[Any, LoopCall]()  # by their caches


def _loop_of(runner: PieceRunner, cache: Any) -> LoopCall:
    call = _loops.get(cache)
    if call is None:
        call = _loops[cache] = LoopCall(runner, cache)
    return call


def _call_of(model: Any) -> PiecesCall | None:
    """Returns the innermost call of `generate()` on this thread, if it is one of that model, and by pieces."""
    for call in reversed(generation.running()):
        if call.model is not model:
            return None
        if isinstance(call, PiecesCall):
            return call
    return None


def keep_off(model: nn.Module) -> Callable[[], object]:
    """Turns cuDNN's attention off until the returned idempotent function is called or the model is collected, and so
    for every other model. It is then as it was, or as the user has set it meanwhile."""
    _users.add(id(model), None)
    return Finalizer(model, partial(_users.remove, id(model)))


def _turn_off() -> Iterator[Undo]:
    stock: Any = cuda.enable_cudnn_sdp
    was_on = cuda.cudnn_sdp_enabled()
    set_by_user = False

    @functools.wraps(stock)
    def enable_cudnn_sdp(enabled: bool) -> None:
        nonlocal set_by_user
        stock(enabled)
        set_by_user = True

    def unwrap() -> None:
        if cuda.enable_cudnn_sdp is enable_cudnn_sdp:  # else another wrapper calls it
            cuda.enable_cudnn_sdp = stock

    def turn_on() -> None:
        if was_on and not set_by_user:
            stock(True)

    cuda.enable_cudnn_sdp = enable_cudnn_sdp
    yield unwrap
    yield turn_on
    stock(False)


_users: Final = SharedPatch[None](_turn_off)  # by the id of a live model
