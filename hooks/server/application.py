"""The HTTP side of a server: transformers' own application with `/metrics`, refusals with numbers, of bodies that its
handlers cannot use, too, keys, and a shutdown that finishes running requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from jinja2 import TemplateError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import GenerationConfig
from transformers.cli.serving import chat_completion, completion, response
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import BaseHandler, GenerationState

from ...allocator.config import parse_time
from ...allocator.errors import ConfigError
from ..device import governors
from ..watch import registry
from . import body, tenants
from .anteroom import Anteroom
from .connections import Connections, most_connections, raise_files
from .doors import Doors
from .ending import Listening, Watchdog
from .engine import Denial
from .load import SLOS
from .loading import Models
from .tenants import asked_seed, asked_slo

CLOSED = {  # paths of transformers' server that load other models, or forget those that there are
    "/load_model": "this server serves the models that it was started with",
    "/reset": "this server serves the models that it was started with",
    "/v1/audio/transcriptions": "this server serves text: no model of speech can be batched continuously",
}


class _Told(BaseHandler):
    """A handler that refuses invalid settings."""

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> GenerationConfig:
        """Reads the settings of a body. HTTPException where they are invalid."""
        try:
            settings: GenerationConfig = super()._build_generation_config(body, *args, **kwargs)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HTTPException(400, f"the settings of the request cannot be used: {error}") from None
        new = settings.max_new_tokens
        if new is not None and (not isinstance(new, int) or new < 1):
            raise HTTPException(400, f"max_new_tokens is {new!r}: give a whole number from 1 on")
        return settings


class _Templated(_Told):
    """A handler that makes a prompt of messages by the model's chat template."""

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        """Finds the model. HTTPException where it has no chat template."""
        name, model, processor = super()._resolve_model(body)
        if getattr(processor, "chat_template", None) is None:
            shown = name.removesuffix("@main")
            raise HTTPException(400, f"{shown} has no chat template, which messages need: ask /v1/completions")
        return name, model, processor


class Completions(_Told, completion.CompletionHandler):
    """Handles `/v1/completions`."""


class ChatCompletions(_Templated, chat_completion.ChatCompletionHandler):
    """Handles `/v1/chat/completions`."""


class Responses(_Templated, response.ResponseHandler):
    """Handles `/v1/responses`."""


@dataclass(frozen=True)
class Address:
    """A server's address and limits. `doors`: who may ask.
    `waiting`: requests of a model that may wait. `grace`: seconds that requests may take to end at a shutdown.
    `as_json`: is a line of JSON printed once it listens?"""

    host: str = "127.0.0.1"
    port: int = 8000
    doors: Doors = field(default_factory=Doors)
    waiting: int = 1024
    grace: float = 30.0
    as_json: bool = False


class Application:
    """The HTTP side of a server. `app`: what uvicorn runs."""

    def __init__(
        self,
        models: Models,
        loops: GenerationState,
        address: Address,
        say: Callable[[str], None],
    ) -> None:
        """`models`: loads the served models and their tokenizers. `loops`: generate, and end without waiting by
        `tell()`. `say`: is called with each line for people."""
        self._models = models
        self._loops: Any = loops
        self._address = address
        self._say = say
        self.app = self._application()

    def run(self, close: Callable[[], object], anteroom: Anteroom) -> None:
        """Serves at the sockets of `anteroom` until SIGINT or SIGTERM. Then it takes no new requests, and ends those
        that still run after a while with an error. `close` is called at the end."""
        tuning, grace = governors.composed_with().tuning.clients, self._address.grace
        connections = Connections(most_connections(raise_files(), tuning), tuning)
        listening = Listening(self.app, connections, grace, self._loops.tell)
        with Watchdog(grace + tuning.told + tuning.hung):
            try:
                listening.run(anteroom.leave())
            finally:
                close()

    def _application(self) -> FastAPI:
        models, loops = self._models, self._loops
        app: FastAPI = build_server(
            models,
            ChatCompletions(models, loops),
            completion_handler=Completions(models, loops),
            response_handler=Responses(models, loops),
            transcription_handler=TranscriptionHandler(models, loops),
            generation_state=loops,
            systemone_handler=SystemOneHandler(models, loops),
        )
        stock = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(running: FastAPI) -> Any:
            async with stock(running) as state:
                at = f"http://{self._address.host}:{self._address.port}"
                self._say(f"ready: {', '.join(self._models.served)} at {at}")
                if self._address.as_json:
                    ready = {"ready": True, "url": at, "models": self._models.served, "pid": os.getpid()}
                    print(json.dumps(ready), flush=True)
                yield state
                self._say("shutting down")

        app.router.lifespan_context = lifespan
        app.get("/metrics")(lambda: Response(registry.text(), media_type="text/plain; version=0.0.4"))
        app.add_middleware(_Checked, refused=self._refused)
        app.exception_handler(HTTPException)(_refused)
        app.exception_handler(TemplateError)(_unfit)
        app.exception_handler(Denial)(_denied)
        self._address.doors.guard(app.routes)
        return app

    async def _refused(self, request: Request) -> JSONResponse | None:
        """Returns the refusal of a request without a key, for a model that is not served, or with an invalid SLO; None
        where it may be computed. Notes valid SLOs."""
        if (why := CLOSED.get(request.url.path)) is not None:
            return refusal(403, why)
        if request.method == "POST":
            try:
                content = body.read(await request.body())
                if content.get("model") is None:
                    return refusal(400, f"the request names no model: {', '.join(self._models.served)}")
                self._models.check(str(content["model"]))
                body.check(request.url.path, content)
            except body.BadBody as error:
                return refusal(400, str(error))
            except HTTPException as error:
                return refusal(error.status_code, str(error.detail))
            asked_seed.set(content.get("seed"))
            tenants.is_open.set(body.is_open(content))
        try:
            given = [request.headers.get(name) for name in SLOS]
            ttft, tpot = (parse_time(text, name) if text else None for text, name in zip(given, SLOS, strict=True))
        except ConfigError as error:
            return refusal(400, str(error))
        asked_slo.set((ttft, tpot) if any(given) else None)
        return None


class _Checked:
    """The application behind a check of each request. Not starlette's BaseHTTPMiddleware, which would pass each piece
    of each answer from task to task."""

    def __init__(self, app: ASGIApp, refused: Callable[[Request], Awaitable[JSONResponse | None]]) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            if (refused := await self._refused(request)) is not None:
                await refused(scope, receive, send)
                return
            came = [{"type": "http.request", "body": await request.body()}]
        except ClientDisconnect:
            return

        async def again() -> Message:
            return came.pop() if came else await receive()

        await self._app(scope, again, send)


async def _unfit(_: Request, error: TemplateError) -> JSONResponse:
    return refusal(400, f"the model's chat template does not take these messages: {error}")


async def _denied(_: Request, denial: Denial) -> JSONResponse:
    return refusal(denial.status, denial.message)


async def _refused(_: Request, error: HTTPException) -> JSONResponse:
    return refusal(error.status_code, str(error.detail))


def refusal(status: int, why: str) -> JSONResponse:
    """Makes an error response in OpenAI's format."""
    return JSONResponse({"error": {"message": why, "type": "invalid_request_error", "code": status}}, status)
