"""The process groups of a link, not registered with torch: two ranks over gloo, or NCCL; the store in which they form.

Note [Ending a wait]
    A rank that waits in gloo for a message notices when the other process ends, but nothing else ends the wait: not
    `abort()`, and not dropping the group, as the work keeps it alive. A second wait for the same work, with a timeout,
    does: when it times out gloo closes the connection, and both waits raise. `close` does this for all outstanding
    work, and drops the group.

Note [Two communicators]
    NCCL runs the operations of a communicator in order, on a stream of its own. If both ways used one, and both ends
    began to send, each receive would wait behind a send that waits for the other end's receive. So each way has a
    communicator, and each of a link's groups its own two. A receiver submits its operation only after the header of the
    message has come over gloo, so an idle link has no outstanding NCCL operation.

Note [Deadlines of its own]
    NCCL does not notice that the other process has ended, and an abort may hang. So the host polls whether an operation
    has ended, until a deadline or `close`, which the link calls when gloo fails; a communicator that is given up is
    aborted on a thread that is not joined. torch's own watchdog, which would end the process, is turned off before the
    first group is made.

Note [Streams]
    An operation waits for the work submitted before to the current stream of its thread. Models compute on the thread's
    usual stream, so the operation would wait for later microbatches; the pair has a stream of its own. The link has
    waited on the host for the copy of a tensor that is sent; a received tensor is complete when `recv` returns. The
    buffers are activations of the pool, whose pages do not move while they live. Receive buffers are allocated on the
    pair's stream: a block that another stream has freed may still be read there.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Protocol, Self

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import ProcessGroupGloo

from ...allocator.config import change_environment
from .errors import NoAnswer, SupervisorLost

_FOREVER: Final = timedelta(days=3650)  # an open link may be idle for any time
_AT_ONCE: Final = timedelta(milliseconds=1)  # 0 would be the group's own timeout
GROUPS: Final = ("states", "bulk")  # of a link
_HERE: Final = "here"
_GONE: Final = "gone"
_Gloo: Any = ProcessGroupGloo  # torch annotates only a part of it


class Store:
    """One connection to the store in which links form, `torch.distributed.TCPStore`. It has a port of its own, as gloo
    takes no other kind of store, and neither a pipe nor a call of Ray carries its protocol. Anybody who reaches its
    port may write to it. A waiting call blocks the connection, so each thread that waits needs a clone. The store ends
    with the last reference in the process that hosts it, or with that process."""

    def __init__(self, store: Any, timeout: float) -> None:
        """`store`: a TCPStore. `timeout`: seconds that a call waits at most."""
        self._store = store
        self.timeout = timeout
        store.set_timeout(timedelta(seconds=timeout))

    @classmethod
    def host(cls, host: str = "127.0.0.1", *, timeout: float) -> Self:
        """Makes a store that listens on this address only, at any free port. `timeout`: seconds of a call at most.
        OSError where this machine has no such address."""
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.bind(address)
            listening.listen(socket.SOMAXCONN)
            made = TCPStore(
                host,
                listening.getsockname()[1],
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
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise SupervisorLost(
                f"no supervisor answers on {host}:{port}: start it first, and see that this machine reaches that port"
            ) from error
        return cls(store, timeout)

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


class TwoRanks(Protocol):
    """Sends tensors between two processes, in order each way. One thread sends and another receives. Both raise
    RuntimeError once the other end is gone, or `close` was called. `direct`: can also send device memory, not only host
    memory."""

    direct: bool

    def send(self, tensor: torch.Tensor, direct: bool = False) -> None:
        """Sends a contiguous tensor, and returns when it is sent. `direct`: it lies on the device, and all writes to it
        have completed."""

    def recv(self, into: torch.Tensor, direct: bool = False) -> None:
        """Receives into a tensor, and returns when it is filled. `direct`: it lies on the device, and nothing else uses
        it."""

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """Returns uint8[nbytes] on the device, for `recv`."""

    def close(self) -> None:
        """Ends the group; calls that wait in it raise. Thread-safe, idempotent."""


class Connect(Protocol):
    """Forms the two groups of one link, on a thread of the link."""

    def __call__(self) -> tuple[TwoRanks, ...]:
        """Waits for the other end, and returns the groups for states and for bulk. RuntimeError: it did not come, or
        gave up."""

    def cancel(self) -> None:
        """Has a waiting call raise, here and at the other end. Thread-safe."""

    def delete_keys(self) -> None:
        """Deletes the store's keys of the link, once both ends have formed it. Thread-safe."""


