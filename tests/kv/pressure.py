"""Somebody who takes pages from caches in use, and leaves the pages that are free full of what must not be read."""

from __future__ import annotations

import ctypes
import gc
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from ballonet.allocator import devices
from ballonet.allocator._native import Device, Range
from ballonet.allocator.config import Config
from ballonet.allocator.errors import PoolExhausted
from ballonet.hooks.device import managers
from ballonet.hooks.kv import pages as kv_pages
from ballonet.hooks.kv import ranges as kv_range
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import KVRange
from ballonet.offload.manager import kv_client, kv_tier
from ballonet.offload.manager.kv_tier import KVTier
from ballonet.offload.policy.kv_pages import Choice, Way
from ballonet.offload.residency import kv_extent, mover
from ballonet.testing.movable import MovableKV

# the modules between whose lines Ctrl-C may come while pages of a cache move
STEPS = (kv_pages, kv_range, kv_tier, kv_client, kv_extent, mover)
POISON = 0xFF  # of what nobody may read: not a number, in every type


@contextmanager
def started(**settings: Any) -> Iterator[Device]:
    """A device, of which no cache holds anything any more in the end."""
    opened = devices.start(Config(device="cpu", **settings)).device
    yield opened
    gc.collect()
    opened.reap(wait=True)
    opened.check()
    numbers = opened.snapshot()
    assert numbers["pages"]["kv"] == 0
    assert numbers["host_pages"] == numbers["host_free"]
    assert numbers["peer_pages"] == numbers["peer_free"]
    del opened
    devices.stop()


def kv_ranges(layers: Iterable[Any]) -> list[KVRange]:
    """The ranges of layers that are in use."""
    by_id = {id(layer._range): layer._range for layer in layers if isinstance(layer, ElasticLayer) and layer.elastic}
    return [kv_range for kv_range in by_id.values() if kv_range is not None]


def tiers(ranges: Iterable[KVRange]) -> list[KVTier]:
    """What the manager knows of them."""
    by_id = {id(kv_range.pages._tier): kv_range.pages._tier for kv_range in ranges}
    return [tier for tier in by_id.values() if tier is not None]


def away(ranges: Iterable[KVRange]) -> int:
    """Pieces that lead to the host, as the core says."""
    return sum(
        kv_range.range.leads_to(piece) in ("alias", "host") for kv_range in ranges for piece in range(kv_range._most)
    )


def press(device: Device, pages: int) -> int:
    """Takes so many pages from whoever offers them, if there are as many; fills them, and gives them back. How many
    were taken."""
    managers.of(device).reclaim.publish_now()
    before: int = device.snapshot()["reclaimed"]
    poison(device, pages)
    after: int = device.snapshot()["reclaimed"]
    return after - before


def hog(device: Device, pages: int, place: str = "device") -> Range:
    """Takes so many pages, which nobody else has until it is closed."""
    made = device.reserve(pages * device.page_size, "weights", device.group())
    {"device": made.map, "host": made.map_host}[place](0, pages)
    return made


def poison(device: Device, more: int = 0) -> None:
    """Fills all free pages, of the device, the peer and the host, and `more` of the device that are not free."""
    device.reap(wait=True)
    numbers = device.snapshot()
    free = device.available + device.idle + more
    host = numbers["host_budget"] // device.page_size - numbers["host_pages"] + numbers["host_free"]
    peer = numbers["peer_budget"] // device.page_size - numbers["peer_pages"] + numbers["peer_free"]
    for count, place in ((free, "device"), (min(host, 64), "host"), (peer, "peer")):
        if count <= 0:
            continue
        other = device.reserve(count * device.page_size, "weights", device.group())
        with suppress(PoolExhausted):
            {"device": other.map, "host": other.map_host, "peer": other.map_peer}[place](0, count)
            ctypes.memset(other.address, POISON, count * device.page_size)
        other.close()
    device.reap(wait=True)


def around_appends(patch: pytest.MonkeyPatch, act: Callable[[KVRange], object]) -> None:
    """From now on `act(range)` is called before and after each append to a range, whichever way that goes."""
    append, append_next = KVRange.append, KVRange.append_next

    def appended(kv_range: KVRange, *args: Any) -> Any:
        act(kv_range)
        pair = append(kv_range, *args)
        act(kv_range)
        return pair

    def appended_next(kv_range: KVRange, *args: Any) -> Any:
        act(kv_range)
        pair = append_next(kv_range, *args)
        if pair is not None:
            act(kv_range)
        return pair

    patch.setattr(KVRange, "append", appended)
    patch.setattr(KVRange, "append_next", appended_next)


def two_thirds(way: Any, twins: Sequence[Any], rows: int, link: float) -> Choice:
    """For `KVReadPlan._choose`: so much of each layer flies, whatever room there is, and whatever that costs."""
    if len(twins) < 2:
        return Choice(Way.ZERO_COPY, 0, 0, 0, 0.0, 0.0)
    return Choice(Way.STREAMED, max(1, max(twin.held for twin in twins) * 2 // 3), 2, 0, 0.0, 0.0)


class Taker:
    """Does something to the pages of ranges in use, drawn from a generator of its own."""

    def __init__(self, device: Device, seed: int) -> None:
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()  # pages taken, and so on
        self._device = device

    def act(self, ranges: Iterable[KVRange]) -> None:
        """Takes pages, copies some behind, restores some, or does nothing."""
        ranges, pages = list(ranges), self.random.randint(1, 9)
        ways = ["take", "poison", "behind", "behind", "back", "away", "restore", "nothing"]
        choice = self.random.choice(ways if self._device.peer is None else [*ways, "down", "down"])
        if choice == "take":
            self.done["taken"] += press(self._device, pages)
        elif choice == "poison":
            poison(self._device)
        for tier in tiers(ranges):
            if choice == "behind":
                before = self._copied()
                tier.client.write_behind(pages)
                self.done["behind"] += self._copied() - before
            elif choice == "down":
                tier.client.demote(pages)
                self._device.synchronize()
                before = tier.client.leaving_peer
                tier.client.write_behind(0)
                self.done["down"] += before - tier.client.leaving_peer
            elif choice == "back":
                self.done["back"] += tier.restore(pages, 0)
        for range_ in ranges:
            pieces = [
                piece
                for piece in range(range_._most)
                if (range_.range.leads_to(piece) == "alias") == (choice == "restore")
            ]
            if choice in ("away", "restore") and pieces:
                piece = self.random.choice(pieces)
                movable = MovableKV(range_.pages)
                self.done[choice] += movable.displace(piece) if choice == "away" else movable.bring_back(piece)

    def _copied(self) -> int:
        copied = self._device.snapshot()["copied"]
        nbytes: int = copied["kv_d2h"] + copied["kv_d2p"]
        return nbytes // self._device.page_size
