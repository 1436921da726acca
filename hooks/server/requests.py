"""The bodies of requests, typed: every field of OpenAI's, as fields.py says, and further ones, as vLLM names them."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta, Struct

from ..sampling.settings import Sampling
from . import fields
from .fields import ASKING, CacheHint, Checked, No, Nothing, Schema
from .messages import Item, Messages

Variables = Annotated[dict[str, Any], Meta(max_length=ASKING.variables)]
ToolMode = Literal["none", "auto", "required"]
Format = fields.TextFormat | fields.JSONObject | fields.JSONSchema
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_SEEDS: Final = 2**63  # of int64


class Defaults(Struct, frozen=True):
    """What a model's generation config says of answers, for fields that a request leaves out. `most`: tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    most: int = ASKING.answer

    @classmethod
    def of(cls, config: Any) -> Defaults:
        """Takes them from a GenerationConfig."""
        temperature = 1.0 if config.temperature is None else config.temperature
        return cls(
            temperature if config.do_sample else 0.0,
            config.top_k or 0,
            config.top_p or 1.0,
            config.min_p or 0.0,
            config.repetition_penalty or 1.0,
            config.max_new_tokens or ASKING.answer,
        )


class Asked(Checked, kw_only=True):
    """The fields that all endpoints have. Null and a field that is left out are the same."""

    model: str
    stream: bool | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    top_k: fields.TopK | None = None
    min_p: fields.MinP | None = None
    seed: fields.Seed | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    repetition_penalty: fields.Repetition | None = None
    logit_bias: fields.Bias | None = None
    stop: fields.Stop | None = None
    stop_token_ids: fields.EndTokens | None = None
    ignore_eos: bool | None = None
    min_tokens: fields.Count | None = None
    structured_outputs: fields.Structure | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if getattr(self, "stream_options", None) is not None and not self.stream:
            raise ValueError("field `stream_options` is of streams: give stream, too")

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, defaults: Defaults, logprobs: int | None, grammar: str | None) -> Sampling:
        """How tokens are chosen."""
        top_k = _or(self.top_k, defaults.top_k)
        return Sampling(
            seed=secrets.randbelow(_SEEDS) if self.seed is None else self.seed,
            temperature=_or(self.temperature, defaults.temperature),
            top_k=max(top_k, 0),
            top_p=_or(self.top_p, defaults.top_p),
            min_p=_or(self.min_p, defaults.min_p),
            presence=_or(self.presence_penalty, 0.0),
            frequency=_or(self.frequency_penalty, 0.0),
            repetition=_or(self.repetition_penalty, defaults.repetition),
            bias=tuple((int(token), by) for token, by in (self.logit_bias or {}).items()),
            least=self.min_tokens or 0,
            logprobs=logprobs,
            grammar=grammar,
        )


class Chunked(Asked, kw_only=True):
    """The fields of endpoints whose streams have chunks."""

    stream_options: fields.ChunkOptions | None = None

    @property
    def tells_usage(self) -> bool:
        """Does the last chunk of a stream say how many tokens there were?"""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Chat(Chunked, kw_only=True):
    """The body of `/v1/chat/completions`."""

    off: ClassVar[tuple[str, ...]] = ("store",)

    messages: Messages
    max_tokens: fields.Tokens | None = None
    max_completion_tokens: fields.Tokens | None = None
    n: fields.Choices | None = None
    logprobs: bool | None = None
    top_logprobs: fields.Likeliest | None = None
    response_format: Format | None = None
    tools: Annotated[list[fields.Tool], Meta(max_length=ASKING.tools)] | None = None
    tool_choice: ToolMode | fields.NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    metadata: fields.Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheHint | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: No | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    function_call: None = None
    functions: Nothing | None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("field `top_logprobs` needs logprobs")
        one_limit(self.max_tokens, self.max_completion_tokens)
        _check_tools([tool.function for tool in self.tools or ()], self.tool_choice)
        check_variables(self.chat_template_kwargs)


