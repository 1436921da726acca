"""Reads and checks bodies of requests before transformers' handlers, which trust them.

Every fault is a `BadBody`, whose text names the wrong field, its value and what is allowed. The handlers themselves
refuse unknown fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, Final

from ...offload.policy.tuning import DEFAULT

SEEDS: Final = range(-(2**63), 2**63)  # integers that torch takes, and every wire format carries
TEXTS: Final = ("text", "input_text", "output_text")  # types of parts of a message that have a text
LIMITS: Final = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
)  # fields that say how long an answer may be


class BadBody(ValueError):
    """A body that no handler can use; the text is for the client."""


def read(sent: bytes, most: int = DEFAULT.serving.nested) -> dict[str, Any]:
    """Returns the JSON object that was sent. BadBody, also where it is nested deeper than `most`."""
    deep = BadBody(f"the body is nested too deeply: at most {most} objects and lists within each other")
    try:
        body = json.loads(sent)
    except RecursionError:
        raise deep from None
    except ValueError as error:
        raise BadBody(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadBody("the body is not a JSON object")
    if _is_deep(body, most):
        raise deep
    return body


def check(path: str, body: Mapping[str, Any]) -> None:
    """Checks the fields that transformers' handlers read without a check. `path`: of the endpoint. BadBody."""
    for name, (holds, wanted) in _FIELDS.items():
        if (value := body.get(name)) is not None and not holds(value):
            raise BadBody(f"{name} is {_shown(value)}: give {wanted}")
    if path == "/v1/chat/completions":
        messages = body.get("messages")
        if not messages or not _is_list(messages):
            raise BadBody(f"messages is {_shown(messages)}: give a list of objects with role and content")
        _check_items("messages", messages, roles=True)
    elif path == "/v1/responses":
        given = body.get("input")
        if not _is_text(given) and not _is_list(given):
            raise BadBody(f"input is {_shown(given)}: give a text, or a list of objects")
        if isinstance(given, list):
            _check_items("input", given, roles=not given or "role" in given[0])
    elif path == "/v1/completions" and not _is_text(body.get("prompt")):
        raise BadBody(f"prompt is {_shown(body.get('prompt'))}: give a text")


def is_open(body: Mapping[str, Any]) -> bool:
    """Does the body leave open how long the answer may be?"""
    return all(body.get(name) is None for name in (*LIMITS, "generation_config"))


def _check_items(field: str, items: list[Any], *, roles: bool) -> None:
    """Checks a list of items. `roles`: are they messages, or items of a response, and not the parts of a message?"""
    if not roles:
        return _check_parts(field, items)
    for number, item in enumerate(items):
        place, kind = f"{field}[{number}]", item.get("type")
        if "role" in item:
            if not _is_text(item["role"]):
                raise BadBody(f"{place}.role is {_shown(item['role'])}: give user, assistant, system or tool")
            _check_content(f"{place}.content", item.get("content"))
            _check_calls(f"{place}.tool_calls", item.get("tool_calls", []))
        elif field == "messages":
            raise BadBody(f"{place} has no role: give user, assistant, system or tool")
        elif kind == "reasoning":
            _check_content(f"{place}.content", item.get("content"))
        elif kind == "function_call":
            _check_texts(place, item, "call_id", "name", "arguments")
            _check_arguments(place, item["arguments"])
        elif kind == "function_call_output":
            _check_texts(place, item, "call_id", "output")
    return None


def _check_content(place: str, content: Any) -> None:
    if content is None or _is_text(content):
        return
    if not _is_list(content):
        raise BadBody(f"{place} is {_shown(content)}: give a text, or a list of objects with a type")
    _check_parts(place, content)


def _check_parts(place: str, parts: list[Any]) -> None:
    for number, part in enumerate(parts):
        if not _is_text(part.get("type")):
            raise BadBody(f"{place}[{number}] has no type: give one such as text")
        if part["type"] in TEXTS:
            _check_texts(f"{place}[{number}]", part, "text")


def _check_calls(place: str, calls: Any) -> None:
    if not _is_list(calls):
        raise BadBody(f"{place} is {_shown(calls)}: give a list of objects")
    for number, call in enumerate(calls):
        function = call.get("function") or call
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            where = f"{place}[{number}].function"
            _check_texts(where, function if isinstance(function, dict) else {}, "arguments")
            _check_arguments(where, function["arguments"])


def _check_texts(place: str, item: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not _is_text(item.get(name)):
            raise BadBody(f"{place}.{name} is {_shown(item.get(name))}: give a text")


def _check_arguments(place: str, text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        raise BadBody(f"{place}.arguments is {_shown(text)}: give JSON in a text") from None


def _is_deep(body: dict[str, Any], most: int) -> bool:
    level: list[Any] = [body]
    for _ in range(most):
        level = [
            inner
            for inner in chain.from_iterable(value.values() if isinstance(value, dict) else value for value in level)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _is_text(value: Any) -> bool:
    """Is it a text without lone surrogates? JSON can have these, but no tokenizer takes them."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    """Is it a finite number? JSON can have NaN and infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def _is_list(value: Any) -> bool:
    """Is it a list of objects?"""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, list) and all(map(_is_text, value)))


def _are_biases(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and _is_number(bias) for key, bias in value.items())


def _shown(value: Any) -> str:
    """The value as JSON, or its beginning."""
    text = "missing" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


_LENGTH: Final = (lambda value: _is_whole(value) and value >= 1, "a whole number of tokens from 1 on")
# field -> (check of its value, what is allowed)
_FIELDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    **dict.fromkeys(LIMITS, _LENGTH),
    "temperature": (lambda value: _is_number(value) and value >= 0, "a number from 0 on"),
    "top_p": (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
    "frequency_penalty": (lambda value: _is_number(value) and value > -1, "a number above -1"),
    "seed": (lambda value: _is_whole(value) and value in SEEDS, "a whole number of 64 bits"),
    "stop": (_are_texts, "a text, or a list of texts"),
    "suffix": (_is_text, "a text"),
    "instructions": (_is_text, "a text"),
    "stream": (lambda value: isinstance(value, bool), "true or false"),
    "tools": (_is_list, "a list of objects"),
    "logit_bias": (_are_biases, "an object of tokens and numbers"),
    "chat_template_kwargs": (lambda value: isinstance(value, dict), "an object"),
    "generation_config": (_is_text, "JSON in a text"),
}
