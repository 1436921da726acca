"""Objects that later packages keep for a runtime, which does not import them: its governor, recorders, shared
budget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

Part = TypeVar("Part")


class RuntimeParts:
    """At most one object of each class, for as long as the runtime lives. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._parts: dict[type, Any] = {}

    def get(self, kind: type[Part]) -> Part | None:
        """Returns the object of this class, None where there is none."""
        part: Part | None = self._parts.get(kind)
        return part

    def of(self, kind: type[Part], make: Callable[[], Part]) -> Part:
        """Returns the object of this class, made by `make` where there is none yet. If `make` raises there is still
        none."""
        with self._lock:
            part = self.get(kind)
            return self.put(make()) if part is None else part

    def put(self, part: Part) -> Part:
        """Keeps the object, in place of an earlier one of its class, and returns it."""
        with self._lock:
            self._parts[type(part)] = part
        return part

    def drop(self, kind: type) -> None:
        """Drops the object of this class. Idempotent."""
        with self._lock:
            self._parts.pop(kind, None)
