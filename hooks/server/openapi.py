"""The description of the endpoints for programs, made of the types that check them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from .chat import ChatChunk, ChatCompletion
from .completions import Completion
from .http import Failure
from .requests import Chat, Completions, Responses

_REFERENCE: Final = "#/components/schemas/{name}"
_STATUSES: Final = ("400", "401", "404", "409", "413", "422", "429", "500", "503")


def description() -> dict[str, Any]:
    """Makes the OpenAPI description of a server."""
    kinds = (Chat, Completions, Responses, ChatCompletion, ChatChunk, Completion, Failure)
    made, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    chat, completions, responses, chat_answer, chunk, completion, failure = made
    any_object = {"type": "object"}
    posts = {
        "/v1/chat/completions": (chat, chat_answer, chunk),
        "/v1/completions": (completions, completion, completion),
        "/v1/responses": (responses, any_object, any_object),
    }
    gets = {path: _get(any_object, failure) for path in ("/v1/models", "/v1/models/{model}", "/health")}
    gets["/v1/models/{model}"]["get"]["parameters"] = [
        {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    ]
    gets["/metrics"] = {"get": {"responses": {"200": {"description": "Prometheus", "content": {"text/plain": {}}}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ballonet", "version": "1"},
        "paths": gets | {path: _post(*schemas, failure) for path, schemas in posts.items()},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def _get(answer: Any, failure: Any) -> dict[str, Any]:
    return {"get": {"responses": _responses({"application/json": {"schema": answer}}, failure)}}


def _post(body: Any, answer: Any, event: Any, failure: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": answer}, "text/event-stream": {"schema": event}}
    asked = {"required": True, "content": {"application/json": {"schema": body}}}
    headers = [
        {"name": name, "in": "header", "schema": {"type": "string"}}
        for name in ("x-request-id", "x-ttft-slo", "x-tpot-slo")
    ]
    return {"post": {"parameters": headers, "requestBody": asked, "responses": _responses(content, failure)}}


def _responses(content: Any, failure: Any) -> dict[str, Any]:
    wrong = {"description": "an error", "content": {"application/json": {"schema": failure}}}
    return {"200": {"description": "the answer", "content": content}} | dict.fromkeys(_STATUSES, wrong)
