"""The state of a link, and a message that it sends."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

from .errors import LinkError, NoAnswer
from .staging import Staged
from .wire import Header


class LinkState(Enum):
    """The state of a link. FORMING becomes OPEN, and both become CLOSED or LOST, which are final."""

    FORMING = "forming"
    OPEN = "open"
    CLOSED = "closed"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class PendingSend:
    """A message that is queued or being sent."""

    header: Header
    staged: Staged
    _over: threading.Event = field(default_factory=threading.Event)
    _error: LinkError | None = None

    @property
    def over(self) -> bool:
        """Whether the message is sent, or has failed."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Waits until the message is sent. LinkError; NoAnswer after `timeout` seconds."""
        if not self._over.wait(timeout):
            raise NoAnswer(f"the other end of the link, for message {self.header.tag!r},", timeout or 0.0)
        if self._error is not None:
            raise self._error

    def end(self, error: LinkError | None = None) -> None:
        """Marks the message as sent, or as failed with an error. Called by the link."""
        self._error = error
        self._over.set()
