"""Which model's forward runs on which thread, and which caches it has used: what a governor takes to be in use."""

from __future__ import annotations

import threading

from .activity import Progress
from .client_state import ModelState, PageState


class Running:
    """The forwards of a device's models. `progress`: of the device. Not thread-safe, but for `ended`: callers hold the
    governor's lock."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._on: dict[int, ModelState] = {}  # the model whose forward runs, by thread
        self._read: dict[int, set[PageState]] = {}  # the page clients that the forward has used so far, by thread

    @property
    def models(self) -> tuple[ModelState, ...]:
        """The models whose forward runs, or was interrupted."""
        return tuple(self._on.values())

    @property
    def here(self) -> ModelState | None:
        """The model whose forward runs on this thread."""
        return self._on.get(threading.get_ident())

    def began(self, state: ModelState, now: float) -> None:
        """Notes that an iteration of the model begins on this thread."""
        state.used = now
        if self._progress.ahead:
            self._progress.begin()
        state.activity.at = max(state.activity.at, now)
        self._on[threading.get_ident()] = state

    def client_began(self, state: PageState, now: float) -> None:
        """Notes that an iteration of the client begins on this thread, within one of its model, if any."""
        state.activity.at = max(state.activity.at, now)
        thread = threading.get_ident()
        if thread in self._on:
            self._read.setdefault(thread, set()).add(state)

    def ended(self, state: ModelState | None, now: float) -> None:
        """Notes that the iteration on this thread has been launched, if it began; None: of a model that is gone. May be
        called in the middle of anything."""
        thread = threading.get_ident()
        read = self._read.pop(thread, set())
        if state is None:
            return
        end = self._progress.end() if self._progress.ahead else None
        state.activity.ended(now, end)
        for cache in read:
            cache.activity.ended(now, end)
        if self._on.get(thread) is state:
            del self._on[thread]

    def forget(self, state: ModelState | None) -> None:
        """Forgets a model that is gone: its iteration ends without it, or has been interrupted."""
        for thread, on in list(self._on.items()):
            if on is state:
                self._on.pop(thread, None)
