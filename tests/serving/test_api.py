"""The endpoints, asked by the stock `openai` client and by plain HTTP; the engine answers by a script."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from msgspec import json as msgspec_json
from openai import OpenAI
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from transformers import GenerationConfig

from ballonet.hooks.server.engine import Denial
from ballonet.hooks.server.fields import ASKING
from ballonet.hooks.server.requests import Defaults, derived_seed

from .scripted import CHAT, END, LONGEST, NAME, Scene

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "adds", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
CALL = 'let me <tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes servers, once for each name."""
    made = dict[str, Scene]()

    def scene(name: str = "usual", **more: Any) -> Scene:
        if name not in made:
            made[name] = Scene(tmp_path_factory.mktemp(name), **more)
        made[name].says("hello ", "world")
        return made[name]

    yield scene
    for one in made.values():
        one.end()


@pytest.fixture
def scene(scenes: Any) -> Scene:
    return scenes()


def chat(scene: Scene, **more: Any) -> Any:
    return scene.openai.chat.completions.create(model=NAME, messages=[USER], **more)


def test_a_chat_is_answered_at_once_and_in_pieces(scene: Scene) -> None:
    whole = chat(scene)
    assert scene.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("hello world", "stop")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(scene.engine.asked[0].prompt), 12)
    chunks = list(chat(scene, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "hello world"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert {chunk.usage for chunk in chunks[:-1]} == {None}
    assert all("usage" not in event for event in scene.events("chat/completions", {"messages": [USER]}))
    assert chat(scene, max_completion_tokens=3).choices[0].finish_reason == "length"


# (the engine's updates, stop strings, what is shown, is the request left early?)
STOPS = [
    (["hello ", "world"], ["wor"], "hello ", True),
    (["hel", "lo wo", "rld"], ["lo w"], "hel", True),
    (["aab", "aac", "d"], ["aac"], "aab", True),
    (["abab", "abac"], ["abac", "zz"], "abab", True),
    (["hello ", "wor"], ["worx", "orld"], "hello wor", False),
    (["x", "y"], ["y"], "x", True),
    (["xé"], ["é"], "x", True),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("updates", "stops", "shown", "left"), STOPS)
def test_an_answer_ends_before_a_stop_string(
    updates: list[str], stops: list[str], shown: str, left: bool, stream: bool, scene: Scene
) -> None:
    scene.says(*updates, *(["never"] if left else []))
    for stop in (stops, stops[0] if len(stops) == 1 else stops):
        if stream:
            chunks = list(chat(scene, stop=stop, stream=True))
            text, reason = (
                "".join(c.choices[0].delta.content or "" for c in chunks),
                chunks[-1].choices[0].finish_reason,
            )
        else:
            choice = chat(scene, stop=stop).choices[0]
            text, reason = choice.message.content, choice.finish_reason
        assert (text, reason) == (shown, "stop")
    scene.wait_until(lambda: len(scene.engine.closed) == 2 * left)


def test_no_stop_string_counts_before_min_tokens(scene: Scene) -> None:
    answer = scene.post("completions", {"prompt": "x", "stop": "l", "min_tokens": 4})[1]
    assert answer["choices"][0]["text"] == "hello wor"


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_no_half_character_is_shown(cut: int, scene: Scene) -> None:
    """Each token is a byte. An answer that ends inside a character shows nothing of it."""
    scene.says(*scene.engine.tokenizer.encode("aé€🙂", add_special_tokens=False))
    length = 1 + 2 + 3 + 4 - cut
    events = scene.events("completions", {"prompt": "x", "max_tokens": length, "logprobs": 0})
    texts = [event["choices"][0]["text"] for event in events]
    assert "".join(texts) == ("aé€🙂" if not cut else "aé€")
    assert not any("\ufffd" in text for text in texts)


def test_several_answers_have_seeds_that_follow_from_one(scene: Scene) -> None:
    chat(scene, n=3, seed=5)
    asked = scene.engine.asked
    seeds = {request.sampling.seed for request in asked}
    assert seeds == {5, derived_seed(5, 1), derived_seed(5, 2)}
    assert len({request.name for request in asked}) == len(seeds) == 3
    scene.says("hello")
    assert [choice.index for choice in chat(scene, n=2).choices] == [0, 1]
    assert {chunk.choices[0].index for chunk in chat(scene, n=2, stream=True)} == {0, 1}
    first, second = (chat(scene), chat(scene)) and scene.engine.asked[-2:]
    assert first.sampling.seed != second.sampling.seed, "without a seed each request has its own"


def test_the_best_of_several_answers_are_told(scene: Scene) -> None:
    scene.engine.script = lambda request: ["aaa"] if request.sampling.seed == derived_seed(1, 2) else ["zzzzzz"]
    answer = scene.openai.completions.create(model=NAME, prompt="x", best_of=3, n=1, seed=1)
    worth = {seed: -(seed % 97) for seed in (1, derived_seed(1, 1), derived_seed(1, 2))}
    totals = {seed: (3 if seed == derived_seed(1, 2) else 6) * value for seed, value in worth.items()}
    best = max(totals, key=lambda seed: totals[seed])
    assert answer.choices[0].text == ("aaa" if best == derived_seed(1, 2) else "zzzzzz")
    assert len(answer.choices) == 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 15 + 3


def test_prompts_are_texts_or_tokens_or_lists_of_either(scene: Scene) -> None:
    ids = scene.engine.tokenizer.encode("ab")
    for prompt, expected in (
        ("ab", [ids]),
        (ids, [ids]),
        (["ab", "b"], [ids, ids[1:]]),
        ([ids, ids[1:]], [ids, ids[1:]]),
    ):
        scene.says("x")
        answer = scene.openai.completions.create(model=NAME, prompt=prompt, n=2, max_tokens=4)
        assert sorted([list(request.prompt) for request in scene.engine.asked]) == sorted(expected * 2)
        assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_an_echo_has_the_prompt_and_its_logprobs(scene: Scene) -> None:
    """As lm-eval's local-completions reads them."""
    ids = scene.engine.tokenizer.encode("abc")
    for stream in (False, True):
        body = {"prompt": [ids], "echo": True, "logprobs": 1, "max_tokens": 1, "seed": 0, "stream": stream}
        if stream:
            events = [event["choices"][0] for event in scene.events("completions", body)]
            text, told = "".join(event["text"] for event in events), [event["logprobs"] for event in events]
            joined = {name: [value for part in told for value in part[name]] for name in told[0]}
        else:
            choice = scene.post("completions", body)[1]["choices"][0]
            text, joined = choice["text"], choice["logprobs"]
        assert text == "abch"
        assert joined["tokens"] == ["a", "b", "c", "h"]
        assert joined["text_offset"] == [0, 1, 2, 3]
        assert joined["token_logprobs"] == [None, *(-(token + 1) / 256 for token in (*ids[1:], ord("h") - 33))]
        assert joined["top_logprobs"][1:] == [{token: joined["token_logprobs"][n + 1]} for n, token in enumerate("bch")]
    answer = scene.openai.completions.create(model=NAME, prompt="ab", echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens) == (
        "ab",
        "length",
        0,
    )


def test_logprobs_of_a_chat_tell_texts_and_bytes(scene: Scene) -> None:
    told = chat(scene, logprobs=True, top_logprobs=2, seed=0).choices[0].logprobs.content
    assert [entry.token for entry in told] == [*"hello world", "<|im_end|>"]
    assert (told[0].bytes, len(told[0].top_logprobs), told[0].top_logprobs[0].token) == ([104], 2, "h")
    scene.says("é")
    assert chat(scene, logprobs=True).choices[0].logprobs.content[0].bytes is None, "half a character"
    chunks = list(chat(scene, logprobs=True, stream=True))
    assert sum(len(c.choices[0].logprobs.content) for c in chunks if c.choices[0].logprobs) == 3


@pytest.mark.parametrize(
    ("config", "body", "expected"),
    [
        ({}, {}, {"temperature": 0.0}),
        ({}, {"temperature": 0.7, "top_p": 0.5}, {"temperature": 0.7, "top_p": 0.5, "top_k": 0}),
        ({"do_sample": True}, {}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}, {}, None),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0}, {"temperature": 0.0, "top_k": 20}),
        ({"top_k": 20}, {"top_k": -1}, {"top_k": 0}),
        ({}, {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5}, None),
        ({}, {"min_p": 0.1, "min_tokens": 3, "logit_bias": {"7": -100}, "seed": -(2**63)}, None),
    ],
)
def test_fields_that_are_left_out_are_as_the_model_says(
    config: dict[str, Any], body: dict[str, Any], expected: dict[str, Any] | None, scenes: Any
) -> None:
    scene = scenes(f"defaults {config}", defaults=Defaults.of(GenerationConfig(**config)))
    assert scene.post("completions", {"prompt": "x", **body})[0] == 200
    sampling = scene.engine.asked[0].sampling
    names = {"presence_penalty": "presence", "frequency_penalty": "frequency", "repetition_penalty": "repetition"}
    names |= {"min_tokens": "least", "logit_bias": "bias"}
    if expected is None:
        given = {name: value for name, value in (config | body).items() if name != "do_sample"}
        expected = {names.get(name, name): value for name, value in given.items()}
        expected |= {"bias": ((7, -100.0),)} if "bias" in expected else {}
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_answers_end_by_stops_ends_and_lengths(scenes: Any) -> None:
    scene = scenes("long", defaults=Defaults(most=LONGEST))
    for body, ends, most in (
        ({}, (END,), LONGEST - 2),
        ({"ignore_eos": True, "max_tokens": 7}, (), 7),
        ({"stop_token_ids": [72], "max_completion_tokens": 3}, (END, 72), 3),
    ):
        path = "completions" if "max_completion_tokens" not in body else "chat/completions"
        assert (
            scene.post(path, {"prompt": "xy"} | body if path == "completions" else {"messages": [USER]} | body)[0]
            == 200
        )
        assert scene.engine.asked[-1].ends == ends
        assert scene.engine.asked[-1].most == most
    scene.says("ab", 72, "never")
    answer = scene.post("completions", {"prompt": "x", "stop_token_ids": [72]})[1]
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == ("ab", 3)


