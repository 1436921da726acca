"""Who waits for whom where a KV cache is used: copies behind for who writes, pages for streams that only append, other
threads for who leases it, the memory of a graph for its replays."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import closing

import pytest
import torch

from ballonet.allocator._native import Range
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.testing.movable import MovableKV

from .hold import Hold, held_copies, meanwhile
from .scene import Captured, Place, scene
from .test_kv_stream import AWAY, LAYERS, LEFT, PAGES, Cache, decided

LONG = 60.0  # seconds, after which a thread hangs


@scene(needs_host=True, pages=256, host_pages=64)
def test_a_copy_behind_waits_for_who_writes(place: Place) -> None:
    """Tokens are on their way when their pages are full, and are copied behind; later nothing more is copied. Pages are
    dirty for as long as copies have not begun."""
    lane = place.lane()
    lane.follow()
    with torch.no_grad(), decided():
        with lane():
            cache = Cache(place)
            place.sleep()
            for number in range(LAYERS):
                cache.update(number, LEFT)
            with held_copies(place, "host") as hold:
                cache.tier.client.write_behind(LAYERS * PAGES)
                cache.tier.client.write_behind(0)
                dirty = sum(kv_range.pages.dirty for kv_range in cache.kv_ranges)
                assert hold.released or dirty == LAYERS * PAGES, "a page is said to be clean before it is copied"
        lane.lead()
        place.synchronize()
        place.device.synchronize()  # on the stand-in copies are late as well
        cache.tier.client.write_behind(0)
        assert not any(kv_range.pages.dirty for kv_range in cache.kv_ranges)
        copied = place.device.snapshot()["copied"]["kv_d2h"]
        assert copied == LAYERS * PAGES * place.page
        for kv_range in cache.kv_ranges:
            assert sum(MovableKV(kv_range.pages).displace(piece) for piece in range(PAGES)) == PAGES
        assert place.device.snapshot()["copied"]["kv_d2h"] == copied
        cache.finish()


@scene(needs_host=True, pages=256, host_pages=64)
def test_second_write_waits_for_the_copy(place: Place) -> None:
    """Full pages are being copied behind when tokens on them are forgotten, and others come there."""
    lane = place.lane()
    with torch.no_grad(), decided():
        cache = Cache(place)
        layer, new = cache.pairs[0][0], cache.drawn(LEFT)
        lane.follow()
        with lane():
            cache.read(0, new)  # the last page is full
            cache.read(0, new)
            place.synchronize()
            with held_copies(place, "host") as hold:
                cache.tier.client.write_behind(LAYERS * PAGES)
                layer.crop(-2 * LEFT)
                cache.read(0, new)
                hold.keeps(lane.done)
            layer.crop(-LEFT)
        lane.lead()
        cache.finish()


def keeps(place: Place, pages: Range) -> None:
    """Whoever looks, this thread or the one in the background."""
    for _ in range(20 if place.cuda else 0):
        place.device.reap()
        assert pages.leads_to(0) == "pending_free", "a page was given back while it was written"
        time.sleep(0.01)


@scene(needs_host=True, pages=256, host_pages=64)
def test_pages_wait_for_a_stream_that_only_appends(place: Place) -> None:
    """Appends and allocates nothing: the pages of a cache that is dropped meanwhile leave after what it was given."""
    layer = ElasticLayer(CacheRanges())
    with torch.no_grad():
        new = torch.randn(2, 8, 4 * place.page // (2 * 2 * 8 * 128 * 4), 128, device=place.kind)
        seen = torch.empty_like(new)
        place.synchronize()
        with closing(Hold(place, place.lane(known=False))) as hold:
            with hold.lane():
                seen.copy_(layer.update(new, new)[0])
            assert layer.kv_range is not None
            pages = layer.kv_range.range
            layer.reset()
            del layer
            keeps(place, pages)
    place.synchronize()
    assert torch.equal(seen, new)


@scene(needs_host=True, pages=256, host_pages=64)
def test_pages_wait_for_a_later_layer_of_a_forward(place: Place) -> None:
    """As above, of a layer that is not the first one of its forward, and runs on a stream of its own."""
    ranges = CacheRanges()
    layers = [ElasticLayer(ranges) for _ in range(2)]
    with torch.no_grad():
        one = torch.randn(2, 8, 1, 128, device=place.kind)
        seen = torch.empty(2, 8, 2, 128, device=place.kind)
        lease = ForwardLease().open()
        for layer in layers:
            layer.update(one, one)
        lease.close()
        place.synchronize()
        with closing(Hold(place, place.lane(known=False))) as hold:
            lease = ForwardLease().open()
            layers[0].update(one, one)
            assert ranges.tier is not None
            assert ranges.tier.turns.forward == lease.number, "there is something to do before a layer appends"
            with hold.lane():
                seen.copy_(layers[1].update(one, one)[0])
            lease.close()
            assert layers[1].kv_range is not None
            pages = layers[1].kv_range.range
            layers.pop().reset()
            keeps(place, pages)
    place.synchronize()
    assert torch.equal(seen, one.expand_as(seen))


@scene(needs_host=True, pages=256, host_pages=64)
def test_a_replay_keeps_its_memory(place: Place) -> None:
    """A graph is replayed on a stream that nothing else has used, and dropped before that is done."""
    x, seen = (torch.zeros(place.page // 2, device=place.kind) for _ in range(2))

    def work() -> tuple[torch.Tensor, ...]:
        y = x
        for _ in range(8):
            y = y + 1
        seen.copy_(y)
        return (y,)

    captured = Captured(place, work)
    seen.zero_()
    place.synchronize()
    with place.lane(known=False)():
        for _ in range(4):
            place.sleep()
        captured.launch()
    del captured
    place.device.trim()
    place.synchronize()
    assert seen.eq(8).all().item()


@scene(needs_host=True, pages=256, host_pages=64)
@pytest.mark.parametrize("forwards", [True, False])
def test_a_lease_keeps_pages_where_they_are(place: Place, forwards: bool) -> None:
    """While one thread uses a cache, in forwards or by itself, another one moves its pages whenever it may."""
    with torch.no_grad(), decided():
        cache, moved, steps = Cache(place), threading.Event(), itertools.count()

        def move() -> None:
            step = next(steps)
            if cache.kv_ranges[step % LAYERS].range.move(step % AWAY, "device"):
                moved.set()

        with meanwhile(move):
            for _ in range(12 if place.cuda else 3):
                lease = ForwardLease()
                if forwards:
                    lease.open()
                for number in range(LAYERS):
                    cache.update(number)
                moved.clear()
                lease.close()
                if forwards:
                    assert moved.wait(LONG), "nothing moves between two forwards"
        cache.finish()
