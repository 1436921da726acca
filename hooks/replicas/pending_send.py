"""What a link is, and what it has on its way."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

from .errors import LinkError, NoAnswer
from .staging import Staged
from .wire import Header


class LinkState(Enum):
    """What a link is. FORMING becomes OPEN, and both become CLOSED or LOST, which are the end."""

    FORMING = "forming"
    OPEN = "open"
    CLOSED = "closed"
    LOST = "lost"


@dataclass(eq=False, slots=True)
class PendingSend:
    """A message on its way."""

    header: Header
    staged: Staged
    _over: threading.Event = field(default_factory=threading.Event)
    _error: LinkError | None = None

    @property
    def over(self) -> bool:
        """Whether it is sent, or has failed."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when it is sent. LinkError; NoAnswer after `timeout` seconds."""
        if not self._over.wait(timeout):
            raise NoAnswer(f"the other end of the link, for message {self.header.tag!r},", timeout or 0.0)
        if self._error is not None:
            raise self._error

    def end(self, error: LinkError | None = None) -> None:
        """Called by the link."""
        self._error = error
        self._over.set()
