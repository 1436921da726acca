"""Bodies of requests that a client may send: what is wrong with them is told, and what is right passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import HTTPException
from transformers import GenerationConfig, LlamaConfig

from ballonet.hooks.server import tenants
from ballonet.hooks.server.body import BadBody, check, is_open, read
from ballonet.offload.policy.tuning import DEFAULT

NESTED = DEFAULT.serving.nested
TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = {"role": "user", "content": "w3"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nested(levels: int) -> dict[str, Any]:
    value: Any = {}
    for _ in range(levels - 1):
        value = [value]
    return {"a": value} if levels else value


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b'{"a": ', "no JSON"),
        (b"\xff{}", "no JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "nested too deeply"),
        (json.dumps(nested(NESTED)).encode(), "nested too deeply"),
        (b'{"a": 1' + b"0" * 10**4 + b"}", "no JSON"),
    ],
)
def test_unreadable_body_is_told(sent: bytes, says: str) -> None:
    with pytest.raises(BadBody, match=says):
        read(sent)


def test_body_nested_up_to_the_limit_is_read() -> None:
    assert read(json.dumps(nested(NESTED - 1)).encode()) == nested(NESTED - 1)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    *(
        (TEXT, {"prompt": "w3", "max_tokens": count}, "max_tokens is .* from 1 on")
        for count in ("many", 0, -4, 1.5, True)
    ),
    (CHAT, {"messages": [USER], "max_completion_tokens": 0}, "max_completion_tokens is 0"),
    (RESPONSES, {"input": "w3", "max_output_tokens": "few"}, "max_output_tokens is"),
    *((TEXT, {"prompt": "w3", "temperature": value}, "temperature is") for value in ("hot", -1, float("nan"), 10**400)),
    *((TEXT, {"prompt": "w3", "top_p": value}, "top_p is") for value in (0, 2, [1])),
    *((TEXT, {"prompt": "w3", "seed": value}, "seed is .* 64 bits") for value in (10**26, "a", -(2**63) - 1)),
    *((TEXT, {"prompt": value}, "prompt is") for value in (None, 5, ["w3"], "\ud800")),
    (TEXT, {"prompt": "w3", "stream": "yes"}, "stream is"),
    (TEXT, {"prompt": "w3", "stop": [1]}, "stop is"),
    (TEXT, {"prompt": "w3", "suffix": 1}, "suffix is"),
    (TEXT, {"prompt": "w3", "frequency_penalty": -1}, "frequency_penalty is"),
    (CHAT, {"messages": [USER], "logit_bias": {"w3": 1}}, "logit_bias is"),
    (CHAT, {"messages": [USER], "tools": "f"}, "tools is"),
    *((CHAT, {"messages": value}, "messages is") for value in (None, "x", [], ["x"], [5], {"role": "user"})),
    (CHAT, {"messages": [{"content": "w3"}]}, r"messages\[0\] has no role"),
    (CHAT, {"messages": [USER, {"role": 1, "content": "w3"}]}, r"messages\[1\].role is 1"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content is 5"),
    (CHAT, {"messages": [{"role": "user", "content": [{"text": "w3"}]}]}, r"content\[0\] has no type"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"content\[0\].text is missing"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}, "arguments is missing"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 1}]}, "tool_calls is 1"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"arguments": "{"}]}]}, "give JSON in a text"),
    *((RESPONSES, {"input": value}, "input is") for value in (None, 5, ["w3"], {"role": "user"})),
    (RESPONSES, {"input": [USER, {"type": "function_call", "call_id": "1"}]}, r"input\[1\].name is missing"),
    (RESPONSES, {"input": [USER, {"type": "function_call_output", "output": "1"}]}, r"input\[1\].call_id is missing"),
    (RESPONSES, {"input": [USER, {"type": "reasoning", "content": [{"type": "text"}]}]}, r"content\[0\].text"),
    (RESPONSES, {"input": [{"type": "input_text"}]}, r"input\[0\].text is missing"),
    (RESPONSES, {"input": "w3", "instructions": 5}, "instructions is 5"),
]


@pytest.mark.parametrize(("path", "body", "says"), WRONG)
def test_a_field_that_is_wrong_is_named(path: str, body: dict[str, Any], says: str) -> None:
    with pytest.raises(BadBody, match=says):
        check(path, body)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "", "max_tokens": 1, "temperature": 0, "top_p": 1, "seed": -(2**63), "stop": ["a", "b"]}),
        (TEXT, {"prompt": "w3", "max_tokens": None, "logit_bias": {"3": -100}, "frequency_penalty": 2.0}),
        (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, USER]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "w3"}, {"type": "image_url"}]}]}),
        (RESPONSES, {"input": "w3"}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"input": [{"type": "input_text", "text": "w3"}]}),
        (RESPONSES, {"input": [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}]}),
    ],
)
def test_body_that_is_right_passes(path: str, body: dict[str, Any]) -> None:
    check(path, body)


class Model:
    config = LlamaConfig(max_position_embeddings=128)


@pytest.mark.parametrize(
    ("prompt", "body", "new"),
    [(2, {"max_tokens": 126}, 126), (2, {"max_tokens": 127}, None), (2, {}, 126), (127, {}, 1), (128, {}, None)],
)
def test_no_sequence_is_longer_than_the_model(prompt: int, body: dict[str, Any], new: int | None) -> None:
    """An answer whose length is left open ends there. `new`: tokens of the answer at most; None: refused."""
    tenants.is_open.set(is_open(body))
    options = GenerationConfig(max_new_tokens=body.get("max_tokens", 1024))
    if new is not None:
        tenants.fit("one", Model(), prompt, options)
        assert options.max_new_tokens == new
        return
    with pytest.raises(HTTPException, match=f"one has {prompt} tokens .* longest sequence has 128: ") as refused:
        tenants.fit("one", Model(), prompt, options)
    assert refused.value.status_code == 413
