"""A part of another library that is replaced while anybody uses what is in its place (allocator/patches.py)."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ballonet.allocator.patches import SharedPatch, Undo


class Library:
    """With two parts, of which the second may refuse to be replaced."""

    def __init__(self) -> None:
        self.parts = SimpleNamespace(first="stock", second="stock", third="stock")
        self.refuses = False
        self.done: list[str] = []

    def put(self, name: str) -> Undo:
        setattr(self.parts, name, "ours")

        def undo() -> None:
            setattr(self.parts, name, "stock")
            self.done.append(name)

        return undo

    def replace(self) -> Iterator[Undo]:
        yield self.put("first")
        if self.refuses:
            raise AttributeError("second")
        yield self.put("second")

    @property
    def ours(self) -> list[str]:
        return [name for name, value in vars(self.parts).items() if value == "ours"]


def test_parts_are_replaced_by_the_first_user_and_put_back_by_the_last() -> None:
    library = Library()
    patch = SharedPatch[str](library.replace)
    patch.add(1, "a")
    patch.add(2, "b")
    patch.also("third", lambda: library.put("third"))
    patch.also("third", lambda: library.put("third"))
    assert (patch.users, patch.get(1), patch.get(3)) == (("a", "b"), "a", None)
    patch.remove(1)
    patch.remove(1)
    assert library.ours == ["first", "second", "third"]
    patch.remove(2)
    assert (library.ours, library.done, patch.users) == ([], ["third", "second", "first"], ())
    patch.add(1, "a")
    patch.also("third", lambda: library.put("third"))
    assert library.ours == ["first", "second", "third"]


def test_failed_replacement_changes_nothing() -> None:
    library = Library()
    library.refuses = True
    patch = SharedPatch[str](library.replace)
    with pytest.raises(AttributeError, match="second"):
        patch.add(1, "a")
    assert (library.ours, patch.users) == ([], ())


def test_interrupted_restoring_goes_on_where_it_was() -> None:
    library = Library()
    patch = SharedPatch[str](library.replace)
    patch.add(1, "a")
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> Undo:
        def undo() -> None:
            if interrupts:
                raise interrupts.pop()

        return undo

    patch.also("interrupted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch.remove(1)
    assert library.ours == ["first", "second"]
    patch.remove(1)
    assert library.ours == []
