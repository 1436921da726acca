"""Every field of OpenAI's types has an effect, or is refused by its name, or is in the list of those without effect
(docs/using.md). The types are those of the pinned `openai`, to any depth that an endpoint reads."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, Union, get_args, get_origin

import pytest
from openai.types import completion_create_params as completions
from openai.types import shared_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartParam,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolChoiceOptionParam,
    ChatCompletionToolUnionParam,
)
from openai.types.chat import completion_create_params as chats
from openai.types.chat.chat_completion_assistant_message_param import ContentArrayOfContentPart
from openai.types.chat.chat_completion_message_tool_call_union_param import ChatCompletionMessageToolCallUnionParam
from openai.types.responses import ToolParam
from openai.types.responses import response_create_params as responses
from openai.types.responses.response_input_message_content_list_param import ResponseInputContentParam
from openai.types.responses.response_input_param import ResponseInputItemParam
from openai.types.responses.response_output_message_param import Content
from openai.types.responses.response_text_config_param import ResponseTextConfigParam
from openai.types.shared_params.response_format_json_schema import JSONSchema
from typing_extensions import is_typeddict

from .scripted import Scene

Body = dict[str, Any]
USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("x", "y")]
FLAT = [{"type": "function", "name": name, "parameters": {}, "strict": False} for name in ("x", "y")]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
CHAT, TEXT, RESPONSES = "chat/completions", "completions", "responses"
BASES: dict[str, Body] = {CHAT: {"messages": [USER]}, TEXT: {"prompt": "ab"}, RESPONSES: {"input": "hi"}}
KINDS = {
    CHAT: chats.CompletionCreateParamsStreaming,
    TEXT: completions.CompletionCreateParamsStreaming,
    RESPONSES: responses.ResponseCreateParamsStreaming,
}


class Place(typing.NamedTuple):
    """Where values of a type are in a body."""

    path: str
    kind: Any
    put: Callable[[Any], Body]


def assistant(part: Any) -> Body:
    return {"messages": [{"role": "assistant", "content": [part]}]}


def called(call: Any) -> Body:
    return {"messages": [{"role": "assistant", "content": "hm", "tool_calls": [call]}]}


PLACES = {
    "message": Place(CHAT, ChatCompletionMessageParam, lambda value: {"messages": [value]}),
    "part": Place(
        CHAT, ChatCompletionContentPartParam, lambda value: {"messages": [{"role": "user", "content": [value]}]}
    ),
    "answered part": Place(CHAT, ContentArrayOfContentPart, assistant),
    "call": Place(CHAT, ChatCompletionMessageToolCallUnionParam, called),
    "tool": Place(CHAT, ChatCompletionToolUnionParam, lambda value: {"tools": [value]}),
    "function": Place(
        CHAT, shared_params.FunctionDefinition, lambda value: {"tools": [{"type": "function", "function": value}]}
    ),
    "choice": Place(CHAT, ChatCompletionToolChoiceOptionParam, lambda value: {"tools": TOOLS, "tool_choice": value}),
    "format": Place(CHAT, chats.ResponseFormat, lambda value: {"response_format": value}),
    "schema": Place(CHAT, JSONSchema, lambda value: {"response_format": {"type": "json_schema", "json_schema": value}}),
    "options": Place(CHAT, ChatCompletionStreamOptionsParam, lambda value: {"stream": True, "stream_options": value}),
    "item": Place(RESPONSES, ResponseInputItemParam, lambda value: {"input": [value]}),
    "input": Place(
        RESPONSES, ResponseInputContentParam, lambda value: {"input": [{"role": "user", "content": [value]}]}
    ),
    "output": Place(
        RESPONSES, Content, lambda value: {"input": [{"type": "message", "role": "assistant", "content": [value]}]}
    ),
    "response tool": Place(RESPONSES, ToolParam, lambda value: {"tools": [value]}),
    "response choice": Place(RESPONSES, responses.ToolChoice, lambda value: {"tools": FLAT, "tool_choice": value}),
    "text": Place(RESPONSES, ResponseTextConfigParam, lambda value: {"text": value}),
    "text format": Place(
        RESPONSES,
        typing.get_type_hints(ResponseTextConfigParam)["format"],
        lambda value: {"text": {"format": value}},
    ),
    "reasoning": Place(RESPONSES, shared_params.Reasoning, lambda value: {"reasoning": value}),
    "response options": Place(
        RESPONSES, responses.StreamOptions, lambda value: {"stream": True, "stream_options": value}
    ),
}
# Values that a field is tried with where those of its type alone say nothing, and what it needs beside it.
TRIED: dict[str, list[Any]] = {
    "model": ["org/model", "other"],
    "arguments": ["{}", '{"a": 1}'],
    "logit_bias": [{"3": 1}, {"3": 2}],
    "stop": ["world", ["lo"]],
    "suffix": ["x"],
    "stream_options": [{"include_usage": True}],
    "annotations": [[], [{"type": "url_citation"}]],
    "json_schema": [{"name": "x", "schema": {"type": "object"}}, {"name": "x", "schema": {"type": "array"}}],
    "format": [{"type": "text"}, {"type": "json_object"}],
    "prompt": ["ab", ["ab", "c"], [1, 2], [[1], [2]]],
    "input": ["x", [USER]],
    "tools": [TOOLS],
    "metadata": [{"a": "b"}],
    f"{RESPONSES} text": [{"format": {"type": "text"}}, {"format": {"type": "json_object"}}],
    f"{RESPONSES} reasoning": [{"effort": "low"}, {"effort": "high"}],
    f"{RESPONSES} tools": [FLAT],
    f"{RESPONSES} stream_options": [{"include_obfuscation": True}],
    "best_of": [2, 3],
    "max_tokens": [1, 2],
    "effort": ["low", "high"],
    "reasoning_effort": ["low", "high"],
    "schema": [{"type": "object"}, {"type": "array"}],
    "parameters": [{"type": "object"}, {"type": "object", "title": "x"}],
}
MORE: dict[tuple[str, str], Body] = {
    (CHAT, "top_logprobs"): {"logprobs": True, "seed": 1},
    (CHAT, "logprobs"): {"seed": 1},
    (CHAT, "stream_options"): {"stream": True},
    (RESPONSES, "stream_options"): {"stream": True},
    (TEXT, "stream_options"): {"stream": True},
    (TEXT, "logprobs"): {"seed": 1},
    (RESPONSES, "top_logprobs"): {"seed": 1},
    (RESPONSES, "include"): {"seed": 1},
    (CHAT, "tool_choice"): {"tools": TOOLS},
    (RESPONSES, "tool_choice"): {"tools": FLAT},
    (CHAT, "parallel_tool_calls"): {"tools": TOOLS, "tool_choice": "required"},
    (RESPONSES, "parallel_tool_calls"): {"tools": FLAT, "tool_choice": "required"},
}
WITHOUT_EFFECT = re.findall(
    r"`(\w+)`",
    next(
        line
        for line in (Path(__file__).parents[2] / "docs" / "using.md").read_text().splitlines()
        if line.startswith("| without effect")
    ),
)
# What is honoured, and must not become refused unnoticed.
HONOURED = {
    CHAT: "messages frequency_penalty logit_bias logprobs max_completion_tokens max_tokens n parallel_tool_calls "
    "presence_penalty reasoning_effort response_format seed stop stream stream_options temperature tool_choice tools "
    "top_logprobs top_p",
    TEXT: "prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options temperature top_p",
    RESPONSES: "include input instructions max_output_tokens parallel_tool_calls reasoning stream temperature text "
    "tool_choice tools top_logprobs top_p",
    "message": "content name tool_call_id tool_calls",
    "part": "text",
    "answered part": "text refusal",
    "call": "id function",
    "tool": "function",
    "function": "name description parameters",
    "choice": "function",
    "format": "json_schema",
    "schema": "schema",
    "options": "include_usage",
    "item": "content role arguments call_id name output",
    "input": "text",
    "output": "text refusal",
    "response tool": "name description parameters",
    "response choice": "name",
    "text": "format",
    "text format": "schema",
    "reasoning": "effort",
    "response options": "",
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("fields"))
    yield made
    made.end()


def samples(kind: Any) -> list[Any]:
    """Values of a type; of an object two, with what it needs alone."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Required, NotRequired, typing.Annotated):
        return samples(inside[0])
    if origin in (Union, types.UnionType):
        return [value for part in inside if part is not type(None) for value in samples(part)]
    if origin is Literal:
        return list(inside)
    if is_typeddict(kind):
        needed = {name: tried(name, hint) for name, hint in hints(kind).items() if is_required(hint)}
        both = [{name: values[min(n, len(values) - 1)] for name, values in needed.items()} for n in (0, 1)]
        return both if both[0] != both[1] else both[:1]
    if origin is dict:
        return [{"a": value} for value in samples(inside[1])]
    if inside:  # Iterable, list and the like
        return [[value] for value in samples(inside[0])]
    return {str: ["x", "y"], bool: [True, False], int: [1, 2], float: [0.5, 1.0]}.get(kind, ["x"])


def hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def is_required(hint: Any) -> bool:
    return get_origin(hint) is Required


def tried(name: str, hint: Any) -> list[Any]:
    return TRIED.get(name, samples(hint))


def members(kind: Any) -> list[Any]:
    """The objects of a union."""
    if get_origin(kind) in (Union, types.UnionType):
        return [member for part in get_args(kind) for member in members(part)]
    return [kind] if is_typeddict(kind) else []


def outcome(scene: Scene, path: str, body: Body) -> tuple[int, Any]:
    """What comes of a request, without names and moments."""
    scene.says("<think>hm</think>", "hello ", "world")
    answer = scene.http.post(f"/v1/{path}", json={"model": "org/model", "temperature": 0.5, **body})
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    asked = [
        replace(generation, name="", sampling=without_seed(generation.sampling, "seed" in body))
        for generation in scene.engine.asked
    ]
    kind = answer.headers["content-type"]
    told = {} if "stream" in kind else answer.json()
    return 200, (asked, kind, nameless(told.get("choices", told.get("output"))), "usage" in answer.text)


def nameless(value: Any) -> Any:
    """What was told, without the names that each request has anew."""
    if isinstance(value, dict):
        return {name: nameless(inner) for name, inner in value.items() if name not in ("id", "call_id")}
    return [nameless(inner) for inner in value] if isinstance(value, list) else value


