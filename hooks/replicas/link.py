"""A link between two replicas in one epoch: two groups of two ranks, one for states and one for bulk.

Note [Two groups]
    States of microbatches and small records go over one group, KV and layers over the other, each in order. The groups
    share the network, so a state never waits behind a queue of KV; bulk is cut into pieces by its sender. An idle group
    has a blocking receive outstanding, so each has a thread that receives and one that sends. The main loop never
    blocks on them: `send` returns once the tensor is staged, `take` does not wait, and `recv` waits on the Wakeup,
    which every link and the channel notify, so a wait for a tensor of one replica also ends when another is lost.

    An error of one group ends the link, and no other: its groups are closed, and the other end's calls fail. An end
    that closes says so first, over the group of states, to tell a close from a crash, and the other end answers and
    closes, too. If no answer comes within `linger` seconds, the groups are closed anyway.

Note [Staged]
    While a message is on its way, threads of gloo and the network read and write its memory. Pages of the pool may move
    meanwhile, so a link gets no memory of the pool: `send` copies a tensor once, in the order of the caller's stream,
    into memory of torch's own allocator, pinned where the tensor lies on a GPU. The sender holds the lease on the
    tensor until `send` returns; on a GPU the copy is ordered before later work of the same stream, for which the pool
    waits before it moves a page. Received bytes lie in such memory too; `take` copies them to the device, in the order
    of the caller's stream.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Self

import msgspec
import torch
from msgspec import Struct

from ...allocator import install
from ...offload.policy.replicas.tuning import DEFAULT, ReplicaTuning
from .channel import Wakeup
from .errors import Interrupted, LinkClosed, LinkError, NoAnswer
from .pair import Connect, TwoRanks, device_buffer

HEADER_BYTES: Final = 256  # of every message, before its payload: a receiver has to know the size of what comes
_BYE: Final = ""  # the tag with which an end closes the link
_CPU: Final = torch.device("cpu")


class LinkState(Enum):
    """The state of a link. FORMING becomes OPEN, and both become CLOSED or LOST, which are final."""

    FORMING = "forming"
    OPEN = "open"
    CLOSED = "closed"
    LOST = "lost"


class Header(Struct, frozen=True, array_like=True):
    """The header of a message. `nbytes`: of its payload, which follows; `direct`: the payload goes from device to
    device."""

    tag: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    direct: bool = False

    def pack(self) -> torch.Tensor:
        """Returns uint8[HEADER_BYTES] outside of the pool. ValueError where the tag or the shape is too long."""
        packed = msgspec.msgpack.encode(self)
        if len(packed) + 2 > HEADER_BYTES:
            raise ValueError(f"a header has {HEADER_BYTES} bytes at most, and that of {self.tag!r} {len(packed) + 2}")
        buffer = host_buffer(HEADER_BYTES, pinned=False).zero_()
        buffer[: len(packed) + 2] = torch.frombuffer(
            bytearray(len(packed).to_bytes(2, "little") + packed), dtype=torch.uint8
        )
        return buffer

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Self:
        """Returns the header that `pack` has encoded. ValueError where these bytes are none."""
        data = packed.numpy().tobytes()
        length = int.from_bytes(data[:2], "little")
        try:
            header = msgspec.msgpack.decode(data[2 : 2 + length], type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"what arrived is no header of a message: {error}") from None
        if header.nbytes < 0 or not isinstance(getattr(torch, header.dtype, None), torch.dtype):
            raise ValueError(f"a header says {header.nbytes} bytes of {header.dtype}: it is damaged")
        return header


class StagedCopy(NamedTuple):
    """A copy of a tensor as uint8[bytes], on the host or on the tensor's device. Complete once `wait` has returned."""

    data: torch.Tensor
    wait: Callable[[], object]


