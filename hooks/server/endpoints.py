"""The routes of a server, as an ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from ..watch import registry
from .chat import Chats
from .completions import TextCompletions
from .engine import Denial
from .http import APIEndpoint, Handler, HTTPCall, answered, denied
from .openapi import Health, description
from .responses import ResponsesEndpoint
from .served import ModelList, Models
from .sleeping import Sleeper


def endpoints(models: Models, lifespan: Any = None, middleware: Sequence[Middleware] = ()) -> Starlette:
    """Makes the application. Whoever puts something before its routes may raise Denial."""

    async def listed(_: HTTPCall) -> Response:
        return answered(ModelList([model.card for model in models]))

    async def shown(call: HTTPCall) -> Response:
        return answered(models.get(call.parameters["model"]).card)

    async def health(_: HTTPCall) -> Response:
        models.check()
        return answered(Health())

    async def metrics(_: HTTPCall) -> Response:
        return Response(registry.text(), media_type="text/plain; version=0.0.4")

    async def openapi(_: HTTPCall) -> Response:
        return answered(description())

    sleeper = Sleeper(models)

    def route(method: str, path: str, handler: Handler) -> Route:
        return Route(path, APIEndpoint(handler), methods=[method])

    return Starlette(
        routes=[
            route("POST", "/v1/chat/completions", Chats(models)),
            route("POST", "/v1/completions", TextCompletions(models)),
            route("POST", "/v1/responses", ResponsesEndpoint(models)),
            route("GET", "/v1/models", listed),
            route("GET", "/v1/models/{model:path}", shown),
            route("POST", "/sleep", sleeper.sleep),
            route("POST", "/wake_up", sleeper.wake),
            route("GET", "/is_sleeping", sleeper.look),
            route("GET", "/metrics", metrics),
            route("GET", "/openapi.json", openapi),
            route("GET", "/health", health),
        ],
        lifespan=lifespan,
        middleware=middleware,
        exception_handlers={HTTPException: denied, Denial: denied},
    )
