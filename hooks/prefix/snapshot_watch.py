"""The forwards of one request to a model whose layers keep a state: how many tokens they have read, and the state where
the prompt ends.

Note [Where the prompt ends]
    An answer is often changed before it comes again in a longer prompt: templates leave out a model's reasoning, or
    write an answer in another way. But the prompt comes again unchanged. So its state is kept beside that of the end.
    It is copied when the forward that has read the last token of the prompt returns.

Note [Models of states alone]
    `generate()` gives such a model (Mamba) the whole prompt, whatever its cache holds; a user who holds its cache by
    hand passes only the new tokens. So does the hook here, in front of the first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from ...allocator.interrupts import Finalizer
from ..cache_argument import given_cache
from ..compat import computes_whole_prompt
from ..forward.hook_base import Hook, remove_all
from .snapshot import StateSnapshot

_BY_TOKEN: Final = ("input_ids", "attention_mask")  # arguments with a column for each token


class Watch:
    """Watches the forwards that are given one cache, until `end`, or until it is collected."""

    def __init__(self, model: Any, cache: Any, prompt: Sequence[int], salt: bytes) -> None:
        """`prompt`: tokens."""
        self.read = 0  # tokens that the layers stand behind
        self.at_prompt: StateSnapshot | None = None
        self._model = model
        self._reads_all = computes_whole_prompt(cache)
        self._cache = weakref.ref(cache)
        self.prompt = prompt
        self._salt = salt
        self._surplus = 0  # first tokens of the next forward that the cache has already
        self._handles: list[RemovableHandle] = []
        self._remove = Finalizer(self, partial(remove_all, self._handles))

    def begin(self, columns: int) -> None:
        """Begins with a cache of so many tokens, before the first forward."""
        self.read = columns
        self._surplus = columns if self._reads_all else 0
        before, after = _Before(self), _After(self)
        self._handles.append(self._model.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        self._handles.append(self._model.register_forward_hook(after, with_kwargs=True))

    def end(self) -> None:
        """Ends the watch. Idempotent."""
        self._remove()

    def cut(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the forward's arguments without tokens that the cache has."""
        if not self._surplus or not self._ours(kwargs):
            return kwargs
        surplus, self._surplus = self._surplus, 0
        return kwargs | {name: kwargs[name][:, surplus:] for name in _BY_TOKEN if kwargs.get(name) is not None}

    def note(self, kwargs: dict[str, Any]) -> None:
        """Notes that a forward has returned."""
        cache, ids = self._cache(), kwargs.get("input_ids")
        if cache is None or ids is None or not self._ours(kwargs):
            return
        self.read += ids.shape[1]
        if self.read == len(self.prompt):
            with suppress(torch.OutOfMemoryError), torch.no_grad():
                self.at_prompt = StateSnapshot.of(cache.layers, self.prompt, self._salt, move=False)

    def _ours(self, kwargs: dict[str, Any]) -> bool:
        """Is the forward one with this cache? Other threads may run the model as well."""
        cache = given_cache(kwargs)
        return cache is not None and cache is self._cache()


class _Before(Hook):
    """The hook before a forward. While another thread removes it, it may be called without keyword arguments."""

    def __init__(self, watch: Watch) -> None:
        """Does not keep it alive."""
        self._watch = weakref.ref(watch)

    def __call__(self, *given: Any) -> Any:
        watch = self._watch()
        if torch.compiler.is_compiling() or watch is None or len(given) < 3:
            return None
        _, args, kwargs = given
        return args, watch.cut(kwargs)


class _After(_Before):
    """The hook after a forward."""

    def __call__(self, *given: Any) -> None:
        watch = self._watch()
        if not torch.compiler.is_compiling() and watch is not None and len(given) == 4:
            watch.note(given[2])
