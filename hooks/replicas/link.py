"""A link between two replicas in one epoch: sends tensors by tag, urgent ones before bulk.

Note [Two threads]
    An idle link has a blocking receive outstanding, so one thread receives, and another forms the link and then sends.
    The main loop never blocks on either: `send` returns once the tensor is staged, `take` does not wait, and `recv`
    waits on the Wakeup, which every link and the channel notify, so a wait for a tensor of one replica also ends when
    another replica is lost. An error ends this link alone: its pair is closed, and outstanding sends and receives fail
    with LinkError.

Note [Closing]
    An end that closes sends `BYE`, to tell a close from a crash. The other end answers with `BYE` and closes too. If no
    answer comes within `linger` seconds, the link is dropped.
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
from .channel import Wakeup
from .errors import ChecksumError, Interrupted, LinkClosed, LinkError, NoAnswer
from .outbox import Outbox, SentMessage
from .pair import Connect, TwoRanks
from .pending_send import LinkState, PendingSend
from .staging import checksum, host_buffer, staged, unstaged
from .wire import BYE, MESSAGE, WORDS, Header

_CPU: Final = torch.device("cpu")


class Link:
    """One end of a link. To be closed, as its threads keep it alive. See Note [Two threads]."""

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
        """Starts to form the link, without waiting. `device`: where received tensors are put."""
        self.epoch = epoch
        self.peer = peer
        self.stale = 0  # messages of another epoch, which were dropped
        self._connect = connect
        self._wakeup = wakeup
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._direct = False  # is device memory sent from device to device? False until the link is formed
        self._linger = tuning.linger
        self._pair: TwoRanks | None = None
        self._state = LinkState.FORMING
        self._error: LinkError | None = None
        self._lock = threading.Lock()  # of the state and the inbox
        self._outbox: Outbox[PendingSend | None] = Outbox(clock, tuning.log)  # None: BYE
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
        """Whether device tensors are sent from device to device, without the host. False until the link is formed."""
        return self._direct

    @property
    def finished(self) -> bool:
        """Whether both threads have ended."""
        return not (self._sender.is_alive() or self._receiver.is_alive())

    @property
    def error(self) -> LinkError | None:
        """Why the link is closed or lost; None while it is neither."""
        return self._error

    @property
    def log(self) -> list[SentMessage]:
        """The latest messages that this end has sent; see outbox.py, Note [At most one chunk]."""
        return self._outbox.log

    def send(self, tensor: torch.Tensor, tag: str, urgent: bool = False, check: bool = False) -> PendingSend:
        """Copies a tensor (staging.py) and queues the copy: `urgent` before all bulk that has not begun. `check`: the
        receiver verifies a checksum. Does not wait, not even for the link to be formed. LinkError; ValueError for a
        tensor or tag that cannot be sent."""
        copy = staged(tensor, self._direct and tensor.device == self._device)
        nbytes = copy.data.numel()
        header = Header(MESSAGE, self.epoch, tag, copy.dtype, copy.shape, nbytes, urgent, 0 if check else None)
        header = replace(header, direct=copy.direct)
        header.encode()  # may raise, here and not on the thread
        sending = PendingSend(header, copy)
        if not self._outbox.put(sending, tag, nbytes, urgent):
            raise self._new_error()
        return sending

    def has(self, tag: str) -> bool:
        """Returns whether `take` would return a tensor, or raise."""
        with self._lock:
            return tag in self._inbox or self._error is not None

    def take(self, tag: str) -> torch.Tensor | None:
        """Removes and returns the next tensor of this tag; None if none has come. ChecksumError: it is damaged; the
        next call returns the one after it. LinkError: the link has ended, and no tensor of the tag is left."""
        with self._lock:
            found = self._inbox[tag].popleft() if tag in self._inbox else None
            if tag in self._inbox and not self._inbox[tag]:
                del self._inbox[tag]
            ended = self._error is not None  # read under the lock: tensors that came before the end are taken first
        if isinstance(found, ChecksumError):
            raise found
        if found is None and ended:
            raise self._new_error()
        if found is None:
            return None
        if self._on_gpu and found.is_cuda:  # allocated on the receiving thread's stream, and used on this one
            found.record_stream(torch.cuda.current_stream(self._device))
        return found.to(self._device, non_blocking=True)

    def recv(self, tag: str, timeout: float | None = None, unless: Callable[[], bool] = lambda: False) -> torch.Tensor:
        """Waits for the next tensor of this tag, and returns it; raises as `take`. Interrupted as soon as `unless`,
        called at each notify, returns True: a control message is waiting. NoAnswer after `timeout` seconds."""

        def look() -> torch.Tensor | None:
            if unless():
                raise Interrupted(f"message {tag!r} of replica {self.peer}")
            return self.take(tag)

        found = self._wakeup.wait(look, timeout)
        if found is None:
            raise NoAnswer(f"message {tag!r} of replica {self.peer}", timeout or 0.0)
        return found

    def begin_close(self) -> None:
        """Closes the link, and tells the other end; queued messages are not sent. Does not wait. Idempotent."""
        with self._lock:
            before = self._state
        self._end(LinkState.CLOSED, LinkClosed(self.epoch, self.peer, "this end has closed it"), bye=True)
        if before is LinkState.FORMING:
            with suppress(RuntimeError):  # the store is gone
                self._connect.cancel()

    def close(self) -> None:
        """Closes the link, and ends its threads. Waits at most `linger` seconds for the other end; a thread that forms
        the link and cannot be cancelled ends by itself, within `forming` seconds. Not to be called by the link's own
        threads. Idempotent."""
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
        except (RuntimeError, OSError) as error:  # OSError: an address that is not found, or not reached
            self._lose(f"it could not be formed, {_first_sentence(error)}")
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
                self._lose(_first_sentence(error))
                if waiting.message is not None:
                    waiting.message.end(self._new_error())
                return
            self._outbox.mark_sent(waiting)
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
                    self._connect.delete_keys()
                is_first = False
                header = Header.decode(words.tolist())
                if header.kind == BYE:
                    self._end(
                        LinkState.CLOSED, LinkClosed(self.epoch, self.peer, "the other end has closed it"), bye=True
                    )
                    return
                direct = header.direct
                size = header.nbytes
                data = pair.device_buffer(size) if direct else host_buffer(size, pinned=self._on_gpu)
                if header.nbytes:
                    pair.recv(data, direct)
                self._deliver(header, data)
        except (RuntimeError, ValueError) as error:
            self._lose(_first_sentence(error))

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
        """Ends the link, unless it has ended. Returns whether this call did. `bye`: sends BYE to the other end."""
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

    def _new_error(self) -> LinkError:
        """Returns a copy of the error: raising the same object again would grow a traceback that keeps frames alive."""
        error = self._error
        assert error is not None
        return type(error)(error.epoch, error.peer, error.reason)


def _words(header: Header) -> torch.Tensor:
    """Returns the header as int64[WORDS] outside of the pool."""
    words = host_buffer(WORDS * 8, pinned=False).view(torch.int64)
    words.copy_(torch.tensor(header.encode()))
    return words


def _first_sentence(error: Exception) -> str:
    """Returns the first line of an error of torch, without the C++ frames and advice after it."""
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
