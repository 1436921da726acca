"""The description of the endpoints for programs, made of the types that check them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from .chat import ChatChunk, ChatCompletion
from .completions import Completion
from .fields import ASKING
from .http import Failure
from .requests import Chat, Completions, Responses
from .responses import ResponseAnswer, ResponseEvent
from .served import ModelCard, ModelList
from .sleeping import SLEEP, WAKE, Sleeping

_REFERENCE: Final = "#/components/schemas/{name}"
_POSTS: Final = {  # path -> its body, its answer, and a part of its stream
    "/v1/chat/completions": (Chat, ChatCompletion, ChatChunk),
    "/v1/completions": (Completions, Completion, Completion),
    "/v1/responses": (Responses, ResponseAnswer, ResponseEvent),
}
_ERRORS: Final = {  # status -> when it is answered, with `code` in parentheses
    "400": "a field is unknown, wrong, or cannot be honoured: `param` names it (invalid_value, invalid_json, "
    "unsupported_parameter); the sequence would be longer than the model's (context_length_exceeded)",
    "401": "the key is missing or wrong (invalid_api_key)",
    "403": "a web page asks that may not, by --allow-origin (unknown_origin)",
    "404": "there is no such model (model_not_found), or no such path (unknown_url)",
    "409": "a request with this x-request-id has not ended (name_in_use); the model cannot sleep, as it has requests "
    "(model_in_use) or there is no room for it (no_room)",
    "413": "the body is larger than --max-body, or the sequence can never fit in memory (request_too_large)",
    "421": "the Host is no name of this server, by --allow-host (unknown_host)",
    "422": "the SLO cannot be kept (slo_not_kept)",
    "429": "too many requests wait (rate_limit_exceeded): `retry-after` says when to try again",
    "500": "the server has a fault (internal_error)",
    "501": "replicas cannot sleep (not_supported)",
    "503": "models load (loading), the server ends, or nothing can be answered: `retry-after` says when to try again",
}
_HEADERS: Final = {  # of requests
    "x-request-id": ("the request's name: no other that has not ended may have it", {"maxLength": ASKING.name}),
    "x-ttft-slo": ("time until the first token, such as 500ms: refused where it cannot be kept", {}),
    "x-tpot-slo": ("time for each further token, such as 50ms", {}),
}


class Health(Struct, frozen=True):
    """The answer of `/health`, which needs no key."""

    status: Literal["ok"] = "ok"


def description() -> dict[str, Any]:
    """Makes the OpenAPI description of a server."""
    kinds = dict.fromkeys(kind for post in _POSTS.values() for kind in post)
    kinds |= dict.fromkeys((ModelList, ModelCard, Health, Sleeping, Failure))
    made, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schemas = dict(zip(kinds, made, strict=True))
    failure = schemas[Failure]
    paths = {
        path: _post(schemas[body], {"application/json": schemas[answer], "text/event-stream": schemas[event]}, failure)
        for path, (body, answer, event) in _POSTS.items()
    }
    doors = "401", "403", "421", "503"
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths |= {
        "/v1/models": _get(_json(schemas[ModelList]), failure, doors),
        "/v1/models/{model}": _get(_json(schemas[ModelCard]), failure, ("404", *doors), parameters=[model]),
        "/sleep": _act(_json(schemas[Sleeping]), failure, SLEEP),
        "/wake_up": _act(_json(schemas[Sleeping]), failure, WAKE),
        "/is_sleeping": _get(_json(schemas[Sleeping]), failure, doors),
        "/metrics": _get({"text/plain": {"type": "string"}}, failure, doors),
        "/openapi.json": _get(_json({"type": "object"}), failure, doors),
        "/health": _get(_json(schemas[Health]), failure, doors[1:], security=[]),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "ballonet", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": schema}


def _get(answer: dict[str, Any], failure: Any, errors: Iterable[str], **more: Any) -> dict[str, Any]:
    return {"get": {"responses": _responses(answer, failure, errors), **more}}


def _act(answer: dict[str, Any], failure: Any, query: Mapping[str, str]) -> dict[str, Any]:
    given = [
        {"name": name, "in": "query", "description": text, "schema": {"type": "string"}} for name, text in query.items()
    ]
    errors = "400", "401", "403", "404", "409", "421", "501", "503"
    return {"post": {"parameters": given, "responses": _responses(answer, failure, errors)}}


def _post(body: Any, answer: dict[str, Any], failure: Any) -> dict[str, Any]:
    headers = [
        {"name": name, "in": "header", "description": text, "schema": {"type": "string", **more}}
        for name, (text, more) in _HEADERS.items()
    ]
    asked = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": {"parameters": headers, "requestBody": asked, "responses": _responses(answer, failure, _ERRORS)}}


def _responses(answer: dict[str, Any], failure: Any, errors: Iterable[str]) -> dict[str, Any]:
    """The answers by status. `answer`: schemas by media type."""
    content = {kind: {"schema": schema} for kind, schema in answer.items()}
    wrong = {"application/json": {"schema": failure}}
    return {"200": {"description": "the answer", "content": content}} | {
        status: {"description": _ERRORS[status], "content": wrong} for status in errors
    }
