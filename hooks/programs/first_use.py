"""Manages every `PreTrainedModel` of a program at its first forward or `generate()`, also of a notebook by `%load_ext
ballonet`.

Note [First use]
    The entries are patched on the classes of transformers, not hooked on modules: a global forward hook of torch
    would run before each of the hundreds of submodules of each step. `generate()` and continuous batching count because
    they build their caches before the first forward. transformers itself is left alone until the program imports it.

Note [First uses that arrive together]
    One thread manages the model; the others wait at the entry, so that their `generate()` builds its cache for a
    managed model. The thread that manages it passes: `manage()` may run the model to measure it. Forwards that have
    begun in another way are not seen (hooks/forward/gate.py).

Note [A part before the whole]
    A program may use a part first: the encoder of a T5, the vision tower of a VLM, a reward model on the trunk of the
    policy. It is managed then, and when the model that has it inside is used, that one takes it over, weights and all:
    they move from where they lie. Of two models with a part in common, neither of which has the other inside, the one
    that generates text is managed, else the first one; a warning says what of the other is not.

Note [Left as it is]
    A model that cannot be managed, for want of pages as a rule, is left as torch made it, with one warning, and the
    program goes on. It is tried again at a later use, when it lies on another device, the budget has changed, or more
    pages are unused than when it was refused. That is checked once a second, with twice the pause after each refusal.
"""

from __future__ import annotations

import functools
import importlib.abc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from ...allocator import devices
from ...allocator.config import Config
from ...allocator.devices import set_budget
from ...allocator.errors import BallonetError, BudgetError, InstallError, PoolExhausted
from ...allocator.install import install, restore
from ...allocator.interrupts import guarded
from ...allocator.notices import warn
from ...allocator.patches import Patches
from ...allocator.units import format_size
from ..attaching import generators
from ..manage import has_inside, managed, overlapping
from ..managed import Managed, outcomes_on
from ..options import ManageOptions

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_ENTRIES: Final = {  # module of transformers → class and method through which a model is used
    "transformers.modeling_utils": ("PreTrainedModel", "__call__"),
    "transformers.generation.utils": ("GenerationMixin", "generate"),
    "transformers.generation.continuous_batching.continuous_api": ("ContinuousMixin", "init_continuous_batching"),
}
_LEAVES: Final = (
    "NOT managed: {0}: {1}. It runs as it would without ballonet, and is tried again when the budget or the free "
    "memory has grown"
)
_IN_PART: Final = "{0} is managed in part: {1} of it is managed with {2}, NOT managed is {3}"
_watching: FirstUse | None = None
_installed = False  # was it installed by loading, and not by the notebook itself?


