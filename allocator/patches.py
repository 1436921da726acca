"""Replaces attributes of other libraries for a while, and puts them back exactly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

User = TypeVar("User")
Undo = Callable[[], object]
_MISSING: Final = object()


class Patches:
    """Replaced attributes, in order. True while there are any."""

    def __init__(self) -> None:
        self._replaced: list[tuple[object, str, object]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        """Replaces an attribute of `owner`, a module or class, which need not have had it."""
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING)))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Puts all attributes back."""
        while self._replaced:
            owner, name, before = self._replaced.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    def __bool__(self) -> bool:
        return bool(self._replaced)


class SharedPatch(Generic[User]):
    """A part of another library that is replaced with the first user, and put back with the last. Thread-safe; users
    may leave in a finalizer, and so anywhere."""

    def __init__(self, replace: Callable[[], Iterator[Undo]]) -> None:
        """`replace` replaces the part, and yields undo functions, step by step; the last step is undone first."""
        self.lock: Final = threading.RLock()
        self._replace = replace
        self._users: dict[int, User] = {}
        self.users: tuple[User, ...] = ()  # in the order in which they came; an attribute, as some look per layer
        self._undo: list[Undo] = []
        self._also: set[Hashable] = set()

    def add(self, key: int, user: User) -> None:
        """Adds the user of this key, an id. Raises as `replace`, and then nothing is replaced and no user added."""
        with self.lock:
            self._users[key] = user  # first: another one that leaves meanwhile, in a finalizer, is not the last
            self.users = tuple(self._users.values())
            if self._undo:
                return
            try:
                for undo in self._replace():
                    self._undo.append(undo)
            except BaseException:
                self.remove(key)
                raise

    def also(self, what: Hashable, replace: Callable[[], Undo]) -> None:
        """Replaces `what` too, once, until the last user leaves: `replace` returns the undo function."""
        with self.lock:
            if what not in self._also:
                self._also.add(what)
                self._undo.append(replace())

    def get(self, key: int) -> User | None:
        """Returns the user of this key, None where there is none."""
        return self._users.get(key)

    def remove(self, key: int) -> None:
        """Removes the user of this key. Idempotent, and to be called again where it was interrupted."""
        with self.lock:
            self._users.pop(key, None)
            self.users = tuple(self._users.values())
            if not self._users:
                self._also.clear()
            while self._undo and not self._users:
                self._undo[-1]()
                self._undo.pop()
