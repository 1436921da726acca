"""The forward of a stage that a thread runs, and the arguments of a model and of its layers."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..cache_argument import given_cache
from ..compat import Cache
from .results import Hidden
from .trees import Call


@dataclass(slots=True)
class Run:
    """One forward of a stage: the input from the stage before, and its cache once it is known."""

    given: Hidden | None
    cache: Any


class Leaving(Exception):  # no error, but torch runs the hooks of modules that an Exception leaves
    """Ends a forward after the last layer of the span."""

    def __init__(self, run: Run, hidden: Hidden) -> None:
        super().__init__()
        self.run = run
        self.hidden = hidden


class Now(threading.local):
    """The forward of a stage that this thread runs."""

    run: Run | None = None

    def running(self, run: Run) -> AbstractContextManager[Run]:
        """A `with` block in which this thread runs `run`."""
        return _Within(self, run)


class _Within:
    """The `with` block of `Now.running`."""

    def __init__(self, now: Now, run: Run) -> None:
        self._now = now
        self._run = run

    def __enter__(self) -> Run:
        self._before = self._now.run
        self._now.run = self._run
        return self._run

    def __exit__(self, *_: object) -> None:
        self._now.run = self._before


def cache_of(call: Call) -> Any:
    """The cache among the arguments of a layer; None where there is none."""
    found = (each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Cache))
    return next(found, given_cache(call.kwargs))


def tokens_of(inputs: Mapping[str, Any]) -> int:
    """Returns the number of tokens of each sequence that a forward is given."""
    for name in ("input_ids", "inputs_embeds"):
        if (given := inputs.get(name)) is not None:
            return int(given.shape[1])
    return 0
