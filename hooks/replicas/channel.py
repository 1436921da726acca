"""The ports between the supervisor, its replicas and their processes, and the wait for all that a main loop has.

Three implementations: child_processes.py, processes of this machine and pipes; on_ray.py, actors of Ray and their
calls; virtual_replicas/fleet_run.py, of predictions and tests, in virtual time. A replica's end, who is admitted, and
what a member has sent are the same in all.

Note [Joining]
    A replica sends its fingerprint, and again after the supervisor was started again. The supervisor compares it with
    that of the first replica, and answers with a member number that was never used, or with the differences. What comes
    from the replica counts as of the latest number.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ...offload.policy.replicas.pipeline import ChunkCost
from .errors import NoAnswer, OtherModel, SupervisorLost
from .messages import Fingerprint, Join, JoinRefusal, Message, SupervisorRestarted, Welcome, decoded
from .microbatch_plan import Request

_Found = TypeVar("_Found")
Sender = TypeVar("Sender", bound=Hashable)  # whom a channel hears: a pipe, or a name


class SupervisorChannel(Protocol):
    """A replica's end: messages to and from the supervisor."""

    def take(self) -> Message | None:
        """Removes and returns the next message; None where none has come. SupervisorLost."""

    def has(self) -> bool:
        """Returns whether a message has come, or the supervisor is lost."""

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        """Returns whether a message of one of these kinds has come. SupervisorLost."""

    def post(self, *messages: Message) -> None:
        """Sends messages. Several in one call cost little more than one. SupervisorLost."""


class Processes(Protocol):
    """The processes of replicas, one of each rank."""

    def start(self, rank: int) -> None:
        """Starts the replica of a rank. OSError."""

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the processes that have ended since the last call, and how each did."""

    def end(self, rank: int, for_good: bool = False) -> None:
        """Kills the process of a rank, if there is one. `for_good`: no other one will be started."""


class Wakeup:
    """A condition that links and channels notify when something may have changed, so a main loop can wait for any of
    them, and for a deadline. Thread-safe. `clock`: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._notified = 0
        self._condition = threading.Condition()

    def notify(self) -> None:
        """Has every waiting thread call its `look` again."""
        with self._condition:
            self._notified += 1
            self._condition.notify_all()

    def wait(self, look: Callable[[], _Found | None], timeout: float | None) -> _Found | None:
        """Calls `look` at once and after each `notify` until it returns something, and returns that; None after
        `timeout` seconds (None: no limit). Raises what `look` raises. No lock is held while `look` runs, and a `notify`
        meanwhile is not missed."""
        end = None if timeout is None else self.clock() + timeout
        while True:
            with self._condition:
                notified = self._notified
            answer = look()
            if answer is not None:
                return answer
            left = None if end is None else end - self.clock()
            if left is not None and left <= 0:
                return None
            with self._condition:
                if self._notified == notified:
                    self._condition.wait(left)


class ToSupervisor(ABC):
    """A replica's end, a SupervisorChannel; implementations add `post` and `close`, and call `arrive` and `lose` on
    threads of theirs. All else is for one thread. `wakeup`: notified when a message comes, and when the supervisor is
    lost; `serving`: set once the replica serves."""

    def __init__(self, wakeup: Wakeup, timeout: float) -> None:
        """`timeout`: seconds that the answer to a joining replica may take."""
        self.wakeup = wakeup
        self.serving = threading.Event()
        self._timeout = timeout
        self._received: deque[Message] = deque()
        self._lost = False

    def join(self, fingerprint: Fingerprint, requests: Sequence[Request] = ()) -> Welcome:
        """Joins, also anew, and returns the supervisor's answer; drops messages to an earlier member. `requests`: see
        messages.Join. OtherModel; SupervisorLost; NoAnswer."""
        self.post(Join(fingerprint, tuple(requests)))
        until = self.wakeup.clock() + self._timeout
        while (left := until - self.wakeup.clock()) > 0:
            message = self.wakeup.wait(self.take, left)
            if isinstance(message, SupervisorRestarted):  # before it had this, or before it has answered
                self.post(Join(fingerprint, tuple(requests)))
            if isinstance(message, JoinRefusal):
                raise OtherModel(message.differences)
            if isinstance(message, Welcome):
                return message
        raise NoAnswer("the supervisor's answer to a joining replica", self._timeout)

    def take(self) -> Message | None:
        """Removes and returns the next message; None where none has come. SupervisorLost."""
        if self._received:
            return self._received.popleft()
        if self._lost:
            raise SupervisorLost("the supervisor has ended, or the network between. Its replicas end with it")
        return None

    def has(self) -> bool:
        """Returns whether a message has come, or the supervisor is lost."""
        return bool(self._received) or self._lost

    def has_kind(self, kinds: tuple[type[Any], ...]) -> bool:
        """Returns whether a message of one of these kinds has come. SupervisorLost."""
        if self._lost and not self._received:
            self.take()
        return any(isinstance(message, kinds) for message in tuple(self._received))

    @abstractmethod
    def post(self, *messages: Message) -> None:
        """Sends messages to the supervisor. SupervisorLost."""

    @abstractmethod
    def close(self) -> None:
        """Ends the connection once the supervisor has everything that was posted. Idempotent."""

    def arrive(self, messages: Sequence[Message]) -> None:
        """Takes in messages, in order."""
        self._received.extend(messages)
        self.wakeup.notify()

    def lose(self) -> None:
        """Notes that the supervisor is lost: after the messages that have come, each `take` says so."""
        self._lost = True
        self.wakeup.notify()


