"""What `ballonet.stats()` returns."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest

import ballonet
from ballonet.allocator import runtime
from ballonet.allocator.config import Config
from ballonet.allocator.errors import ConfigError, NotInstalled
from ballonet.allocator.stats import Stats

SNAPSHOT: dict[str, Any] = {
    "page_size": 4096,
    "budget": 40960,
    "created": 6,
    "pages": {"free": 1, "weights": 2, "activations": 0, "kv": 3, "retiring": 0},
    "host_pages": 4,
    "copied": {"weights_h2d": 5, "weights_d2h": 6, "kv_h2d": 7, "kv_d2h": 8},
    "driver_calls": {"cuMemMap": 9},
    "faults": 1,
    "reclaimed": 10,
    "heap": {"live": 11},
}


def test_counts_are_attributes_and_items() -> None:
    stats = Stats.of(SNAPSHOT)
    assert (stats.page_size, stats.budget, stats.host_pages, stats.faults) == (4096, 40960, 4, 1)
    assert stats.reclaimed == 10
    assert stats.pages.kv == stats.pages["kv"] == 3
    assert stats.copied.kv_d2h == stats.copied["kv_d2h"] == 8
    assert stats.driver_calls["cuMemMap"] == 9
    assert dict(stats.pages) == SNAPSHOT["pages"] == stats.pages
    assert sum(stats.pages.values()) == 6
    with pytest.raises(KeyError):
        stats.pages["keys"]


def test_nothing_of_it_can_be_changed() -> None:
    stats = Stats.of(SNAPSHOT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.budget = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.pages.kv = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        stats.driver_calls["cuMemMap"] = 1  # type: ignore[index]


def test_to_dict_is_plain_and_a_copy() -> None:
    stats = Stats.of(SNAPSHOT)
    plain = stats.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == {"page_size", "budget", "pages", "host_pages", "copied", "driver_calls", "faults", "reclaimed"}
    plain["driver_calls"]["cuMemMap"] = 0
    assert stats.driver_calls["cuMemMap"] == 9
    assert copy.deepcopy(stats) == stats


def test_before_install_and_after_a_failed_one_there_are_none() -> None:
    assert runtime.current() is None, "this test needs a process without ballonet"
    with pytest.raises(NotInstalled, match=r"ballonet\.install\(\)"):
        ballonet.stats()
    with pytest.raises(ConfigError):
        runtime.start(Config(device="cpu", page_size=4097))
    with pytest.raises(ballonet.BallonetError):
        ballonet.stats()


def test_a_running_device_is_described() -> None:
    runtime.start(Config(device="cpu", page_size=65536, budget=2**20 + 5))
    try:
        stats = ballonet.stats()
        assert (stats.page_size, stats.budget) == (65536, 2**20)
        assert all(isinstance(value, int) for value in [*stats.pages.values(), *stats.driver_calls.values()])
    finally:
        runtime.stop()
