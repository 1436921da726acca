"""A thread that takes a queue of the store empty, as it fills."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from .errors import NoAnswer, SupervisorLost
from .store import Store

_FOREVER: Final = 7 * 86400.0  # s; when it is over the wait begins again (the store's milliseconds are 32 bits)
_END: Final = ""  # of who closes; nobody else sends it


class Listener:
    """Waits in the store, on a connection of its own, so that it neither looks again and again nor holds up others. It
    hears at once when the supervisor's process ends."""

    def __init__(self, store: Store, queue: str, told: Callable[[str], None], ended: Callable[[], None]) -> None:
        """`told`: called with each text, in order, in the thread. `ended`: once, when the store is gone. SupervisorLost
        if it is so now."""
        self.error: SupervisorLost | None = None
        self._store = store
        self._queue = queue
        self._told = told
        self._ended = ended
        self._waiting = store.clone(_FOREVER)
        self._thread = threading.Thread(target=self._listen, name=f"ballonet {queue}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. What others send later stays in the store. A thread that does not end within the time that
        the store has to answer is left: it waits for a machine that is gone without a word. Idempotent."""
        if self._thread.is_alive():
            with suppress(SupervisorLost):  # of which the thread hears too
                self._store.push(self._queue, _END)
            self._thread.join(self._store.timeout)

    def _listen(self) -> None:
        while True:
            try:
                text = self._waiting.pop(self._queue, wait=True)
            except NoAnswer:
                continue
            except SupervisorLost as error:
                self.error = error
                self._ended()
                return
            if text == _END:
                return
            if text is not None:
                self._told(text)
