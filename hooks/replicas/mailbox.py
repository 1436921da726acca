"""The control plane: small messages between the supervisor and replicas, in order, each read once.

Note [Mail]
    Each member has a queue in the supervisor's store. An entry, of one message or several, is JSON after its keyed hash
    (secret.py), and has a sequence number per sender and receiver, so a replayed entry is ignored. Reading removes it
    from the store, which does not grow. A thread waits for entries; the main loop takes those that have come, or waits
    on the Wakeup. messages.py encodes and decodes the texts.
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
    """A received message. `sender`: the number of a member, or SUPERVISOR."""

    sender: int
    text: str


class Mailbox:
    """The mailbox of one member, or of the supervisor. Any thread may post; one takes. To be closed."""

    def __init__(self, store: Store, me: int, secret: str, wakeup: Wakeup) -> None:
        """`wakeup`: is notified when a message comes, and when the store is lost. SupervisorLost."""
        self.me = me
        self.refused = 0  # entries with a wrong hash, or replayed
        self._store = store
        self._secret = secret
        self._wakeup = wakeup
        self._sent: defaultdict[int, int] = defaultdict(int)  # number of the latest entry, by receiver
        self._read: defaultdict[int, int] = defaultdict(int)  # number of the latest entry, by sender
        self._received: deque[Mail] = deque()
        self._posting = threading.Lock()
        self._listener = Listener(store, _queue(me), self._receive, wakeup.notify)

    def post(self, to: int, *texts: str) -> None:
        """Sends messages to a member, after all earlier ones. SupervisorLost."""
        with self._posting:
            self._sent[to] += 1
            said = json.dumps([self.me, self._sent[to], texts])
            self._store.push(_queue(to), proof(self._secret, str(to), said) + said)

    def take(self) -> Mail | None:
        """Removes and returns the next message; None if none has come. SupervisorLost: none is left, and none will
        come."""
        if self._received:
            return self._received.popleft()
        if self._listener.error is not None:
            raise SupervisorLost(*self._listener.error.args)
        return None

    def has(self) -> bool:
        """Returns whether `take` would return a message, or raise. For the thread that takes."""
        return bool(self._received) or self._listener.error is not None

    def close(self) -> None:
        """Ends the thread, and empties the queue in the store. Idempotent."""
        self._listener.close()
        with suppress(SupervisorLost, NoAnswer):  # then the queue is gone too
            while self._store.pop(_queue(self.me), wait=False) is not None:
                pass

    def _receive(self, text: str) -> None:
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
        self._received.extend(Mail(sender, each) for each in texts)
        self._wakeup.notify()


def _queue(member: int) -> str:
    return f"mail/{'supervisor' if member == SUPERVISOR else member}"
