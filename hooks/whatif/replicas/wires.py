"""Links in virtual time: one direction of each, in the order that policy/replicas/exchange.py decides."""

from __future__ import annotations

from collections.abc import Callable

from ....offload.policy.replicas.exchange import LinkOrder
from .agenda import Agenda


class Wire:
    """What one replica sends. `moved`: bytes that were not urgent, so far."""

    def __init__(self, agenda: Agenda, bandwidth: float, part: int) -> None:
        """`bandwidth`: bytes per second; `part`: bytes that are sent at once of what is not urgent."""
        self.order = LinkOrder(part)
        self.moved = 0
        self._agenda = agenda
        self._bandwidth = bandwidth
        self._then: dict[str, tuple[int, Callable[[], None]]] = {}  # by tag: bytes left, and what follows
        self._count = 0

    def send(self, nbytes: int, then: Callable[[], None], *, urgent: bool = False) -> None:
        """Sends a message; `then` is called once all of it has come."""
        if not nbytes:
            self._agenda.after(0.0, then)
            return
        self._count += 1
        tag = str(self._count)
        self._then[tag] = nbytes, then
        self.order.queue(tag, nbytes, self._agenda.now, urgent=urgent)
        self._begin()

    def _begin(self) -> None:
        nbytes = self.order.begin(self._agenda.now)
        if nbytes is not None:
            self._agenda.after(nbytes / self._bandwidth, self._end)

    def _end(self) -> None:
        sent = self.order.end(self._agenda.now)
        left, then = self._then.pop(sent.tag)
        if not sent.urgent:
            self.moved += sent.nbytes
        if left > sent.nbytes:
            self._then[sent.tag] = left - sent.nbytes, then
        self._begin()
        if left == sent.nbytes:
            then()