def test_reasoning_is_no_content(scene: Scene) -> None:
    scene.says("<thi", "nk>hm", "</think>so", " it is")
    message = chat(scene).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "so it is")
    chunks = [chunk.choices[0].delta for chunk in chat(scene, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == "hm"
    assert "".join(delta.content or "" for delta in chunks) == "so it is"
    scene.says("hm</think>so")
    begun = chat(scene, extra_body={"chat_template_kwargs": {"thinking": True}}).choices[0].message
    assert (begun.reasoning_content, begun.content) == ("hm", "so"), "what the template has begun"


CHOICES: list[tuple[Any, list[str], list[tuple[str, str]], str | None]] = [
    ("auto", [CALL[:20], CALL[20:]], [("f", '{"a": 3}')], "let me"),
    (None, [CALL, CALL], [("f", '{"a": 3}')] * 2, None),
    ("none", ["plain"], [], "plain"),
    (
        "required",
        ['[{"name": "f", "argu', 'ments": {"a": 3}}, {"name": "g", "arguments": {}}]'],
        [("f", '{"a": 3}'), ("g", "{}")],
        None,
    ),
    ({"type": "function", "function": {"name": "f"}}, ['{"a"', ": 3}"], [("f", '{"a": 3}')], None),
]


@pytest.mark.parametrize(("choice", "updates", "calls", "content"), CHOICES)
def test_tools_are_called(choice: Any, updates: list[str], calls: list[Any], content: str | None, scene: Scene) -> None:
    scene.says(*updates)
    more: dict[str, Any] = {"tools": TOOLS} | ({} if choice is None else {"tool_choice": choice})
    whole = chat(scene, **more).choices[0]
    assert [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []] == calls
    assert whole.finish_reason == ("tool_calls" if calls else "stop")
    assert content is None or whole.message.content == content
    assert ("adds" in scene.prompt) == (choice != "none")
    grammar = scene.engine.asked[0].sampling.grammar
    assert (grammar is not None) == (choice not in (None, "auto", "none"))
    streamed = dict[int, list[str]]()
    for chunk in chat(scene, stream=True, **more):
        for part in chunk.choices[0].delta.tool_calls or []:
            call = streamed.setdefault(part.index, [part.function.name, ""])
            call[1] += part.function.arguments
    assert [tuple(call) for call in streamed.values()] == calls


def test_an_answer_that_may_have_one_call_ends_after_it(scene: Scene) -> None:
    scene.says(CALL, CALL, CALL)
    choice = chat(scene, tools=TOOLS, parallel_tool_calls=False).choices[0]
    assert (len(choice.message.tool_calls), choice.finish_reason, len(scene.engine.closed)) == (1, "tool_calls", 1)


@pytest.mark.parametrize("updates", [['<tool_call>{"name": "f", </tool_call>', " more"], ["<tool_call>nothing"]])
def test_a_call_that_cannot_be_read_is_text(updates: list[str], scene: Scene) -> None:
    scene.says(*updates)
    message = chat(scene, tools=TOOLS).choices[0].message
    assert message.tool_calls is None
    assert message.content.strip(" ") in (
        "".join(updates),
        "".join(updates).removeprefix("<tool_call>"),
        updates[0][11:-12] + updates[-1],
    )


FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_object"}}, '"type": "object"'),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "integer"),
    ("chat", {"structured_outputs": {"json": json.dumps(SCHEMA)}}, "integer"),
    ("text", {"structured_outputs": {"regex": "a/b+"}}, r"start: /a\/b+/"),
    ("text", {"structured_outputs": {"choice": ["yes", 'n"o']}}, r'"yes" | "n\"o"'),
    ("text", {"structured_outputs": {"grammar": 'start: "x"'}}, 'start: "x"'),
    ("text", {"structured_outputs": {"json_object": True}}, "object"),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, "integer"),
    (
        "chat",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]},
        "head",
    ),
]


