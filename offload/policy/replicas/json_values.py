"""Events, actions and the dataclasses in them, converted to JSON values and back.

A dataclass becomes an object whose key "" has the name of its class; an enum member one with its `value`; tuples become
lists, and lists tuples again. An infinite number of seconds is `Infinity`, as Python's json writes and reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from enum import Enum
from types import ModuleType
from typing import Any, Final

from .. import tuning
from . import actions, chunk_cost, demand, drop_gate, events, groups, restore_plan


def kinds(modules: Iterable[ModuleType]) -> dict[str, Any]:
    """Returns the dataclasses and enums of these modules, by name."""
    return {
        name: found
        for module in modules
        for name, found in vars(module).items()
        if isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))
    }


KINDS: Final[Mapping[str, Any]] = {
    **kinds((actions, drop_gate, events, groups, restore_plan, demand)),
    "ChunkCost": chunk_cost.ChunkCost,
    "Replicas": tuning.Replicas,
}


def to_plain(value: Any) -> Any:
    """Returns the value as JSON values. TypeError where it contains another type."""
    if isinstance(value, Enum):
        return {"": type(value).__name__, "value": value.value}
    if dataclasses.is_dataclass(value):
        fields = {each.name: to_plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return {"": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{value!r} cannot be written as text")


def from_plain(value: Any, known: Mapping[str, Any] = KINDS) -> Any:
    """Returns the value that `to_plain` converted. KeyError where a class is not `known`; also what the classes
    raise."""
    if isinstance(value, list):
        return tuple(from_plain(each, known) for each in value)
    if isinstance(value, dict):
        fields = {name: from_plain(each, known) for name, each in value.items() if name}
        return known[value[""]](**fields)
    return value
