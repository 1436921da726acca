"""The port through which the supervisor and its replicas exchange messages, and the wait for all that a main loop has.

Implementations: connections.py, between processes; tests have one within a process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from .messages import Message

_Found = TypeVar("_Found")


class SupervisorChannel(Protocol):
    """A replica's end: messages to and from the supervisor."""

    def take(self) -> Message | None:
        """Removes and returns the next message; None where none has come. SupervisorLost."""

    def has(self) -> bool:
        """Returns whether a message has come, or the supervisor is lost."""

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        """Returns whether a message of one of these kinds has come. SupervisorLost."""

    def post(self, *messages: Message) -> None:
        """Sends messages. Several in one call cost little more than one. SupervisorLost."""


class ReplicaSink(Protocol):
    """Sends messages to replicas."""

    def post(self, member: int, message: Message) -> None:
        """Sends a message to one replica, without waiting for it to be read. Nothing where there is no such one."""


class ReplicaChannel(ReplicaSink, Protocol):
    """The supervisor's end: messages to and from replicas."""

    def take(self) -> tuple[int, Message] | None:
        """Removes and returns the next message, (member, message); None where none has come."""

    def has(self) -> bool:
        """Returns whether a message has come."""


class Wakeup:
    """A condition that links and channels notify when something may have changed, so a main loop can wait for any of
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
