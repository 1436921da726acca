"""Exchange of KV between the members of a group, and the order in which one link sends. Pure.

Note [Activations first]
    After a drop a request's KV lies where the request was, and each member needs that of its own layers: each of k
    equal members sends (k - 1) / k of its KV (KunServe §4.2). The same link carries activations, which are small and
    which a stage waits for. A transfer that has begun cannot be stopped, so KV is sent in parts of whole pages that
    take about a quarter of a stage's time, and before each part the link sends the queued activations: an activation
    waits for at most one part. `LinkOrder` decides; `waited` checks its log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from ..tuning import DEFAULT


def shares(used: int, layers: Sequence[int], own: int | None) -> tuple[int, ...]:
    """Returns the bytes that member `own` sends to each member (0 to itself) of KV with `used` bytes over all layers.
    `layers`: how many each member keeps. The bytes sent and those that stay add up to `used`. `own`: None where the
    sender is the host."""
    total, ends, passed = sum(layers), [0], 0
    for count in layers:
        passed += count
        ends.append(used * passed // total)
    return tuple(0 if n == own else ends[n + 1] - ends[n] for n in range(len(layers)))


def part_bytes(stage: float, bandwidth: float, page: int, part: float = DEFAULT.replicas.exchange_part) -> int:
    """Returns the bytes of a part: whole pages, at least one, that take about the fraction `part` of `stage` seconds at
    `bandwidth` bytes per second."""
    return max(1, int(stage * part * bandwidth / page)) * page


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, or a part of one. `queued`, `began`, `ended`: seconds; infinity as long as that is still to come."""

    tag: str
    nbytes: int
    urgent: bool
    queued: float
    began: float
    ended: float


class LinkOrder:
    """Orders what one direction of a link sends. `log`: what was sent, in order. See Note [Activations first]."""

    def __init__(self, part: int) -> None:
        """`part`: bytes of a part of a message that is not urgent. ValueError where it is below 1."""
        if part < 1:
            raise ValueError(f"nothing can be sent in parts of {part} bytes")
        self.log: list[Sent] = []
        self._part = part
        self._urgent: deque[Sent] = deque()
        self._others: deque[Sent] = deque()
        self._sending: Sent | None = None

    def queue(self, tag: str, nbytes: int, now: float, *, urgent: bool) -> None:
        """Queues a message. `urgent`: sent whole, before all others; else sent in parts."""
        (self._urgent if urgent else self._others).append(Sent(tag, nbytes, urgent, now, math.inf, math.inf))

    def forget(self, tags: Container[str]) -> None:
        """Removes queued messages with these tags. A part that is under way is still sent."""
        self._urgent = deque(message for message in self._urgent if message.tag not in tags)
        self._others = deque(other for other in self._others if other.tag not in tags)

    def begin(self, now: float) -> int | None:
        """Begins the next part, and returns its bytes; None where one is under way, or nothing is queued."""
        if self._sending is not None or not (self._urgent or self._others):
            return None
        if self._urgent:
            first = self._urgent.popleft()
        else:
            first = self._others.popleft()
            if first.nbytes > self._part:
                self._others.appendleft(replace(first, nbytes=first.nbytes - self._part))
                first = replace(first, nbytes=self._part)
        self._sending = replace(first, began=now)
        return first.nbytes

    def end(self, now: float) -> Sent:
        """Ends the part under way, and returns it. RuntimeError where there is none."""
        if self._sending is None:
            raise RuntimeError("the link ends what it has not begun")
        self.log.append(replace(self._sending, ended=now))
        self._sending = None
        return self.log[-1]


def waited(log: Iterable[Sent]) -> int:
    """Returns the largest number of non-urgent parts that any urgent message of a log waited for."""
    sent = list(log)
    others = [message for message in sent if not message.urgent]
    return max(
        (
            sum(message.queued < it.ended and it.began < message.began for it in others)
            for message in sent
            if message.urgent
        ),
        default=0,
    )
