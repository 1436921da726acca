"""Attributes of other libraries that are replaced for a while, and put back exactly."""

from __future__ import annotations

from typing import Final

_MISSING: Final = object()


class Patches:
    """What was replaced, in order. True while there is anything."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        """`owner` is a module or a class, which need not have had the attribute."""
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Everything as it was before."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __bool__(self) -> bool:
        return bool(self._replaced)
