"""What a request costs before its model: chat templates, tokenizing, compiling of grammars. `render` does one job, all
of whose input and output can be sent to another process, which needs no torch: so names of transformers are imported
here, and not by hooks/compat.py.
"""

from __future__ import annotations

import functools
import inspect
import re
from types import SimpleNamespace
from typing import Any, Final

from msgspec import Struct

from . import grammars
from .engine import Denial
from .fields import FunctionTool, decoded
from .requests import DECODERS


class Source(Struct, frozen=True):
    """Where a model's tokenizer is, on the hub or in a folder. `family`: its `model_type`; `own_templates`: may clients
    send a template?"""

    name: str
    revision: str = "main"
    family: str = ""
    own_templates: bool = False


class Conversation(Struct, frozen=True):
    """What a prompt is made of. `tools`: as a template is given them; `variables`: of the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] | None = None
    template: str | None = None
    effort: str | None = None


class RenderJob(Struct, frozen=True):
    """One request's work: of a conversation, or of texts, and of a grammar. `strict`: functions whose calls are held to
    their schemas where they come in a text. Or of a `body` that is large: is it one of this `kind`?"""

    conversation: Conversation | None = None
    texts: tuple[str, ...] = ()
    grammar: str | None = None
    strict: tuple[FunctionTool, ...] = ()
    body: bytes | bytearray = b""
    kind: str = ""


class Rendered(Struct, frozen=True):
    """`prompts`: token ids of each prompt; `opening`: what a template has begun of the answer; `grammar`: checked."""

    prompts: tuple[tuple[int, ...], ...]
    opening: str = ""
    grammar: str | None = None


@functools.cache
def tokenizer_of(source: Source) -> Any:
    """Loads a tokenizer, once in a process. OSError, ValueError."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.name, revision=source.revision)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"its tokenizer is a {type(tokenizer).__name__}, which cannot decode token by token")
    return tokenizer


@functools.cache
def answer_template(source: Source) -> dict[str, Any] | None:
    """Returns how answers of a model are divided into text, reasoning and calls, by its tokenizer or its family; None:
    that is not known."""
    from transformers.cli.serving.utils import get_response_template

    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=source.family))
    return get_response_template(tokenizer_of(source), model)


def render(source: Source, job: RenderJob) -> Rendered:
    """Does a job. Denial 400."""
    if job.kind:
        decoded(job.body, DECODERS[job.kind])
        return Rendered(())
    tokenizer = tokenizer_of(source)
    grammar = _with_calls(source, job.strict) if job.strict else job.grammar
    if grammar is not None:
        _check_grammar(grammar)
    if job.conversation is None:
        texts = [list(tokenizer(text)["input_ids"]) for text in job.texts]
        return Rendered(tuple(map(tuple, texts)), grammar=grammar)
    text = _chat(source, job.conversation)
    prompt = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    return Rendered((prompt,), _opening(source, text), grammar)


def _chat(source: Source, chat: Conversation) -> str:
    """The text that a template makes of a conversation."""
    tokenizer, variables = tokenizer_of(source), dict(chat.variables or {})
    for name in variables:
        if name in _reserved():
            raise _wrong("chat_template_kwargs", f"{name} is no variable of a template: it is the renderer's")
    if chat.template is not None and not source.own_templates:
        raise _wrong("chat_template", "this server takes no templates of clients (--allow-client-templates)")
    if chat.template is None and not tokenizer.chat_template:
        raise _wrong("messages", "this model has no chat template, which messages need: ask /v1/completions")
    try:
        template = tokenizer.get_chat_template(chat.template, chat.tools)
        if chat.effort is not None:
            _check_used("reasoning_effort", "reasoning_effort", template)
            if variables.setdefault("reasoning_effort", chat.effort) != chat.effort:
                raise _wrong("reasoning_effort", "chat_template_kwargs has another one")
        if chat.tools:
            _check_used("tools", "tools", template)
        for name in chat.variables or ():
            _check_used("chat_template_kwargs", name, template)
        roles = {"developer"} if "developer" in template else set()
        messages = [
            message if message["role"] != "developer" or roles else {**message, "role": "system"}
            for message in chat.messages
        ]
        return str(
            tokenizer.apply_chat_template(
                messages,
                tools=chat.tools or None,
                chat_template=template,
                add_generation_prompt=True,
                tokenize=False,
                **variables,
            )
        )
    except Denial:
        raise
    except Exception as error:  # any error: a template may raise anything
        raise _wrong("messages", f"the model's chat template does not take these messages: {error}") from None


@functools.cache
def _reserved() -> frozenset[str]:
    """Names that are no variables of a template: those of what renders it."""
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    renderers = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    names = {name for renderer in renderers for name in inspect.signature(renderer).parameters}
    return frozenset({*names, "messages"})


def _check_used(field: str, name: str, template: str) -> None:
    if not re.search(rf"\b{re.escape(name)}\b", template):
        raise _wrong(field, f"the model's chat template knows no {name}")


def _opening(source: Source, text: str) -> str:
    """What the template has begun of the answer, such as a thought: what follows the last begin of a turn."""
    template = answer_template(source)
    anchors = None if template is None else template.get("start_anchor", template.get("start_anchor_pattern"))
    if template is None or anchors is None:
        return ""
    known = [anchors] if isinstance(anchors, str) else anchors
    pattern = "|".join(known if "start_anchor_pattern" in template else map(re.escape, known))
    return text[max((match.end() for match in re.finditer(pattern, text, re.DOTALL)), default=len(text)) :]


_PLAIN: Final = re.compile(r"(?:\\s\*)?([^\\^$.|?*+()\[\]{}]+)")  # a delimiter that is a text


def _with_calls(source: Source, tools: tuple[FunctionTool, ...]) -> str:
    """The grammar of a text in which calls have the model's own form."""
    calls = (answer_template(source) or {}).get("fields", {}).get("tool_calls", {})
    opening, closing = (
        _PLAIN.fullmatch(calls.get(name, calls.get(f"{name}_pattern", ""))) for name in ("open", "close")
    )
    shape = {"type": "function", "function": "{content}"}
    if not opening or not closing or (calls.get("content"), calls.get("transform")) != ("json", shape):
        raise _wrong("tools", "strict functions need tool_choice required or a named one: no grammar holds other calls")
    delimiters = opening[1], closing[1]
    special = {token.content for token in tokenizer_of(source).added_tokens_decoder.values() if token.special}
    return grammars.of_text_with_calls(tools, *delimiters, special=special.issuperset(delimiters))


def _check_grammar(grammar: str) -> None:
    try:
        wrong = grammars.check(grammar)
    except ModuleNotFoundError:
        why = "formats and chosen tools need llguidance: pip install 'ballonet[structured]'"
        raise Denial(400, why, "unsupported_parameter") from None
    if wrong:
        raise Denial(400, f"the format cannot be compiled: {wrong}", "invalid_value")


def _wrong(field: str, message: str) -> Denial:
    return Denial(400, f"{field}: {message}", "invalid_value", field)
