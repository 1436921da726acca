"""Layers that stopped streaming: each stays on the host, and is read from a slot of its own.

Such a slot takes part in no turns. The core may take its pages as those of a resident layer, and copies nothing then:
the slot's addresses lead to the layer's copy on the host. See ring.py, Note [Starting and stopping to stream].
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ...allocator._native import Range
from .layer_parts import StreamedLayer
from .slots import Copies, Slot


class OwnSlots:
    """The own slots of one model, at first none. Not thread-safe, but for what may be asked on any thread."""

    def __init__(self) -> None:
        self._slots: dict[int, tuple[StreamedLayer, Slot[int]]] = {}

    # -- on any thread

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose slots have their pages, ascending."""
        slots = self._slots and list(self._slots.items())
        return tuple(sorted(layer for layer, (_, slot) in slots if not is_taken(slot))) if slots else ()

    @property
    def pages(self) -> int:
        """Device pages of all own slots."""
        return sum(slot.range.pieces for _, slot in list(self._slots.values()) if not is_taken(slot))

    @property
    def host_pages(self) -> int:
        """Host pages of these layers."""
        return sum(part.backing.backed for streamed, _ in list(self._slots.values()) for part in streamed.parts)

    def offer(self, layer: int) -> list[tuple[Range, int, int, Range, int, Copies]]:
        """The pages of the layer's slot, for `Device.publish`; none where it has none."""
        if layer not in self._slots:
            return []
        streamed, slot = self._slots[layer]
        offered = []
        for part in streamed.parts:
            backing = part.backing
            sources = backing.copies(part.first, part.count, 0) if backing.file is not None else []
            offered.append((slot.range, part.offset, part.count, backing.pages, part.first, sources))
        return offered

    # -- for the ring

    @property
    def members(self) -> list[tuple[StreamedLayer, Slot[int]]]:
        """The layers, and their slots."""
        return list(self._slots.values())

    def get(self, layer: int) -> tuple[StreamedLayer, Slot[int]] | None:
        """The layer and its slot, None where it has none."""
        return self._slots.get(layer)

    def add(self, streamed: StreamedLayer, opened: Range) -> None:
        """Adds a slot of these pages for the layer; it is filled when a pass begins."""
        self._slots[streamed.layer] = streamed, Slot(opened, [streamed.layer])

    def remove(self, layers: Collection[int] | None = None) -> Iterable[StreamedLayer]:
        """Closes the slots of these layers, with None of all, and returns those that had one, one after the other. They
        are on the host."""
        for layer in self._slots.keys() & (self._slots if layers is None else layers):
            streamed, slot = self._slots.pop(layer)
            slot.range.close()
            for part in streamed.parts:
                if part.backing.file is not None:  # the core filled host pages from it when it took the slot
                    part.backing.drop()
            yield streamed

    def forget(self, layer: int) -> None:
        """Closes the slot of a layer that is resident again, and its copy on the host."""
        streamed, slot = self._slots.pop(layer)
        slot.range.close()
        for part in streamed.parts:
            part.backing.close()


def is_taken(slot: Slot[int]) -> bool:
    """Has the core taken the pages of an own slot? Its addresses lead to the host then."""
    return slot.range.leads_to(0) != "device"
