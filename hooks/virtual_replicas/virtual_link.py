"""One direction of a link in virtual time, with the order of policy/replicas/link_order.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...offload.policy.replicas.link_order import LinkOrder
from .event_queue import EventQueue


@dataclass(slots=True)
class _Message:
    left: int  # bytes to be sent
    then: Callable[[], None]
    owner: object


class VirtualLink:
    """Sends messages of one replica. `moved`: bytes sent so far that were not urgent."""

    def __init__(self, events: EventQueue, bandwidth: float, part: int) -> None:
        """`bandwidth`: bytes per second; `part`: bytes of a part of a message that is not urgent."""
        self.order = LinkOrder(part)
        self.moved = 0
        self._events = events
        self._bandwidth = bandwidth
        self._messages: dict[str, _Message] = {}  # by tag
        self._count = 0
        self._paused = False

    def send(self, nbytes: int, then: Callable[[], None], *, urgent: bool = False, owner: object = None) -> None:
        """Sends a message. `then`: called once it has arrived, unless `cancel` was called with its `owner`."""
        self._count += 1
        tag = str(self._count)
        self._messages[tag] = _Message(nbytes, then, owner)
        if not nbytes:
            self._events.after(0.0, lambda: self._complete(tag))
            return
        self.order.queue(tag, nbytes, self._events.now, urgent=urgent)
        self._begin()

    def cancel(self, owner: object) -> None:
        """Cancels the owner's messages that have not arrived."""
        self._forget({tag for tag, message in self._messages.items() if message.owner is owner})

    def pause(self) -> None:
        """Sends nothing new until `resume`, as the sender is paused."""
        self._paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False
        self._begin()

    def end(self) -> None:
        """Cancels all messages that have not arrived, as the sender has ended."""
        self._forget({*self._messages})

    def _forget(self, tags: set[str]) -> None:
        for tag in tags:
            del self._messages[tag]
        self.order.forget(tags)

    def _complete(self, tag: str) -> None:
        message = self._messages.pop(tag, None)
        if message is not None:
            message.then()

    def _begin(self) -> None:
        nbytes = None if self._paused else self.order.begin(self._events.now)
        if nbytes is not None:
            self._events.after(nbytes / self._bandwidth, self._end)

    def _end(self) -> None:
        sent = self.order.end(self._events.now)
        if not sent.urgent:
            self.moved += sent.nbytes
        message = self._messages.get(sent.tag)
        if message is not None:
            message.left -= sent.nbytes
        self._begin()
        if message is not None and not message.left:
            self._complete(sent.tag)
