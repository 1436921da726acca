"""KV that leaves the device for the peer, and the peer for the host: where it is, what it shows, and who goes first."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import device_choice, devices, install
from ballonet.allocator._native import Device
from ballonet.allocator.config import Config
from ballonet.hooks.device import managers
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.offload.policy.kv_pages import Near, lacking, leaving, mean_seconds
from ballonet.offload.record import link

from .. import models
from ..pool import bytes_that_exist, take_out
from ..threads import elsewhere
from .pressure import Taker, around_appends, hog, press, started
from .test_tiers import BUDGET, HOST, PAGE, Pair, kv_copied

PEER = 4
SETTINGS: dict[str, Any] = {"budget": BUDGET * PAGE, "host_budget": HOST * PAGE, "page_size": PAGE}


@pytest.fixture(params=[{}])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with started(spill=True, peer_budget=PEER * PAGE, **SETTINGS, **request.param) as opened:
        yield opened


def where(pair: Pair) -> str:
    """Where each page is: device, peer or host, by the first letter."""
    return "".join((pair.kv_range.range.place(piece) or "-")[0] for piece in range(pair.kv_range._most))


def settled(pair: Pair) -> None:
    """What is on its way has arrived, and was looked at."""
    devices.require().synchronize()
    pair.tier.client.write_behind(0)


def test_the_peer_is_filled_first_and_the_host_after_it_and_all_is_restored(device: Device) -> None:
    pair = Pair(100)  # 7 full pages
    assert press(device, 6) == 6
    assert where(pair) == "pppphhdd"
    device.trim()
    assert (bytes_that_exist("peer"), bytes_that_exist("host")) == (4 * PAGE, 2 * PAGE)
    assert (kv_copied(device, "d2p"), kv_copied(device)) == (4, 2)
    pair.check()
    pair.tier.extents.look()
    assert (pair.tier.client.displaced, pair.tier.extents.near) == (6, 4)
    assert pair.tier.restore(3, 0) == 3  # those on the host first, as they cost more there, then the newest
    assert where(pair) == "pppddddd"
    assert (kv_copied(device, "h2d"), kv_copied(device, "p2d")) == (2, 1)
    pair.check()
    assert pair.tier.restore(9, 0) == 3
    assert where(pair) == "dddddddd"
    pair.update(1)
    assert press(device, 6) == 6
    assert (kv_copied(device, "d2p"), kv_copied(device)) == (4, 2), "they were clean"
    pair.check()


def test_pages_copied_behind_lie_on_the_peer_while_it_has_room(device: Device) -> None:
    pair = Pair(100)
    pair.tier.client.write_behind(6)
    settled(pair)
    assert [pair.kv_range.pages._extent.backing.pages.place(n) for n in range(7)] == ["peer"] * 4 + ["host"] * 2 + [""]
    assert pair.offers()[:6] == [(n, True) for n in range(6)]
    assert press(device, 6) == 6
    assert where(pair) == "pppphhdd"
    pair.check()


def test_the_coldest_pages_leave_the_peer_and_nobody_can_tell(device: Device) -> None:
    pair = Pair(100)
    assert press(device, 4) == 4
    view, expected = pair.elastic.keys, pair.stock.keys.clone()
    pair.tier.client.demote(2)
    settled(pair)
    assert where(pair) == "hhppdddd"
    assert torch.equal(view, expected)
    pair.check()
    device.reap(wait=True)
    assert device.snapshot()["peer_free"] == 2
    assert kv_copied(device, "p2h") == 2
    assert press(device, 2) == 2
    assert where(pair) == "hhppppdd"
    pair.update(40)
    pair.both(lambda layer: layer.reorder_cache(torch.tensor([1, 0])))
    pair.check()
    del view


@pytest.mark.parametrize("device", [{"link_bandwidth": 2**18}], indirect=True)
def test_demoted_page_leads_to_the_host_once_its_bytes_are_there(device: Device) -> None:
    pair = Pair(100)
    assert press(device, 4) == 4
    pair.tier.client.demote(4)  # takes 60 ms
    pair.tier.client.write_behind(0)
    pair.check()
    assert pair.tier.client.leaving_peer == pair.tier.client.displaced - where(pair).count("h") > 0
    settled(pair)
    assert (where(pair), pair.tier.client.leaving_peer) == ("hhhhdddd", 0)
    pair.check()


@pytest.mark.parametrize("device", [{"link_bandwidth": 2**18}], indirect=True)
def test_demoted_page_written_to_meanwhile_stays_on_the_peer(device: Device) -> None:
    pair = Pair(100)
    assert press(device, 4) == 4
    pair.tier.client.demote(4)
    pair.both(lambda layer: layer.crop(-60))  # into the third page, which leads to the peer
    pair.update(70)
    settled(pair)
    assert where(pair).startswith("hhp")
    pair.check()
    pair.both(lambda layer: layer.crop(-100))  # and into the first
    pair.update(30)
    settled(pair)
    pair.check()
    device.check()


def test_no_page_leaves_the_peer_under_another_threads_forward(device: Device) -> None:
    lease = ForwardLease().open()
    pair = Pair(100)
    assert press(device, 4) == 4

    def other() -> int:
        pair.tier.client.demote(4)
        settled(pair)
        return where(pair).count("h")

    assert elsewhere(other) == 0
    assert pair.tier.client.leaving_peer == 4
    pair.check()
    lease.close()
    assert elsewhere(other) == 4
    pair.check()


def test_a_full_host_keeps_it_on_the_peer(device: Device) -> None:
    pair = Pair(100)
    assert press(device, 4) == 4
    other = hog(device, HOST, "host")
    pair.tier.client.demote(4)
    settled(pair)
    assert where(pair) == "ppppdddd"
    assert press(device, 1) == 0
    other.close()
    device.reap(wait=True)
    pair.tier.client.demote(4)
    settled(pair)
    assert where(pair) == "hhhhdddd"
    pair.check()


def test_the_manager_makes_room_on_the_peer_with_what_was_used_longest_ago(device: Device) -> None:
    manager = managers.of(device)
    pairs = [Pair(60), Pair(60)]
    assert press(device, 4) == 4
    assert device.snapshot()["peer_free"] == 0
    other = hog(device, BUDGET - 14)  # few are free
    for pair in pairs:
        pair.tier.client.used = time.monotonic() - 100 * (2 - pairs.index(pair))
    before = [where(pair).count("p") for pair in pairs]
    manager.client_changed(pairs[0].tier.number)
    for pair in pairs:
        settled(pair)
    device.reap(wait=True)
    after = [where(pair).count("p") for pair in pairs]
    assert sum(before) - sum(after) == 1, "a quarter of four"
    assert kv_copied(device, "p2h") == 1
    coldest = next(n for n, count in enumerate(before) if count)
    assert before[coldest] - after[coldest] == 1
    demotions = [event for event in devices.of().events.since().events if event.source == "demotion"]
    assert [demotion.what for demotion in demotions] == [pairs[coldest].tier.client.name]
    for pair in pairs:
        pair.check()
    other.close()


def test_the_link_of_the_peer_is_measured_as_that_of_the_host_is(device: Device) -> None:
    manager = managers.of(device)
    managers.measure_link(device, manager)
    assert manager.link.peer_bandwidth is not None
    assert manager.link.peer_page_seconds == PAGE / manager.link.peer_bandwidth
    assert link.measure(device, place="peer") is not None
    assert device.snapshot()["peer_free"] == device.snapshot()["peer_pages"]
    manager.link.bandwidth, manager.link.peer_bandwidth = 2.0**20, 2.0**22
    pair = Pair(100)
    assert press(device, 6) == 6
    pair.tier.extents.look()
    assert pair.tier._reading(6) == (4 / 1024 + 2 / 256) / 6
    assert pair.tier.restore(9, 0) == 6
    devices.of().events.hear()
    back = [event for event in devices.of().events.since().events if event.verb == "restore"][-1]
    assert (back.source, back.verb, back.predicted) == ("running KV", "restore", pytest.approx(4 / 1024 + 2 / 256))


def test_how_much_leaves_and_whose() -> None:
    assert [lacking(free, 16) for free in (0, 1, 2, 3)] == [4, 3, 0, 0]
    assert lacking(0, 1) == 1
    assert lacking(0, 0) == 0
    caches = [Near(1, 5, True, 1.0), Near(2, 2, False, 9.0), Near(3, 4, False, 3.0), Near(4, 0, False, 0.0)]
    assert leaving(caches, 0) == {}
    assert leaving(caches, 5) == {3: 4, 2: 1}
    assert leaving(caches, 99) == {3: 4, 2: 2, 1: 5}
    assert mean_seconds(3, 1, 1.0, 5.0) == 2.0
    assert mean_seconds(3, 1, None, 5.0) == mean_seconds(0, 0, 1.0, 5.0) == 5.0
    assert mean_seconds(3, 1, 2.0, None) == 2.0
    assert mean_seconds(1, 1, None, None) is None


@pytest.mark.parametrize(("settings", "label", "budget"), [
    ({"peer": "auto", "peer_budget": 6 * PAGE}, "device 1", 6),
    ({"peer_budget": 6 * PAGE}, "device 1", 6),
    ({"peer": "same"}, "second pool", BUDGET // 4),
    ({"peer": "none", "peer_budget": 6 * PAGE}, "", 0),
    ({}, "", 0),
])  # fmt: skip
def test_peer_is_the_one_asked_for_and_shown(settings: dict[str, Any], label: str, budget: int) -> None:
    with started(**SETTINGS, **settings) as opened:
        shown = ballonet.stats()
        assert (shown.peer, shown.peer_budget, shown.peer_pages) == (label, budget * PAGE, 0)
        assert opened.peer == {"device 1": 1, "second pool": 0, "": None}[label]
        if label:
            pair = Pair(100)
            assert press(opened, 3) == 3
            assert ballonet.stats().peer_pages == 3
            assert where(pair) == "pppddddd"
            pair.check()
            del pair


def test_without_peer_access_it_says_so_and_goes_on() -> None:
    opened = device_choice.open_device(Config(device="cpu", **SETTINGS))
    calls = opened.snapshot()["driver_calls"]["cuDeviceCanAccessPeer"]
    opened.close()
    fault = ("cuDeviceCanAccessPeer", calls + 2)  # the one before is of the probe
    with ExitStack() as until:
        with pytest.warns(RuntimeWarning, match="ballonet: no peer"):
            device = until.enter_context(started(peer="auto", faults=(fault,), **SETTINGS))
        assert ballonet.stats().peer == ""
        pair = Pair(60)
        assert press(device, 2) == 2
        assert where(pair).startswith("hh")
        pair.check()
        del pair, device


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A device under torch whose peer is small."""
    ballonet.install(2**22, page_size=4096, host_budget=2**24, peer_budget=24 * 4096, device="cpu")
    yield devices.require()
    devices.require().check()
    assert bytes_that_exist("peer") <= 24 * 4096
    take_out()


