"""What a decoder layer is called with and returns, as far as running a span has to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .trees import Call, TreePath, get


@dataclass(frozen=True, slots=True)
class FromCall:
    """What the call was given there."""

    path: TreePath


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that says nothing of the tokens, as a rule None."""

    value: object


@dataclass(frozen=True, slots=True)
class Several:
    """A tuple or a list of these."""

    parts: tuple[Answer, ...]
    as_list: bool


Answer = FromCall | Fixed | Several


@dataclass(frozen=True, slots=True)
class LayerForm:
    """One decoder layer. `travels`: where in its call lies what comes from the layers before it, the hidden states
    first; `answer`: what it returns when it passes its input through; `caches`: the layers of a cache that it uses."""

    travels: tuple[TreePath, ...]
    answer: Answer
    caches: tuple[int, ...]


def answer_of(output: object, call: Call, states: TreePath) -> Answer:
    """What to return in the place of `output` where the layer passes its input through: objects of its call where it
    returned these, the hidden states (which lie at `states`) for a tensor like them, and nothing for others."""
    for path, value in _objects(call._asdict()):
        if value is output and not isinstance(output, bool | int | float | str | None):
            return FromCall(path)
    if isinstance(output, torch.Tensor):
        before = get(call._asdict(), states)
        alike = isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (output.shape, output.dtype)
        return FromCall(states) if alike else Fixed(None)
    if isinstance(output, list | tuple):
        return Several(tuple(answer_of(each, call, states) for each in output), isinstance(output, list))
    return Fixed(output if isinstance(output, bool | int | float | str) else None)


def pass_through(answer: Answer, call: Call) -> Any:
    """What a layer returns that passes its input through."""
    if isinstance(answer, FromCall):
        return get(call._asdict(), answer.path)
    if isinstance(answer, Fixed):
        return answer.value
    parts = [pass_through(each, call) for each in answer.parts]
    return parts if answer.as_list else tuple(parts)


def _objects(value: object, path: TreePath = ()) -> Iterator[tuple[TreePath, object]]:
    yield path, value
    if isinstance(value, Mapping):
        for key in value:
            yield from _objects(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _objects(each, (*path, index))
