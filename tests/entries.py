"""Weights of the core that entries of its reclaim list name."""

from __future__ import annotations

from dataclasses import dataclass

from ballonet.allocator import _native

from .core import PAGE, Core, behind, holds, write


@dataclass
class Layer:
    """Weights in pages of their own, each page full of another byte, and a twin that has no pages at first."""

    core: Core
    group: _native.Group
    range: _native.Range
    twin: _native.Range
    value: int

    def entry(self, key: int, sources: list[_native.Source] | None = None) -> _native.Entry:
        return key, self.group, [(self.range, 0, self.range.pieces, self.twin, 0, sources or [])]

    def clean(self) -> Layer:
        """Makes the twin of a range."""
        self.twin.map_host(0, self.twin.pieces)
        fill(self.twin, self.value)
        return self

    @property
    def place(self) -> str | None:
        (place,) = {behind(self.range.address + piece * PAGE)[0] for piece in range(self.range.pieces)}
        return place

    def intact(self) -> bool:
        return all(holds(self.range.address + piece * PAGE, self.value + piece) for piece in range(self.range.pieces))


def fill(one: _native.Range, value: int) -> None:
    for piece in range(one.pieces):
        write(one.address + piece * PAGE, value + piece)


def layer(core: Core, pieces: int = 2, value: int = 1, group: _native.Group | None = None) -> Layer:
    group = group or core.device.group()
    pages, twin = core.range(pieces, "weights", group, mapped=pieces), core.range(pieces, "weights", group)
    made = Layer(core, group, pages, twin, value)
    fill(made.range, value)
    return made


def keys(core: Core) -> list[int]:
    return [key for _, key, _ in core.device.taken()]
