"""The forward of a stage that a thread runs, and what is read from the arguments of a model and of its layers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from ..compat import Cache
from .results import Hidden
from .trees import Call

CACHES: Final = ("past_key_values", "cache_params", "state")  # what models call what they keep between forwards


@dataclass(slots=True)
class Run:
    """One forward of a stage: what it is given, and its cache as far as it is known."""

    given: Hidden | None
    cache: Any


class Leaving(Exception):  # no error, but torch runs the hooks of modules that an Exception leaves
    """The last layer of the span has run."""

    def __init__(self, run: Run, hidden: Hidden) -> None:
        super().__init__()
        self.run = run
        self.hidden = hidden


class Now(threading.local):
    """The forward of a stage that this thread runs."""

    run: Run | None = None

    def running(self, run: Run) -> AbstractContextManager[Run]:
        """Within it this thread runs that one."""
        return _Within(self, run)


class _Within:
    """Within it a thread runs this forward."""

    def __init__(self, now: Now, run: Run) -> None:
        self._now = now
        self._run = run

    def __enter__(self) -> Run:
        self._before = self._now.run
        self._now.run = self._run
        return self._run

    def __exit__(self, *_: object) -> None:
        self._now.run = self._before


def cache_name(model: nn.Module) -> str:
    """What the forward of the model calls its cache."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in CACHES if name in known), CACHES[0])


def cache_of(call: Call, name: str) -> Any:
    """The cache among the arguments of a layer; None where there is none."""
    found = (each for each in (*call.args, *call.kwargs.values()) if isinstance(each, Cache))
    return next(found, call.kwargs.get(name))


def tokens_of(inputs: Mapping[str, Any]) -> int:
    """How many tokens of each sequence a forward is given."""
    for name in ("input_ids", "inputs_embeds"):
        if (given := inputs.get(name)) is not None:
            return int(given.shape[1])
    return 0