class Completions(Chunked, kw_only=True):
    """The body of `/v1/completions`. `logprobs`: so many of the likeliest tokens are told with each one."""

    prompt: str | Annotated[list[str | fields.TokenId | list[fields.TokenId]], Meta(min_length=1)]
    max_tokens: fields.Count | None = None
    n: fields.Choices | None = None
    best_of: fields.Choices | None = None
    echo: bool | None = None
    logprobs: fields.Likeliest | None = None
    response_format: Format | None = None
    suffix: Annotated[str, Meta(max_length=0)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.best_of is not None and (
            self.best_of < (self.n or 1) or (self.stream and self.best_of > (self.n or 1))
        ):
            raise ValueError("field `best_of` is n at least, and more only without stream")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("field `max_tokens` is 0, which needs echo")
        if isinstance(self.prompt, list) and len(set(map(type, self.prompt))) > 1:
            raise ValueError("field `prompt` mixes texts, tokens and lists: give items of one kind")
        if self.choices > ASKING.choices:
            raise ValueError(f"field `prompt`: {self.choices} answers are asked for, of at most {ASKING.choices}")

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts, or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        tokens = [item for item in self.prompt if isinstance(item, int)]
        return [tokens] if tokens else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def choices(self) -> int:
        """Answers that are computed for all prompts together."""
        return len(self.prompts) * (self.best_of or self.n or 1)


class Reasoning(Checked, kw_only=True):
    """How a model reasons. `effort`: templates are given it as `reasoning_effort`."""

    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    summary: None = None
    generate_summary: None = None
    context: Literal["auto"] | None = None


class SchemaFormat(Checked, tag_field="type", tag="json_schema", kw_only=True):
    """JSON of a schema, as `fields.NamedSchema`."""

    name: fields.FunctionName
    schema: Schema
    description: str | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        fields.NamedSchema(name=self.name, schema=self.schema)


class TextConfig(Checked, kw_only=True):
    """The format of a response's text."""

    format: fields.TextFormat | fields.JSONObject | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseTool(Checked, tag_field="type", tag="function", kw_only=True):
    """A tool of a response."""

    off: ClassVar[tuple[str, ...]] = ("defer_loading", "is_async")

    name: fields.FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: No | None = None
    output_schema: None = None
    is_async: No | None = msgspec.field(name="async", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.function()

    def function(self) -> fields.FunctionTool:
        """The same as a tool of a chat. ValueError."""
        return fields.FunctionTool(
            name=self.name, description=self.description, parameters=self.parameters, strict=self.strict
        )


class ResponseToolChoice(Checked, tag_field="type", tag="function", kw_only=True):
    """The choice of one tool."""

    name: fields.FunctionName


class Responses(Asked, kw_only=True):
    """The body of `/v1/responses`."""

    off: ClassVar[tuple[str, ...]] = ("background", "store")

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=ASKING.messages)]
    instructions: str | None = None
    stream_options: fields.StreamOptions | None = None
    max_output_tokens: fields.Tokens | None = None
    top_logprobs: fields.Likeliest | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=ASKING.tools)] | None = None
    tool_choice: ToolMode | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template: str | None = None
    chat_template_kwargs: Variables | None = None
    metadata: fields.Metadata | None = None
    max_tool_calls: fields.Tokens | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheHint | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: No | None = None
    store: No | None = None
    context_management: Nothing | None = None
    access_programs: None = None
    background_options: None = None
    conversation: None = None
    image: None = None
    moderation: None = None
    previous_response_id: None = None
    prompt: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_tools([tool.function() for tool in self.tools or ()], self.tool_choice)
        check_variables(self.chat_template_kwargs)


DECODERS: Final = {kind.__name__: msgspec.json.Decoder(kind) for kind in (Chat, Completions, Responses)}


def check_variables(given: dict[str, Any] | None) -> None:
    """Checks the size of a template's variables. ValueError."""
    fields.bound("chat_template_kwargs", given, ASKING.variable_bytes, ASKING.variable_depth)


def _check_tools(tools: list[fields.FunctionTool], choice: Any) -> None:
    names = [tool.name for tool in tools]
    if len(names) != len(set(names)):
        raise ValueError("field `tools` has two functions of one name")
    if not tools and choice not in (None, "none", "auto"):
        raise ValueError("field `tool_choice` needs tools")
    chosen = getattr(getattr(choice, "function", choice), "name", None)
    if chosen is not None and chosen not in names:
        raise ValueError(f"field `tool_choice` names {chosen!r}, which is not among the tools")


def one_limit(*limits: int | None) -> None:
    """Checks that an answer's length is given once. ValueError."""
    if len({limit for limit in limits if limit is not None}) > 1:
        raise ValueError("field `max_tokens` and max_completion_tokens differ: give one")


def derived_seed(seed: int, choice: int) -> int:
    """The seed of one of several answers: that of the first is the request's."""
    if not choice:
        return seed
    digest = hashlib.blake2b(f"{seed} {choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _SEEDS


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given
