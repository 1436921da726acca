"""The tensors among the arguments of a decoder layer's call: which of them come from the layers before it.

Note [What travels]
    As a rule the hidden states are all that a decoder layer needs of those before it. Some need more: gemma3n and
    gemma4 keep the keys and values that later layers share in a dictionary, others hand on a second residual stream. So
    what travels is found and not assumed: a model runs once as it is and once with all its layers passing their input
    through, and the tensors of a layer's call that are not the same in both come from the layers before (forms.py).
    They are named by their way through the call: a tuple is rebuilt around a tensor that is put in, a list or a mapping
    is changed in place, because the model's loop hands the same object to the next layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import torch

Way = tuple[str | int, ...]  # through mappings by key and sequences by index


class Call(NamedTuple):
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def leaves(value: object, without: frozenset[str] = frozenset(), way: Way = ()) -> Iterator[tuple[Way, torch.Tensor]]:
    """The tensors in nested sequences and mappings, with their ways. `without`: keys of mappings that are left out."""
    if isinstance(value, torch.Tensor):
        yield way, value
    elif isinstance(value, Mapping):
        for key in value:
            if isinstance(key, str | int) and key not in without:
                yield from leaves(value[key], without, (*way, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from leaves(each, without, (*way, index))


def copied_leaves(call: Call, without: frozenset[str]) -> dict[Way, torch.Tensor]:
    """Copies of the tensors of a call, by their ways."""
    return {way: tensor.detach().clone() for way, tensor in leaves(call._asdict(), without)}


def get(value: Any, way: Way) -> Any:
    """What lies at the end of the way; None where that does not lead there."""
    for step in way:
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list | tuple) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return None
    return value


def put(value: Any, way: Way, tensor: torch.Tensor) -> Any:
    """Returns `value` with the tensor at the end of the way. Mappings and lists are changed in place, tuples rebuilt;
    where there is nothing on the way a tuple grows. See Note [What travels]."""
    if not way:
        return tensor
    step, rest = way[0], way[1:]
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
    """Are these the same elements, or nothing both? Not a number is the same as itself."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other)) or (
        one.is_floating_point() and bool(((one == other) | (one.isnan() & other.isnan())).all())
    )
