"""What `ballonet.stats()` returns."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.config import Config
from ballonet.allocator.errors import ConfigError, NotInstalled
from ballonet.allocator.events import Count
from ballonet.allocator.stats import DriverSeconds, Stats

SNAPSHOT: dict[str, Any] = {
    "page_size": 4096,
    "budget": 40960,
    "created": 6,
    "pages": {"free": 1, "weights": 2, "activations": 0, "kv": 3, "pending_free": 0},
    "host_pages": 4,
    "peer": "second pool",
    "peer_budget": 81920,
    "peer_pages": 16,
    "copied": {
        "weights_h2d": 5,
        "weights_d2h": 6,
        "kv_h2d": 7,
        "kv_d2h": 8,
        "kv_p2d": 17,
        "kv_d2p": 18,
        "kv_p2h": 19,
    },
    "driver_calls": {"cuMemMap": 9},
    "faults": 1,
    "reclaimed": 10,
    "spilled": 12,
    "driver_ns": {"callers": 1_500_000_000, "background": 2_000_000},
    "heap": {"live": 11},
}
EVENTS = {
    "idle activations": {"reclaim": Count(2, 13, 0.5), "restore": Count(1, 14, 0.0)},
    "budget": {"set": Count(1, 15, 0.25)},
}


def test_counts_are_attributes_and_items() -> None:
    stats = Stats.of(SNAPSHOT, EVENTS)
    assert (stats.page_size, stats.budget, stats.host_pages, stats.faults) == (4096, 40960, 4, 1)
    assert (stats.reclaimed, stats.spilled) == (10, 12)
    assert (stats.peer, stats.peer_budget, stats.peer_pages, stats.copied.kv_p2h) == ("second pool", 81920, 16, 19)
    assert stats.driver_seconds == DriverSeconds(callers=1.5, background=0.002)
    assert stats.events["idle activations"]["reclaim"].pages == 13
    assert {source: dict(verbs) for source, verbs in stats.events.items()} == EVENTS
    assert stats.pages.kv == stats.pages["kv"] == 3
    assert stats.copied.kv_d2h == stats.copied["kv_d2h"] == 8
    assert stats.driver_calls["cuMemMap"] == 9
    assert dict(stats.pages) == SNAPSHOT["pages"] == stats.pages
    assert sum(stats.pages.values()) == 6
    with pytest.raises(KeyError):
        stats.pages["keys"]


def test_statistics_cannot_be_changed() -> None:
    stats = Stats.of(SNAPSHOT, EVENTS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.budget = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.pages.kv = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        stats.driver_calls["cuMemMap"] = 1  # type: ignore[index]
    with pytest.raises(TypeError):
        stats.events["idle activations"]["reclaim"] = Count(0, 0, 0.0)  # type: ignore[index]
    assert repr(stats.driver_calls) == "Calls({'cuMemMap': 9})"


def test_to_dict_is_plain_and_a_copy() -> None:
    stats = Stats.of(SNAPSHOT, EVENTS)
    plain = stats.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == {field.name for field in dataclasses.fields(Stats)}
    assert plain["driver_seconds"] == {"callers": 1.5, "background": 0.002}
    assert plain["events"]["budget"] == {"set": {"events": 1, "pages": 15, "seconds": 0.25}}
    plain["driver_calls"]["cuMemMap"] = 0
    assert stats.driver_calls["cuMemMap"] == 9
    assert copy.deepcopy(stats) == stats == pickle.loads(pickle.dumps(stats))


def test_statistics_print_as_a_few_lines() -> None:
    title, *lines = str(Stats.of(SNAPSHOT, EVENTS)).splitlines()
    assert title.startswith("ballonet: ")
    assert "of a budget of " in title
    assert max(map(len, lines)) < 80
    assert [line.split()[0] for line in lines[:5]] == ["free", "weights", "activations", "kv", "pending"]
    assert "driver_calls" not in str(Stats.of(SNAPSHOT, EVENTS))
    assert "driver_calls" in repr(Stats.of(SNAPSHOT, EVENTS))


def test_before_install_and_after_a_failed_one_there_are_none() -> None:
    assert devices.current() is None, "this test needs a process without ballonet"
    with pytest.raises(NotInstalled, match=r"ballonet\.install\(\)"):
        ballonet.stats()
    with pytest.raises(ConfigError):
        devices.start(Config(device="cpu", page_size=4097))
    with pytest.raises(ballonet.BallonetError):
        ballonet.stats()


def test_a_running_device_is_described() -> None:
    devices.start(Config(device="cpu", page_size=65536, budget=2**20 + 5))
    try:
        stats = ballonet.stats()
        assert (stats.page_size, stats.budget) == (65536, 2**20)
        assert all(isinstance(value, int) for value in [*stats.pages.values(), *stats.driver_calls.values()])
        assert (stats.spilled, dict(stats.events)) == (0, {})
        devices.of().events.decided("idle activations", "reclaim", 2)
        devices.require().set_budget(2**19)
        events = ballonet.stats().events
        assert events["idle activations"]["reclaim"] == Count(1, 2, 0.0)
        assert (events["budget"]["set"].events, events["budget"]["set"].pages) == (1, 8), "what the core did by itself"
    finally:
        devices.stop()