class GlooPair:
    """Two ranks over gloo, a TwoRanks for host memory."""

    direct = False

    def __init__(self, group: Any, other: int) -> None:
        """`other`: the rank at the other end."""
        self._group: Any = group
        self._other = other
        self._works: list[Any] = []  # outstanding operations
        self._lock = threading.Lock()

    def send(self, tensor: torch.Tensor, direct: bool = False) -> None:
        """Sends a contiguous host tensor. RuntimeError, see TwoRanks."""
        assert not direct, "gloo carries tensors of the host"
        self._run(lambda group: group.send([tensor], self._other, 0))

    def recv(self, into: torch.Tensor, direct: bool = False) -> None:
        """Receives into a host tensor. RuntimeError, see TwoRanks."""
        assert not direct, "gloo carries tensors of the host"
        self._run(lambda group: group.recv([into], self._other, 0))

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """Raises RuntimeError: gloo does not send device memory."""
        raise RuntimeError(f"the other end sends {nbytes} bytes over NCCL, which this end does not use")

    def close(self) -> None:
        """Ends the group; calls that wait in it raise. Idempotent. See Note [Ending a wait]."""
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
                self._works = [other for other in self._works if other is not work]


class GlooConnect:
    """Forms the groups of one link over the store, with keys below `epoch/E/link/I-J`, I < J.

    Each end first sets a key and waits for the other's, as this wait, unlike gloo's, can be cancelled."""

    def __init__(self, store: Store, epoch: int, me: int, peer: int, timeout: float) -> None:
        """`timeout`: seconds to wait for the other end."""
        self._store = store
        self._below = f"epoch/{epoch}/link/{min(me, peer)}-{max(me, peer)}"
        self._me = me
        self._peer = peer
        self._timeout = timeout
        self._cancelled = False
        self.first = False  # set by the call: is this rank 0?

    def __call__(self) -> tuple[TwoRanks, ...]:
        """Forms the groups, waiting for the other end. RuntimeError: it did not come, or gave up."""
        return self.over_gloo()

    def over_gloo(self) -> tuple[GlooPair, ...]:
        """Forms both groups over gloo. Raises as the call."""
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
        prefixes = [f"{self._below}/{group}" for group in GROUPS]
        return tuple(GlooPair(_Gloo(store.below(prefix), rank, 2, options), 1 - rank) for prefix in prefixes)

    def cancel(self) -> None:
        """Has a waiting call raise, here and at the other end. Thread-safe."""
        self._cancelled = True
        for member in (self._me, self._peer):
            self._store.set(f"{self._below}/{member}", _GONE)

    def delete_keys(self) -> None:
        """Deletes the keys of the link. Both ends may do so."""
        of_gloo = [f"{group}/0/{rank}" for group in GROUPS for rank in (0, 1)]
        for key in (self._me, self._peer, *of_gloo):
            self._store.delete(f"{self._below}/{key}")


@lru_cache(maxsize=8)
def _device(address: str) -> Any:
    """Returns gloo's device for an address, with its thread: one for all links of a process."""
    return _Gloo.create_device(hostname=address)


@lru_cache(maxsize=8)
def local_address(host: str, port: int) -> str:
    """Returns this machine's address on the route to the store, at which peers reach it."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(address)  # sends nothing
        return str(route.getsockname()[0])


def device_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns uint8[nbytes] on a device, uninitialized: an activation, whose pages do not move while it lives."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


_UNWATCHED: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_WAYS: Final = ("there", "back")  # from the first rank, and to it
_ID: Final = 64  # bytes of the name of an end's GPU

Group = Any  # ProcessGroupNCCL, which torch does not annotate
MakeGroup = Callable[[Store, str, int, float], Group]  # (store, prefix, rank, timeout in seconds)


@dataclass(frozen=True, slots=True)
class LinkGpu:
    """The GPU of this end of a link. `name`: unique, empty where NCCL cannot be used; `stream`: makes the pair's stream
    the current one; `timeout`: seconds of one operation at most; `make`: makes communicators, None: NCCL's."""

    name: str
    device: torch.device
    stream: Callable[[], AbstractContextManager[Any]]
    timeout: float
    make: MakeGroup | None = None


# Seconds until an operation is looked at first, and between two looks at most. Chosen: less than the states of a
# microbatch take, and a thousandth of a CPU while a large message is on its way.
_FIRST_LOOK: Final = 2e-5
_LAST_LOOK: Final = 1e-3


