"""A process group of two ranks, not registered with torch, which a link owns: formed, used by two threads, ended.

Note [Ending a wait]
    A rank that waits in gloo for a message hears when the other process ends, but nothing else ends the wait: not
    `abort()`, and not dropping the group, as the work holds what it needs. What does is a second wait for the same
    work, with a timeout: when it is over gloo closes the connection, and both waits raise. `close` does this for
    whatever is waited for, and the last reference to the group goes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Protocol

import torch
from torch.distributed.distributed_c10d import ProcessGroupGloo

from .store import Store

_FOREVER: Final = timedelta(days=3650)  # an open link may be idle as long as it likes
_AT_ONCE: Final = timedelta(milliseconds=1)  # 0 would be the group's own timeout
_HERE: Final = "here"
_GONE: Final = "gone"
_Gloo: Any = ProcessGroupGloo  # most of which torch does not annotate


class TwoRanks(Protocol):
    """Carries tensors between two processes, each way in order. One thread sends and another receives. Both raise
    RuntimeError once the other end is gone, or `close` was called. `direct`: tensors of the devices can be carried;
    those of the host always can."""

    direct: bool

    def send(self, tensor: torch.Tensor, direct: bool = False) -> None:
        """Returns when a tensor, which is contiguous, is sent. `direct`: it lies on the device, and all that was
        written to it is there."""

    def recv(self, into: torch.Tensor, direct: bool = False) -> None:
        """Returns when a tensor is filled. `direct`: it lies on the device, and nothing else uses it."""

    def room(self, nbytes: int) -> torch.Tensor:
        """uint8[nbytes] on the device, for `recv`."""

    def close(self) -> None:
        """Ends it, and whatever waits in it. Any thread, idempotent."""


class Connect(Protocol):
    """Makes the two ranks of one link, in a thread of the link."""

    def __call__(self) -> TwoRanks:
        """Waits for the other end. RuntimeError: it did not come, or went."""

    def cancel(self) -> None:
        """Has a call that waits return, with an error, here and at the other end. Any thread."""

    def forget(self) -> None:
        """Deletes what forming the link left elsewhere, once both ends have formed it. Any thread."""


class GlooPair:
    """Two ranks over gloo."""

    direct = False

    def __init__(self, group: Any, other: int) -> None:
        """`other`: the rank at the other end."""
        self._group: Any = group
        self._other = other
        self._works: list[Any] = []  # that are waited for
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor, direct: bool = False) -> None:
        """See TwoRanks."""
        assert not direct, "gloo carries tensors of the host"
        self._run(lambda group: group.send([tensor], self._other, 0))

    def recv(self, into: torch.Tensor, direct: bool = False) -> None:
        """See TwoRanks."""
        assert not direct, "gloo carries tensors of the host"
        self._run(lambda group: group.recv([into], self._other, 0))

    def room(self, nbytes: int) -> torch.Tensor:
        """See TwoRanks; RuntimeError, as nothing comes to the device."""
        raise RuntimeError(f"the other end sends {nbytes} bytes over NCCL, which this end does not use")

    def close(self) -> None:
        """See TwoRanks, and Note [Ending a wait]."""
        with self._lock:
            self._group = None
            works = [*self._works]
        for work in works:
            with suppress(RuntimeError):
                work.wait(_AT_ONCE)

    def _run(self, begin: Callable[[Any], Any]) -> None:
        with self._lock:
            if self._group is None:
                raise RuntimeError("this end of the link is closed")
            work = begin(self._group)
            self._works.append(work)
        try:
            work.wait(_FOREVER)
        finally:
            with self._lock:
                self._works = [each for each in self._works if each is not work]


class GlooConnect:
    """Forms the pair of one link: a group over the store, below `epoch/E/link/I-J` with I < J.

    Each end says that it is here and waits for the other before gloo is called, as there nothing could cancel it."""

    def __init__(self, store: Store, epoch: int, me: int, peer: int, timeout: float) -> None:
        """`timeout`: seconds that the other end is waited for."""
        self._store = store
        self._below = f"epoch/{epoch}/link/{min(me, peer)}-{max(me, peer)}"
        self._me = me
        self._peer = peer
        self._timeout = timeout
        self._cancelled = False
        self.first = False  # once it is called: is this the first of the two ranks?

    def __call__(self) -> GlooPair:
        """See Connect."""
        store = self._store.clone(self._timeout)
        store.set(f"{self._below}/{self._me}", _HERE)
        if self._cancelled:
            self.cancel()
        if any(store.get(f"{self._below}/{member}") != _HERE for member in (self._peer, self._me)):
            raise RuntimeError("it was given up while it was formed")
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=self._timeout)
        options._devices = [_device(local_address(store.host_name, store.port))]
        rank = int(self._me > self._peer)
        self.first = rank == 0
        return GlooPair(_Gloo(store.below(self._below), rank, 2, options), 1 - rank)

    def cancel(self) -> None:
        """See Connect."""
        self._cancelled = True
        for member in (self._me, self._peer):
            self._store.set(f"{self._below}/{member}", _GONE)

    def forget(self) -> None:
        """See Connect. Both ends may do so."""
        for key in (self._me, self._peer, "0/0", "0/1"):  # the last two are gloo's
            self._store.delete(f"{self._below}/{key}")


@lru_cache(maxsize=8)
def _device(address: str) -> Any:
    """What all links of a process share, a thread of gloo's: an own one for each would be another thread for each."""
    return _Gloo.create_device(hostname=address)


@lru_cache(maxsize=8)
def local_address(host: str, port: int) -> str:
    """The address of this machine on the way to the store, where the other ends find it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as found:
        found.connect(address)  # sends nothing
        return str(found.getsockname()[0])
