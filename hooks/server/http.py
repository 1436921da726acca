"""One HTTP request to an endpoint: its body and headers, its answer or stream, and errors as OpenAI has them.

Note [One name, two requests]
    Clients choose the name of a request as `x-request-id`. A proxy that repeats a request does so with the same name.
    So a name is taken (HTTP 409, by the engine) until its request has ended, a cancelled one once its loop has dropped
    it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...allocator.config import parse_time
from ...allocator.errors import ConfigError
from .engine import RETRY, Denial
from .fields import ASKING
from .load import SLOS

_KINDS: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}  # OpenAI's types
_DONE: Final = b"data: [DONE]\n\n"


class HTTPCall(Struct, frozen=True):
    """A request to an endpoint. `name`: its x-request-id; `content`: its body, empty once it was read; `parameters`: of
    its query and its path; `ttft`, `tpot`: its SLOs in seconds."""

    name: str
    content: bytearray
    parameters: dict[str, Any]
    ttft: float | None = None
    tpot: float | None = None


class ErrorDetail(Struct, frozen=True):
    """What is wrong, as OpenAI says it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Failure(Struct, frozen=True):
    """The body of an answer that is an error."""

    error: ErrorDetail


Handler = Callable[[HTTPCall], Awaitable[Response]]


def fault_of(error: Exception) -> tuple[int, ErrorDetail]:
    """Returns the status and the words of an error; other errors than a Denial are logged, and not told."""
    if not isinstance(error, Denial):
        logging.getLogger(__name__).error("a request failed", exc_info=error)
        error = Denial(500, f"the server has a fault: {type(error).__name__}", "internal_error")
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return error.status, ErrorDetail(error.message, kind, error.param, error.code)


def failed(error: Exception) -> Response:
    """Makes the answer to a request that failed."""
    status, fault = fault_of(error)
    headers = {}
    if status in (429, 503):
        wait = getattr(error, "retry_after", None)
        headers["retry-after"] = str(math.ceil(RETRY if wait is None else wait))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return answered(Failure(fault), status, headers)


def answered(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Makes an answer of JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


class Stream(Response):
    """An answer that is a stream of events. An error in it is an event, too."""

    def __init__(
        self, events: AsyncGenerator[Any, None], first: Any, failed_event: Callable[[ErrorDetail], Any]
    ) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._first = first
        self._failed = failed_event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all of it."""
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for line in self._lines():
                await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self) -> AsyncGenerator[bytes, None]:
        yield _line(self._first)
        try:
            async for event in self._events:
                yield _line(event)
        except Exception as error:  # any error: the status is sent already
            yield _line(self._failed(fault_of(error)[1]))
        yield _DONE


async def streamed(events: AsyncGenerator[Any, None], failed_event: Callable[[ErrorDetail], Any] = Failure) -> Response:
    """Makes an answer that is a stream. It begins once there is an event, so that an earlier error has a status of its
    own. Denial."""
    return Stream(events, await anext(events), failed_event)


def _line(event: Any) -> bytes:
    """An event of a stream; those with a `type` have it as their name."""
    kind = getattr(event, "type", None)
    name = f"event: {kind}\n".encode() if kind else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"


class APIEndpoint:
    """An ASGI application for one route. A request whose client goes away is cancelled."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        request = Request(scope, receive)
        name = request.headers.get("x-request-id") or secrets.token_hex(16)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", name.encode("latin-1")))
            await send(message)

        try:
            call = await _call(request, name)
        except ClientDisconnect:
            return
        except Exception as error:  # any error: it is told
            await failed(error)(scope, receive, named)
            return
        tasks = [asyncio.create_task(self._answer(call, scope, named)), asyncio.create_task(_gone(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, call: HTTPCall, scope: Scope, send: Send) -> None:
        try:
            response = await self._handler(call)
        except Exception as error:  # any error: it is told
            response = failed(error)
        with suppress(OSError):  # the client has gone
            await response(scope, _nothing, send)


async def _gone(receive: Receive) -> None:
    """Waits until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    """Receives nothing: APIEndpoint looks itself whether the client has gone."""
    return {"type": "http.disconnect"}


async def _call(request: Request, name: str) -> HTTPCall:
    if len(name) > ASKING.name:
        raise Denial(400, f"x-request-id has more than {ASKING.name} characters", "invalid_value", "x-request-id")
    given = [request.headers.get(header) for header in SLOS]
    try:
        slos = [parse_time(text, header) if text else None for text, header in zip(given, SLOS, strict=True)]
    except ConfigError as error:
        raise Denial(400, str(error), "invalid_value") from None
    content = bytearray()
    async for part in request.stream():  # `body()` would have all parts beside the whole
        content += part
    return HTTPCall(name, content, {**request.query_params, **request.path_params}, *slos)


async def denied(_: Request, error: Exception) -> Response:
    """Makes the answer to a request that is denied before an endpoint has it, or that no route takes; for starlette,
    which would call what is not asynchronous on a thread."""
    if isinstance(error, Denial):
        return failed(error)
    status = getattr(error, "status_code", 404)
    response = failed(Denial(status, str(getattr(error, "detail", error)), "unknown_url"))
    response.headers.update(getattr(error, "headers", None) or {})
    return response
