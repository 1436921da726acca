"""A bell: one thing for which a main loop waits while several threads work for it, each of which rings it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


class Bell:
    """Rung by links and mailboxes whenever something may have changed for who waits. So a main loop hears a link and
    the control plane at once, whichever comes first, and its deadline."""

    def __init__(self) -> None:
        self._rings = 0
        self._rung = threading.Condition()

    def ring(self) -> None:
        """Has all who wait look again."""
        with self._rung:
            self._rings += 1
            self._rung.notify_all()

    def wait(self, look: Callable[[], _Found | None], timeout: float | None) -> _Found | None:
        """What `look` finds, which is called at once and after each ring; None after `timeout` seconds (None: never).
        What `look` raises is raised. It is called with no lock held, and a ring while it looks is not missed."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._rung:
                rings = self._rings
            found = look()
            if found is not None:
                return found
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            with self._rung:
                if self._rings == rings:
                    self._rung.wait(left)