@pytest.mark.parametrize(("path", "body", "has"), FORMS)
def test_a_form_is_a_grammar(path: str, body: dict[str, Any], has: str, scene: Scene) -> None:
    pytest.importorskip("llguidance")
    assert post(scene, path, body)[0] == 200
    assert has in (scene.engine.asked[0].sampling.grammar or "")


def post(scene: Scene, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    place, given = {
        "chat": ("chat/completions", {"messages": [USER]}),
        "text": ("completions", {"prompt": "x"}),
        "responses": ("responses", {"input": "hi"}),
    }[path]
    return scene.post(place, given | body, **headers)


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1


WRONG: list[tuple[str, dict[str, Any], int, str]] = [
    ("text", {"model": "gpt-5"}, 404, "model_not_found"),
    ("text", {"prompt": ""}, 400, "no tokens"),
    ("text", {"prompt": [1, "a"]}, 400, "prompt"),
    ("text", {"prompt": [[258]]}, 400, "prompt"),
    ("text", {"prompt": ["x"] * (ASKING.choices + 1)}, 400, "prompt"),
    ("text", {"max_tokens": LONGEST}, 400, "context_length_exceeded"),
    ("text", {"max_tokens": 0}, 400, "max_tokens"),
    ("text", {"max_tokens": 3, "min_tokens": 4}, 400, "min_tokens"),
    ("text", {"best_of": 1, "n": 2}, 400, "best_of"),
    ("text", {"best_of": 2, "stream": True}, 400, "best_of"),
    ("text", {"suffix": "x"}, 400, "suffix"),
    ("text", {"seed": 10**26}, 400, "seed"),
    ("text", {"temperature": 2.1}, 400, "temperature"),
    ("text", {"temperature": "hot"}, 400, "temperature"),
    ("text", {"top_p": 0}, 400, "top_p"),
    ("text", {"stop": ["x"] * (ASKING.stops + 1)}, 400, "stop"),
    ("text", {"stop": [""]}, 400, "stop"),
    ("text", {"logit_bias": {"w3": 1}}, 400, "logit_bias"),
    ("text", {"logit_bias": {"258": 1}}, 400, "logit_bias"),
    ("text", {"logit_bias": {str(n): 1 for n in range(ASKING.biases + 1)}}, 400, "logit_bias"),
    ("text", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("text", {"generation_config": "{}"}, 400, "generation_config"),
    ("text", {"structured_outputs": {}}, 400, "structured_outputs"),
    ("text", {"structured_outputs": {"regex": "a["}}, 400, "invalid regex"),
    ("text", {"structured_outputs": {"json": nested(99)}}, 400, "json"),
    ("text", {"structured_outputs": {"json": "{"}}, 400, "json"),
    ("chat", {"messages": []}, 400, "messages"),
    ("chat", {"messages": [USER] * (ASKING.messages + 1)}, 400, "messages"),
    ("chat", {"messages": [{"content": "x"}]}, 400, "role"),
    (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400,
        "image_url",
    ),
    ("chat", {"messages": [{"role": "user", "content": "no judges"}]}, 400, "no judges here"),
    ("chat", {"n": ASKING.choices + 1}, 400, "n:"),
    ("chat", {"top_logprobs": 2}, 400, "logprobs"),
    ("chat", {"max_tokens": 2, "max_completion_tokens": 3}, 400, "max_tokens"),
    ("chat", {"tool_choice": "required"}, 400, "tool_choice"),
    ("chat", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, 400, "tool_choice"),
    ("chat", {"tools": [*TOOLS, TOOLS[0]]}, 400, "tools"),
    (
        "chat",
        {"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(ASKING.tools + 1)]},
        400,
        "tools",
    ),
    ("chat", {"tools": TOOLS, "response_format": {"type": "json_object"}}, 400, "tool_choice"),
    (
        "chat",
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        400,
        "structured_outputs",
    ),
    ("chat", {"chat_template": "{{ 1 }}"}, 400, "chat_template"),
    *(
        ("chat", {"chat_template_kwargs": {name: 1}}, 400, name)
        for name in ("conversation", "tokenize", "return_dict", "tools", "tokenizer_kwargs", "truncation", "messages")
    ),
    *(
        ("chat", {"chat_template_kwargs": {name: 1}}, 400, name)
        for name in ("chat_template", "self", "add_generation_prompt", "documents", "padding", "unknown")
    ),
    ("chat", {"chat_template_kwargs": {"mood": nested(ASKING.variable_depth)}}, 400, "chat_template_kwargs"),
    ("chat", {"chat_template_kwargs": {"mood": "x" * ASKING.variable_bytes}}, 400, "chat_template_kwargs"),
    (
        "chat",
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        400,
        "reasoning_effort",
    ),
    ("responses", {"input": []}, 400, "input"),
    ("responses", {"input": [{"role": "user"}]}, 400, "content"),
    ("responses", {"input": [{"type": "function_call", "call_id": "1"}]}, 400, "name"),
    ("responses", {"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ("responses", {"store": True}, 400, "store"),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), WRONG)
def test_a_wrong_request_is_refused_with_its_reason(
    path: str, body: dict[str, Any], status: int, says: str, scene: Scene
) -> None:
    given, answer = post(scene, path, body)
    error = answer["error"]
    assert given == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert says in f"{error['message']} {error['code']}"
    assert given != 404 or error["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b'{"model": ', "no JSON"),
        (b"\xff{}", "no JSON"),
        (b"[1]", "object"),
        (b'{"model": "\\ud800 and more"}', "no JSON"),
        (b'{"temperature": NaN}', "no JSON"),
        (b'{"max_tokens": 1' + b"0" * 10**4 + b"}", "max_tokens"),
        (b'{"chat_template_kwargs": ' + b'{"a":' * 10**5 + b"}" * 10**5 + b"}", "nested too deeply"),
    ],
)
def test_bodies_that_cannot_be_read_are_refused_with_the_reason(sent: bytes, says: str, scene: Scene) -> None:
    answer = scene.http.post("/v1/chat/completions", content=sent)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_a_large_body_is_read_beside_the_event_loop(scene: Scene) -> None:
    """What is wrong in it is told as of a small one."""
    large = b"x" * (ASKING.body + 1)
    for sent, says in (
        (b'{"model": "org/model", "messages": [' + b'{"role": "user"},' * 20000 + b"]}", "messages[0].content"),
        (b'{"model": "org/model", "messages": [{"role": "user", "content": "' + large + b'"}]}', "longest sequence"),
    ):
        answer = scene.http.post("/v1/chat/completions", content=sent)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


def test_errors_of_engines_have_their_status_or_are_events(scene: Scene) -> None:
    for denial, raised in (
        (Denial(429, "full", "rate_limit_exceeded", retry_after=2.5), openai.RateLimitError),
        (Denial(503, "ends"), openai.InternalServerError),
        (Denial(400, "long", "context_length_exceeded", "messages"), openai.BadRequestError),
        (Denial(413, "large"), openai.APIStatusError),
    ):
        for stream in (False, True):
            scene.says(denial)
            with pytest.raises(raised) as caught:
                chat(scene, stream=stream)
            assert caught.value.status_code == denial.status
            assert caught.value.code == denial.code
            assert denial.status != 429 or caught.value.response.headers["retry-after"] == "3"
    scene.says("hel", Denial(503, "the server shuts down"))
    with pytest.raises(openai.APIError, match="shuts down"):
        list(chat(scene, stream=True))
    events = scene.events("chat/completions", {"messages": [USER]})
    assert events[-1] == {
        "error": {"message": "the server shuts down", "type": "server_error", "param": None, "code": None}
    }
    failed = scene.events("responses", {"input": "hi"})[-1]
    assert (failed["type"], failed["response"]["error"]["message"]) == ("response.failed", "the server shuts down")


def test_a_client_that_goes_away_leaves_no_request(scene: Scene) -> None:
    scene.engine.script = lambda _: ["x"] * 10**6
    scene.engine.closed.clear()
    with contextlib.closing(chat(scene, stream=True, max_tokens=LONGEST // 2)) as stream:
        next(iter(stream))
    scene.wait_until(lambda: len(scene.engine.closed) == 1)


def test_names_and_slos_come_from_headers(scene: Scene) -> None:
    answer = scene.http.post(
        "/v1/completions",
        json={"model": NAME, "prompt": "x"},
        headers={"x-request-id": "mine", "x-ttft-slo": "2s", "x-tpot-slo": "80ms"},
    )
    assert answer.headers["x-request-id"] == "mine"
    assert "mine" in answer.json()["id"]
    asked = scene.engine.asked[0]
    assert (asked.name, asked.ttft, asked.tpot) == ("mine", 2.0, 0.08)
    assert post(scene, "text", {}, **{"x-ttft-slo": "soon"})[0] == 400
    assert post(scene, "text", {}, **{"x-request-id": "x" * 200})[0] == 400


def test_doors_and_lists(scene: Scene) -> None:
    shown = scene.openai.models.retrieve(NAME)
    assert ([model.id for model in scene.openai.models.list()], shown.id, shown.max_model_len) == (
        [NAME],
        NAME,
        LONGEST,
    )
    with pytest.raises(openai.NotFoundError):
        scene.openai.models.retrieve("other")
    with pytest.raises(openai.AuthenticationError) as refused:
        OpenAI(base_url=f"{scene.url}/v1", api_key="wrong", max_retries=0).models.list()
    assert refused.value.code == "invalid_api_key"
    assert scene.http.get("/health", headers={"authorization": ""}).status_code == 200
    assert scene.http.get("/metrics").status_code == 200
    assert scene.http.get("/load_model").json()["error"]["code"] == "unknown_url"
    assert scene.http.get("/v1/completions").status_code == 405
    scene.engine.answers = False
    try:
        assert scene.http.get("/health").status_code == 503
    finally:
        scene.engine.answers = True


def test_models_sleep_and_wake_behind_the_key(scene: Scene) -> None:
    def asked(method: str, path: str, **more: Any) -> tuple[int, Any]:
        answer = scene.http.request(method, path, **more)
        return answer.status_code, answer.json()

    engine = scene.engine
    awake, asleep = {"is_sleeping": False, "levels": {NAME: 0}}, {"is_sleeping": True, "levels": {NAME: 2}}
    assert asked("GET", "/is_sleeping") == (200, awake)
    assert asked("POST", f"/sleep?level=2&model={NAME}&timeout=500ms") == (200, asleep)
    assert asked("GET", "/is_sleeping") == (200, asleep)
    assert asked("POST", "/wake_up") == (200, awake)
    assert asked("POST", "/sleep")[0] == 200
    assert engine.slept == [(2, 0.5), (1, None)]
    engine.wake()
    for path, status, param in (
        ("/sleep?level=3", 400, "level"),
        ("/sleep?timeout=soon", 400, "timeout"),
        ("/sleep?levels=1", 400, "levels"),
        ("/wake_up?tags=weights", 400, "tags"),
        ("/sleep?model=other", 404, "model"),
    ):
        assert (asked("POST", path)[0], asked("POST", path)[1]["error"]["param"]) == (status, param)
    engine.refusal = Denial(409, "it serves requests", "model_in_use")
    assert asked("POST", "/sleep")[1]["error"]["code"] == "model_in_use"
    engine.refusal = None
    for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
        assert asked(method, path, headers={"authorization": ""})[0] == 401
    assert engine.asleep == 0


def test_the_description_is_made_of_the_types(scene: Scene) -> None:
    described = scene.http.get("/openapi.json").json()
    schemas = described["components"]["schemas"]
    temperature = next(kind for kind in schemas["Chat"]["properties"]["temperature"]["anyOf"] if "maximum" in kind)
    assert (temperature["minimum"], temperature["maximum"]) == (0, 2)
    assert schemas["Chat"]["additionalProperties"] is False
    referred = {path.rpartition("/")[2] for path in _references(described)}
    assert referred <= {*schemas}
    assert msgspec_json.encode(described)


def test_the_description_says_what_answers_and_errors_there_are(scene: Scene) -> None:
    described = scene.http.get("/openapi.json").json()
    assert {*described["paths"]} == {re.sub(":path", "", route.path) for route in scene.app.routes}
    for path, methods in described["paths"].items():
        for operation in methods.values():
            right = operation["responses"]["200"]["content"]
            is_typed = all("$ref" in content["schema"] for content in right.values())
            assert is_typed or path in ("/metrics", "/openapi.json")
            texts = [answer["description"] for answer in operation["responses"].values()]
            assert len(texts) == len({*texts}) > 3
    assert described["paths"]["/health"]["get"]["security"] == []
    for name, kind in described["components"]["schemas"].items():
        for field, schema in kind.get("properties", {}).items():
            assert schema.keys() - {"default", "description"}, (name, field)


def test_answers_have_the_types_of_the_stock_client(scene: Scene) -> None:
    """The client itself takes any answer; here types are checked."""
    logprobs = {"logprobs": True, "top_logprobs": 1}
    flat = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    told = {"include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}, "metadata": {"a": "b"}}
    for path, body, whole, part in (
        ("chat/completions", {"messages": [USER], "n": 2, **logprobs}, ChatCompletion, ChatCompletionChunk),
        ("chat/completions", {"messages": [USER], "tools": TOOLS}, ChatCompletion, ChatCompletionChunk),
        ("completions", {"prompt": "x", "logprobs": 1, "max_tokens": 4}, Completion, None),
        ("responses", {"input": "hi", **told}, Response, ResponseStreamEvent),
        ("responses", {"input": "hi", "tools": flat, "max_output_tokens": 90}, Response, ResponseStreamEvent),
    ):
        scene.says("<think>hm</think>", CALL)
        TypeAdapter(whole).validate_python(scene.post(path, body)[1], strict=True)
        if part is not None:
            events = scene.events(path, body)
            assert len(events) > 2
            for event in events:
                TypeAdapter(part).validate_python(event, strict=True)
    scene.says("hello", Denial(503, "gone"))
    failed = scene.events("responses", {"input": "hi"})[-1]
    assert TypeAdapter(ResponseStreamEvent).validate_python(failed, strict=True).type == "response.failed"
    for listed in scene.http.get("/v1/models").json()["data"]:
        assert TypeAdapter(Model).validate_python(listed, strict=True).id == NAME


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "$ref":
                yield inner
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def test_a_response_is_made_of_items(scene: Scene) -> None:
    scene.says("<think>hm</think>", CALL)
    tools = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
    whole = scene.openai.responses.create(model=NAME, input="hi", tools=tools, instructions="be brief")
    assert "system\nbe brief" in scene.prompt
    thought, text, call = whole.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "hm")
    assert (text.content[0].text, whole.output_text) == ("let me", "let me")
    assert (call.name, call.arguments, whole.status) == ("f", '{"a": 3}', "completed")
    with scene.openai.responses.stream(model=NAME, input="hi", tools=tools, instructions="be brief") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert (final.output_text, final.output[2].arguments) == ("let me", '{"a": 3}')
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    scene.says("so 7")
    last = scene.openai.responses.create(
        model=NAME, input=[USER, *whole.output, answered], tools=tools, max_output_tokens=2
    )
    assert "<think>hm</think><tool_call>" in scene.prompt
    assert f"tool\n7 {call.call_id}" in scene.prompt
    assert (last.status, last.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    scene.says("ok")
    told = scene.openai.responses.create(
        model=NAME, input="hi", top_logprobs=1, include=["message.output_text.logprobs"]
    )
    assert [entry.token for entry in told.output[0].content[0].logprobs] == ["o", "k", "<|im_end|>"]


def test_parsed_answers_of_the_stock_client(scene: Scene) -> None:
    pytest.importorskip("llguidance")
    from pydantic import BaseModel

    class Sum(BaseModel):
        a: int

    scene.says('{"a": 3}')
    parsed = scene.openai.chat.completions.parse(model=NAME, messages=[USER], response_format=Sum)
    assert parsed.choices[0].message.parsed == Sum(a=3)
    assert scene.openai.responses.parse(model=NAME, input="hi", text_format=Sum).output_parsed == Sum(a=3)


def test_messages_reach_the_template(scene: Scene) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 3}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "add", "name": "ann"},
        {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    body = {"messages": messages, "reasoning_effort": "low", "chat_template_kwargs": {"mood": "calm"}}
    assert post(scene, "chat", body)[0] == 200
    for text in (
        "system\nbe brief",
        "user ann\nadd",
        "well<think>hm</think>",
        'call_1 {"name": "f"',
        "7 call_1",
        "\nno",
    ):
        assert text in scene.prompt
    assert "effort low calm" in scene.prompt


def test_models_differ_in_what_they_can_do(scenes: Any) -> None:
    bare = scenes("bare", chat=None)
    assert "no chat template" in post(bare, "chat", {})[1]["error"]["message"]
    assert post(bare, "text", {})[0] == 200
    plain = scenes("plain", chat="{{ messages[0].content }}", family="llama")
    plain.says(CALL)
    assert post(plain, "chat", {})[1]["choices"][0]["message"]["content"] == CALL
    assert post(plain, "chat", {"tools": TOOLS, "tool_choice": "none"})[0] == 200
    for field, body in (
        ("tools", {"tools": TOOLS, "tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS}),
        ("reasoning_effort", {"reasoning_effort": "low"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"mood": "calm"}}),
    ):
        assert post(plain, "chat", body)[1]["error"]["param"] == field
    told = scenes("unknown family", chat=CHAT, family="llama")
    told.says('[{"name": "g", "arguments": {}}]')
    answer = post(told, "chat", {"tools": TOOLS, "tool_choice": "required"})
    assert answer[0] in (200, 400), "by whether llguidance is there"
    if answer[0] == 200:
        assert answer[1]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "g"
    own = scenes("own templates", own_templates=True)
    assert post(own, "chat", {"chat_template": "say {{ messages[0].content }}"})[0] == 200
    assert own.prompt == "say hi"
    wrong = post(own, "chat", {"chat_template": "{% for %}"})
    assert wrong[0] == 400
