"""The types that fields of requests share, with their ranges, and what becomes of a field that is wrong.

Note [Every field has an effect]
    A field that a client sends is honoured, or has no effect by definition (docs/using.md lists these), or is refused
    by name. So every struct here forbids unknown fields, and a field of OpenAI's that has no effect here is typed as
    what stands for its absence: None, an empty list, the one value that a server without the feature has anyway.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from .engine import Denial

Body = TypeVar("Body")


@dataclass(frozen=True, slots=True)
class Asking:
    """What one request may ask for. All chosen: more than clients were seen to send, and little enough that what a
    limit lets through is worked off in milliseconds, but for prompts."""

    messages: int = 4096
    parts: int = 1024  # of a message
    tools: int = 128  # as OpenAI
    stops: int = 16
    stop_length: int = 256  # characters
    biases: int = 4096
    ends: int = 128  # further tokens that end an answer
    choices: int = 128  # answers to all prompts of a request
    likeliest: int = 20  # tokens told with each one: as OpenAI
    variables: int = 32  # of a chat template, so many levels deep, of so many bytes as JSON
    variable_depth: int = 8
    variable_bytes: int = 2**16
    schema_bytes: int = 2**18  # a grammar, or a schema as JSON
    nested: int = 64  # levels of a schema: tools have a dozen, and Python's encoder fails at about 1,000
    body: int = 2**18  # bytes parsed by the event loop: tens of milliseconds of small lists (measured); else elsewhere
    name: int = 128  # characters of an x-request-id, or of a function's name
    answer: int = 1024  # tokens, where neither the request nor the model's generation config says: as transformers


ASKING: Final = Asking()
_FIELD: Final = re.compile(r"field `([^`]+)`")

Temperature = Annotated[float, Meta(ge=0, le=2, description="0: the likeliest token")]
Share = Annotated[float, Meta(gt=0, le=1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="0 and -1: all tokens")]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=100)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Choices = Annotated[int, Meta(ge=1, le=ASKING.choices)]
Likeliest = Annotated[int, Meta(ge=0, le=ASKING.likeliest)]
StopString = Annotated[str, Meta(min_length=1, max_length=ASKING.stop_length)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=ASKING.stops)]
Bias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=ASKING.biases),
]
EndTokens = Annotated[list[TokenId], Meta(max_length=ASKING.ends)]
FunctionName = Annotated[str, Meta(pattern=f"^[a-zA-Z0-9_.-]{{1,{ASKING.name}}}$")]
Metadata = Annotated[dict[str, str], Meta(max_length=16)]
Schema = dict[str, Any]
Nothing = Annotated[list[Any], Meta(max_length=0)]  # a list that may be there, without anything
No = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]  # checked by `Checked`


class Checked(Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a request. ValueError where a field of `off` is true."""

    off: ClassVar[tuple[str, ...]] = ()  # the fields of type No

    def __post_init__(self) -> None:
        for name, shown in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            if name in self.off and getattr(self, name):
                raise ValueError(f"field `{shown}` can only be false")


class CacheHint(Checked, kw_only=True):
    """How a prompt may be cached. No answer depends on it."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class FunctionTool(Checked, kw_only=True):
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        bound("parameters", self.parameters, ASKING.schema_bytes, ASKING.nested)


class Tool(Checked, tag_field="type", tag="function", kw_only=True):
    """A tool of a chat."""

    function: FunctionTool


class NamedFunction(Checked, kw_only=True):
    """The name of a function."""

    name: FunctionName


class NamedTool(Checked, tag_field="type", tag="function", kw_only=True):
    """The choice of one tool."""

    function: NamedFunction


class TextFormat(Checked, tag_field="type", tag="text", kw_only=True):
    """Any text."""


class JSONObject(Checked, tag_field="type", tag="json_object", kw_only=True):
    """A JSON object."""


class NamedSchema(Checked, kw_only=True):
    """A JSON schema. Its name and description have no effect: a grammar holds the answer to it, strict or not."""

    name: FunctionName
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        bound("schema", self.schema, ASKING.schema_bytes, ASKING.nested)


class JSONSchema(Checked, tag_field="type", tag="json_schema", kw_only=True):
    """JSON of a schema."""

    json_schema: NamedSchema


class Structure(Checked, kw_only=True):
    """vLLM's `structured_outputs`: one of its fields. `json`: a schema, or its text; `grammar`: Lark, of llguidance."""

    json: Schema | str | None = None
    regex: Annotated[str, Meta(max_length=ASKING.schema_bytes)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=ASKING.choices)] | None = None
    grammar: Annotated[str, Meta(max_length=ASKING.schema_bytes)] | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = (self.json, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(value is not None for value in given) != 1:
            raise ValueError("field `structured_outputs` needs one of json, regex, choice, grammar, json_object")
        if isinstance(self.json, str):
            try:
                self.json = msgspec.json.decode(self.json, type=Schema)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"field `json` is no schema: {error}") from None
        bound("json", self.json, ASKING.schema_bytes, ASKING.nested)


class StreamOptions(Checked, kw_only=True):
    """How a stream is sent."""

    off: ClassVar[tuple[str, ...]] = ("include_obfuscation",)

    include_obfuscation: No | None = None


class ChunkOptions(StreamOptions, kw_only=True):
    """How chunks are sent. `include_usage`: does the last one say how many tokens there were?"""

    include_usage: bool | None = None


def bound(field: str, value: Any, nbytes: int, depth: int) -> None:
    """Checks that a tree of JSON is so large and so deep at most. ValueError."""
    if value is None:
        return
    if _is_deep(value, depth):
        raise ValueError(f"field `{field}` is nested too deeply: at most {depth} objects and lists within each other")
    if len(msgspec.json.encode(value)) > nbytes:
        raise ValueError(f"field `{field}` has more than {nbytes} bytes as JSON")


def _is_deep(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inner = chain.from_iterable(value.values() if isinstance(value, dict) else value for value in level)
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def decoded(content: bytes | bytearray, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Parses and checks a body. Denial 400, which names the field that is wrong."""
    try:
        return decoder.decode(content)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        inside = _FIELD.search(text)
        names = [path.strip("`").rpartition("$")[2].lstrip("."), inside[1] if inside else ""]
        where = ".".join(filter(None, names)) or None
        raise Denial(400, f"{where}: {text}" if path else text, "invalid_value", where) from None
    except RecursionError:
        raise Denial(400, "the body is nested too deeply", "invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Denial(400, f"the body is no JSON: {error}", "invalid_json") from None
