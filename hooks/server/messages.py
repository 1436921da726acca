"""The messages of a chat and the items of a response, typed, and what a chat template is given of them.

An image, sound or file is no part that is known here, and so refused by its name: no address that a client names is
opened.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from .fields import ASKING, CacheHint, Checked, FunctionName, No, Nothing

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(Checked, tag_field="type", tag="text", kw_only=True):
    """A text in a message."""

    text: str
    prompt_cache_breakpoint: CacheHint | None = None


class RefusalPart(Checked, tag_field="type", tag="refusal", kw_only=True):
    """What an assistant refused with; a template is given it as a text."""

    refusal: str


Texts = str | Annotated[list[TextPart], Meta(min_length=1, max_length=ASKING.parts)]
AssistantTexts = str | Annotated[list[TextPart | RefusalPart], Meta(min_length=1, max_length=ASKING.parts)]


class SystemMessage(Checked, tag_field="role", tag="system", kw_only=True):
    """A message of the role system. `name`: templates are given it, here and in other messages."""

    content: Texts
    name: str | None = None


class DeveloperMessage(Checked, tag_field="role", tag="developer", kw_only=True):
    """A message of the role developer: system, where the template knows no developer."""

    content: Texts
    name: str | None = None


class UserMessage(Checked, tag_field="role", tag="user", kw_only=True):
    """A message of the role user."""

    content: Texts
    name: str | None = None


class CalledFunction(Checked, kw_only=True):
    """The call of a function. `arguments`: an object of JSON, as text. ValueError."""

    name: FunctionName
    arguments: str

    def __post_init__(self) -> None:
        arguments_of(self.arguments)


class ToolCall(Checked, tag_field="type", tag="function", kw_only=True):
    """A call that an assistant made."""

    id: str
    function: CalledFunction


class AssistantMessage(Checked, tag_field="role", tag="assistant", kw_only=True):
    """A message of the role assistant."""

    content: AssistantTexts | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=ASKING.tools)] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Nothing | None = None

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls and self.reasoning_content is None:
            raise ValueError("field `content` is missing: give it, or tool_calls")


class ToolMessage(Checked, tag_field="role", tag="tool", kw_only=True):
    """What a tool answered."""

    content: Texts
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage
Messages = Annotated[list[Message], Meta(min_length=1, max_length=ASKING.messages)]


class InputText(Checked, tag_field="type", tag="input_text", kw_only=True):
    """A text of a user."""

    text: str
    prompt_cache_breakpoint: CacheHint | None = None


class OutputText(Checked, tag_field="type", tag="output_text", kw_only=True):
    """A text of an assistant. `logprobs`: as they were told; no effect."""

    text: str
    annotations: Nothing | None = None
    logprobs: list[Any] | None = None


class ReasoningText(Checked, tag_field="type", tag="reasoning_text", kw_only=True):
    """What an assistant thought."""

    text: str


Part = InputText | OutputText | RefusalPart | ReasoningText


class Item(Checked, kw_only=True):
    """An item of a response's input. What it must have, and what it may have, follows from its `type`. Its `id` and
    `status` have no effect. ValueError."""

    off: ClassVar[tuple[str, ...]] = ("is_async",)

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Annotated[list[Part], Meta(max_length=ASKING.parts)] | None = None
    call_id: str | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | Annotated[list[InputText], Meta(max_length=ASKING.parts)] | None = None
    summary: Nothing | None = None
    id: str | None = None
    status: Status | None = None
    phase: None = None
    caller: None = None
    namespace: None = None
    encrypted_content: None = None
    is_async: No | None = msgspec.field(name="async", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        needed, allowed = _ITEMS[self.type]
        for name in (*needed, *_CONTENTS):
            given = getattr(self, name) is not None
            if name in needed and not given:
                raise ValueError(f"field `{name}` is missing: {self.type} has it")
            if given and name not in needed and name not in allowed:
                raise ValueError(f"field `{name}` is of no {self.type}")
        if self.arguments is not None:
            arguments_of(self.arguments)


_CONTENTS: Final = ("role", "content", "call_id", "name", "arguments", "output", "summary")
_ITEMS: Final = {  # type -> what it must have, and may have
    "message": (("role", "content"), ()),
    "function_call": (("call_id", "name", "arguments"), ()),
    "function_call_output": (("call_id", "output"), ("name",)),
    "reasoning": ((), ("content", "summary")),
}


def arguments_of(text: str) -> dict[str, Any]:
    """Parses the arguments of a call. ValueError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("field `arguments` is no object of JSON, as a text") from None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Makes what a chat template is given of a chat."""
    return [_message(message) for message in messages]


def _message(message: Message) -> dict[str, Any]:
    given: dict[str, Any] = {"role": message.__struct_config__.tag, "content": _joined(message.content)}
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            given["tool_calls"] = [_call(call.id, call.function) for call in message.tool_calls]
        if message.reasoning_content is not None:
            given["reasoning_content"] = message.reasoning_content
    if isinstance(message, ToolMessage):
        given["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        given["name"] = message.name
    return given


def _call(name: str, function: CalledFunction) -> dict[str, Any]:
    made = {"name": function.name, "arguments": arguments_of(function.arguments)}
    return {"type": "function", "id": name, "function": made}


def _joined(content: str | list[Any] | None) -> str:
    """The texts of a message as one, joined as transformers does."""
    if content is None or isinstance(content, str):
        return content or ""
    return " ".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def template_items(items: str | list[Item], instructions: str | None) -> list[dict[str, Any]]:
    """Makes what a chat template is given of a response's input. Reasoning and calls that follow one another, and a
    text before calls, are one message, as in a chat."""
    given: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*given, {"role": "user", "content": items}]
    turn: dict[str, Any] | None = None  # of the assistant, to which the next item may belong
    for item in items:
        if item.type == "function_call_output":
            given.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id})
            turn = None
        elif item.type == "message" and item.role != "assistant":
            given.append({"role": item.role, "content": _joined(item.content)})
            turn = None
        else:
            if turn is None or (item.type != "function_call" and (turn["content"] or "tool_calls" in turn)):
                turn = {"role": "assistant", "content": ""}
                given.append(turn)
            if item.type == "reasoning":
                turn["reasoning_content"] = turn.get("reasoning_content", "") + _joined(item.content)
            elif item.type == "message":
                turn["content"] = _joined(item.content)
            else:
                function = CalledFunction(name=item.name or "", arguments=item.arguments or "{}")
                turn.setdefault("tool_calls", []).append(_call(item.call_id or "", function))
    return given
