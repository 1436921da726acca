"""The queue of messages to be sent over a link: urgent ones before bulk, with a log to verify that.

Note [At most one chunk]
    A link sends one message after the other. Bulk (KV) is cut into chunks by its sender; a chunk that has begun is
    finished, and no other begins while an urgent message (an activation) waits. So an urgent message waits for at most
    one chunk, and for earlier urgent ones (KunServe §4.2, coordinated exchange). Each event of the outbox has a tick in
    the log; between the ticks `put` and `begun` of an urgent message no bulk message has its tick `begun`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

_Message = TypeVar("_Message")


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that was sent. `put`, `begun`, `ended`: ticks, in the order of events; `waited`: seconds in the queue;
    `took`: seconds of sending."""

    tag: str
    urgent: bool
    nbytes: int
    put: int
    begun: int = 0
    ended: int = 0
    waited: float = 0.0
    took: float = 0.0


@dataclass(slots=True)
class QueuedMessage(Generic[_Message]):
    """A message in the outbox, and its row of the log so far. `since`: time of its latest event, in seconds."""

    message: _Message
    row: SentMessage
    since: float


class Outbox(Generic[_Message]):
    """A queue with two priorities. Thread-safe. See Note [At most one chunk]."""

    def __init__(self, clock: Callable[[], float], remembered: int) -> None:
        """`remembered`: rows that the log keeps."""
        self._clock = clock
        self._tick = 0
        self._urgent: deque[QueuedMessage[_Message]] = deque()
        self._bulk: deque[QueuedMessage[_Message]] = deque()
        self._log: deque[SentMessage] = deque(maxlen=remembered)
        self._closed = False
        self._last: list[QueuedMessage[_Message]] = []  # after it was closed
        self._changed = threading.Condition()

    def put(self, message: _Message, tag: str, nbytes: int, urgent: bool) -> bool:
        """Queues a message, after the earlier ones of its priority. Returns False, and queues nothing, once closed."""
        with self._changed:
            if self._closed:
                return False
            row = SentMessage(tag, urgent, nbytes, put=self._next_tick())
            (self._urgent if urgent else self._bulk).append(QueuedMessage(message, row, self._clock()))
            self._changed.notify()
            return True

    def next(self) -> QueuedMessage[_Message] | None:
        """Waits for a message, removes and returns it. None once the outbox is closed, see `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._urgent or self._bulk)
            if self._closed:
                return self._last.pop() if self._last else None
            found = (self._urgent or self._bulk).popleft()
            now = self._clock()
            found.row = replace(found.row, begun=self._next_tick(), waited=now - found.since)
            found.since = now
            return found

    def mark_sent(self, done: QueuedMessage[_Message]) -> None:
        """Logs that a message from `next` is sent."""
        with self._changed:
            self._log.append(replace(done.row, ended=self._next_tick(), took=self._clock() - done.since))

    def close(self, *last: _Message) -> list[_Message]:
        """Closes the outbox, and returns the messages that were not sent. `next` returns `last` (at most one message),
        and then None. To be called once."""
        with self._changed:
            self._closed = True
            self._last = [
                QueuedMessage(each, SentMessage("", False, 0, put=self._next_tick()), self._clock()) for each in last
            ]
            left = [each.message for each in (*self._urgent, *self._bulk)]
            self._urgent.clear()
            self._bulk.clear()
            self._changed.notify_all()
            return left

    @property
    def log(self) -> list[SentMessage]:
        """The latest messages that were sent, in order."""
        with self._changed:
            return [*self._log]

    def _next_tick(self) -> int:
        self._tick += 1
        return self._tick
