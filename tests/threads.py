"""Another thread, for what a test does on one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LONG = 600.0  # seconds, after which a thread hangs


class ActingThread(threading.Thread):
    """Does something on a thread of its own, from now on."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._results: list[object] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._results.append(self._act())
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Returns, or raises, what came of it, once: the thread has ended then, and keeps nothing."""
        self.join(LONG)
        assert not self.is_alive(), "the thread hangs"
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._results.pop()


def elsewhere(act: Callable[[], T]) -> T:
    """Returns, or raises, what `act` does on another thread, which has ended then."""
    result: T = ActingThread(act).result()
    return result
