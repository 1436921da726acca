"""Mailboxes with typed messages (messages.py): a replica's, and the supervisor's."""

from __future__ import annotations

from collections import deque
from typing import Any

from .mailbox import SUPERVISOR, Mailbox
from .messages import Message, decoded, encoded


class ToSupervisor:
    """A replica's mailbox, a replica_setup.SupervisorChannel. Used by one thread."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._received: deque[Message] = deque()

    def take(self) -> Message | None:
        """Removes and returns the next message; None where none has come. SupervisorLost."""
        self._fill()
        return self._received.popleft() if self._received else None

    def has(self) -> bool:
        """Returns whether a message has come, or the supervisor is lost."""
        return bool(self._received) or self._box.has()

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        """Returns whether a message of one of these kinds has come. SupervisorLost."""
        self._fill()
        return any(isinstance(each, kinds) for each in self._received)

    def post(self, *messages: Message) -> None:
        """Sends messages to the supervisor. SupervisorLost."""
        self._box.post(SUPERVISOR, *map(encoded, messages))

    def _fill(self) -> None:
        while (mail := self._box.take()) is not None:
            self._received.append(decoded(mail.text))


class FromReplicas:
    """The supervisor's mailbox, with the member number of each sender."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box

    def take(self) -> tuple[int, Message] | None:
        """Removes and returns the next message, (member, message); None where none has come. ValueError: it is no
        message of this version."""
        mail = self._box.take()
        return None if mail is None else (mail.sender, decoded(mail.text))

    def has(self) -> bool:
        """Returns whether a message has come."""
        return self._box.has()

    def post(self, member: int, message: Message) -> None:
        """Sends a message to one replica."""
        self._box.post(member, encoded(message))
