"""When the pool is full: torch's own out-of-memory error, what it says, and that one can go on after it."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from ballonet.allocator import _native, device_choice, devices
from ballonet.allocator.config import Config
from ballonet.allocator.devices import set_budget
from ballonet.allocator.errors import BallonetError, BudgetInUse, ConfigError, NotInstalled
from ballonet.allocator.install import install, restore

from .core import Other

BUDGET = 8 * 2**20
PAGE = 64 * 2**10


@pytest.fixture
def device() -> Iterator[_native.Device]:
    install(budget=BUDGET, page_size=PAGE, device="cpu")
    yield devices.require()
    devices.require().check()
    gc.collect()
    restore()
    assert devices.current() is None, "a tensor of the pool is still alive"


def test_the_error_is_torchs_and_says_what_to_do(device: _native.Device) -> None:
    keep = torch.zeros(2**19)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(BUDGET, dtype=torch.uint8)
    text = str(caught.value)
    assert "8.00 MiB" in text
    for word in ("budget", "weights", "activations", "KV", "free", "set_budget", "smaller batch"):
        assert word.lower() in text.lower(), word
    assert not isinstance(caught.value, BallonetError)
    assert keep.sum() == 0


@pytest.mark.parametrize("fits", [False, True])
def test_error_names_the_smallest_budget_that_would_do(device: _native.Device, fits: bool) -> None:
    keep = [torch.zeros(2**19), torch.zeros(2**17)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(BUDGET - 2**18, dtype=torch.uint8)
    match = re.search(r"set_budget\((\d+)\)", str(caught.value))
    assert match is not None
    set_budget(int(match[1]) - (0 if fits else device.page_size))
    with nullcontext() if fits else pytest.raises(torch.OutOfMemoryError):
        torch.empty(BUDGET - 2**18, dtype=torch.uint8)
    assert not keep[0].any()


def test_a_budget_beyond_the_machine_is_refused(device: _native.Device) -> None:
    with pytest.raises(ConfigError, match="but the device has"):
        set_budget("999TiB")
    assert device.budget == BUDGET
    with pytest.raises(ConfigError, match="ask for less"):
        device_choice.open_device(Config(device="cpu", budget=999 * 2**40))


def test_missing_gpu_is_said_where_torch_could_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(UserWarning, match="torch can use no GPU here"):
        install(budget=BUDGET, page_size=PAGE)
    restore()
    monkeypatch.setattr(torch.version, "cuda", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install(budget=BUDGET, page_size=PAGE)
    restore()


def test_operator_that_fails_leaves_no_page_behind(device: _native.Device) -> None:
    def pages() -> dict[str, int]:
        device.trim()
        device.reap(wait=True)
        owned: dict[str, int] = device.snapshot()["pages"]
        return {owner: count for owner, count in owned.items() if owner != "free"}

    torch.ones(1000)
    before = pages()
    for _ in range(5):
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([torch.ones(2**18) for _ in range(9)])
        gc.collect()
    assert pages() == before


@pytest.mark.parametrize("size", [2**40, 2**62, 2**63 - 1])
def test_an_absurd_size_is_out_of_memory(device: _native.Device, size: int) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(size, dtype=torch.uint8)


def test_error_is_raised_in_the_thread_that_asked(device: _native.Device, other: Other) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        other.does(lambda: torch.empty(2 * BUDGET, dtype=torch.uint8))
    assert torch.ones(10).sum() == 10


def test_an_operator_that_fails_changes_nothing(device: _native.Device) -> None:
    tensor = torch.arange(2**19, dtype=torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        tensor.resize_(2**22)
    assert torch.equal(tensor[:1000], torch.arange(1000.0))
    weight = torch.randn(512, 512, requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError):
        (torch.ones(4096, 512) @ weight).sum().backward()
    assert weight.grad is None


def test_a_budget_below_what_is_in_use_is_refused_and_changes_nothing(device: _native.Device) -> None:
    tensor = torch.ones(2**20)
    with pytest.raises(BudgetInUse) as refused:
        set_budget("2MiB")
    assert tensor.nbytes <= refused.value.immovable == refused.value.smallest < BUDGET
    assert device.budget == BUDGET
    set_budget(refused.value.smallest)
    assert tensor.numpy().sum() == 2**20
    set_budget(BUDGET)
    del tensor
    set_budget("2MiB")
    assert torch.ones(2**17).sum() == 2**17
    assert device.snapshot()["created"] * PAGE <= 2 * 2**20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**20)


@pytest.mark.parametrize("size", ["many", 0, -1, "1KiB"])
def test_a_budget_that_makes_no_sense_is_refused(device: _native.Device, size: int | str) -> None:
    with pytest.raises(ConfigError):
        set_budget(size)
    assert device.budget == BUDGET


def test_a_budget_needs_a_pool() -> None:
    with pytest.raises(NotInstalled, match="install"):
        set_budget("1GiB")
