"""A supervisor as one replica sees it, whose words are a test's."""

from __future__ import annotations

from collections import deque
from typing import Any

from ballonet.hooks.replicas.messages import Message


class Desk:
    """A SupervisorChannel. `said`: what it says; `late`: the same, while the replica waits for something else."""

    def __init__(self) -> None:
        self.said: deque[Message] = deque()
        self.late: deque[Message | None] = deque()  # one at each look; None: nothing comes
        self.heard: list[Message] = []
        self.posted: list[tuple[Message, ...]] = []  # the same, as they came

    def take(self) -> Message | None:
        return self.said.popleft() if self.said else None

    def has(self) -> bool:
        return bool(self.said)

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        if self.late and (came := self.late.popleft()) is not None:
            self.said.append(came)
        return any(isinstance(each, kinds) for each in self.said)

    def post(self, *messages: Message) -> None:
        self.heard += messages
        self.posted.append(messages)
