"""Spilling: what fits nowhere on the device lies on host pages, is right there, and goes with the last block."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch

import ballonet
from ballonet.allocator import _native, devices, install
from ballonet.allocator.errors import ConfigError, InstallError, PoolExhausted

from .core import PAGE, Core, Gate, all_calls, behind, entry, holds, opened, physical, refused, write
from .faulting import faults_at_every_call
from .pool import bytes_that_exist, in_pool


@pytest.fixture(autouse=True)
def quiet() -> None:
    _native.Device.on_spill(lambda: None)  # what an earlier install() left there would warn


def place(address: int, nbytes: int = PAGE) -> set[str | None]:
    return {behind(page)[0] for page in range(address // PAGE * PAGE, address + nbytes, PAGE)}


def spilled(core: Core) -> int:
    pages: int = core.device.snapshot()["spilled"]
    return pages


def test_spilled_block_goes_when_it_is_freed_and_device_pages_come_first_again() -> None:
    with opened(budget=4, host_budget=8, spill=True) as core:
        kv = core.range(4, mapped=4)
        keep, block = core.device.allocate(PAGE // 2), core.device.allocate(4 * PAGE)
        assert spilled(core) == 5
        core.device.deallocate(block)
        core.device.reap(wait=True)
        assert spilled(core) == 1  # under the block that is live
        core.device.trim()
        assert physical("host") == PAGE
        kv.close()
        again = core.device.allocate(PAGE // 4)  # there would be room beside the live block, on the host
        assert (place(again, 1), place(keep, 1)) == ({"device"}, {"host"})
        core.device.deallocate(keep)
        core.device.deallocate(again)
        core.device.reap(wait=True)
        assert spilled(core) == 0


@pytest.mark.parametrize("size", [6, 30, 2**40 // PAGE])
def test_no_more_than_the_host_budget(size: int) -> None:
    with opened(budget=4, host_budget=8, spill=True) as core:
        twin = core.range(4)
        twin.map_host(0, 4)
        before = core.device.snapshot()
        with pytest.raises(PoolExhausted, match="host"):
            core.device.allocate(size * PAGE)
        after = core.device.snapshot()
        assert (after["spilled"], after["host_pages"]) == (0, before["host_pages"])
        core.device.check()
        core.device.allocate(4 * PAGE)
        core.device.allocate(4 * PAGE)  # all that the host has left
        assert spilled(core) == 4


def test_not_where_it_is_not_allowed() -> None:
    with opened(budget=4, host_budget=8) as core:
        with pytest.raises(PoolExhausted, match="It exceeds the whole budget"):
            core.device.allocate(5 * PAGE)
        assert physical("host") == 0


def test_not_during_a_capture(gate: Gate) -> None:
    with opened(budget=2, host_budget=8, spill=True, path=gate.path) as core:
        idle = core.device.allocate(2 * PAGE)
        core.device.deallocate(idle)
        gate.capture(True)
        more = core.range(2)

        def ask() -> None:
            refused(lambda: core.device.allocate(3 * PAGE))
            refused(lambda: more.map(0, 1))

        made = all_calls(ask)
        assert not made.keys() & {"cuMemUnmap", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"}
        assert not any(name.startswith("cuMemcpy") for name in made)
        assert spilled(core) == 0
        gate.capture(False)
        core.device.allocate(3 * PAGE)
        assert spilled(core) == 3


def test_not_in_the_pool_of_a_graph() -> None:
    code = """
        pool = (1, 2)
        device.begin_pool(pool)
        out = ctypes.c_void_p()
        assert core.allocate(65 * 4096, 0, None, ctypes.byref(out)) == 1
        device.end_pool(pool)
        spilled = allocate(65 * 4096)
        assert device.snapshot()["spilled"] == 65
        core.deallocate(spilled)
        device.release_pool(pool)
        device.check()
    """
    entry(code, options="budget=64 * 4096, host_budget=80 * 4096, spill=True")


def test_a_fault_at_every_driver_call_of_it() -> None:
    def spill(scene: tuple[Core, dict[int, int]]) -> None:
        core, blocks = scene
        for value in (1, 2, 3):
            block = core.device.allocate(2 * PAGE)
            write(block, value, 2 * PAGE)
            blocks[block] = value
        first = next(iter(blocks))
        core.device.deallocate(first)
        del blocks[first]

    went_on = []
    for (core, blocks), done in faults_at_every_call(
        lambda core: (core, {}), spill, budget=2, host_budget=6, spill=True
    ):
        went_on.append(done)
        assert all(holds(block, value, 2 * PAGE) for block, value in blocks.items())
        for block in blocks:
            core.device.deallocate(block)
        core.device.reap(wait=True)
        assert spilled(core) == 0
    assert went_on.count(True) > len(went_on) // 2


# -- Under torch ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[_native.Device]:
    """The default: spilling is on."""
    monkeypatch.delenv("BALLONET_SPILL", raising=False)
    monkeypatch.setattr(install, "_warned", False)
    ballonet.install(budget="4MiB", host_budget="16MiB", page_size="64KiB", device="cpu")
    yield devices.require()
    devices.require().check()
    gc.collect()
    ballonet.restore()
    assert devices.current() is None


def test_torch_goes_on_beyond_the_budget_and_one_is_told_once(pool: _native.Device) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [torch.full((2**18,), float(n)) for n in range(7)]  # 7 MiB
    assert [str(warning.message).count("BALLONET_SPILL=0") for warning in caught] == [1]
    assert [in_pool(tensor) for tensor in tensors] == sorted((in_pool(tensor) for tensor in tensors), reverse=True)
    assert not in_pool(tensors[-1])
    assert all((tensor == n).all() for n, tensor in enumerate(tensors))
    assert torch.stack(tensors).sum() == 2**18 * 21
    assert bytes_that_exist() <= 4 * 2**20
    assert 3 * 2**20 <= bytes_that_exist("host") <= 16 * 2**20
    with pytest.raises(torch.OutOfMemoryError, match=r"spilled to the host 3.*Nor has the host room"):
        torch.empty(int(3.75 * 2**20))
    del tensors
    pool.trim()
    assert bytes_that_exist("host") == 0
    assert in_pool(torch.ones(2**18))


def test_a_warning_that_is_an_error_harms_nobody(pool: _native.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: raised.append(args.exc_type))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert torch.ones(2 * 2**20).sum() == 2 * 2**20
    assert raised == [RuntimeWarning]


def test_spilling_can_be_turned_off(pool: _native.Device) -> None:
    with pytest.raises(InstallError, match="spill"):
        ballonet.install(spill=False)
    ballonet.install(spill=True)
    ballonet.restore()
    with pytest.raises(ConfigError, match="spill"):
        ballonet.install(spill="yes")  # type: ignore[arg-type]
    ballonet.install(budget="4MiB", page_size="64KiB", device="cpu", spill=False)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**21)
    assert bytes_that_exist("host") == 0
