"""The HTTP side of a server: its endpoints behind doors, and a shutdown that finishes running requests."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette

from .anteroom import Anteroom
from .connections import CLIENTS, Connections, raise_files
from .doors import Doors
from .ending import Listening, Watchdog
from .endpoints import endpoints
from .served import Models


@dataclass(frozen=True)
class Address:
    """A server's address and limits. `doors`: who may ask.
    `waiting`: requests of a model that may wait. `grace`: seconds that requests may take to end at a shutdown.
    `as_json`: is a line of JSON printed once it listens? `names`: that clients ask for, of each model; none: those it
    was started with. `own_templates`: may clients send chat templates?"""

    host: str = "127.0.0.1"
    port: int = 8000
    doors: Doors = field(default_factory=Doors)
    waiting: int = 1024
    grace: float = 30.0
    as_json: bool = False
    names: tuple[str, ...] = ()
    own_templates: bool = False


class Application:
    """The HTTP side of a server. `app`: what uvicorn runs."""

    def __init__(self, models: Models, address: Address, say: Callable[[str], None]) -> None:
        """`say`: is called with each line for people."""
        self._models = models
        self._address = address
        self._say = say
        self._tuning = CLIENTS
        doors, longest = address.doors, [model.longest or 0 for model in models]
        self.app = endpoints(models, self._lifespan, doors.middleware())
        doors.guard(self.app.routes, max(longest) if all(longest) else 0, self._tuning)

    def run(self, close: Callable[[], object], anteroom: Anteroom) -> None:
        """Serves at the sockets of `anteroom` until SIGINT or SIGTERM. Then it takes no new requests, and ends those
        that still run after a while with an error. `close` is called at the end."""
        tuning, grace = self._tuning, self._address.grace
        connections = Connections(raise_files(), tuning)
        listening = Listening(self.app, connections, grace, self._models.tell)
        with Watchdog(grace + tuning.told + tuning.hung):
            try:
                listening.run(anteroom.leave())
            finally:
                close()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None, None]:
        at = f"http://{self._address.host}:{self._address.port}"
        names = sorted(model.name for model in self._models)
        self._say(f"ready: {', '.join(names)} at {at}")
        if self._address.as_json:
            print(json.dumps({"ready": True, "url": at, "models": names, "pid": os.getpid()}), flush=True)
        yield
        self._say("shutting down")
