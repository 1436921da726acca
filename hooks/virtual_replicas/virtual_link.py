"""Links between replicas in virtual time: a message takes its bytes divided by the bandwidth.

Note [Two lanes]
    As on a real link (hooks/replicas/link.py, Note [Two groups]), states and records go over one lane, KV and layers
    over the other, each in order, and so each replica sends. A state does not wait for KV; that both share a network is
    left out, as states are small beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..replicas.channel import Wakeup
from ..replicas.errors import LinkClosed, LinkError
from ..replicas.link import LinkEnd, LinkState
from .virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class VirtualBytes:
    """Bytes that are not there: a tensor in a simulation. `is_damaged`: they are not those that were sent."""

    nbytes: int
    is_damaged: bool = False


class Wire:
    """One direction of a network or a link to the host. `moved`: bytes sent so far."""

    def __init__(self, time: VirtualTime, bandwidth: float) -> None:
        """`bandwidth`: bytes per second."""
        self.moved = 0
        self._time = time
        self._bandwidth = bandwidth
        self._free = 0.0  # when what was sent before is through

    def send(self, nbytes: int, then: Callable[[], object]) -> None:
        """Sends bytes behind those sent before, and calls `then` once they are there."""
        self.moved += nbytes
        self._free = max(self._free, self._time.now()) + nbytes / self._bandwidth
        self._time.at(self._free, then)


class Sender:
    """What one replica sends to others, and receives. `wakeup`: of its main loop; `states`, `bulk`: see Note
    [Two lanes]; `is_alive`: its process has not ended; `damages`: the next KV that comes is damaged."""

    def __init__(self, time: VirtualTime, wakeup: Wakeup, bandwidth: float) -> None:
        self.wakeup = wakeup
        self.states = Wire(time, bandwidth)
        self.bulk = Wire(time, bandwidth)
        self.is_alive = True
        self.damages = False


class VirtualLink(LinkEnd):
    """One end of a link, in place of hooks/replicas/link.Link. `owner`: the replica at this end; `other`: the other
    end, None until that replica forms the link, too."""

    finished = True

    def __init__(self, epoch: int, peer: int, owner: Sender) -> None:
        super().__init__(epoch, peer, owner.wakeup)
        self.owner = owner
        self.other: VirtualLink | None = None
        self._early: list[tuple[Any, str, bool]] = []  # sent before the link was formed

    def open(self) -> None:
        """Notes that the link is formed."""
        if self.state is LinkState.FORMING:
            self._state = LinkState.OPEN
            early, self._early = self._early, []
            for message in early:
                self._send(*message)
            self.owner.wakeup.notify()

    def send(self, tensor: Any, tag: str, urgent: bool = False) -> None:
        """Sends a tensor, or VirtualBytes, or what else has `nbytes`. LinkError."""
        if self._error is not None:
            raise self._new_error()
        if self.state is LinkState.FORMING:
            self._early.append((tensor, tag, urgent))
        else:
            self._send(tensor, tag, urgent)

    def begin_close(self) -> None:
        """Closes the link, and tells the other end. Idempotent."""
        other = self.other
        if self._end(LinkState.CLOSED, LinkClosed(self.epoch, self.peer, "this end has closed it")) and other:
            closed = LinkClosed(other.epoch, other.peer, "the other end has closed it")
            self._over(self.owner.states, 0, lambda: other._end(LinkState.CLOSED, closed))

    def close(self) -> None:
        """Closes the link."""
        self.begin_close()

    def lose(self, reason: str) -> None:
        """Notes that the link is lost, unless it has ended."""
        self._end(LinkState.LOST, LinkError(self.epoch, self.peer, reason))

    def _send(self, tensor: Any, tag: str, urgent: bool) -> None:
        other, owner = self.other, self.owner
        assert other is not None
        self._over(owner.states if urgent else owner.bulk, tensor.nbytes, lambda: other._deliver(tensor, tag))

    def _over(self, wire: Wire, nbytes: int, then: Callable[[], object]) -> None:
        """Sends over a lane; what a process has sent that has ended meanwhile does not come."""
        if self.owner.is_alive:
            wire.send(nbytes, lambda: then() if self.owner.is_alive else None)

    def _deliver(self, tensor: Any, tag: str) -> None:
        if self._error is not None:
            return
        if tag == "kv" and self.owner.damages:
            self.owner.damages, tensor = False, VirtualBytes(tensor.nbytes, is_damaged=True)
        self._inbox[tag].append(tensor)
        self._wakeup.notify()
