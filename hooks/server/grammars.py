"""Grammars of llguidance, as texts: what response formats, structured outputs and chosen tools hold an answer to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from . import fields
from .fields import FunctionTool, Structure

_ANY_OBJECT: Final = {"type": "object"}
_TEXT: Final = "TEXT: /(.|\\n)*/\n"


def of_schema(schema: Mapping[str, Any]) -> str:
    """Makes the grammar of JSON of a schema."""
    return json.dumps({"grammars": [{"json_schema": schema}]})


def of_regex(regex: str) -> str:
    """Makes the grammar of what matches a regular expression."""
    inside = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL).replace("\n", r"\n")
    return f"start: /{inside}/\n"


def of_structure(structure: Structure) -> str:
    """Makes the grammar that a structure asks for."""
    if structure.choice is not None:
        return f"start: {' | '.join(map(_text, structure.choice))}\n"
    if structure.regex is not None:
        return of_regex(structure.regex)
    if structure.grammar is not None:
        return structure.grammar
    return of_schema(structure.json if isinstance(structure.json, dict) else _ANY_OBJECT)


def of_format(given: Any) -> str | None:
    """Makes the grammar of a response format; None: any text may come."""
    if given is None or isinstance(given, fields.TextFormat):
        return None
    if isinstance(given, fields.JSONObject):
        return of_schema(_ANY_OBJECT)
    return of_schema(getattr(given, "json_schema", given).schema or {})


def of_arguments(tool: FunctionTool) -> str:
    """Makes the grammar of one call's arguments."""
    return of_schema(tool.parameters or _ANY_OBJECT)


def of_calls(tools: Iterable[FunctionTool], several: bool) -> str:
    """Makes the grammar of a list of calls, as JSON: `name` and `arguments` of each. `several`: may it have more than
    one?"""
    more = ' (", " call)*' if several else ""
    return f'start: "[" call{more} "]"\n{_alternatives("call", map(_call, tools))}'


def of_text_with_calls(tools: Iterable[FunctionTool], opening: str, closing: str, special: bool) -> str:
    """Makes the grammar of a text with calls in it, as JSON between `opening` and `closing`. `special`: are these
    tokens, and no text?"""
    begin, end = (opening, closing) if special else (_text(opening), _text(closing))
    head = f"head: TEXT {begin}\n" if special else f"head[lazy]: TEXT {begin}\n"
    between = r"/\s*/"
    calls = f"start: (head {between} call {between} {end})* TEXT\n"
    return f"%llguidance {{}}\n{calls}{head}{_TEXT}{_alternatives('call', map(_call, tools))}"


def check(grammar: str) -> str:
    """Says why a grammar cannot be compiled; empty: it can. ModuleNotFoundError where llguidance is not installed."""
    from llguidance import LLMatcher

    return str(LLMatcher.validate_grammar(grammar, None))


def _call(tool: FunctionTool) -> str:
    """The rule of one call. Each schema is a root of its own, so that its references hold."""
    begin = _text(f'{{"name": "{tool.name}", "arguments": ')
    return f"{begin} %json {json.dumps(tool.parameters or _ANY_OBJECT)} {_text('}')}"


def _alternatives(name: str, rules: Iterable[str]) -> str:
    made = list(rules)
    lines = "".join(f"{name}_{number}: {rule}\n" for number, rule in enumerate(made))
    return f"{name}: {' | '.join(f'{name}_{number}' for number in range(len(made)))}\n{lines}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
