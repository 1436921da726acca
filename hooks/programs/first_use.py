"""Manages every `PreTrainedModel` of a program at its first forward or `generate()`, unasked.

Note [First use]
    The two entries are patched on the classes of transformers, not hooked on modules: a global forward hook of torch
    would run before each of the hundreds of submodules of each step. `generate()` counts because it builds its cache
    before the first forward. transformers itself is left alone until the program imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from ...allocator.errors import AlreadyManaged, BallonetError
from ..managed import Managed, manage, managed_as

_ENTRIES: Final = {  # module of transformers → class and method through which a model is used
    "transformers.modeling_utils": ("PreTrainedModel", "__call__"),
    "transformers.generation.utils": ("GenerationMixin", "generate"),
}
_MISSING: Final = object()


class FirstUse:
    """Watches until `close()`. `managed` are the models it has taken in hand and that still live."""

    def __init__(self, **options: Any) -> None:
        """`options` go to `manage()`."""
        self._options = options
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._managed: weakref.WeakKeyDictionary[Any, weakref.ref[Managed]] = weakref.WeakKeyDictionary()
        self._patched: list[tuple[type, str, object]] = []
        self._finder = _AfterImport({name: self._patch for name in _ENTRIES if name not in sys.modules})
        sys.meta_path.insert(0, self._finder)
        for name in _ENTRIES:
            if name in sys.modules:
                self._patch(sys.modules[name])

    @property
    def managed(self) -> list[Managed]:
        return [handle for reference in self._managed.values() if (handle := reference()) is not None]

    def close(self) -> None:
        """Takes the patches out again; models that are managed stay so."""
        sys.meta_path.remove(self._finder)
        while self._patched:
            owner, method, before = self._patched.pop()
            if before is _MISSING:
                delattr(owner, method)
            else:
                setattr(owner, method, before)

    def _patch(self, module: ModuleType) -> None:
        class_name, method = _ENTRIES[module.__name__]
        owner = getattr(module, class_name)
        before = vars(owner).get(method, _MISSING)
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def entered(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model not in self._seen:
                self._take(model)
                if model in self._seen:  # by whatever is called now that it is managed
                    return getattr(owner, method)(model, *args, **kwargs)
            return original(model, *args, **kwargs)

        setattr(owner, method, entered)
        self._patched.append((owner, method, before))

    def _take(self, model: Any) -> None:
        """Manages the model, unless it is traced by the compiler, in use already, or refused, which warns once."""
        import torch

        if torch.compiler.is_compiling() or not isinstance(model, torch.nn.Module):
            return
        self._seen.update(model.modules())  # a model inside this one is part of it
        if managed_as(model) is not None:
            return  # the program's own doing
        try:
            handle = manage(model, **self._options)
        except AlreadyManaged:
            return
        except BallonetError as error:
            warnings.warn(f"ballonet leaves {type(model).__name__} as it is: {error}", RuntimeWarning, stacklevel=3)
            return
        self._managed[model] = weakref.ref(handle)


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
