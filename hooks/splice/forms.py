"""The forms of decoder layers: the arguments and results that matter for running a span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .trees import Call, TreePath, get


@dataclass(frozen=True, slots=True)
class FromCall:
    """A returned object that was an argument of the call, at `path`."""

    path: TreePath


@dataclass(frozen=True, slots=True)
class Fixed:
    """A returned value that does not depend on the tokens, as a rule None."""

    value: object


@dataclass(frozen=True, slots=True)
class Several:
    """A returned tuple or list of such values."""

    parts: tuple[Answer, ...]
    as_list: bool


Answer = FromCall | Fixed | Several


@dataclass(frozen=True, slots=True)
class LayerForm:
    """The form of one decoder layer. `travels`: paths in its call of the tensors that come from earlier layers, the
    hidden states first. `answer`: its result when it passes its input through. `caches`: the layers of a cache that it
    uses."""

    travels: tuple[TreePath, ...]
    answer: Answer
    caches: tuple[int, ...]


def answer_of(output: object, call: Call, states: TreePath) -> Answer:
    """Returns the result that replaces `output` when the layer passes its input through: objects of its call where it
    returned these, the hidden states (at the path `states`) for a tensor like them, and None for others."""
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
    """Returns the result of a layer that passes its input through."""
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
