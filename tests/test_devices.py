"""Two runtimes in one process, each of a device of the stand-in: neither sees the other's pages, models, settings."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ballonet.allocator import control, devices, install, looks
from ballonet.allocator.config import Config
from ballonet.allocator.devices import Runtime
from ballonet.allocator.errors import InstallError, NotInstalled
from ballonet.hooks.device import managers
from ballonet.hooks.forward.lease import GroupLease
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.hooks.manage import managed
from ballonet.hooks.managed import Managed
from ballonet.hooks.options import ManageOptions
from ballonet.testing.movable import MovableKV

from . import models
from .tuned import Clock, Tuned

TOKENS = 12
FIRST = Config(device="cpu", budget=2**23, page_size=4096, host_budget=2**22, reserve=5.0)
SECOND = Config(device="cpu", budget=2**24, page_size=8192, host_budget=2**22, reserve=7.0)


@pytest.fixture
def two(tuned: Tuned) -> Iterator[tuple[Runtime, Runtime]]:
    tuned(weights={"large": 2**11})  # so that tiny layers have ranges
    started = devices.start(FIRST), devices.start(SECOND, number=1)
    yield started
    gc.collect()
    for runtime in started:
        runtime.device.check()
        devices.stop(runtime.number)
    assert devices.current() is None


def manage_on(model: Any, on: Runtime, **options: Any) -> Managed:
    return managed(model, ManageOptions(**options), on=on)


def pages(of: Runtime, owner: str) -> int:
    count: int = of.device.snapshot()["pages"][owner]
    return count


def say(model: Any) -> Any:
    """What it says, and the cache that it said it with."""
    ids = torch.arange(40)[None] + 3
    return model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=TOKENS,
        max_new_tokens=TOKENS,
        return_dict_in_generate=True,
    )


def test_each_device_has_one_runtime(two: tuple[Runtime, Runtime]) -> None:
    first, second = two
    assert devices.every() == two
    assert (devices.of(0), devices.of(1), devices.of()) == (first, second, first)
    assert [devices.holding(runtime.device) for runtime in two] == [*two]
    with pytest.raises(InstallError, match="already"):
        devices.start(SECOND, number=1)
    assert devices.current(2) is None
    with pytest.raises(NotInstalled):
        devices.of(2)


def test_settings_managers_and_events_are_of_one_runtime(two: tuple[Runtime, Runtime]) -> None:
    first, second = two
    mine, theirs = (managers.of(runtime.device) for runtime in two)
    assert mine is not theirs
    assert (managers.of(first.device), managers.of(second.device)) == (mine, theirs)
    assert [runtime.settings.reserve for runtime in two] == [5.0, 7.0]
    assert [runtime.device.page_size for runtime in two] == [4096, 8192]
    assert (mine.events, theirs.events) == (first.events, second.events)
    second.events.decided("lend", "reclaim", 3)
    assert first.events.counts() == {}
    assert second.events.counts()["lend"]["reclaim"].pages == 3


def test_a_runtime_is_composed_without_changing_the_other(two: tuple[Runtime, Runtime]) -> None:
    first, second = (runtime.device for runtime in two)
    before = managers.composed_with()
    kept, replaced = managers.of(first), managers.of(second)
    clock = Clock(7.0)
    assert managers.compose_with(before._replace(clock=clock), second) == before
    assert managers.of(first) is kept
    assert managers.of(second) is not replaced
    assert [managers.of(device).clock is clock for device in (first, second)] == [False, True]
    assert [managers.composed_with(device).clock is clock for device in (None, first, second)] == [False, False, True]


def test_models_and_caches_take_pages_of_their_own_runtime(two: tuple[Runtime, Runtime]) -> None:
    first, second = two
    built = [models.build("llama"), models.build("gpt2")]
    expected = [say(model).sequences for model in built]
    with manage_on(built[0], first), manage_on(built[1], second):
        weights = [pages(runtime, "weights") for runtime in two]
        assert min(weights) > 0
        names = [[seat.name for seat in managers.of(runtime.device)._known.clients.models] for runtime in two]
        assert names == [[type(built[0]).__name__], [type(built[1]).__name__]]
        kept = say(built[1])
        assert torch.equal(kept.sequences, expected[1])
        assert pages(first, "kv") == 0 < pages(second, "kv")
        also = say(built[0])
        assert torch.equal(also.sequences, expected[0])
        assert pages(first, "kv") > 0
        assert [pages(runtime, "weights") for runtime in two] == weights
        assert [len(managers.of(runtime.device)._known.clients.paged) for runtime in two] == [1, 1]
        said = [looks.look(number=runtime.number) for runtime in two]
        assert [[model["name"] for model in look["models"]] for look in said] == names
        kv_range = kept.past_key_values.layers[0].kv_range
        with GroupLease(kv_range.group):
            assert MovableKV(kv_range.pages).displace(0)
        assert [looks.look(number=runtime.number)["kv"]["displaced"] for runtime in two] == [0, 1]
        del kept, also, kv_range
    for runtime in two:
        gc.collect()
        runtime.device.reap(wait=True)
        assert (pages(runtime, "weights"), pages(runtime, "kv")) == (0, 0)


def test_shortage_takes_from_its_own_runtime(two: tuple[Runtime, Runtime]) -> None:
    first, second = two
    model = models.build("llama")
    expected = say(model).sequences
    other = models.build("llama")
    with manage_on(model, first) as mine, manage_on(other, second) as theirs:
        used = sum(pages(second, owner) for owner in ("weights", "kv", "activations"))
        second.device.set_budget((used - 2) * second.device.page_size, 0)
        assert theirs.report().streamed
        assert not mine.report().streamed
        assert first.device.budget == FIRST.budget
        assert torch.equal(say(other).sequences, expected)
        assert torch.equal(say(model).sequences, expected)
        assert not first.events.counts()
        gc.collect()


def test_a_runtime_ends_and_the_other_goes_on(tuned: Tuned) -> None:
    first, second = devices.start(FIRST), devices.start(SECOND, number=1)
    device = first.device
    devices.stop()
    assert devices.every() == (second,)
    assert devices.current() is second
    with pytest.raises(NotInstalled):
        devices.holding(device)
    again = devices.start(FIRST)
    assert again is not first
    assert managers.of(again.device) is not managers.of(second.device)
    devices.stop(1)
    devices.stop(0)
    assert devices.every() == ()
    devices.stop()  # of nothing
    with pytest.raises(NotInstalled):
        devices.require()


def test_a_cache_outlives_the_runtime_that_it_was_made_for(two: tuple[Runtime, Runtime]) -> None:
    """Once that has ended it gets pages of the one that is there, as a cache that was made for none."""
    first, second = two
    third = devices.start(SECOND, number=2)
    ranges = CacheRanges(device=third.device)
    place = torch.device("cpu")
    assert ranges.device_at(place) is third.device
    assert CacheRanges().device_at(place) is first.device
    devices.stop(2)
    assert ranges.device_at(place) is first.device
    assert CacheRanges(device=second.device).device_at(place) is second.device
    assert ranges.device_at(torch.device("meta")) is None


def test_a_budget_from_outside_is_that_of_the_device_it_names(
    two: tuple[Runtime, Runtime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    install.listen()
    try:
        assert control.ask(os.getpid(), 3 * 2**22, 60, device=1)["budget"] == 3 * 2**22
    finally:
        control.stop()
    assert [runtime.device.budget for runtime in two] == [2**23, 3 * 2**22]