def test_tokens_are_those_of_stock_while_pages_go_all_ways(crowded: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Taker(crowded, 3)
    around_appends(monkeypatch, lambda kv_range: taker.act([kv_range]))
    with install.stock():
        model = models.build("llama")
        expected = models.generate(model, "beam", models.prompts(3, 120), 40)
    with ballonet.manage(model):
        output = models.generate(model, "beam", models.prompts(3, 120), 40)
    assert torch.equal(output.tokens, expected.tokens)
    assert output.agrees(expected)
    assert min(taker.done.values()) > 0, taker.done
    assert taker.done["down"] > 0
    del model


def test_several_threads_generate_while_pages_go_to_the_peer_and_on(crowded: Device) -> None:
    ids = {"input_ids": models.prompts(1, 100)["input_ids"]}
    with install.stock():
        both = [models.build("llama"), models.build("qwen2")]
        expected = [models.generate(model, "greedy", ids, 30) for model in both]
    outputs_of: dict[int, list[models.Output]] = {0: [], 1: []}
    manager, drawn = managers.of(crowded), random.Random(1)
    end = time.monotonic() + 600

    def enough() -> bool:
        copied = crowded.snapshot()["copied"]
        return time.monotonic() > end or min(copied["kv_d2p"], copied["kv_p2h"]) > 0

    def generate(index: int) -> None:
        while len(outputs_of[index]) < 2 or not enough():
            outputs_of[index].append(models.generate(both[index], "greedy", ids, 30))

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(2)]
    with ballonet.manage(both[0]), ballonet.manage(both[1]):
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            manager.reclaim.publish_now()
            crowded.take(crowded.published[:3])
            for _, cache in manager._known.clients.paged:
                cache.demote(drawn.randint(1, 4))
                cache.write_behind(drawn.randint(0, 2))
        for thread in threads:
            thread.join()
    for index, outputs in outputs_of.items():
        assert all(output.agrees(expected[index]) for output in outputs)
    copied = crowded.snapshot()["copied"]
    assert min(copied["kv_d2p"], copied["kv_p2h"]) > 0, copied
