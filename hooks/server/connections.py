"""Connections whose clients are slow, silent or many.

Note [Why a subclass of uvicorn's protocol]
    uvicorn has a timeout for connections between two requests, and one limit, at which clients get 503 however idle the
    others are. It has none for headers, bodies and readers that never end. Other servers have some of these (hypercorn:
    no bodies; granian: Rust, and none for bodies) and would be another dependency, while a proxy in front would have
    all, but not each user has one. Its protocol of h11 is Python, and what is asked of it here is few attributes, which
    a test holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What clients may take of a server. Seconds, bytes and counts."""

    # For the line and the headers of a request, from the connection or its first byte on, and for each `piece` of a
    # body: the slowest client sends 4 KiB a second. Chosen.
    headers: float = 20.0
    body: float = 60.0
    piece: int = 2**18
    # A client that reads nothing of its answer is waited for, once the kernel's buffers are full. Chosen.
    reader: float = 60.0
    # A connection stays open for its client's next request: longer than clients keep one (openai 5 s, nginx 60 s), as
    # a request fails that is sent while the server closes its connection. Chosen.
    idle: int = 75
    sweep: float = 1.0  # between two looks at all connections: 1 ms for 4,000. Measured
    # Connections at once: less where the process may have fewer files, of which it needs `files` more (at most a
    # quarter of all) for models and prefixes. Chosen: more than clients of one machine's models have.
    connections: int = 4096
    files: int = 1024
    burst: int = 32  # accepted in one turn of the event loop, when nobody is answered: 0.2 ms each. Measured
    lines: int = 20  # of the log in a second, of each logger: a client may cause one with each request. Chosen
    # Bytes of a body: so many for each token of the longest sequence (text has 4 in English, ids 7, escaped text three
    # times as many), and so many for all else. Of all bodies that have come in part: an eighth of a small machine's
    # memory. Chosen.
    token: int = 16
    rest: int = 2**20
    bodies: int = 2**28
    # Processes that render and tokenize: prompts of a million tokens take seconds each, others a millisecond. A job
    # beyond its seconds or bytes ends with its process; one that keeps more than `kept` is replaced; so many jobs wait,
    # as requests may wait for a model. Chosen.
    renderers: int = 4
    render: float = 20.0
    render_memory: int = 2**30
    render_kept: int = 2**26
    jobs: int = 1024
    # Requests are told that a shutdown ends them, before connections are closed; all else has until the process is
    # ended. Chosen.
    told: float = 5.0
    hung: float = 10.0


CLIENTS: Final = ClientLimits()


def raise_files() -> int:
    """Raises the limit of this process's files to the largest. Returns how many more it may open."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most - len(os.listdir("/proc/self/fd"))


class Connections:
    """The connections of a server, at most `most`. `burst`: so many are accepted before the first of them is here;
    others wait in the kernel."""

    def __init__(self, files: int, tuning: ClientLimits = CLIENTS, clock: Callable[[], float] = time.monotonic) -> None:
        """`files`: that the process may open."""
        self.most = max(1, min(tuning.connections, files - min(tuning.files, files // 4)))
        self.burst = max(1, min(tuning.burst, (files - self.most) // 4))  # those before are still being closed
        self.tuning = tuning
        self.clock = clock
        self.open: set[BoundedConnection] = set()
        self.idle: dict[BoundedConnection, None] = {}  # which compute nothing, the longest idle one first

    def admit(self, connection: BoundedConnection) -> bool:
        """Adds a connection; where there are too many, instead of the one that has been idle for longest. Returns
        whether there is room for it."""
        if len(self.open) >= self.most:
            if not self.idle:
                return False
            next(iter(self.idle)).end()
        self.open.add(connection)
        self.idle[connection] = None
        return True

    def sweep(self) -> None:
        """Ends connections whose client should have sent or read something by now."""
        now = self.clock()
        for connection in [connection for connection in self.open if connection.is_late(now)]:
            connection.end()


class _Lingering:
    """A transport that is closed only once its client has sent the rest of a body, which nobody reads: the kernel would
    reset the connection otherwise, and the client would lose the answer."""

    def __init__(self, transport: asyncio.Transport, connection: BoundedConnection) -> None:
        self.lingers = False
        self._transport = transport
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Is nothing more sent?"""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """Closes it, a second time at once."""
        if self.lingers or self._connection.conn.their_state is not h11.SEND_BODY:
            self._transport.close()
            return
        self.lingers = True
        self._transport.write_eof()
        self._connection.flow.resume_reading()