class NcclPair:
    """Two ranks on different GPUs, a TwoRanks. See the notes above."""

    direct = True

    def __init__(
        self,
        control: GlooPair,
        out: Group,
        into: Group,
        other: int,
        gpu: LinkGpu,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`control`: for host memory; `out`, `into`: communicators to send and to receive; `other`: the rank at the
        other end."""
        self._control = control
        self._out = out
        self._into = into
        self._other = other
        self._gpu = gpu
        self._clock = clock
        self._closed = threading.Event()

    def send(self, tensor: torch.Tensor, direct: bool = False) -> None:
        """Sends a contiguous tensor: `direct` over NCCL, else over gloo. RuntimeError, see TwoRanks."""
        if not direct:
            self._control.send(tensor)
            return
        self._run(self._out, lambda group: group.send([tensor], self._other, 0))

    def recv(self, into: torch.Tensor, direct: bool = False) -> None:
        """Receives into a tensor: `direct` over NCCL, else over gloo. RuntimeError, see TwoRanks."""
        if not direct:
            self._control.recv(into)
            return
        self._run(self._into, lambda group: group.recv([into], self._other, 0))

    def device_buffer(self, nbytes: int) -> torch.Tensor:
        """Returns uint8[nbytes] on the device, allocated on the pair's stream."""
        with self._gpu.stream():
            return device_buffer(nbytes, self._gpu.device)

    def close(self) -> None:
        """Ends the pair; calls that wait in it raise. Idempotent. See Note [Deadlines of its own]."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._control.close()
        groups, self._out, self._into = (self._out, self._into), None, None
        threading.Thread(target=_abort, args=groups, name="ballonet nccl abort", daemon=True).start()

    def _run(self, group: Group, begin: Callable[[Group], Any]) -> None:
        if group is None or self._closed.is_set():
            raise RuntimeError("this end of the link is closed")
        with self._gpu.stream():
            work = begin(group)
        until, pause = self._clock() + self._gpu.timeout, _FIRST_LOOK
        while not work.is_completed():
            if self._closed.wait(pause):
                raise RuntimeError("this end of the link is closed")
            if self._clock() >= until:
                raise RuntimeError(f"NCCL has not ended an operation in {self._gpu.timeout:g} s")
            pause = min(2 * pause, _LAST_LOOK)
        if (error := work.exception()) is not None:
            raise RuntimeError(f"NCCL: {error}")


class NcclConnect(GlooConnect):
    """Forms a pair over gloo and, where both ends have a GPU of their own, NCCL's communicators beside it."""

    def __init__(self, store: Store, epoch: int, me: int, peer: int, timeout: float, gpu: LinkGpu) -> None:
        """`timeout`: see GlooConnect."""
        super().__init__(store, epoch, me, peer, timeout)
        self._gpu = gpu

    def __call__(self) -> tuple[TwoRanks, ...]:
        """Forms the groups, waiting for the other end. RuntimeError: it did not come, or gave up."""
        over_gloo = self.over_gloo()
        if not self._differ(over_gloo[0]):
            return over_gloo
        rank, store = int(not self.first), self._store.clone(self._timeout)
        make = self._gpu.make or make_communicator

        def over_nccl(group: str, control: GlooPair) -> NcclPair:
            there, back = (make(store, f"{self._below}/{group}/{way}", rank, self._gpu.timeout) for way in _WAYS)
            out, into = (there, back) if self.first else (back, there)
            return NcclPair(control, out, into, 1 - rank, self._gpu)

        return tuple(map(over_nccl, GROUPS, over_gloo))

    def delete_keys(self) -> None:
        """Deletes the keys of the link. Both ends may do so."""
        super().delete_keys()
        for group in GROUPS:
            for way in _WAYS:
                self._store.delete(f"{self._below}/{group}/{way}/0")

    def _differ(self, control: GlooPair) -> bool:
        """Returns whether the ends have different GPUs: NCCL refuses two ranks on one GPU."""
        mine = torch.zeros(_ID, dtype=torch.uint8)
        name = self._gpu.name.encode()[:_ID]
        mine[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8) if name else mine[:0]
        theirs = torch.empty_like(mine)
        ways = (control.send, mine), (control.recv, theirs)
        for act, tensor in ways if self.first else ways[::-1]:
            act(tensor)
        return bool(name) and bool(theirs.any()) and not torch.equal(mine, theirs)


def make_communicator(store: Store, prefix: str, rank: int, timeout: float) -> Group:
    """Returns an NCCL process group of two ranks, not registered with torch. RuntimeError."""
    change_environment(dict(_UNWATCHED))
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    kind: Any = ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout)
    return kind(store.below(prefix), rank, 2, options)


def gpu_name(device: torch.device) -> str:
    """Returns the UUID of a GPU; empty where NCCL cannot be used."""
    if device.type != "cuda" or not distributed.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def stream_of(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes a stream of a GPU. Returns a function whose context manager makes it the current stream."""
    stream = torch.cuda.Stream(device)
    return lambda: torch.cuda.stream(stream)


def _abort(*groups: Group) -> None:
    for group in groups:
        with suppress(RuntimeError):
            group.abort()