class FirstUse:
    """Manages models at their first use, until `close()`. `managed`: those of them that still exist."""

    def __init__(
        self,
        options: ManageOptions | None = None,
        *,
        pause: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`options`: of `manage()`; by default those of the environment. `pause`: seconds between checks whether a
        refused model fits now, twice as long after each refusal (chosen). OptionError."""
        self._options = ManageOptions.of({}) if options is None else options
        self._pause = pause
        self._clock = clock
        self._taking: dict[int, _Taking] = {}  # by the id of a module
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._left: weakref.WeakKeyDictionary[Any, _Left] = weakref.WeakKeyDictionary()
        self._managed: weakref.WeakKeyDictionary[Any, weakref.ref[Managed]] = weakref.WeakKeyDictionary()
        self._patched = Patches()
        self._finder = _AfterImport({name: self._patch for name in _ENTRIES if name not in sys.modules})
        sys.meta_path.insert(0, self._finder)
        for name in _ENTRIES:
            if name in sys.modules:
                self._patch(sys.modules[name])

    @property
    def managed(self) -> list[Managed]:
        return [handle for reference in self._managed.values() if (handle := reference()) is not None]

    def close(self) -> None:
        """Removes the patches; managed models stay managed."""
        sys.meta_path.remove(self._finder)
        self._patched.restore()

    def _patch(self, module: ModuleType) -> None:
        class_name, method = _ENTRIES[module.__name__]
        owner = getattr(module, class_name)
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def entered(model: Any, *args: Any, **kwargs: Any) -> Any:
            if (model not in self._seen or self._may_fit(model)) and self._take(model):
                # the method may be another one now that the model is managed
                return getattr(owner, method)(model, *args, **kwargs)
            return original(model, *args, **kwargs)

        self._patched.replace(owner, method, entered)

    def _take(self, model: Any) -> bool:
        """Manages the model, or waits until another thread has; warns where it is refused. False where a compiler
        traces it, or this thread is managing it."""
        if torch.compiler.is_compiling() or not isinstance(model, nn.Module):
            return False
        mine = _Taking()
        parts = list(model.modules())  # a model inside this one is part of it

        def begin() -> _Taking:
            taking = self._taking.setdefault(id(model), mine)
            if taking is mine:
                self._taking.update(dict.fromkeys(map(id, parts), mine))
            return taking

        def end(failed: bool) -> None:
            for part in parts:
                if self._taking.get(id(part)) is mine:
                    del self._taking[id(part)]
            mine.done.set()

        with guarded(begin, end) as taking:
            if taking is mine:
                self._manage(model)
                self._seen.update(parts)
                return True
        return taking.wait()

    def _may_fit(self, model: Any) -> bool:
        """May the model be tried, the first time or again?"""
        left = self._left.get(model) if self._left else None
        return left is not None and left.may_fit(model)

    def _manage(self, model: Any) -> None:
        others = overlapping(model)
        if any(has_inside(other, model) for other, _ in others):
            return  # managed already, as it is or with the one around it
        left = self._left.pop(model, None)
        for other, _ in others:
            if not self._gives_way(other, model):
                self._note_part(model, other)
                return
        try:
            handle = managed(model, self._options, replaced=[made for _, made in others])
        except (BallonetError, PoolExhausted, torch.OutOfMemoryError) as error:
            self._left[model] = _Left(model, self._pause if left is None else 2 * left.pause, self._clock)
            short = error.short if isinstance(error, BudgetError) else str(error)
            outcomes_on(devices.of()).note_left(type(model).__name__, short)
            if left is None:
                warn(_LEAVES.format(type(model).__name__, short))
            for other, _ in others:
                self._manage(other)  # unless it still is
        else:
            for other, _ in others:
                self._managed.pop(other, None)
                if not has_inside(model, other):
                    self._note_part(other, model)
            self._managed[model] = weakref.ref(handle)

    def _gives_way(self, other: nn.Module, model: nn.Module) -> bool:
        """May the management of `other` end, so that `model` is managed? See Note [A part before the whole]."""
        wins = has_inside(model, other) or (bool(generators(model)) and not generators(other))
        return wins and other in self._managed

    def _note_part(self, model: nn.Module, other: nn.Module) -> None:
        """Says which part of a model is not managed, as `other` is and keeps what both have."""
        common = {id(tensor) for tensor in (*other.parameters(), *other.buffers())}
        own = {name: tensor for name, tensor in model.named_parameters() if id(tensor) not in common}
        if own:
            lies = sum(tensor.nbytes for tensor in model.parameters() if id(tensor) in common)
            rest = sum(tensor.nbytes for tensor in own.values())
            names = ", ".join(dict.fromkeys(name.partition(".")[0] for name in own))
            whose = type(model).__name__, format_size(lies), type(other).__name__, f"{names} ({format_size(rest)})"
            warn(text := _IN_PART.format(*whose))
            outcomes_on(devices.of()).note_left(type(model).__name__, text)


class _Left:
    """The circumstances in which a model was refused."""

    def __init__(self, model: nn.Module, pause: float, clock: Callable[[], float]) -> None:
        """`pause`: seconds between checks whether they have changed."""
        self._place = _place(model)
        self.pause = pause
        self._clock = clock
        self._next = clock() + pause
        self._budget, self._unused = _room()

    def may_fit(self, model: nn.Module) -> bool:
        """Are more pages unused, or is the model on another device? Costs next to nothing before the next check is
        due."""
        runtime = devices.current()
        if _place(model) != self._place:
            return True
        if runtime is None or (runtime.device.budget == self._budget and self._clock() < self._next):
            return False
        self._next = self._clock() + self.pause
        budget, unused = _room()
        return budget != self._budget or unused > self._unused


def _place(model: nn.Module) -> torch.device | None:
    first = next(model.parameters(), None)
    return None if first is None else first.device


def _room() -> tuple[int, int]:
    """Returns (the budget in bytes, its unused pages)."""
    runtime = devices.current()
    if runtime is None:
        return 0, 0
    device = runtime.device
    now = device.snapshot()
    used = sum(now["pages"][owner] for owner in ("weights", "activations", "kv"))
    return device.budget, device.budget // device.page_size - used + now["heap"]["cached"] // device.page_size


class _Taking:
    """A model that a thread is managing. `done` is set at the end, however it ends."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def wait(self) -> bool:
        """Waits until the model is managed. False, and at once, where this thread manages it."""
        if self._thread == threading.get_ident():
            return False
        while not self.done.wait(1) and self._process == os.getpid():  # the child of a fork lacks that thread
            pass
        return True


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls back, once, when a submodule that is not imported yet has been executed."""

    def __init__(self, callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._callbacks:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_call(module: ModuleType) -> None:
            execute(module)
            if callback := self._callbacks.pop(fullname, None):
                callback(module)

        spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Installs ballonet unless it is installed, and manages models at their first use from now on. Idempotent."""
    global _watching, _installed
    if _watching is not None:
        print("ballonet: loaded already")
        return
    before, _installed = devices.current(), _installed or devices.current() is None
    install()
    _watching = FirstUse()
    runtime = devices.of()
    device = runtime.device
    if _installed and runtime is before and (asked := Config.from_env().budget) is not None:
        set_budget(asked)  # the pool was kept open, under the budget of the time before
    place = f"GPU {device.ordinal}" if device.kind == "cuda" else "the CPU (host stand-in)"
    print(
        f"ballonet: {format_size(device.budget)} on {place} in pages of {format_size(device.page_size)}; models are "
        "managed at their first forward or generate(). ballonet.stats() shows who owns what"
    )


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Releases the models, and gives torch its own allocator back if loading had replaced it and torch can return to
    it."""
    global _watching, _installed
    if _watching is None:
        return
    _watching.close()
    for handle in _watching.managed:
        handle.release()
    _watching = None
    if _installed:
        try:
            restore()
        except InstallError as error:
            print(f"ballonet: unloaded; models are as they were. The pool stays: {error}")
            return
        _installed = devices.current() is not None  # memory of the pool is still in use, so it closes later
    if _installed:
        print(
            "ballonet: unloaded; models are as they were. Tensors that lie in the pool keep it open: drop them, and "
            "ballonet.restore() closes it; until then a new budget needs ballonet.set_budget()"
        )
    else:
        print("ballonet: unloaded; models and the allocator are as they were")
