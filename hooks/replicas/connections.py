"""Connections between the supervisor and the processes of its replicas: the channel of messages, and joining.

Note [Connections]
    The supervisor listens on a socket, by default of this machine only, and each replica connects to it. Both ends
    prove by hashes of random numbers (multiprocessing's challenge) that they know the supervisor's secret, which is
    never sent; so neither strangers nor replicas of other supervisors come in. Nothing is encrypted. A message is a
    msgspec struct and never a pickled object, so who is connected cannot run code here. A connection keeps the order
    of messages, and ends with either process, which the other one notices at once.

Note [Joining]
    A replica sends its fingerprint, and again after it was taken for lost. The supervisor compares it with that of the
    first replica, and answers with a member number that was never used, or with the differences. What comes over the
    connection counts as of the latest number.

Note [Who does not read]
    A stopped process reads nothing. So the supervisor has a thread and a queue for each replica, and never waits for
    one; a replica sends at once, as the supervisor has a thread that reads.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from typing import Any, Final

from .channel import Wakeup
from .errors import NoAnswer, OtherModel, SecretRefused, SupervisorLost, SupervisorPortInUse
from .messages import Fingerprint, Join, JoinRefusal, Message, Welcome, decoded, encoded

LOCAL: Final = "127.0.0.1"
_IN_USE: Final = (errno.EADDRINUSE, errno.EACCES)


class MessageWire:
    """One end of a connection: messages each way, in order. One thread receives; any thread may send."""

    def __init__(self, opened: socket.socket) -> None:
        """`opened`: a connected socket, which is taken over."""
        opened.settimeout(None)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else small messages wait for acknowledgements
        self._socket = opened
        self._connection: Connection = Connection(os.dup(opened.fileno()))
        self._sending = threading.Lock()

    def authenticate(self, secret: str, within: float, *, accepts: bool) -> None:
        """Proves both ends' knowledge of the secret. `within`: seconds; `accepts`: this end has accepted the
        connection, so it asks first. AuthenticationError; OSError, EOFError: the other end says nothing, or is gone."""
        key = secret.encode()
        steps = (deliver_challenge, answer_challenge)
        with self._deadline(within):
            for step in steps if accepts else steps[::-1]:
                step(self._connection, key)

    def send(self, *messages: Message) -> None:
        """Sends messages together. OSError once the other end is gone."""
        with self._sending:
            self._connection.send_bytes(encoded(*messages))

    def receive(self) -> Sequence[Message]:
        """Waits for messages that were sent together, and returns them. OSError, EOFError: the other end is gone;
        ValueError: it is of another version."""
        return decoded(self._connection.recv_bytes())

    def end_sending(self) -> None:
        """Lets the other end read what was sent, and then the end."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Ends the connection: threads that wait in it raise. Idempotent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection. No thread may use it any more. Idempotent."""
        self._socket.close()
        with suppress(OSError):
            self._connection.close()

    @contextmanager
    def _deadline(self, within: float) -> Iterator[None]:
        timer = threading.Timer(within, self.end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


class ToSupervisor:
    """A replica's connection, a channel.SupervisorChannel. `host`: of the supervisor. `take`, `has` and `has_kind` are
    for one thread. To be closed."""

    def __init__(self, host: str, port: int, secret: str | None, wakeup: Wakeup, timeout: float) -> None:
        """Connects to a supervisor, waiting until it listens. `wakeup`: is notified when a message comes, and when the
        supervisor is lost; `timeout`: seconds. SecretRefused; SupervisorLost: none answers."""
        if not secret:
            raise SecretRefused("a supervisor admits only replicas with its secret, and none was given: give it")
        self.host = host
        self._timeout = timeout
        self._wakeup = wakeup
        self._received: deque[Message] = deque()
        self._lost = False
        self._wire = _connected(host, port, timeout)
        try:
            self._wire.authenticate(secret, timeout, accepts=False)
        except AuthenticationError:
            self._wire.close()
            raise SecretRefused(
                "the supervisor has another secret than this replica: give both the same one, or another address"
            ) from None
        except (OSError, EOFError) as error:
            self._wire.close()
            raise SupervisorLost(f"what listens on {host}:{port} is no supervisor, or it has ended") from error
        self._reader = threading.Thread(target=self._read, name="ballonet supervisor in", daemon=True)
        self._reader.start()

    def join(self, fingerprint: Fingerprint) -> Welcome:
        """Joins, also anew, and returns the supervisor's answer; drops messages to an earlier member. OtherModel;
        SupervisorLost; NoAnswer."""
        self.post(Join(fingerprint))
        until = time.monotonic() + self._timeout
        while (left := until - time.monotonic()) > 0:
            message = self._wakeup.wait(self.take, left)
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

    def post(self, *messages: Message) -> None:
        """Sends messages to the supervisor. SupervisorLost."""
        try:
            self._wire.send(*messages)
        except OSError as error:
            raise SupervisorLost(
                "the supervisor has ended, or the network between. Start it again, and join"
            ) from error

    def close(self) -> None:
        """Ends the connection once the supervisor has read everything, or after the timeout. Idempotent."""
        self._wire.end_sending()
        self._reader.join(self._timeout)
        self._wire.end()
        self._reader.join()
        self._wire.close()

    def _read(self) -> None:
        with suppress(OSError, EOFError, ValueError):
            while True:
                self._received.extend(self._wire.receive())
                self._wakeup.notify()
        self._lost = True
        self._wakeup.notify()


class FromReplicas:
    """The supervisor's connections, a channel.ReplicaChannel, and the socket at which replicas join. One thread takes;
    any may post. `refused`: connections and replicas so far. To be closed."""

    def __init__(self, host: str, port: int, secret: str, links: int, wakeup: Wakeup, within: float) -> None:
        """`host`, `port`: to listen at, 0: any free port; `links`: the port of the store in which links form; `wakeup`:
        is notified when a message comes; `within`: seconds that a new connection has to prove itself.
        SupervisorPortInUse; OSError where this machine has no such address."""
        self.host = host
        self.refused = 0
        self._secret = secret
        self._links = links
        self._wakeup = wakeup
        self._within = within
        self._lock = threading.Lock()  # of the members
        self._members: dict[int, _Replica] = {}
        self._admitted = 0
        self._served: Fingerprint | None = None  # of the first replica
        self._received: deque[tuple[int, Message]] = deque()
        self._listening = _listening(host, port)
        self._thread = threading.Thread(target=self._accept, name="ballonet joining", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that replicas join at."""
        return int(self._listening.getsockname()[1])

    def take(self) -> tuple[int, Message] | None:
        """Removes and returns the next message, (member, message); None where none has come."""
        return self._received.popleft() if self._received else None

    def has(self) -> bool:
        """Returns whether a message has come."""
        return bool(self._received)

    def post(self, member: int, message: Message) -> None:
        """Sends a message to one replica, without waiting. Nothing where it is not connected."""
        with self._lock:
            replica = self._members.get(member)
        if replica is not None:
            replica.outgoing.put(message)

    def stop_listening(self) -> None:
        """Lets no further replica join. Idempotent."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def close(self) -> None:
        """Ends all connections, after the messages that were posted, which may take the seconds of `within`."""
        self.stop_listening()
        self._listening.close()
        with self._lock:
            replicas = {*self._members.values()}
        for replica in replicas:
            replica.outgoing.put(None)
        for replica in replicas:
            replica.sender.join(self._within)
            replica.wire.end()

    def _accept(self) -> None:
        while True:
            try:
                opened, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(MessageWire(opened),), daemon=True).start()

    def _serve(self, wire: MessageWire) -> None:
        """Admits a replica, and takes in its messages until it ends."""
        replica = _Replica(wire)
        with suppress(OSError, EOFError, ValueError, AuthenticationError):
            wire.authenticate(self._secret, self._within, accepts=True)
            messages = wire.receive()  # minutes later, where it loads a large model first
            replica.sender.start()
            while self._hear(replica, messages):
                messages = wire.receive()
        with self._lock:
            self.refused += replica.member is None
            if replica.member is not None:
                self._members.pop(replica.member, None)
        replica.outgoing.put(None)
        if replica.sender.ident is not None:
            replica.sender.join(self._within)
        wire.end()
        wire.close()

    def _hear(self, replica: _Replica, messages: Sequence[Message]) -> bool:
        """Takes in messages of a replica. Returns False where it is not admitted."""
        for message in messages:
            if isinstance(message, Join):
                if not self._admit(replica, message.fingerprint):
                    return False
            elif replica.member is None:
                return False
            else:
                self._received.append((replica.member, message))
        self._wakeup.notify()
        return True

    def _admit(self, replica: _Replica, fingerprint: Fingerprint) -> bool:
        """Answers a replica that joins. Returns whether it is admitted. See Note [Joining]."""
        with self._lock:
            served = self._served = self._served or fingerprint
            if differences := served.differences(fingerprint):
                replica.outgoing.put(JoinRefusal(differences))
                return False
            if replica.member is not None:
                self._members.pop(replica.member, None)
            replica.member, self._admitted = self._admitted, self._admitted + 1
            self._members[replica.member] = replica
            replica.outgoing.put(Welcome(replica.member, self._links))
        return True


class _Replica:
    """A connected replica. `member`: its latest number, None before it is admitted; `outgoing`: messages to it, None:
    the end."""

    def __init__(self, wire: MessageWire) -> None:
        self.wire = wire
        self.member: int | None = None
        self.outgoing: SimpleQueue[Message | None] = SimpleQueue()
        self.sender = threading.Thread(target=self._send, name="ballonet replica out", daemon=True)

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self.outgoing.get()) is not None:
                self.wire.send(message)


def _listening(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno in _IN_USE:
            raise SupervisorPortInUse(host, port) from error
        raise


def _connected(host: str, port: int, timeout: float, pause: Callable[[float], object] = time.sleep) -> MessageWire:
    """Connects to a supervisor, which may start later than this process."""
    until = time.monotonic() + timeout
    while True:
        try:
            return MessageWire(socket.create_connection((host, port), timeout))
        except OSError as error:
            if time.monotonic() >= until:
                raise SupervisorLost(
                    f"no supervisor answers on {host}:{port}: start it first, and see that this machine reaches that "
                    "port"
                ) from error
        pause(min(0.1, timeout))
