"""The control plane as replica and supervisor use it: typed messages in mailboxes."""

from __future__ import annotations

from collections import deque
from typing import Any

from .mailbox import SUPERVISOR, Mailbox
from .messages import Message, decoded, encoded


class ToSupervisor:
    """What a replica hears from the supervisor, and tells it. Used by one thread."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._came: deque[Message] = deque()

    def take(self) -> Message | None:
        """See setup.SupervisorChannel."""
        self._fill()
        return self._came.popleft() if self._came else None

    def has(self) -> bool:
        """See setup.SupervisorChannel."""
        return bool(self._came) or self._box.has()

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        """See setup.SupervisorChannel. SupervisorLost."""
        self._fill()
        return any(isinstance(each, kinds) for each in self._came)

    def post(self, *messages: Message) -> None:
        """See setup.SupervisorChannel. SupervisorLost."""
        self._box.post(SUPERVISOR, *map(encoded, messages))

    def _fill(self) -> None:
        while (mail := self._box.take()) is not None:
            self._came.append(decoded(mail.text))


class FromReplicas:
    """What the supervisor hears, with the number of who said it, and tells."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box

    def take(self) -> tuple[int, Message] | None:
        """The next message; None where nothing is here. ValueError: it is none of this version."""
        mail = self._box.take()
        return None if mail is None else (mail.sender, decoded(mail.text))

    def has(self) -> bool:
        """Is anything here?"""
        return self._box.has()

    def post(self, member: int, message: Message) -> None:
        """Tells one replica something."""
        self._box.post(member, encoded(message))
