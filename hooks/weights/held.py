"""Who holds the tensors of a model beside it: told to people, as far as Python can tell."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from types import CellType, FrameType, ModuleType
from typing import Final

from torch import nn

from ..streaming.watched import REFERRED, Census, Place, Watched

STRANGERS: Final = "someone holds memory that a weight of the model had before"
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, CellType)
_ITERATOR: Final[type] = type(iter([]))
_CLIMB: Final = 5  # steps from a container to what it belongs to


def held(model: nn.Module, censuses: Iterable[Census]) -> dict[str, str]:
    """Name of a tensor that someone outside of `model` holds -> who, or how. Looks through all objects that there
    are."""
    prefixes = {id(module): prefix for prefix, module in model.named_modules()}
    places = {place: why for each in censuses for place, why in each.held()}
    owners = _owners([place for place, why in places.items() if why == REFERRED])
    found = {}
    for place, why in places.items():
        prefix = prefixes.get(id(place.module()))
        name = ".".join((*filter(None, (prefix,)), place.name, *place.path))
        whose = owners.get(place, set())
        found[name] = f"{why}: {', '.join(sorted(whose))}" if whose else why
    return found


def _owners(places: list[Place]) -> dict[Place, set[str]]:
    """What refers to the tensors at the places, beside their modules."""
    at = {id(place.find()): place for place in places}
    owners: dict[Place, set[str]] = {}
    referrers = gc.get_referrers(*(place.find() for place in places)) if places else []
    for referrer in referrers:
        held_here = {at[id(each)] for each in gc.get_referents(referrer) if id(each) in at}
        if held_here and not isinstance(referrer, Watched):
            names = _owner(referrer, [referrers])
            for place in held_here:
                owners.setdefault(place, set()).update(names)
    return owners


def _owner(container: object, ours: list[object]) -> set[str]:
    """What it is, and where it only contains other things, what it belongs to. `ours`: what is not meant."""
    level = [container]
    for _ in range(_CLIMB):
        known = {name for each in level if (name := _named(each))}
        if known:
            return known
        ours.append(level)
        level = [each for each in gc.get_referrers(*level) if all(each is not own for own in ours)]
        level = [each for each in level if not isinstance(each, FrameType) and type(each) is not _ITERATOR]
    return {f"a {type(container).__name__}"}


def _named(it: object) -> str:
    """Empty where that says nothing."""
    if isinstance(it, FrameType):
        return f"a variable of {it.f_code.co_qualname}()"
    if isinstance(it, ModuleType):
        return f"a variable of {it.__name__}"
    return "" if isinstance(it, _CONTAINERS) else f"{type(it).__module__}.{type(it).__qualname__}"
