"""Another thread, for what a test does on one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
LONG = 600.0  # seconds, after which a thread hangs


def elsewhere(act: Callable[[], T]) -> T:
    """Returns, or raises, what `act` does on another thread, which has ended then."""
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG)
    if failed:
        raise failed.pop()
    assert results, "the thread hangs"
    return results.pop()
