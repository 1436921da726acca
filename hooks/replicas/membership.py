"""How replicas join a supervisor, over its store."""

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
    """A replica that has joined: its number, which is never given again, and what it runs."""

    member: int
    fingerprint: Fingerprint


class Reception:
    """The supervisor's side: a thread admits who joins; the main loop takes them. To be closed."""

    def __init__(
        self,
        store: Store,
        secret: str,
        served: Fingerprint | None,
        wakeup: Wakeup,
        clock: Callable[[], float],
        within: float,
    ) -> None:
        """`served`: what all have to run; None: what the first one runs. `within`: seconds that a joiner has to
        answer."""
        self.door = AdmissionServer(secret, served, clock, within)
        self._store = store
        self._wakeup = wakeup
        self._came: deque[Admitted] = deque()
        self._listener = Listener(store, JOIN_QUEUE, self._answer, wakeup.notify)

    def take(self) -> Admitted | None:
        """The next replica that has joined, None if there is none."""
        return self._came.popleft() if self._came else None

    def close(self) -> None:
        """Admits nobody any more. Idempotent."""
        self._listener.close()

    def _answer(self, text: str) -> None:
        reply = self.door.on(text)
        if reply is None:
            return
        try:
            self._store.push(reply.queue, reply.text)
        except SupervisorLost:
            return  # the listener hears of it, too
        if reply.admitted is not None:
            self._came.append(Admitted(*reply.admitted))
            self._wakeup.notify()


def join(store: Store, secret: str | None, fingerprint: Fingerprint, timeout: float) -> int:
    """Asks the supervisor of a store to be admitted, and returns the number that it gives. Waits `timeout` seconds for
    each of two answers. SecretRefused, OtherModel (with what differs), JoinRefused; NoAnswer, SupervisorLost."""
    knock = AdmissionClient(secret, fingerprint)
    asked = knock.hello()
    waiting = store.clone(timeout)

    def answer(said: str) -> str:
        store.push(JOIN_QUEUE, said)
        found = waiting.pop(knock.queue, wait=True)
        if found is None:
            raise NoAnswer("the supervisor's answer to who joins", timeout)
        return found

    return knock.member(answer(knock.prove(answer(asked))))
