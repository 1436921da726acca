"""A pair of ranks that sends device memory over NCCL, from GPU to GPU, and host memory over gloo.

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

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed

from ...allocator.config import change_environment
from ...offload.policy.tuning import DEFAULT, Replicas
from .link import device_buffer
from .pair import GROUPS, GlooConnect, GlooPair, Store, TwoRanks

_UNWATCHED: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_WAYS: Final = ("there", "back")  # from the first rank, and to it
_ID: Final = 64  # bytes of the name of an end's GPU

Group = Any  # ProcessGroupNCCL, which torch does not annotate
MakeGroup = Callable[[Store, str, int, float], Group]  # (store, prefix, rank, timeout in seconds)


class NcclPair:
    """Two ranks on different GPUs, a TwoRanks. See the notes above."""

    direct = True

    def __init__(
        self,
        control: GlooPair,
        out: Group,
        into: Group,
        other: int,
        stream: Callable[[], AbstractContextManager[Any]],
        device: torch.device,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
        tuning: Replicas = DEFAULT.replicas,
    ) -> None:
        """`control`: for host memory; `out`, `into`: communicators to send and to receive; `other`: the rank at the
        other end; `stream`: makes the pair's stream the current one; `timeout`: seconds of one operation at most."""
        self._control = control
        self._out = out
        self._into = into
        self._other = other
        self._stream = stream
        self._device = device
        self._timeout = timeout
        self._clock = clock
        self._tuning = tuning
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
        with self._stream():
            return device_buffer(nbytes, self._device)

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
        with self._stream():
            work = begin(group)
        until, pause = self._clock() + self._timeout, self._tuning.looked_first
        while not work.is_completed():
            if self._closed.wait(pause):
                raise RuntimeError("this end of the link is closed")
            if self._clock() >= until:
                raise RuntimeError(f"NCCL has not ended an operation in {self._timeout:g} s")
            pause = min(2 * pause, self._tuning.looked_last)
        if (error := work.exception()) is not None:
            raise RuntimeError(f"NCCL: {error}")


class NcclConnect(GlooConnect):
    """Forms a pair over gloo and, where both ends have a GPU of their own, NCCL's communicators beside it."""

    def __init__(
        self,
        store: Store,
        epoch: int,
        me: int,
        peer: int,
        timeout: float,
        *,
        gpu: str,
        device: torch.device,
        stream: Callable[[], AbstractContextManager[Any]],
        bulk: float,
        make: MakeGroup | None = None,
    ) -> None:
        """`gpu`: the unique name of the GPU `device` of this end; `stream`: makes the pair's stream the current one;
        `bulk`: seconds of one operation at most; `make`: makes communicators, None: NCCL's."""
        super().__init__(store, epoch, me, peer, timeout)
        self._gpu = gpu
        self._device = device
        self._stream = stream
        self._bulk = bulk
        self._make = make or make_communicator
        self._wait = timeout

    def __call__(self) -> tuple[TwoRanks, ...]:
        """Forms the groups, waiting for the other end. RuntimeError: it did not come, or gave up."""
        over_gloo = self.over_gloo()
        if not self._differ(over_gloo[0]):
            return over_gloo
        rank, store = int(not self.first), self._store.clone(self._wait)

        def over_nccl(group: str, control: GlooPair) -> NcclPair:
            there, back = (self._make(store, f"{self._below}/{group}/{way}", rank, self._bulk) for way in _WAYS)
            out, into = (there, back) if self.first else (back, there)
            return NcclPair(control, out, into, 1 - rank, self._stream, self._device, self._bulk)

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
        name = self._gpu.encode()[:_ID]
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
    for each in groups:
        with suppress(RuntimeError):
            each.abort()
