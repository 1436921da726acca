"""Where a recorded forward leaves what graphs may hold: functions of transformers, replaced while a recording runs, or
while the rest of a forward is computed that was broken off in the middle of its graphs.

Note [Patches]
    `Cache.update`, the attention function that a module asks `AttentionInterface` for, and the mask functions by the
    names under which modelling files have them. The replacements act on a thread that records and pass all other calls
    on. They are put in with the first recording that runs and taken out with the last.

Note [Broken off]
    A graph cannot be replayed, a mask has come or gone, or there is no memory for a token: then the caches of some
    layers hold the new token already, and others do not. So the model's own forward runs from its beginning, and each
    call that was made before (an update, a mask, attention, a module that is never captured) returns what it returned
    then, instead of being made again. What lies between, which changes nothing, is computed a second time.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import masking_utils, modeling_utils

from ...allocator.interrupts import Guarded, guarded
from ...allocator.patches import Patches, SharedPatch, Undo
from ..compat import Cache
from . import batch
from .batch import BatchStep
from .recipe import EagerCall, Fresh, same_function
from .recorder import ForwardRecorder, RecordedLayers

_MASKS: Final = "create_"  # how the names of mask functions begin
_WARNS: Final = "warn_if_padding_and_no_attention_mask"  # looks at tokens of a prompt: the host waits for the device


class ResumedForward:
    """Stands where a recorder does, see `patches.recording`, and gives back what the calls that were made have
    returned."""

    def __init__(self, cache: Any, batch: BatchStep | None, done: Iterable[tuple[EagerCall, Any]]) -> None:
        """`cache`, `batch`: of the forward. `done`: the calls that were made, in order, with what they returned."""
        self.cache = cache
        self.batch = batch
        self.fine = True  # is attention cut out?
        self.new: tuple[Any, Any] | None = None  # see ForwardRecorder
        self._done = deque(done)
        self._thread = threading.get_ident()
        self._modules: list[Any] = [call.function for call, _ in self._done if call.kind == "module"]

    @property
    def records(self) -> bool:
        """Is there a call that is not to be made again?"""
        return bool(self._done) and threading.get_ident() == self._thread

    def call(self, kind: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns what the call has returned, if it is the next of those that were made; else makes it."""
        if self.records:
            call, result = self._done[0]
            if call.kind == kind and same_function(call.function, function):
                self._done.popleft()
                return result
        return function(*args, **kwargs)

    def aside(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes a call."""
        return function(*args, **kwargs)

    def found(self, tensor: Any) -> Fresh:
        """Says that attention reads what the cache has returned, as it was seen to."""
        return Fresh((0, 0), 0)

    def refuse(self, why: str) -> None:
        """Does nothing: there will be no recipe."""

    def add(self) -> None:
        """Has the modules among the calls return what they returned, until `remove`."""
        for module in self._modules:
            vars(module)["forward"] = functools.partial(self._forward, module, type(module).forward)

    def remove(self) -> None:
        for module in self._modules:
            vars(module).pop("forward", None)

    def _forward(self, module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.records and self._done[0][0].function is module:
            return self._done.popleft()[1]
        return stock(module, *args, **kwargs)


class _Thread(threading.local):
    recorder: ForwardRecorder | ResumedForward | None = None


_thread: Final = _Thread()


def _recorder() -> ForwardRecorder | ResumedForward | None:
    """The recorder of this thread, if the call that is about to be made has to be noted, or was made before."""
    recorder = _thread.recorder
    return recorder if recorder is not None and recorder.records else None


def recording(
    recorder: ForwardRecorder | ResumedForward, model: nn.Module, layers: RecordedLayers | ResumedForward, fine: bool
) -> Guarded[None]:
    """A `with` block in which a forward of `model` on this thread is recorded, or computed on. `fine`: attention is cut
    out; else only the modules that `layers` names are."""
    before = _thread.recorder

    def begin() -> None:
        _recording.add(id(recorder), fine)
        for file in {type(module).__module__ for module in model.modules()}:
            if file in sys.modules:
                _recording.also(file, functools.partial(_patch_masks, sys.modules[file]))
        if type(recorder.cache).update is not Cache.update:
            own: Any = type(recorder.cache)
            _recording.also(id(own), functools.partial(_patch_update, own))
        recorder.fine = fine
        layers.add()
        _thread.recorder = recorder
        if isinstance(recorder, ForwardRecorder):
            recorder.__enter__()  # type: ignore[no-untyped-call]

    def end(failed: bool) -> None:
        if isinstance(recorder, ForwardRecorder) and _get_current_dispatch_mode() is recorder:
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        _thread.recorder = before
        layers.remove()
        _recording.remove(id(recorder))

    return guarded(begin, end)


def _replace() -> Iterator[Undo]:
    patches = Patches()
    yield patches.restore
    patches.replace(Cache, "update", _update(vars(Cache)["update"]))
    interface = modeling_utils.AttentionInterface
    patches.replace(interface, "get_interface", _get_interface(vars(interface)["get_interface"]))
    model = modeling_utils.PreTrainedModel
    patches.replace(model, _WARNS, _warn(vars(model)[_WARNS]))


_recording: Final = SharedPatch[bool](_replace)  # by the id of a recorder


def _patch_update(owner: Any) -> Undo:
    patches = Patches()
    if "update" in vars(owner):
        patches.replace(owner, "update", _update(vars(owner)["update"]))
    return patches.restore


def _patch_masks(file: Any) -> Undo:
    patches, stock = Patches(), vars(masking_utils)
    for name, function in list(vars(file).items()):
        if name.startswith(_MASKS) and name in stock and function is stock[name]:
            patches.replace(file, name, _mask(function))
    return patches.restore


def _mask(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def create(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        return stock(*args, **kwargs) if recorder is None else recorder.call("mask", stock, args, kwargs)

    return create


def _warn(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def warn(*args: Any, **kwargs: Any) -> None:
        recorder = _recorder()
        if recorder is None:
            stock(*args, **kwargs)
        else:
            recorder.aside(stock, *args, **kwargs)

    return warn


def _update(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def update(cache: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        if recorder is None or not recorder.fine:
            return stock(cache, *args, **kwargs)
        if recorder.batch is not None:  # attention updates the cache, with the real rows
            recorder.new = args[:2]
            return args[:2]
        return recorder.call("update", stock, (cache, *args), kwargs)

    return update


def _get_interface(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def get_interface(*args: Any, **kwargs: Any) -> Any:
        attention = stock(*args, **kwargs)
        recorder = _recorder()
        if recorder is None or not recorder.fine:
            return attention

        @functools.wraps(attention)
        def attend(module: Any, query: Any, key: Any, value: Any, *more: Any, **given: Any) -> Any:
            recorder = _recorder()
            if recorder is None:
                return attention(module, query, key, value, *more, **given)
            if recorder.batch is not None:
                new, recorder.new = recorder.new or (key, value), None
                if new[0] is not key or new[1] is not value:
                    recorder.refuse("attention reads something else than the cache has returned")
                scale, dropout = given.get("scaling"), given.get("dropout", 0.0)
                own = recorder.batch, module.layer_idx, query, key, value, scale, dropout
                return recorder.call("attention", batch.attend, own, {}), None
            if not all(isinstance(recorder.found(part), Fresh) for part in (key, value)):
                recorder.refuse("attention reads something else than the cache has returned")
            return recorder.call("attention", attention, (module, query, key, value, *more), given)

        return attend

    return get_interface
