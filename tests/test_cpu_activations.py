"""With no GPU, what torch allocates on the CPU lies in the pool: proved from /proc, for all that torch does with it."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ballonet.allocator import _native, devices
from ballonet.allocator.install import install, restore, stock

from . import programs
from .pool import bytes_that_exist, in_pool
from .threads import elsewhere

BUDGET = 64 * 2**20


@pytest.fixture
def device() -> Iterator[_native.Device]:
    install(budget=BUDGET, page_size="64KiB", device="cpu")
    yield devices.require()
    assert bytes_that_exist() <= BUDGET
    devices.require().check()
    gc.collect()
    restore()
    assert devices.current() is None, "a tensor of the pool is still alive"


def test_tensors_lie_in_the_memfd(device: _native.Device) -> None:
    tensor = torch.arange(300_000)
    assert in_pool(tensor)
    assert in_pool(tensor + 1)
    assert in_pool(torch.empty(1))
    assert bytes_that_exist() >= tensor.nbytes
    assert torch.equal(tensor, torch.from_numpy(np.arange(300_000)))


def test_an_empty_tensor_has_no_memory(device: _native.Device) -> None:
    allocations = device.snapshot()["heap"]["allocations"]
    assert torch.empty(0).data_ptr() == 0
    assert torch.empty(3, 0, 2).sum().item() == 0
    assert device.snapshot()["heap"]["allocations"] > allocations  # the sum itself was counted


def test_storages_resize_and_change_hands(device: _native.Device) -> None:
    tensor = torch.arange(100.0)
    tensor.resize_(50_000)
    assert in_pool(tensor)
    assert torch.equal(tensor[:100], torch.arange(100.0))
    storage = tensor.untyped_storage()
    storage.resize_(400)
    assert torch.equal(torch.empty(0).set_(tensor)[:100], torch.arange(100.0))
    other = torch.ones(10)
    other.set_(torch.zeros(20))
    assert other.numel() == 20
    view = torch.arange(1000).view(10, 100)[3:5].t()
    assert torch.equal(view.clone(), view)
    assert in_pool(view.clone())


def test_a_lazy_clone_is_copied_when_written(device: _native.Device) -> None:
    tensor = torch.arange(1000.0)
    clone = torch._lazy_clone(tensor)
    clone += 1
    assert torch.equal(tensor + 1, clone)
    assert in_pool(clone)


def test_numpy_shares_both_ways(device: _native.Device) -> None:
    tensor = torch.zeros(1000)
    array = tensor.numpy()
    array[5] = 3
    assert tensor[5] == 3
    del tensor
    assert array[5] == 3
    assert not in_pool(torch.from_numpy(np.ones(1000)))


def test_share_memory_leaves_the_pool(device: _native.Device) -> None:
    tensor = torch.arange(1000).share_memory_()
    assert tensor.is_shared()
    assert not in_pool(tensor)
    assert torch.equal(tensor, torch.arange(1000))


def test_onednn_frees_where_it_allocated() -> None:
    """Tensors of oneDNN are freed with the allocator that is current then, whoever allocated them."""
    values = torch.randn(64, 64)
    before = values.to_mkldnn()
    install(budget=BUDGET, page_size="64KiB", device="cpu")
    during = torch.randn(64, 64).to_mkldnn()
    with stock():
        aside = torch.randn(64, 64).to_mkldnn()
    assert torch.equal(before.to_dense(), values)
    del before, aside
    restore()  # `during` lives: the pool must stay until it is gone
    assert devices.current() is not None
    assert during.to_dense().isfinite().all()
    del during
    restore()
    assert devices.current() is None


def test_stock_memory_that_is_freed_raw_is_freed(device: _native.Device) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def one() -> None:
        with stock():
            tensor = torch.ones(512, 512).to_mkldnn()
        del tensor

    one()
    before = resident()
    for _ in range(200):  # 200 MiB
        one()
    assert resident() - before < 50 * 2**20


def test_the_profiler_sees_the_memory(device: _native.Device) -> None:
    with torch.profiler.profile(profile_memory=True) as profile:
        tensor = torch.empty(2**18)
        del tensor
    usage = {event.key: event.self_cpu_memory_usage for event in profile.key_averages()}
    assert usage["aten::empty"] == 2**20
    assert usage["[memory]"] == -(2**20)


def test_threads_keep_their_contents(device: _native.Device) -> None:
    def work(seed: int) -> int:
        choose = random.Random(seed)
        mine: list[tuple[int, torch.Tensor]] = []
        for step in range(400):
            value = seed * 1000 + step
            mine.append((value, torch.full((choose.choice((1, 100, 5_000, 60_000)),), value)))
            if len(mine) > 10:
                value, tensor = mine.pop(choose.randrange(len(mine)))
                assert bool((tensor == value).all()), f"tensor {value} was overwritten"
        assert all(bool((tensor == value).all()) for value, tensor in mine)
        return len(mine)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(16))) == [10] * 16


def test_a_tensor_is_freed_by_another_thread(device: _native.Device) -> None:
    before = device.snapshot()["heap"]["live"]
    box = [torch.ones(10_000)]
    elsewhere(box.clear)
    assert device.snapshot()["heap"]["live"] == before


def test_a_stock_section_is_for_its_thread_only(device: _native.Device) -> None:
    inside, go_on = threading.Event(), threading.Event()
    pooled: dict[str, bool] = {}

    def stay_inside() -> None:
        with stock():
            inside.set()
            go_on.wait()
            pooled["other"] = in_pool(torch.ones(1000))

    thread = threading.Thread(target=stay_inside)
    thread.start()
    inside.wait()
    pooled["here"] = in_pool(torch.ones(1000))
    with stock(), stock():
        nested = torch.ones(1000)
    go_on.set()
    thread.join()
    assert pooled == {"here": True, "other": False}
    assert not in_pool(nested)
    assert in_pool(torch.ones(1000))
    nested.resize_(5000)
    assert nested[:1000].eq(1).all()


def test_a_stock_section_ends_with_an_exception(device: _native.Device) -> None:
    with pytest.raises(KeyError), stock():
        raise KeyError
    assert in_pool(torch.ones(10))


class _Numbers(Dataset[tuple[torch.Tensor, bool]]):
    """Reads a tensor of the parent in the worker, and says whether what the worker allocates lies in the pool."""

    def __init__(self) -> None:
        self.values = torch.arange(64.0)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        fresh = torch.full((1000,), float(self.values[index]))
        return fresh, in_pool(fresh)


def test_data_loader_workers_use_stock_memory(device: _native.Device) -> None:
    loader = DataLoader(_Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    rows = [(values[:, 0], pooled) for values, pooled in loader]
    assert torch.equal(torch.cat([first for first, _ in rows]), torch.arange(64.0))
    assert not any(bool(pooled.any()) for _, pooled in rows)
    assert in_pool(torch.ones(100))


def test_a_forked_child_frees_what_it_inherited(device: _native.Device) -> None:
    inherited = [torch.arange(1000), torch.randn(64, 64).to_mkldnn()]
    child = os.fork()
    if child == 0:  # no assertion may escape here: the child would go on with the parent's tests
        torch.set_num_threads(1)  # the parent's OpenMP threads are not here
        fine = bool(inherited[0].sum() == 499_500)
        inherited.clear()
        fine &= not in_pool(torch.ones(100))
        fine &= bool(torch.randn(8, 8).to_mkldnn().to_dense().isfinite().all())
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert inherited[0].sum() == 499_500
    live = device.snapshot()["heap"]["live"]
    inherited.clear()
    assert device.snapshot()["heap"]["live"] < live


def test_what_lives_after_restore_stays_valid() -> None:
    install(budget=BUDGET, page_size="64KiB", device="cpu")
    tensor = torch.arange(10_000)
    restore()
    assert in_pool(tensor)
    assert not in_pool(torch.ones(1000))
    tensor.resize_(20_000)  # grows into stock memory
    assert not in_pool(tensor)
    assert torch.equal(tensor[:10_000], torch.arange(10_000))
    restore()
    assert devices.current() is None


def test_installing_again_takes_up_the_pool_that_is_still_in_use() -> None:
    install(budget=BUDGET, page_size="64KiB", device="cpu")
    tensor, first = torch.arange(10_000), devices.require()
    restore()
    install(budget=BUDGET, page_size="64KiB", device="cpu")
    assert devices.require() is first
    assert in_pool(torch.ones(1000))
    del tensor
    restore()
    assert devices.current() is None


def test_the_process_ends_well_with_tensors_alive() -> None:
    script = (
        "import torch; from ballonet.allocator.install import install; install(budget='16MiB', device='cpu');"
        "keep = torch.ones(1000); torch.keep = keep; print(int(keep.sum()))"
    )
    assert programs.run(script) == "1000\n"
