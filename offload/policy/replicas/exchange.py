"""Exchange of KV between the members of a group, and the order in which one link sends. Pure.

Note [Who goes first]
    After a drop a request's KV lies where the request was, and each member needs that of its own layers: of what it
    has, each of k equal members sends (k - 1) / k (KunServe §4.2). The same link carries activations, which are small
    and which a stage waits for. What is on the wire cannot be stopped, so KV goes in parts of whole pages that take
    about a quarter of a stage's time, and before each part the link sends the activations that wait: an activation
    waits for one part at most. `LinkOrder` decides; its log shows whether that held (`waited`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from ..tuning import DEFAULT


def shares(used: int, layers: Sequence[int], own: int | None) -> tuple[int, ...]:
    """Returns the bytes that member `own` sends to each member, to itself none, of KV that has `used` bytes over all
    layers. `layers`: how many each member keeps; equal ones make (k - 1) / k. Nothing is lost: with what stays (the
    rest of `used`) they add up. `own`: None where who sends is no member, but the host."""
    total, ends, passed = sum(layers), [0], 0
    for count in layers:
        passed += count
        ends.append(used * passed // total)
    return tuple(0 if n == own else ends[n + 1] - ends[n] for n in range(len(layers)))


def part_bytes(stage: float, bandwidth: float, page: int, part: float = DEFAULT.replicas.exchange_part) -> int:
    """Returns the bytes of a part: whole pages, one at least, that take about `part` of a stage's seconds."""
    return max(1, int(stage * part * bandwidth / page)) * page


@dataclass(frozen=True, slots=True)
class Sent:
    """What goes over a link: seconds when it was queued, began and ended; infinity as long as it has not."""

    tag: str
    nbytes: int
    urgent: bool
    queued: float
    began: float
    ended: float


class LinkOrder:
    """What one direction of a link sends next. See Note [Who goes first]. `log`: what it has sent, in order."""

    def __init__(self, part: int) -> None:
        """`part`: bytes that are sent at once of what is not urgent. ValueError."""
        if part < 1:
            raise ValueError(f"nothing can be sent in parts of {part} bytes")
        self.log: list[Sent] = []
        self._part = part
        self._urgent: deque[Sent] = deque()
        self._others: deque[Sent] = deque()
        self._sending: Sent | None = None

    def queue(self, tag: str, nbytes: int, now: float, *, urgent: bool) -> None:
        """Adds a message. `urgent`: it goes whole, before all that is not; else in parts."""
        (self._urgent if urgent else self._others).append(Sent(tag, nbytes, urgent, now, math.inf, math.inf))

    def forget(self, tags: Container[str]) -> None:
        """Takes out messages that wait: nobody wants them any more. A part that is under way goes on."""
        self._urgent = deque(each for each in self._urgent if each.tag not in tags)
        self._others = deque(each for each in self._others if each.tag not in tags)

    def begin(self, now: float) -> int | None:
        """Returns the bytes that the link sends from now on; None where something is under way, or nothing waits."""
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
        """Returns what has been sent. RuntimeError where nothing was under way."""
        if self._sending is None:
            raise RuntimeError("the link ends what it has not begun")
        self.log.append(replace(self._sending, ended=now))
        self._sending = None
        return self.log[-1]


def waited(log: Iterable[Sent]) -> int:
    """Returns for how many parts that were not urgent the urgent message waited that waited for most of them."""
    sent = list(log)
    others = [each for each in sent if not each.urgent]
    return max(
        (sum(each.queued < it.ended and it.began < each.began for it in others) for each in sent if each.urgent),
        default=0,
    )
