"""The HTTP side of a server: its endpoints behind a key, and a shutdown that finishes running requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..device import governors
from .endpoints import endpoints
from .engine import Denial
from .served import Models

OPEN: Final = ("/health",)  # routes that need no key


@dataclass(frozen=True)
class Address:
    """A server's address and limits. `key`: clients send it as `Authorization: Bearer KEY`; None: no check.
    `waiting`: requests of a model that may wait. `grace`: seconds that requests may take to end at a shutdown.
    `as_json`: is a line of JSON printed once it listens? `names`: that clients ask for, of each model; none: those it
    was started with. `own_templates`: may clients send chat templates?"""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    waiting: int = 1024
    grace: float = 30.0
    as_json: bool = False
    names: tuple[str, ...] = ()
    own_templates: bool = False


class _Listening(uvicorn.Server):
    """A uvicorn server that ends the remaining requests `grace` seconds after a shutdown begins."""

    def __init__(self, config: uvicorn.Config, grace: float, tell: Callable[[], None]) -> None:
        super().__init__(config)
        self._grace = grace
        self._tell = tell

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        telling = asyncio.get_running_loop().call_later(self._grace, self._tell)
        await super().shutdown(sockets)
        telling.cancel()


class Application:
    """The HTTP side of a server. `app`: what uvicorn runs."""

    def __init__(self, models: Models, address: Address, say: Callable[[str], None]) -> None:
        """`say`: is called with each line for people."""
        self._models = models
        self._address = address
        self._say = say
        self.app = endpoints(models, self._lifespan)
        for route in self.app.routes:
            if address.key is not None and route.path not in OPEN:  # type: ignore[attr-defined]
                route.app = _Door(route.app, address.key)  # type: ignore[attr-defined]

    def run(self, close: Callable[[], object]) -> None:
        """Serves until SIGINT or SIGTERM. Then it takes no new requests, and ends those that still run after a while
        with an error. `close` is called at the end."""
        tuning = governors.composed_with().tuning.serving
        config = uvicorn.Config(
            self.app,
            host=self._address.host,
            port=self._address.port,
            log_level="warning",
            timeout_keep_alive=tuning.idle_connection,
            timeout_graceful_shutdown=round(self._address.grace + tuning.told),
        )
        before = signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it again after its own shutdown
        try:
            with suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again, too
                _Listening(config, self._address.grace, self._models.tell).run()
        finally:
            close()
            signal.signal(signal.SIGTERM, before)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None, None]:
        at = f"http://{self._address.host}:{self._address.port}"
        names = sorted(model.name for model in self._models)
        self._say(f"ready: {', '.join(names)} at {at}")
        if self._address.as_json:
            print(json.dumps({"ready": True, "url": at, "models": names, "pid": os.getpid()}), flush=True)
        yield
        self._say("shutting down")


class _Door:
    """A route that needs a key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection. Denial."""
        sent = Headers(scope=scope).get("authorization", "").encode("latin-1")  # the bytes as they came
        if not hmac.compare_digest(sent, self._expected):
            raise Denial(401, "an API key is needed: Authorization: Bearer KEY", "invalid_api_key")
        await self._app(scope, receive, send)