class BoundedConnection(H11Protocol):
    """A connection that ends where its client is late, see Note [Why a subclass of uvicorn's protocol]."""

    def __init__(self, *arguments: Any, connections: Connections, **named: Any) -> None:
        """`connections`: all of them; the others are H11Protocol's."""
        super().__init__(*arguments, **named)
        self._connections = connections
        self._received = self._stalls = 0  # bytes; times that the client has not read for a while
        self._phase: tuple[object, ...] = ()
        self._since = connections.clock()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        self._lingering = self.transport = cast(Any, _Lingering(transport, self))
        if not self._connections.admit(self):
            transport.write(_BUSY)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        self._received += len(data)
        if not self._lingering.lingers:
            super().data_received(data)

    def handle_events(self) -> None:
        """Begins a request once its headers are there."""
        super().handle_events()
        if self._is_answering:
            self._connections.idle.pop(self, None)

    def on_response_complete(self) -> None:
        """Called when a request was answered."""
        if self in self._connections.open:
            self._connections.idle[self] = None
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Called by asyncio when the client reads too little."""
        self._stalls += 1
        super().pause_writing()

    def is_late(self, now: float) -> bool:
        """Has nothing come of what the client should send or read now, for too long?"""
        limit, *phase = self._waits_for()
        if phase != [*self._phase]:
            self._phase, self._since = tuple(phase), now
        return bool(now - self._since > limit)

    def end(self) -> None:
        """Ends it at once; a request of it is cancelled."""
        self._forget()
        self.transport.abort()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _waits_for(self) -> tuple[Any, ...]:
        """Returns for how many seconds it waits, and what is another thing each time that it waits anew."""
        tuning = self._connections.tuning
        if self.flow.write_paused or (self.transport.is_closing() and not self._lingering.lingers):
            return tuning.reader, "reads", self._stalls
        if self.conn.their_state is h11.SEND_BODY:
            return tuning.body, "body", self.cycle, self._received // tuning.piece
        if self._is_answering:
            return float("inf"), "answer", self.cycle
        if self.cycle is None or self.conn.trailing_data[0]:
            return tuning.headers, "headers", self.cycle
        return tuning.idle, "idle", self.cycle

    def _forget(self) -> None:
        self._connections.open.discard(self)
        self._connections.idle.pop(self, None)


class FewLines(logging.Filter):
    """Lets a logger write so many lines in a second, and say how many it has left out."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._most = most
        self._clock = clock
        self._second, self._lines, self._left_out = clock(), 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Called by logging with each line."""
        if (now := self._clock()) - self._second >= 1:
            if self._left_out:
                record.msg, record.args = (
                    f"{record.getMessage()} ({self._left_out} lines before it were left out)",
                    None,
                )
            self._second, self._lines, self._left_out = now, 0, 0
        self._lines += 1
        self._left_out += self._lines > self._most
        return self._lines <= self._most


@contextlib.contextmanager
def few_lines(names: tuple[str, ...], most: int) -> Any:
    """A `with` block in which loggers of these names write only so many lines in a second."""
    filters = [(logging.getLogger(name), FewLines(most)) for name in names]
    for logger, lines in filters:
        logger.addFilter(lines)
    try:
        yield
    finally:
        for logger, lines in filters:
            logger.removeFilter(lines)
