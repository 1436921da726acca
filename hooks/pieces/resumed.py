"""The rest of a forward that was broken off in the middle of its graphs, computed eagerly.

Note [Broken off]
    A graph cannot be replayed, a mask has come or gone, or there is no memory for a token: then the caches of some
    layers hold the new token already, and others do not. So the model's own forward runs from its beginning, and each
    call that was made before (an update, a mask, attention, a module that is never captured) returns what it returned
    then, instead of being made again. What lies between, which changes nothing, is computed a second time.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from .batch import BatchStep
from .recipe import EagerCall, Fresh, same_function


class ResumedForward:
    """Stands where a recorder does, see `seams.recording`, and gives back what the calls that were made have
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
