"""Eviction from a store: down to its limit in bytes, and to free pages when they are short."""

from __future__ import annotations

from ...allocator.interrupts import if_free
from ...offload.governor.client import ModelClient
from ..device import pressure
from .contents import Contents


class Limit:
    """Evicts the least valuable blocks and states of one store."""

    def __init__(self, contents: Contents, nbytes: int | None, model: ModelClient) -> None:
        """`nbytes`: bytes of pages that may be kept, None for any number. `model`: whose prefixes they are."""
        self._contents = contents
        self._model = model
        self.nbytes = nbytes
        pressure.add(contents.device, self)

    @property
    def priority(self) -> int:
        """The priority of the model."""
        return self._model.priority

    def enforce(self) -> None:
        """Evicts down to the limit, and until the core could take all kept pages within any operator, except a part of
        the device (`tuning.prefixes.stuck`). The caller is within `Contents.change`."""
        contents = self._contents
        while self.nbytes is not None and contents.nbytes > self.nbytes and self.evict():
            pass
        device = contents.device
        most = device.budget // device.page_size // contents.governor.tuning.prefixes.stuck
        while contents.sequence_pages > most and self._stuck() > most and self.evict(on_device=True):
            pass

    def evict(self, count: int = 1, *, on_device: bool = False) -> bool:
        """Evicts so many blocks or states, see `PrefixIndex.evict`. False where none may be evicted."""
        contents, before = self._contents, self._contents.pages
        gone = contents.index.evict(count, on_device=on_device)
        if gone:
            contents.counts.evicted += gone
            contents.log_decision("evict", before - contents.pages)
        return gone > 0

    def give_up(self, pages: int) -> int:
        """Gives back about so many pages of its device, and returns how many, see pressure.py. Does nothing while
        another thread changes the contents. Takes no lock of a paged cache, as the caller may hold another one's."""
        contents = self._contents
        before = contents.device_pages

        def make_room() -> None:
            if not contents.index.sound:  # the paged cache would have to forget its blocks
                return
            with contents.change() as index:
                while (left := pages - before + contents.device_pages) > 0 and self.evict(
                    index.blocks_of(left, contents.sequence_pages), on_device=True
                ):
                    pass

        return before - contents.device_pages if if_free(contents.lock, make_room) else 0

    def _stuck(self) -> int:
        """Pages that the core could not take: small states, pages that are not full, dirty ones without a host page."""
        contents, numbers = self._contents, self._contents.device.snapshot()
        host_pages = numbers["host_budget"] // contents.device.page_size - numbers["host_pages"] + numbers["host_free"]
        dirty = contents.index.states.dirty + sum(each.dirty for each in contents.index.idle)
        fixed = contents.fixed_pages + sum(each.fixed for each in contents.index.idle)
        return fixed + max(0, dirty - (host_pages if contents.device.host_pages else 0))
