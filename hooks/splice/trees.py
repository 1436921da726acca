"""The tensors among the arguments of a decoder layer's call: which of them come from the layers before it.

Note [What travels]
    As a rule the hidden states are all that a decoder layer needs of those before it. Some need more: gemma3n and
    gemma4 keep the keys and values that later layers share in a dictionary, others hand on a second residual stream. So
    the tensors that travel are found and not assumed: a model runs once as it is and once with all its layers passing
    their input through, and the tensors of a layer's call that differ come from the layers before (forms.py).
    Each is named by its path through the call. A tuple is rebuilt around a tensor that is put in; a list or a mapping
    is changed in place, because the model's loop hands the same object to the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import torch

TreePath = tuple[str | int, ...]  # through mappings by key and sequences by index


class Call(NamedTuple):
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def leaves(
    value: object, without: frozenset[str] = frozenset(), path: TreePath = ()
) -> Iterator[tuple[TreePath, torch.Tensor]]:
    """The tensors in nested sequences and mappings, with their paths. `without`: keys of mappings that are left out."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str | int) and key not in without:
                yield from leaves(value[key], without, (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from leaves(each, without, (*path, index))


def copied_leaves(call: Call, without: frozenset[str]) -> dict[TreePath, torch.Tensor]:
    """Returns copies of the tensors of a call, by their paths."""
    return {path: tensor.detach().clone() for path, tensor in leaves(call._asdict(), without)}


def get(value: Any, path: TreePath) -> Any:
    """Returns the value at the end of the path; None where the path does not exist."""
    for step in path:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def put(value: Any, path: TreePath, tensor: torch.Tensor) -> Any:
    """Returns `value` with the tensor at the end of the path. Mappings and lists are changed in place, tuples rebuilt
    and extended where needed. See Note [What travels]."""
    if not path:
        return tensor
    step, rest = path[0], path[1:]
    if isinstance(value, MutableMapping):
        value[step] = put(value.get(step), rest, tensor)
        return value
    index = cast(int, step)
    items = list(value) if isinstance(value, Sequence) else []
    items += [None] * (index + 1 - len(items))
    items[index] = put(items[index], rest, tensor)
    if isinstance(value, list):
        value[:] = items
        return value
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(items)
    return tuple(items)


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Are both None, or tensors with equal bits? A NaN equals itself."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other)) or (
        one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )
