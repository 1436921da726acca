"""A KV cache as a client of the governor (client.py): what it has, what of it may be taken, and what it is worth."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any

from ...allocator._native import Device, Group, Range, Transfer
from ...allocator.errors import BallonetError
from ..policy.reclaim_order import Rung
from ..residency.kv_extents import KVExtents
from ..residency.kv_places import coldest
from .client import Offer, PageClient
from .governor_api import GovernorApi
from .kv_offers import KVOffers
from .kv_read_plan import KVReadPlan, Streamed
from .kv_saving import KVSaving
from .kv_turns import KVTurns


class KVClient(PageClient):
    """The `PageClient` of one KV cache, which KVTier holds."""

    def __init__(
        self,
        device: Device,
        group: Group,
        governor: GovernorApi,
        extents: KVExtents,
        turns: KVTurns,
        transfer: Transfer,
        lock: Lock,
    ) -> None:
        """`group`: of all its ranges; `transfer`: the stream of its copies; `lock`: of its states."""
        self.name = "KV cache"
        self.used = governor.clock()  # when tokens were appended last
        self.goal = 0  # pages that it is to have in this iteration
        self.grows_by = 1  # ranges that it has, or will have
        self.way = KVReadPlan(device, group, transfer, governor.marks, governor.clock, governor.tuning.kv_reads)
        self.takable = KVOffers(extents, turns, self.way)
        self.saving = KVSaving(extents, self.takable, turns, transfer, governor, lock, self.name)
        self._group = group
        self._extents = extents
        self._only_cached = False

    @property
    def running(self) -> bool:
        """Does any thread lease it?"""
        return self._group.leases > 0

    @property
    def displaced(self) -> int:
        """Pages that lie on the peer or the host and would be on the device if there were room, as far as known."""
        return self._extents.away

    @property
    def pages(self) -> int:
        """Pages under its tokens, wherever they are, and those that it is about to request."""
        return max(self.goal, self._extents.pieces)

    @property
    def device_pages(self) -> int:
        """Device pages that it has."""
        self._extents.look()
        return self._extents.pieces - self._extents.away

    @property
    def ranges(self) -> list[tuple[str, Range]]:
        """The ranges of its layers, with what lies in each."""
        return [(extent.contents, extent.range) for extent in self._extents.all()]

    @property
    def displaced_on_peer(self) -> int:
        """The pages of `displaced` that lie on the peer."""
        return self._extents.near

    @property
    def peer_pages(self) -> int:
        """Pages of the peer that could go to the host."""
        self._extents.look()
        return sum(len(coldest(extent)) for extent in self._extents.all())

    @property
    def leaving_peer(self) -> int:
        """The pages that are on their way there."""
        return sum(len(extent.backing.leaving) for extent in self._extents.all())

    @property
    def only_cached(self) -> bool:
        """Is it only there in case that a prompt begins with its tokens? Then it has no slots. Set while no other
        thread uses it."""
        return self._only_cached

    @only_cached.setter
    def only_cached(self, now: bool) -> None:
        self._only_cached, self.goal = now, 0
        if now:
            with suppress(BallonetError):  # where they cannot go back now `give_slots` gives them back later
                self.way.give()

    @property
    def streamed(self) -> Streamed:
        """How what is away is read."""
        return self.way.status(self.displaced)

    def offers(self) -> Sequence[Offer]:
        """Returns what may be taken, in this order. Clean pages that are only cached cost nothing to give."""
        offers = self.takable.all()
        if not self._only_cached:
            return offers
        return [replace(offer, idle=Rung.PREFIX) if offer.clean else offer for offer in offers]

    def entry(self, index: int) -> tuple[Group, list[Any]] | None:
        """(group, parts) of an offer for `Device.publish`; None where there is no such offer any more."""
        parts = self.takable.parts(index)
        return (self._group, parts) if parts else None

    def give_slots(self) -> None:
        """Slots go back, unless somebody leases the cache now. The governor says when: a forward holds no lease on its
        cache before its first layer, and none between two iterations."""
        self.way.give_if_unused()

    def write_behind(self, pages: int) -> None:
        """As `KVSaving.write_behind`."""
        self.saving.write_behind(pages)

    def demote(self, pages: int) -> None:
        """As `KVSaving.demote`."""
        self.saving.demote(pages)
