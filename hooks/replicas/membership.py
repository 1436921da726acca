"""Joining a supervisor over its store: the supervisor's listener, and the replica's call."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .admission_protocol import JOIN_QUEUE, AdmissionClient, AdmissionServer
from .errors import NoAnswer, SupervisorLost
from .fingerprint import Fingerprint
from .listener import Listener
from .store import Store
from .wakeup import Wakeup


@dataclass(frozen=True, slots=True)
class Admitted:
    """A replica that has joined: its number, which is never used again, and its fingerprint."""

    member: int
    fingerprint: Fingerprint


class JoinListener:
    """The supervisor's side: a thread admits replicas. To be closed."""

    def __init__(
        self,
        store: Store,
        secret: str,
        served: Fingerprint | None,
        wakeup: Wakeup,
        clock: Callable[[], float],
        within: float,
    ) -> None:
        """`served`: the fingerprint that all must have; None: that of the first replica. `within`: seconds that a
        joining replica has to answer."""
        self.protocol = AdmissionServer(secret, served, clock, within)
        self._store = store
        self._wakeup = wakeup
        self._admitted: deque[Admitted] = deque()
        self._listener = Listener(store, JOIN_QUEUE, self._answer, wakeup.notify)

    def take(self) -> Admitted | None:
        """Removes and returns the next replica that has joined, None if there is none."""
        return self._admitted.popleft() if self._admitted else None

    def close(self) -> None:
        """Stops admitting replicas. Idempotent."""
        self._listener.close()

    def _answer(self, text: str) -> None:
        reply = self.protocol.reply_to(text)
        if reply is None:
            return
        try:
            self._store.push(reply.queue, reply.text)
        except SupervisorLost:
            return  # the listener notices it, too
        if reply.admitted is not None:
            self._admitted.append(Admitted(*reply.admitted))
            self._wakeup.notify()


def join(store: Store, secret: str | None, fingerprint: Fingerprint, timeout: float) -> int:
    """Joins the supervisor of a store, and returns the assigned member number. Waits at most `timeout` seconds for each
    of two replies. SecretRefused, OtherModel (with the differences), JoinRefused; NoAnswer, SupervisorLost."""
    client = AdmissionClient(secret, fingerprint)
    hello = client.hello()
    waiting = store.clone(timeout)

    def answer(said: str) -> str:
        store.push(JOIN_QUEUE, said)
        found = waiting.pop(client.queue, wait=True)
        if found is None:
            raise NoAnswer("the supervisor's reply to a joining replica", timeout)
        return found

    return client.member(answer(client.prove(answer(hello))))
