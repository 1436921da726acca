"""Background copies of a KV cache's pages: to the host or the peer, and from the peer to the host.

Note [Before it is copied]
    A draft of the reclaim list (published.py) may have a page as dirty while its backing gets one here. Published then,
    the core would take the backing for one that holds the bytes. So the governor is told between the two: the draft is
    void.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heapreplace
from threading import Lock
from typing import Any

from ...allocator._native import Transfer
from ...allocator.errors import BallonetError, PoolExhausted
from ...allocator.interrupts import if_free
from ..policy.peer import mean_seconds
from ..residency.kv_extent import KVExtent
from ..residency.kv_extents import KVExtents
from ..residency.kv_places import coldest
from .governor_api import GovernorApi
from .kv_offers import KVOffers
from .kv_turns import KVTurns


class KVSaving:
    """Background copies of one cache. Thread-safe. No call waits for the cache's lock, which the caller may hold."""

    def __init__(
        self,
        extents: KVExtents,
        offers: KVOffers,
        turns: KVTurns,
        transfer: Transfer,
        governor: GovernorApi,
        lock: Lock,
        name: str,
    ) -> None:
        """`transfer`: the stream of the copies; `lock`: held while they begin or end; `name`: of the cache in
        events."""
        self._extents = extents
        self._offers = offers
        self._turns = turns
        self._transfer = transfer
        self._governor = governor
        self._lock = lock
        self._name = name
        self._behind = Lock()  # held by the thread that is about to copy what is marked

    def write_behind(self, pages: int) -> None:
        """Starts to copy up to so many full pages to their backings, those first that would be taken first, and notes
        what was copied before. See Note [Before it is copied]. Does nothing where the driver refuses."""
        if (pages or self._extents.busy) and not self._lock.locked():  # perhaps by this very thread
            if_free(self._behind, partial(self._write_behind, pages))

    def notice(self) -> bool:
        """Notes what has been copied, unless copies are being submitted. Returns whether more is clean. DriverError."""
        with self._lock:
            return self._extents.busy and not self._behind.locked() and self._extents.saved()

    def demote(self, pages: int) -> None:
        """Starts to copy up to so many pages from the peer to the host, those first that are not read there; they take
        their places once they have arrived, when `write_behind` is called, or the next iteration begins. Returns at
        once; does nothing where the driver refuses."""
        self._extents.look()
        if not self._lock.locked():  # as in write_behind
            if_free(self._behind, partial(self._demote, pages))

    def demote_one(self, extent: KVExtent, piece: int, stream: int) -> bool:
        """Moves this page from the peer to the host, if it lies there and can go now. DriverError."""
        with self._lock:
            ready, copies = extent.demote([cold for cold in coldest(extent) if cold == piece])
            if not ready:
                return False
            done = self._transfer.copy(copies, after=stream, owner="kv", to="host")
            extent.backing.demoting(ready, done)
            done.wait()
            extent.mover.saving.saved()
            return extent.backing.pages.leads_to(piece) == "host"

    def _write_behind(self, pages: int) -> None:
        with self._lock:
            settled = self._extents.saved()
            chosen = self._dirty(pages)
            for extent, pieces in chosen.items():
                extent.mover.saving.mark(pieces)
        if settled or chosen:
            self._governor.copies_changed()
        with self._lock, suppress(BallonetError, PoolExhausted):
            self._copy_behind(chosen)

    def _copy_behind(self, chosen: dict[KVExtent, list[int]]) -> None:
        ready = {extent: extent.save(pieces) for extent, pieces in chosen.items()}
        copies = [copy for _, its in ready.values() for copy in its]
        if copies:
            stream = self._turns.stream
            for extent in ready:
                extent.mover.arrive(stream)  # some may have been restored just now
            done = self._transfer.copy(copies, after=stream, owner="kv", to="host")
            self._decided("write-behind", sum(len(mapped) for mapped, _ in ready.values()), self._sending(ready))
            for extent, (mapped, _) in ready.items():
                extent.mover.saving.submitted(mapped, done)

    def _demote(self, pages: int) -> None:
        with self._lock, suppress(BallonetError, PoolExhausted):
            self._extents.saved()
            ready: dict[KVExtent, list[int]] = {}
            copies: list[tuple[int, int, int]] = []
            for extent in self._extents.all():
                ready[extent], more = extent.demote(coldest(extent)[: max(0, pages - len(copies))])
                copies += more
            if copies:
                done = self._transfer.copy(copies, after=self._turns.stream, owner="kv", to="host")
                seconds = self._governor.link.page_seconds
                self._decided("demotion", len(copies), None if seconds is None else len(copies) * seconds)
                for extent, mapped in ready.items():
                    extent.backing.demoting(mapped, done)

    def _decided(self, lever: str, pages: int, predicted: float | None) -> None:
        self._governor.events.decided(lever, "pull", pages, what=self._name, predicted=predicted)

    def _sending(self, ready: Mapping[KVExtent, tuple[Sequence[int], Sequence[Any]]]) -> float | None:
        """Seconds that copies of these pages take; None where a link they need was not measured."""
        host, peer = self._governor.link.page_seconds, self._governor.link.peer_page_seconds
        places = Counter(extent.backing.pages.place(piece) for extent, (pieces, _) in ready.items() for piece in pieces)
        mean = mean_seconds(places["peer"], places["host"], peer, host)
        return None if mean is None else places.total() * mean

    def _dirty(self, pages: int) -> dict[KVExtent, list[int]]:
        """Returns so many full pages that are not clean, in the order in which they would be taken."""
        chosen: dict[KVExtent, list[int]] = {}
        full = self._offers.full() if pages > 0 else []
        for of_extents in full[1::2]:
            extents = {number: extent for number, _ in of_extents if (extent := self._extents.get(number)) is not None}
            runs = [
                (first, number, end)
                for number, spans in of_extents
                if number in extents and not extents[number].restless
                for first, end in spans
            ]
            heapify(runs)
            while runs and pages > 0:
                piece, number, end = runs[0]
                chosen.setdefault(extents[number], []).append(piece)
                pages -= 1
                if piece + 1 < end:
                    heapreplace(runs, (piece + 1, number, end))
                else:
                    heappop(runs)
        return chosen