class InOrder:
    """Takes numbered messages in order, and once."""

    def __init__(self) -> None:
        self._last = 0
        self._early: dict[int, bytes] = {}

    def take(self, number: int, packed: bytes) -> list[Message]:
        """Takes in what has a number, and returns the messages that are next."""
        if number > self._last:
            self._early[number] = packed
        messages: list[Message] = []
        while (following := self._early.pop(self._last + 1, None)) is not None:
            self._last += 1
            messages += decoded(following)
        return messages


class Members(ABC, Generic[Sender]):
    """The supervisor's end: who is a member, and what members have sent. Implementations add `send`, and call `hear`
    and `leave` on threads of theirs; one thread takes, any may post. See Note [Joining]. `cost`: of chunks, which
    replicas are told when they join; None: they measure it."""

    def __init__(self, host: str, links: int, wakeup: Wakeup) -> None:
        """`host`, `links`: see messages.Welcome; `wakeup`: notified when a message comes."""
        self.cost: ChunkCost | None = None
        self._host = host
        self._links = links
        self._wakeup = wakeup
        self._admitted = 0
        self._served: Fingerprint | None = None  # of the first replica
        self._senders: dict[int, Sender] = {}  # by member
        self._numbers: dict[Sender, int] = {}  # the latest of each
        self._received: deque[tuple[int, Message]] = deque()
        self._lock = threading.Lock()  # of who is a member

    @abstractmethod
    def send(self, sender: Sender, message: Message) -> None:
        """Sends a message to a replica, without waiting for it to be read."""

    def hear(self, sender: Sender, messages: Iterable[Message]) -> None:
        """Takes in messages of a replica, in order; drops those before it is admitted."""
        for message in messages:
            if isinstance(message, Join):
                self._admit(sender, message.fingerprint)
            elif (member := self._numbers.get(sender)) is not None:
                self._received.append((member, message))
        self._wakeup.notify()

    def leave(self, sender: Sender) -> None:
        """Notes that nothing more comes from a replica, nor goes there."""
        with self._lock:
            member = self._numbers.pop(sender, None)
            if member is not None:
                del self._senders[member]
        self._wakeup.notify()

    def take(self) -> tuple[int, Message] | None:
        """Removes and returns the next message, (member, message); None where none has come."""
        return self._received.popleft() if self._received else None

    def has(self) -> bool:
        """Returns whether a message has come."""
        return bool(self._received)

    def post(self, member: int, message: Message) -> None:
        """Sends a message to one replica, without waiting. Nothing where there is no such one."""
        with self._lock:
            sender = self._senders.get(member)
        if sender is not None:
            self.send(sender, message)

    def _admit(self, sender: Sender, fingerprint: Fingerprint) -> None:
        """Gives a replica that joins a number, or the differences."""
        self.leave(sender)
        with self._lock:
            self._served = self._served or fingerprint
            answer: Message
            if differences := self._served.differences(fingerprint):
                answer = JoinRefusal(differences)
            else:
                answer = Welcome(self._admitted, self._host, self._links, self.cost)
                self._senders[self._admitted], self._numbers[sender] = sender, self._admitted
                self._admitted += 1
        self.send(sender, answer)
