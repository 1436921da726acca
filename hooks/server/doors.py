"""The doors of a server: who may ask, by its key, its Host and its Origin, and how large a body may be.

Note [What is behind a door]
    A door belongs to a route and is asked after the router has matched it. What is open is therefore decided by what
    answers, and not by a path, which older routers take from the Host header.

Note [Servers without a key]
    A web page can have a browser ask a server on the user's own machine, and read the answers once the page's name
    leads to 127.0.0.1 (DNS rebinding). The browser still sends that name as Host, and the page's as Origin. So without
    a key only addresses and known names are taken as Host, and known pages as Origin. With a key anything is: proxies
    send names of theirs, and no page knows the key.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...allocator.config import API_KEY, variables
from ...allocator.errors import ConfigError
from ...allocator.units import format_size
from .connections import CLIENTS, ClientLimits
from .engine import Denial

OPEN: Final = ("/health",)  # routes that need no key
_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")


def read_key(given: str | None, file: Path | None) -> str | None:
    """Returns the key that was given, or is in a file or in BALLONET_API_KEY; None: there is none. ConfigError."""
    key = given
    if file is not None:
        try:
            key = file.read_text().strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"no key can be read from {file}: {error}") from None
    elif given is None:
        key = variables([API_KEY]).get(API_KEY, "").strip() or None
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise ConfigError(
            "the API key is empty, or has characters other than printable ASCII, which clients cannot send"
        )
    return key


@dataclass(frozen=True)
class Doors:
    """What a server asks of requests. `key`: clients send it as `Authorization: Bearer KEY`; None: no check. `hosts`:
    names that a Host may have without a key, beside localhost and addresses. `origins`: of web pages that may ask, or
    `*`. `max_body`: bytes; None: what the longest sequence of a model takes."""

    key: str | None = None
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    max_body: int | None = None

    def guard(self, routes: Iterable[Any], longest: int = 0, tuning: ClientLimits = CLIENTS) -> None:
        """Puts a door before each of an application's routes. They raise Denial, which the application answers.
        `longest`: tokens of the longest sequence of a model; 0: it has no limit."""
        largest = self.max_body or (longest * tuning.token + tuning.rest if longest else tuning.bodies)
        bodies = _Bodies(largest, max(largest, tuning.bodies))
        for route in routes:
            route.app = _Door(route.app, self, bodies, keyed=self.key is not None and route.path not in OPEN)

    def middleware(self) -> list[Middleware]:
        """Returns what lets web pages ask: nothing, unless there are `origins`."""
        if not self.origins:
            return []
        allowed: dict[str, Any] = {"allow_origins": [*self.origins], "allow_headers": ["*"]}
        return [Middleware(CORSMiddleware, allow_methods=["GET", "POST"], **allowed)]

    def check(self, headers: Headers, *, keyed: bool) -> None:
        """Raises Denial where a request with these headers may not be answered."""
        if keyed and not self._has_key(headers):
            raise Denial(401, "an API key is needed: Authorization: Bearer KEY", "invalid_api_key")
        if self.key is None and not all(map(self._is_known, headers.getlist("host"))):
            why = "is no name of this server, as --allow-host gives them: ask it by its address, or give it a key"
            raise Denial(421, f"the host {headers['host']!r} {why}", "unknown_host")
        origin = headers.get("origin")
        if self.key is None and origin is not None and not self.origins & {origin, "*"}:
            raise Denial(403, f"pages of {origin} may not ask, as no --allow-origin says so", "unknown_origin")

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        bearer = scheme.lower() == "bearer"
        assert self.key is not None
        return hmac.compare_digest(sent.strip().encode("latin-1"), self.key.encode()) and bearer

    def _is_known(self, host: str) -> bool:
        match = _HOST.fullmatch(host.strip().lower())
        if match is None:
            return False
        name = match[1].strip("[]").removesuffix(".")
        with suppress(ValueError):
            return bool(ip_address(name))
        return name in self.hosts or name == "localhost"


class _Bodies:
    """Bodies that are being received."""

    def __init__(self, largest: int, most: int) -> None:
        """Bytes of one, and of all together."""
        self._largest = largest
        self._most = most
        self._arriving = 0

    @contextmanager
    def limited(self, receive: Receive, headers: Headers) -> Iterator[Receive]:
        """Gives what receives the body of a request, and raises Denial once it is too large."""
        taken = 0

        def check(nbytes: int) -> None:
            if nbytes > self._largest:
                why = f"the body is larger than {format_size(self._largest)} (--max-body)"
                raise Denial(413, why, "request_too_large")
            if self._arriving > self._most:
                raise Denial(503, "too many large requests come at once: try again later", retry_after=1.0)

        async def receive_part() -> Message:
            nonlocal taken
            message = await receive()
            nbytes = len(message.get("body", b""))
            taken += nbytes
            self._arriving += nbytes
            check(taken)
            return message

        check(int(headers.get("content-length", "0")))  # a number, or h11 would have refused it
        try:
            yield receive_part
        finally:
            self._arriving -= taken


class _Door:
    """A route behind a check of each request."""

    def __init__(self, app: ASGIApp, doors: Doors, bodies: _Bodies, *, keyed: bool) -> None:
        self._app = app
        self._doors = doors
        self._bodies = bodies
        self._keyed = keyed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection. Denial."""
        headers = Headers(scope=scope)
        self._doors.check(headers, keyed=self._keyed)
        with self._bodies.limited(receive, headers) as limited:
            await self._app(scope, limited, send)
