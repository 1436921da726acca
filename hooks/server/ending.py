"""How a server listens and ends: at SIGTERM or Ctrl-C it takes no new requests, and those that run have a while.

Note [Whatever hangs]
    A signal's handler in Python runs on the main thread, between two of its bytecodes: never, where that thread waits
    for a lock or a driver. C's handler writes each signal to a socket, which a thread of the watchdog reads. It ends
    the process at a second signal, and where it is still there some time after the grace time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self

import uvicorn
from starlette.types import ASGIApp

from .connections import BoundedConnection, Connections, few_lines

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LOGGERS = ("asyncio", "uvicorn.error", f"{__package__}.http")


class Listening(uvicorn.Server):
    """A server of an application at some sockets. After SIGTERM or SIGINT requests may go on for `grace` seconds, then
    `tell` is called, which ends them, and a little later connections are closed."""

    def __init__(
        self,
        app: ASGIApp,
        connections: Connections,
        grace: float = 0.0,
        tell: Callable[[], None] = lambda: None,
        lifespan: Literal["auto", "off"] = "auto",
    ) -> None:
        tuning = connections.tuning
        settings: dict[str, Any] = {
            "http": partial(BoundedConnection, connections=connections),
            "ws": "none",
            "interface": "asgi3",
            "proxy_headers": False,
            "backlog": connections.burst,
            "access_log": False,
            "lifespan": lifespan,
            "log_level": "warning",
            "timeout_keep_alive": tuning.idle,
            "timeout_graceful_shutdown": grace + tuning.told,
        }
        super().__init__(uvicorn.Config(app, **settings))
        self._connections = connections
        self._grace = grace
        self._tell = tell

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal, or until `should_exit` is set."""
        with few_lines(_LOGGERS, self._connections.tuning.lines):
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen, and to look at connections."""
        await super().startup(sockets)
        for link in sockets or []:  # the backlog of asyncio is also how many it accepts at once
            link.listen(self._connections.tuning.connections)
        self._sweeping = asyncio.create_task(self._sweep())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends requests."""
        telling = asyncio.get_running_loop().call_later(self._grace, self._tell)
        await super().shutdown(sockets)
        telling.cancel()
        self._sweeping.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends at the signals of a shutdown; not again, as stock does, after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _sweep(self) -> None:
        while True:
            self._connections.sweep()
            await asyncio.sleep(self._connections.tuning.sweep)


class Watchdog:
    """Ends the process at a second signal, or so many seconds after the first one. A context of the main thread."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="ballonet-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Watches for no more signals. After one, the rest of the process still has its seconds only."""
        signal.set_wakeup_fd(self._before)
        self._writer.close()

    def _watch(self) -> None:
        timer = threading.Timer(self._seconds, end_process, [f"something hung for {self._seconds:g} s"])
        timer.daemon = True
        with self._reader:
            while number := self._reader.recv(1):
                if number[0] not in _SIGNALS:
                    continue
                if timer.ident is not None:
                    end_process("a second signal came")
                timer.start()


def end_process(why: str) -> None:
    """Ends the process, with what it has written so far, unless writing hangs."""

    def flush() -> None:
        with suppress(OSError, ValueError):
            print(f"ballonet: the server is ended: {why}", file=sys.stderr, flush=True)
            sys.stdout.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(1)
