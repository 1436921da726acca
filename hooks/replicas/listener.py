"""A thread that reads a queue of the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from .errors import NoAnswer, SupervisorLost
from .store import Store

_FOREVER: Final = 7 * 86400.0  # s; when it is over the wait begins again (the store's milliseconds are 32 bits)
_END: Final = ""  # pushed by `close`; no message is empty


class Listener:
    """Waits for texts in a queue, on a connection of its own: it neither polls nor blocks other calls, and notices at
    once when the supervisor's process ends."""

    def __init__(self, store: Store, queue: str, on_text: Callable[[str], None], on_lost: Callable[[], None]) -> None:
        """`on_text`: called with each text, in order, on the thread. `on_lost`: called once, when the store is gone.
        SupervisorLost where it is gone already."""
        self.error: SupervisorLost | None = None
        self._store = store
        self._queue = queue
        self._on_text = on_text
        self._on_lost = on_lost
        self._waiting = store.clone(_FOREVER)
        self._thread = threading.Thread(target=self._listen, name=f"ballonet {queue}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. Later texts stay in the store. A thread that does not end within the store's timeout is
        abandoned: it waits for a machine that has disappeared. Idempotent."""
        if self._thread.is_alive():
            with suppress(SupervisorLost):  # which ends the thread too
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
                self._on_lost()
                return
            if text == _END:
                return
            if text is not None:
                self._on_text(text)
