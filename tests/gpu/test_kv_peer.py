"""KV on a second place of device memory: it is read there, goes on to the host and comes home, while layers compute."""

from __future__ import annotations

import pytest
import torch

from ballonet.offload.governor import kv_read_plan
from ballonet.offload.governor.governor import Governor
from ballonet.offload.policy.layer_stream import Choice, Way

from .hold import held_copies
from .scene import Lane, Place, scene
from .test_kv_stream import AWAY, LAYERS, Cache

IN_PLACE = Choice(Way.ZERO_COPY, AWAY, 0, 0, 0.0, 0.0, 0.0)


@scene(needs_host=True, pages=256, host_pages=64, peer="auto", peer_pages=12)
def test_kv_goes_to_the_peer_and_on_to_the_host_and_comes_home(place: Place) -> None:
    """The older pages of each layer leave for the peer, those that find no room there for the host; then some go on to
    the host, once copies have passed that run beside attention; then all come home."""
    shown = place.device.snapshot()
    assert shown["peer"], place.device.peer_refused
    room = shown["peer_budget"] // place.page
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_read_plan, "choose", lambda *args, **kw: IN_PLACE)
        patch.setattr(Governor, "restorable_pages", lambda *args: 0)
        cache, lanes = Cache(place), [place.lane() for _ in range(2)]
        before: Lane | None = None
        for _ in range(3):
            for home in cache.homes:
                assert sum(home.pages.displace(piece) for piece in range(AWAY)) == AWAY
            near = cache.tier.client.near
            with held_copies(place, "host") as hold:
                cache.tier.client.demote(room // 4)
                cache.tier.client.write_behind(0)
                assert hold.released or cache.tier.client.leaving == min(near, room // 4), (
                    "it did not wait for the copies"
                )
            for lane in lanes:
                for number in range(LAYERS):
                    lane.follow(before)
                    with lane():
                        cache.update(number)
                    before = lane
            assert before is not None
            before.lead()
            place.device.synchronize()
            cache.tier.client.write_behind(0)
            assert cache.tier.client.leaving == 0
            assert cache.tier.client.near == near - min(near, room // 4)
            assert cache.tier.restore(AWAY * LAYERS, cache.homes[0].pages.stream) == AWAY * LAYERS
        assert near < room <= AWAY * LAYERS
        copied = place.device.snapshot()["copied"]
        assert min(copied["kv_d2p"], copied["kv_p2d"], copied["kv_p2h"], copied["kv_d2h"]) > 0
        cache.finish()
