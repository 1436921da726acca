"""A condition variable with a predicate: a main loop waits for whatever several threads work on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


class Wakeup:
    """A condition that links and mailboxes notify when something may have changed, so a main loop can wait for any of
    them, and for a deadline. Thread-safe."""

    def __init__(self) -> None:
        self._notified = 0
        self._condition = threading.Condition()

    def notify(self) -> None:
        """Has every waiting thread call its `look` again."""
        with self._condition:
            self._notified += 1
            self._condition.notify_all()

    def wait(self, look: Callable[[], _Found | None], timeout: float | None) -> _Found | None:
        """Calls `look` at once and after each `notify` until it returns something, and returns that; None after
        `timeout` seconds (None: no limit). Raises what `look` raises. No lock is held while `look` runs, and a `notify`
        meanwhile is not missed."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._condition:
                notified = self._notified
            found = look()
            if found is not None:
                return found
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            with self._condition:
                if self._notified == notified:
                    self._condition.wait(left)
