"""The slots that several layers of a model take turns in."""

from __future__ import annotations

from collections.abc import Sequence

from ...allocator._native import Device, Group, Range
from .slots import Slot, open_pages


class SharedSlots:
    """The shared slots of one model, at first none; their ranges belong to `group`. Not thread-safe."""

    def __init__(self, device: Device, group: Group) -> None:
        self.slots: list[Slot[int]] = []
        self._device = device
        self._group = group

    @property
    def pages(self) -> int:
        """Device pages of all shared slots."""
        return sum(slot.range.pieces for slot in self.slots)

    def open(self, pages: int) -> Range:
        """Returns a new range with so many device pages. PoolExhausted, DriverError."""
        return open_pages(self._device, self._group, "weights", pages)

    def make(self, slot_pages: Sequence[int]) -> None:
        """Makes slots, each as large as wanted. PoolExhausted, DriverError: there may be fewer then."""
        for index, pages in enumerate(slot_pages):
            if index == len(self.slots):
                self.slots.append(Slot(self.open(pages)))
            elif self.slots[index].range.pieces < pages:
                slot = self.slots[index]
                made = self.open(pages)
                slot.range.close()
                slot.range, slot.holds = made, None

    def shrink(self, slots: int) -> None:
        """Closes all but the first so many."""
        while len(self.slots) > slots:
            self.slots.pop().range.close()
