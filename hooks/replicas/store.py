"""The store of a supervisor: keys and queues over TCP, `torch.distributed.TCPStore`, with errors that are typed.

The store is not authenticated: anybody who reaches its port may have written its values. secret.py has the keyed hashes
that messages carry.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, Self

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError, DistStoreError, QueueEmptyError

from .errors import NoAnswer, SupervisorLost, SupervisorPortInUse

LOCAL: Final = "127.0.0.1"
_IN_USE: Final = (errno.EADDRINUSE, errno.EACCES)


class Store:
    """One connection to the store. A waiting call blocks the connection, so each thread that waits needs a clone. The
    store ends with the last reference in the process that hosts it, or with that process."""

    def __init__(self, store: Any, timeout: float) -> None:
        """`store`: a TCPStore. `timeout`: seconds that a call waits at most."""
        self._store = store
        self.timeout = timeout
        store.set_timeout(timedelta(seconds=timeout))

    @classmethod
    def host(cls, host: str = LOCAL, port: int = 0, *, timeout: float) -> Self:
        """Makes a store that listens on this address only; port 0: any free port. `timeout`: seconds of a call at most.
        SupervisorPortInUse; OSError where this machine has no such address."""
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(address)
                listening.listen(socket.SOMAXCONN)
            except OSError as error:
                if error.errno in _IN_USE:
                    raise SupervisorPortInUse(host, port) from error
                raise
            port = listening.getsockname()[1]
            made = TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout),
                master_listen_fd=listening.detach(),
            )
        return cls(made, timeout)

    @classmethod
    def connect(cls, host: str, port: int, *, timeout: float) -> Self:
        """Connects to the store of a supervisor. SupervisorLost: none answers within `timeout` seconds."""
        try:
            found = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise SupervisorLost(
                f"no supervisor answers on {host}:{port}: start it first, and see that this machine reaches that port"
            ) from error
        return cls(found, timeout)

    @property
    def port(self) -> int:
        return int(self._store.port)

    @property
    def host_name(self) -> str:
        return str(self._store.host)

    def clone(self, timeout: float | None = None) -> Store:
        """Opens another connection. `timeout`: seconds of its calls at most; None: as here. SupervisorLost."""
        with self._typed("a connection"):
            return Store(self._store.clone(), self.timeout if timeout is None else timeout)

    def below(self, prefix: str) -> PrefixStore:
        """Returns the store with all keys below a prefix, for a process group."""
        return PrefixStore(prefix, self._store)

    def set(self, key: str, value: str) -> None:
        """Sets a key. SupervisorLost."""
        with self._typed(key):
            self._store.set(key, value)

    def get(self, key: str) -> str:
        """Waits until a key is set, and returns its value. NoAnswer, SupervisorLost."""
        with self._typed(key):
            return bytes(self._store.get(key)).decode(errors="replace")

    def delete(self, key: str) -> None:
        """Deletes a key, if it is set. SupervisorLost."""
        with self._typed(key):
            self._store.delete_key(key)

    def push(self, queue: str, value: str) -> None:
        """Appends to a queue, without waiting for an acknowledgement: values of several connections come in any order.
        SupervisorLost."""
        with self._typed(queue):
            self._store.queue_push(queue, value)

    def pop(self, queue: str, wait: bool) -> str | None:
        """Removes and returns the first value of a queue; None where the queue is empty. `wait`: blocks until one
        comes. An emptied queue leaves no key. NoAnswer, SupervisorLost."""
        with self._typed(queue):
            try:
                return bytes(self._store.queue_pop(queue, wait)).decode(errors="replace")
            except QueueEmptyError:
                return None

    def keys(self) -> int:
        """Returns the number of keys. SupervisorLost."""
        with self._typed("the number of keys"):
            return int(self._store.num_keys())

    @contextmanager
    def _typed(self, what: str) -> Iterator[None]:
        try:
            yield
        except DistNetworkError as error:
            raise SupervisorLost(
                f"the store on {self.host_name}:{self.port} does not answer any more: its supervisor has ended, or the "
                "network between. Replicas end with it; start it again and join"
            ) from error
        except DistStoreError as error:
            raise NoAnswer(f"{what!r} in the supervisor's store", self.timeout) from error