class _Lane:
    """One group of a link: what is to be sent over it, and its threads, which start once it is formed."""

    def __init__(self, link: Link, name: str) -> None:
        self.outgoing: SimpleQueue[tuple[Header, StagedCopy] | None] = SimpleQueue()
        self.threads: list[threading.Thread] = []
        self._link = link
        self._name = name

    def start(self, pair: TwoRanks) -> None:
        """Starts to send and to receive."""
        for way, act in (("out", self._send), ("in", self._receive)):
            name = f"ballonet link {self._link.epoch}/{self._link.peer} {self._name} {way}"
            self.threads.append(threading.Thread(target=act, args=(pair,), name=name, daemon=True))
        for thread in self.threads:
            thread.start()

    def clear(self) -> None:
        """Drops what waits to be sent."""
        with suppress(Empty):
            while True:
                self.outgoing.get_nowait()

    def _send(self, pair: TwoRanks) -> None:
        try:
            while (message := self.outgoing.get()) is not None:
                header, copy = message
                copy.wait()
                pair.send(header.pack())
                if header.nbytes:
                    pair.send(copy.data, header.direct)
        except RuntimeError as error:
            self._lose(error)
        self._link._sent_all()

    def _receive(self, pair: TwoRanks) -> None:
        packed = host_buffer(HEADER_BYTES, pinned=False)
        try:
            while True:
                pair.recv(packed)
                header = Header.unpack(packed)
                if header.tag == _BYE:
                    self._link._heard_bye()
                    return
                pinned = self._link.device.type == "cuda"
                data = pair.device_buffer(header.nbytes) if header.direct else host_buffer(header.nbytes, pinned)
                if header.nbytes:
                    pair.recv(data, header.direct)
                self._link._deliver(header, data)
        except (RuntimeError, ValueError) as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Loses the link; after a while where it may just be closed, of which the group of states has to tell."""
        if self is not self._link._states:
            self._link._states.threads[-1].join(self._link._linger)
        self._link._lose(first_sentence(error))


class LinkEnd:
    """One end of a link: its state, and what has come. Thread-safe."""

    def __init__(self, epoch: int, peer: int, wakeup: Wakeup) -> None:
        """`wakeup`: notified when something comes, and when the link ends."""
        self.epoch = epoch
        self.peer = peer
        self._wakeup = wakeup
        self._state = LinkState.FORMING
        self._error: LinkError | None = None
        self._lock = threading.Lock()  # of the state and the inbox
        self._inbox: defaultdict[str, deque[Any]] = defaultdict(deque)

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def error(self) -> LinkError | None:
        """Why the link is closed or lost; None while it is neither."""
        return self._error

    def has(self, tag: str) -> bool:
        """Returns whether `take` would return a tensor, or raise."""
        with self._lock:
            return tag in self._inbox or self._error is not None

    def take(self, tag: str) -> torch.Tensor | None:
        """Removes and returns the next tensor of this tag; None if none has come. LinkError: the link has ended, and no
        tensor of the tag is left."""
        with self._lock:
            received: torch.Tensor | None = self._inbox[tag].popleft() if tag in self._inbox else None
            if tag in self._inbox and not self._inbox[tag]:
                del self._inbox[tag]
            ended = self._error is not None  # read under the lock: tensors that came before the end are taken first
        if received is None and ended:
            raise self._new_error()
        return received

    def recv(self, tag: str, timeout: float | None = None, unless: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """Waits for the next tensor of this tag, and returns it; raises as `take`. Interrupted as soon as `unless`,
        called at each notify, returns True: a control message is waiting. NoAnswer after `timeout` seconds."""

        def look() -> torch.Tensor | None:
            if unless():
                raise Interrupted(f"message {tag!r} of replica {self.peer}")
            return self.take(tag)

        tensor = self._wakeup.wait(look, timeout)
        if tensor is None:
            raise NoAnswer(f"message {tag!r} of replica {self.peer}", timeout or 0.0)
        return tensor

    def _end(self, state: LinkState, error: LinkError) -> bool:
        """Ends the link, unless it has ended. Returns whether this call did."""
        with self._lock:
            if self._error is not None:
                return False
            self._state, self._error = state, error
        self._wakeup.notify()
        return True

    def _new_error(self) -> LinkError:
        """Returns a copy of the error: raising the same object again would grow a traceback that keeps frames alive."""
        error = self._error
        assert error is not None
        return type(error)(error.epoch, error.peer, error.reason)


class Link(LinkEnd):
    """One end of a link. To be closed, as its threads keep it alive. See Note [Two groups]."""

    def __init__(
        self,
        connect: Connect,
        epoch: int,
        peer: int,
        wakeup: Wakeup,
        *,
        device: torch.device = _CPU,
        tuning: ReplicaTuning = DEFAULT,
    ) -> None:
        """Starts to form the link, without waiting. `device`: where received tensors are put."""
        super().__init__(epoch, peer, wakeup)
        self.device = device
        self._connect = connect
        self._direct = False  # is device memory sent from device to device? False until the link is formed
        self._linger = tuning.linger
        self._pairs: tuple[TwoRanks, ...] = ()  # under the lock, too
        self._has_keys = True  # in the store
        self._answered = threading.Event()  # the other end has said that it closes
        self._states = _Lane(self, "states")
        self._bulk = _Lane(self, "bulk")
        self._former = threading.Thread(target=self._form, name=f"ballonet link {epoch}/{peer}", daemon=True)
        self._former.start()

    def __repr__(self) -> str:
        return f"Link(epoch={self.epoch}, peer={self.peer}, {self._state.value})"

    @property
    def direct(self) -> bool:
        """Whether device tensors are sent from device to device, without the host. False until the link is formed."""
        return self._direct

    @property
    def finished(self) -> bool:
        """Whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool = False) -> None:
        """Copies a tensor, see Note [Staged], and sends the copy over the group of states if `urgent`, else over that
        of bulk. Does not wait, not even for the link to be formed. LinkError; ValueError for a tensor or tag that
        cannot be sent."""
        direct = self._direct and tensor.device == self.device
        copy = staged(tensor, direct)
        dtype = str(tensor.dtype).removeprefix("torch.")
        header = Header(tag, dtype, tuple(tensor.shape), copy.data.numel(), direct)
        header.pack()  # may raise, here and not on the thread
        if self._error is not None:
            raise self._new_error()
        (self._states if urgent else self._bulk).outgoing.put((header, copy))

    def take(self, tag: str) -> torch.Tensor | None:
        """Removes and returns the next tensor of this tag; None if none has come. LinkError: the link has ended, and no
        tensor of the tag is left."""
        received = super().take(tag)
        if received is None:
            return None
        if received.is_cuda:  # allocated on the receiving thread's stream, and used on this one
            received.record_stream(torch.cuda.current_stream(self.device))
        return received.to(self.device, non_blocking=True)

    def begin_close(self) -> None:
        """Closes the link, and tells the other end; messages that wait are not sent. Does not wait. Idempotent."""
        before = self._state
        self._close("this end has closed it")
        if before is LinkState.FORMING:
            with suppress(RuntimeError):  # the store is gone
                self._connect.cancel()

    def close(self) -> None:
        """Closes the link, and ends its threads. Waits at most `linger` seconds for the other end; a thread that forms
        the link and cannot be cancelled ends by itself, within `forming` seconds. Not to be called by the link's own
        threads. Idempotent."""
        self.begin_close()
        self._join()
        self._drop_groups()
        self._join()

    def _join(self) -> None:
        until = time.monotonic() + self._linger
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    @property
    def _threads(self) -> list[threading.Thread]:
        return [self._former, *self._states.threads, *self._bulk.threads]

    def _form(self) -> None:
        try:
            pairs = self._connect()
        except (RuntimeError, OSError) as error:  # OSError: an address that is not found, or not reached
            self._lose(f"it could not be formed, {first_sentence(error)}")
            return
        with self._lock:
            is_wanted = self._state is LinkState.FORMING
            if is_wanted:
                self._state, self._pairs, self._direct = LinkState.OPEN, pairs, pairs[0].direct
                for lane, pair in zip((self._states, self._bulk), pairs, strict=True):
                    lane.start(pair)
        if not is_wanted:
            for pair in pairs:
                pair.close()
        self._wakeup.notify()

    def _deliver(self, header: Header, data: torch.Tensor) -> None:
        received = unstaged(data, header.dtype, header.shape)
        with self._lock:
            self._inbox[header.tag].append(received)
            has_keys, self._has_keys = self._has_keys, False
        if has_keys:  # the other end has formed the link, too
            self._connect.delete_keys()
        self._wakeup.notify()

    def _close(self, reason: str) -> None:
        if self._end(LinkState.CLOSED, LinkClosed(self.epoch, self.peer, reason)):
            for lane in (self._states, self._bulk):
                lane.clear()
            self._states.outgoing.put((Header(_BYE, "uint8", (), 0), StagedCopy(host_buffer(0, False), bool)))
            self._states.outgoing.put(None)

    def _heard_bye(self) -> None:
        self._answered.set()
        self._close("the other end has closed it")

    def _sent_all(self) -> None:
        """Closes the groups, once the other end has answered or does not."""
        if self._state is LinkState.CLOSED:
            self._answered.wait(self._linger)
        self._drop_groups()

    def _lose(self, reason: str) -> None:
        if self._end(LinkState.LOST, LinkError(self.epoch, self.peer, reason)):
            self._drop_groups()

    def _drop_groups(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, ()
        self._answered.set()
        for lane in (self._states, self._bulk):
            lane.outgoing.put(None)
        for pair in pairs:
            pair.close()


def staged(tensor: torch.Tensor, direct: bool = False) -> StagedCopy:
    """Starts to copy a tensor, and returns the copy. `direct`: on the tensor's own device. ValueError: a sparse,
    quantized or meta tensor. See Note [Staged]."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise ValueError(f"a tensor of layout {tensor.layout} on {tensor.device} has no plain bytes that can be sent")
    data = device_buffer(tensor.nbytes, tensor.device) if direct else host_buffer(tensor.nbytes, pinned=tensor.is_cuda)
    if tensor.numel():
        data.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)
    if not tensor.is_cuda:
        return StagedCopy(data, bool)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return StagedCopy(data, event.synchronize)


def unstaged(data: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the tensor that was staged as `data`, as a view of it. ValueError where the sizes do not match."""
    kind: torch.dtype = getattr(torch, dtype)
    if torch.Size(shape).numel() * kind.itemsize != data.numel():
        raise ValueError(f"{data.numel()} bytes are no {dtype} tensor of shape {shape}")
    return data.view(kind).view(shape)


def host_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    """Returns uint8[nbytes] on the host, uninitialized, outside of the pool."""
    with install.stock():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


def first_sentence(error: Exception) -> str:
    """Returns the first line of an error of torch, without the C++ frames and advice after it."""
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