def without_seed(sampling: Any, given: bool) -> Any:
    return (
        sampling
        if given
        else type(sampling)(**{name: getattr(sampling, name) for name in sampling.__struct_fields__} | {"seed": 0})
    )


def verdict(scene: Scene, path: str, name: str, bodies: list[Body], without: Body | None) -> str:
    """honoured, refused or ignored: what becomes of a field's values."""
    results = [outcome(scene, path, body) for body in bodies]
    wrong = [text for status, text in results if status != 200]
    assert all(status in (200, 400, 404) for status, _ in results), (name, results)
    assert all(re.search(rf"\b{name}\b|Invalid value|type", text) for text in wrong), (name, wrong)
    right = [result for status, result in results if status == 200]
    others = right if without is None else [*right, outcome(scene, path, without)[1]]
    if any(result != others[0] for result in others):
        return "honoured"
    return "refused" if wrong else "ignored"


def test_every_field_of_a_body_is_honoured_or_refused(scene: Scene) -> None:
    for path, kind in KINDS.items():
        verdicts = {}
        for name, hint in hints(kind).items():
            base = BASES[path] | MORE.get((path, name), {})
            values = TRIED.get(f"{path} {name}") or tried(name, hint)
            without = None if name in BASES[path] or name == "model" else base
            verdicts[name] = verdict(scene, path, name, [base | {name: value} for value in values], without)
        check(path, verdicts)


@pytest.mark.parametrize("place", PLACES)
def test_every_field_of_a_part_is_honoured_or_refused(place: str, scene: Scene) -> None:
    path, kind, put = PLACES[place]
    verdicts = dict[str, str]()
    for member in members(kind):
        sample = samples(member)[0]
        if member is ChatCompletionAssistantMessageParam:
            sample["content"] = "x"
        if "call_id" in hints(member):
            sample["call_id"] = "x"
        status, why = outcome(scene, path, BASES[path] | put(sample))
        if status != 200:  # an object that is not known here is named by what it has
            assert any(re.search(rf"\b{part}\b", why) for part in (*sample, *map(str, sample.values()), "input")), (
                member,
                why,
            )
            continue
        for name, hint in hints(member).items():
            bodies = [BASES[path] | put(sample | {name: value}) for value in tried(name, hint)]
            without = None if is_required(hint) else BASES[path] | put(sample)
            new = verdict(scene, path, name, bodies, without)
            verdicts[name] = new if verdicts.get(name) != "honoured" else "honoured"
            assert new != "ignored" or name in WITHOUT_EFFECT or len(tried(name, hint)) == 1, (member, name)
    check(place, verdicts)


def check(place: str, verdicts: dict[str, str]) -> None:
    honoured = {name for name, what in verdicts.items() if what == "honoured"}
    assert {*HONOURED[place].split()} <= honoured, verdicts
    ignored = {name for name, what in verdicts.items() if what == "ignored"} - {"type", "role"}
    assert ignored <= {*WITHOUT_EFFECT}, ignored
