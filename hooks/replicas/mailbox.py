"""The control plane: small messages between the supervisor and replicas, in order, each read once.

Note [Mail]
    Each member has a queue in the supervisor's store. What is sent at once, one message or several, is JSON behind its
    keyed hash (secret.py), and counts how often its sender sent to this reader before, so that what is sent again by
    somebody else is not read twice. Reading takes it out of the store, which does not grow. A member's own thread waits
    for mail; its main loop takes what is here, or waits on the wakeup. What a message says, and of which epoch, is for
    its reader (messages.py).
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from .errors import NoAnswer, SupervisorLost
from .listener import Listener
from .secret import proof, proves
from .store import Store
from .wakeup import Wakeup

SUPERVISOR: Final = -1  # its number; members count from 0


@dataclass(frozen=True, slots=True)
class Mail:
    """`sender`: the number of a member, or SUPERVISOR."""

    sender: int
    text: str


class Mailbox:
    """The mail of one member, or of the supervisor. Any thread may post; one takes. To be closed."""

    def __init__(self, store: Store, me: int, secret: str, wakeup: Wakeup) -> None:
        """`wakeup`: is rung when mail comes, or none will any more. SupervisorLost."""
        self.me = me
        self.refused = 0  # messages of who does not know the secret, or that were sent again
        self._store = store
        self._secret = secret
        self._wakeup = wakeup
        self._sent: defaultdict[int, int] = defaultdict(int)  # messages, by receiver
        self._read: defaultdict[int, int] = defaultdict(int)  # number of the last one, by sender
        self._came: deque[Mail] = deque()
        self._posting = threading.Lock()
        self._listener = Listener(store, _queue(me), self._hear, wakeup.notify)

    def post(self, to: int, *texts: str) -> None:
        """Sends messages, behind all that this sent there before. SupervisorLost."""
        with self._posting:
            self._sent[to] += 1
            said = json.dumps([self.me, self._sent[to], texts])
            self._store.push(_queue(to), proof(self._secret, str(to), said) + said)

    def take(self) -> Mail | None:
        """The next message, None if none is here. SupervisorLost: none is left, and none will come."""
        if self._came:
            return self._came.popleft()
        if self._listener.error is not None:
            raise SupervisorLost(*self._listener.error.args)
        return None

    def has(self) -> bool:
        """Whether `take` would return a message, or raise. For the thread that takes."""
        return bool(self._came) or self._listener.error is not None

    def close(self) -> None:
        """Ends its thread, and leaves nothing in the store. Idempotent."""
        self._listener.close()
        with suppress(SupervisorLost, NoAnswer):  # its store is gone with it
            while self._store.pop(_queue(self.me), wait=False) is not None:
                pass

    def _hear(self, text: str) -> None:
        length = len(proof(self._secret))
        claimed, said = text[:length], text[length:]
        if not proves(claimed, self._secret, str(self.me), said):
            self.refused += 1
            return
        sender, number, texts = json.loads(said)
        if number <= self._read[sender]:
            self.refused += 1
            return
        self._read[sender] = number
        self._came.extend(Mail(sender, each) for each in texts)
        self._wakeup.notify()


def _queue(member: int) -> str:
    return f"mail/{'supervisor' if member == SUPERVISOR else member}"
