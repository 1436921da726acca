"""A link between two replicas in one epoch: tensors by tag, urgent ones before bulk, faults that stay with the link.

Note [Two threads]
    A link that is idle has a receive outstanding, which can only be waited for, so there is a thread that receives and
    one that forms the link and then sends. Neither is ever waited for by a main loop: `send` returns once the tensor is
    staged, `take` looks, and `recv` waits on the wakeup, which every link and the mailbox ring, so that who waits for a
    tensor of one replica hears that another is gone. An error ends this link alone: its pair is closed, and what waits
    to be sent or received fails with LinkError.

Note [Closing]
    An end that goes tells the other one (`BYE`), or its leaving would look like a crash. The other answers the same and
    is closed too. Who does not answer within `linger` is left.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

import torch

from ...offload.policy.tuning import DEFAULT, Replicas
from .errors import ChecksumError, Interrupted, LinkClosed, LinkError, NoAnswer
from .outbox import Logged, Outbox
from .pair import Connect, TwoRanks
from .pending_send import LinkState, PendingSend
from .staging import checksum, room, staged, unstaged
from .wakeup import Wakeup
from .wire import BYE, MESSAGE, WORDS, Header

_CPU: Final = torch.device("cpu")


class Link:
    """One end. See Note [Two threads]. To be closed: its threads keep it alive."""

    def __init__(
        self,
        connect: Connect,
        epoch: int,
        peer: int,
        wakeup: Wakeup,
        *,
        device: torch.device = _CPU,
        tuning: Replicas = DEFAULT.replicas,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begins to form it, and returns. `device`: where received tensors are put."""
        self.epoch = epoch
        self.peer = peer
        self.stale = 0  # messages that were dropped, as they were of another epoch
        self._connect = connect
        self._wakeup = wakeup
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._direct = False  # does device memory go from device to device? Not before the link is formed
        self._linger = tuning.linger
        self._pair: TwoRanks | None = None
        self._state = LinkState.FORMING
        self._error: LinkError | None = None
        self._lock = threading.Lock()  # of the state and the inbox
        self._outbox: Outbox[PendingSend | None] = Outbox(
            clock, tuning.log
        )  # None: the other end is told that this goes
        self._inbox: defaultdict[str, deque[torch.Tensor | ChecksumError]] = defaultdict(deque)
        name = f"ballonet link {epoch}/{peer}"
        self._receiver = threading.Thread(target=self._receive, name=f"{name} in", daemon=True)
        self._sender = threading.Thread(target=self._form_and_send, name=f"{name} out", daemon=True)
        self._sender.start()

    def __repr__(self) -> str:
        return f"Link(epoch={self.epoch}, peer={self.peer}, {self._state.value})"

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def device(self) -> torch.device:
        """Where received tensors are put."""
        return self._device

    @property
    def direct(self) -> bool:
        """Do tensors of the device go to the other one's without the host? Not before it is formed."""
        return self._direct

    @property
    def finished(self) -> bool:
        """Have its threads ended?"""
        return not (self._sender.is_alive() or self._receiver.is_alive())

    @property
    def error(self) -> LinkError | None:
        """Why it is closed or lost; None while it is not."""
        return self._error

    @property
    def log(self) -> list[Logged]:
        """The latest messages that this end has sent; see outbox.py, Note [At most one chunk]."""
        return self._outbox.log

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool = False, check: bool = False) -> PendingSend:
        """Sends a copy of a tensor, which is made before this returns (staging.py): behind what is waiting if it is
        bulk, before all bulk that has not begun if it is `urgent`. `check`: the receiver compares a checksum. Waits for
        nothing, not even for the link to be formed. LinkError; ValueError: such a tensor or tag cannot be sent."""
        copy = staged(tensor, self._direct and tensor.device == self._device)
        nbytes = copy.data.numel()
        header = Header(MESSAGE, self.epoch, tag, copy.dtype, copy.shape, nbytes, urgent, 0 if check else None)
        header = replace(header, direct=copy.direct)
        header.encode()  # which may raise, and not in the thread
        sending = PendingSend(header, copy)
        if not self._outbox.put(sending, tag, nbytes, urgent):
            raise self._ended()
        return sending

    def has(self, tag: str) -> bool:
        """Whether `take` would return a tensor, or raise."""
        with self._lock:
            return tag in self._inbox or self._error is not None

    def take(self, tag: str) -> torch.Tensor | None:
        """The next tensor of this tag, None if none is here. ChecksumError: it is damaged, and the next call returns
        the one after it. LinkError: the link is gone, and nothing of the tag is left."""
        with self._lock:
            found = self._inbox[tag].popleft() if tag in self._inbox else None
            if tag in self._inbox and not self._inbox[tag]:
                del self._inbox[tag]
            ended = self._error is not None  # not later: what comes before the end has to be taken first
        if isinstance(found, ChecksumError):
            raise found
        if found is None and ended:
            raise self._ended()
        if found is None:
            return None
        if self._on_gpu and found.is_cuda:  # its memory is the receiving thread's stream's, and is used on this one
            found.record_stream(torch.cuda.current_stream(self._device))
        return found.to(self._device, non_blocking=True)

    def recv(self, tag: str, timeout: float | None = None, unless: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """Waits for the next tensor of this tag; as `take`. Interrupted as soon as `unless` says so, which is asked at
        each ring of the wakeup: something of the control plane is waiting. NoAnswer after `timeout` seconds."""

        def look() -> torch.Tensor | None:
            if unless():
                raise Interrupted(f"message {tag!r} of replica {self.peer}")
            return self.take(tag)

        found = self._wakeup.wait(look, timeout)
        if found is None:
            raise NoAnswer(f"message {tag!r} of replica {self.peer}", timeout or 0.0)
        return found

    def begin_close(self) -> None:
        """Tells the other end that this one goes; what is not sent yet is not sent. Idempotent."""
        with self._lock:
            before = self._state
        self._end(LinkState.CLOSED, LinkClosed(self.epoch, self.peer, "this end has closed it"), bye=True)
        if before is LinkState.FORMING:
            with suppress(RuntimeError):  # of a store that is gone
                self._connect.cancel()

    def close(self) -> None:
        """Ends it, and its threads. Waits `linger` seconds at most for an end that does not answer; what cannot be
        cancelled while it is formed ends by itself, in `forming` seconds. Not for its own threads. Idempotent."""
        self.begin_close()
        self._join()
        self._drop_pair()
        self._join()

    def _join(self) -> None:
        until = time.monotonic() + self._linger
        for thread in (self._sender, self._receiver):
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def _form_and_send(self) -> None:
        try:
            pair = self._connect()
        except (RuntimeError, OSError) as error:  # the latter: of an address that is not found, or not reached
            self._lose(f"it could not be formed, {_said(error)}")
            return
        with self._lock:
            self._pair = pair
            if self._state is LinkState.FORMING:
                self._state = LinkState.OPEN
            self._direct = pair.direct
            self._receiver.start()
        self._wakeup.notify()
        while (waiting := self._outbox.next()) is not None:
            try:
                self._send_one(pair, waiting.message)
            except RuntimeError as error:
                self._lose(_said(error))
                if waiting.message is not None:
                    waiting.message.end(self._ended())
                return
            self._outbox.sent(waiting)
            if waiting.message is not None:
                waiting.message.end()

    def _send_one(self, pair: TwoRanks, sending: PendingSend | None) -> None:
        if sending is None:
            pair.send(_words(Header(BYE, self.epoch)))
            return
        sending.staged.wait()
        header, data = sending.header, sending.staged.data
        if header.checksum is not None:
            header = replace(header, checksum=checksum(data))
        pair.send(_words(header))
        if header.nbytes:
            pair.send(data, header.direct)

    def _receive(self) -> None:
        pair = self._pair
        words = _words(Header(BYE, self.epoch))
        is_first = True
        try:
            while pair is not None:
                pair.recv(words)
                if is_first:  # so the other end has formed the link, too
                    self._connect.forget()
                is_first = False
                header = Header.decode(words.tolist())
                if header.kind == BYE:
                    self._end(
                        LinkState.CLOSED, LinkClosed(self.epoch, self.peer, "the other end has closed it"), bye=True
                    )
                    return
                direct = header.direct
                size = header.nbytes
                data = pair.room(size) if direct else room(size, pinned=self._on_gpu)
                if header.nbytes:
                    pair.recv(data, direct)
                self._deliver(header, data)
        except (RuntimeError, ValueError) as error:
            self._lose(_said(error))

    def _deliver(self, header: Header, data: torch.Tensor) -> None:
        if header.epoch != self.epoch:
            self.stale += 1
            return
        found: torch.Tensor | ChecksumError = unstaged(data, header.dtype, header.shape)
        if header.checksum is not None and header.checksum != checksum(data):
            found = ChecksumError(self.epoch, self.peer, header.tag)
        with self._lock:
            self._inbox[header.tag].append(found)
        self._wakeup.notify()

    def _lose(self, reason: str) -> None:
        if self._end(LinkState.LOST, LinkError(self.epoch, self.peer, reason), bye=False):
            self._drop_pair()

    def _end(self, state: LinkState, error: LinkError, bye: bool) -> bool:
        """Only the first end of a link counts: returns whether this is it. `bye`: the other end is told."""
        with self._lock:
            if self._error is not None:
                return False
            self._state, self._error = state, error
        for sending in self._outbox.close(*((None,) if bye else ())):
            if sending is not None:
                sending.end(error)
        self._wakeup.notify()
        return True

    def _drop_pair(self) -> None:
        with self._lock:
            pair, self._pair = self._pair, None
        if pair is not None:
            pair.close()

    def _ended(self) -> LinkError:
        """The error, made anew: one that is raised again would grow a traceback that keeps frames alive."""
        error = self._error
        assert error is not None
        return type(error)(error.epoch, error.peer, error.reason)


def _words(header: Header) -> torch.Tensor:
    """int64[WORDS], outside the pool."""
    words = room(WORDS * 8, pinned=False).view(torch.int64)
    words.copy_(torch.tensor(header.encode()))
    return words


def _said(error: Exception) -> str:
    """The first sentence of an error of torch, which goes on with frames and advice."""
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
