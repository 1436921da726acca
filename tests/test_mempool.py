"""The pool under `torch.cuda.MemPool`: the wiring, with torch's side played by the test, and on a GPU all of it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ballonet.allocator import _native, devices
from ballonet.allocator import install as module
from ballonet.allocator.errors import InstallError
from ballonet.allocator.install import install, reclaim, restore
from ballonet.allocator.pluggable import MemPoolRoute, mem_pool_route

from .core import Other
from .test_pluggable import on_gpu

BUDGET = 2**23


class FakePools:
    """torch's pools as far as a route uses them: which pool an allocation of a thread gets its memory from.

    As in torch, the pools in use are asked in the order in which they were begun, and what a pool caches goes back
    when nothing uses it any more.
    """

    def __init__(self) -> None:
        self.begun: list[tuple[Any, int]] = []  # (pool, thread)
        self.live: list[FakePool] = []
        self.emptied = 0

    def begin(self, device: int, pool: Any) -> None:
        if pool == "broken":
            raise RuntimeError("no such pool")
        self.begun.append((pool, threading.get_ident()))

    def end(self, device: int, pool: Any) -> None:
        self.begun.remove(next(entry for entry in self.begun if entry[0] == pool))

    def of_this_thread(self) -> Any:
        """The pool that an allocation of this thread comes from, None where it is torch's own memory."""
        return next((pool for pool, thread in self.begun if thread == threading.get_ident()), None)

    @contextlib.contextmanager
    def use(self, pool: Any, device: int) -> Iterator[None]:
        torch.cuda.memory._cuda_beginAllocateCurrentThreadToPool(device, pool.id)
        try:
            yield
        finally:
            torch.cuda.memory._cuda_endAllocateToPool(device, pool.id)

    def empty_cache(self) -> None:
        assert not self.begun, "while a pool is in use torch gives nothing back"
        self.emptied += 1


class FakePool:
    count = 0

    def __init__(self, segments: Any) -> None:
        FakePool.count += 1
        self.id = (0, FakePool.count)
        self.segments = segments


class FakeGraph:
    """A graph's own pool takes what its thread allocates during capture."""

    fails = False

    def capture_begin(self, pool: object = None) -> None:
        if self.fails:
            raise RuntimeError("capture cannot begin")
        pools.begin(0, self)

    def capture_end(self) -> None:
        pools.end(0, self)
        if pools.of_this_thread() is not None:
            raise RuntimeError("capture was invalidated")


pools = FakePools()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePools:
    global pools
    pools = FakePools()
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *functions: functions, raising=False)
    for owner in (torch._C, torch.cuda.memory):
        monkeypatch.setattr(owner, "_cuda_beginAllocateCurrentThreadToPool", pools.begin, raising=False)
        monkeypatch.setattr(owner, "_cuda_endAllocateToPool", pools.end, raising=False)
    for owner in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(owner, "empty_cache", pools.empty_cache)
    monkeypatch.setattr(torch.cuda, "MemPool", FakePool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", pools.use)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    return pools


@pytest.fixture
def route(fake: FakePools) -> Iterator[MemPoolRoute]:
    opened = MemPoolRoute(1, 2, 0)
    opened.open()
    yield opened
    opened.close()
    assert not fake.begun


def patched() -> list[object]:
    names = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool")
    owners = (torch._C, torch.cuda.memory)
    return [
        *(getattr(owner, name) for owner in owners for name in names),
        *(owner.empty_cache for owner in (torch.cuda, torch.cuda.memory)),
        torch.cuda.CUDAGraph.capture_begin,
        torch.cuda.CUDAGraph.capture_end,
    ]


def test_this_thread_and_no_other_is_routed_and_nothing_stays_behind(fake: FakePools, other: Other) -> None:
    before = patched()
    opened = MemPoolRoute(1, 2, 0)
    assert not opened.is_open
    opened.open()
    assert fake.of_this_thread() == opened._pool.id
    assert other.does(lambda: (fake.of_this_thread(), opened.renew())) == (None, False)
    opened.close()
    opened.close()
    assert fake.of_this_thread() is None
    assert patched() == before


def test_renewing_leaves_the_pool_and_goes_on_with_another(route: MemPoolRoute, fake: FakePools) -> None:
    first = fake.of_this_thread()
    assert route.renew()
    assert fake.emptied == 1
    second = fake.of_this_thread()
    assert second not in (None, first)
    torch.cuda.empty_cache()  # the user's own call does the same
    assert fake.emptied == 2
    assert fake.of_this_thread() not in (None, second)


def test_a_capture_has_its_pool_to_itself(route: MemPoolRoute, fake: FakePools) -> None:
    ours = fake.of_this_thread()
    graph = FakeGraph()
    graph.capture_begin(pool=None)
    assert fake.of_this_thread() is graph
    assert not route.renew()
    graph.capture_end()
    assert fake.of_this_thread() == ours


def test_captures_that_fail_give_the_thread_back(route: MemPoolRoute, fake: FakePools) -> None:
    ours = fake.of_this_thread()
    broken = FakeGraph()
    broken.fails = True
    with pytest.raises(RuntimeError, match="cannot begin"):
        broken.capture_begin()
    assert fake.of_this_thread() == ours
    outer, inner = FakeGraph(), FakeGraph()
    outer.capture_begin()
    inner.capture_begin()
    with pytest.raises(RuntimeError, match="invalidated"):
        inner.capture_end()
    assert fake.of_this_thread() is outer
    outer.capture_end()
    assert fake.of_this_thread() == ours


def test_a_pool_of_the_users_own_comes_first(route: MemPoolRoute, fake: FakePools) -> None:
    """One, too, that inductor's graph trees begin through torch._C."""
    ours = fake.of_this_thread()
    with fake.use(FakePool(None), 0):
        theirs = fake.of_this_thread()
        assert theirs != ours
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, "tree")
        torch._C._cuda_endAllocateToPool(0, "tree")
        assert fake.of_this_thread() == theirs
    assert fake.of_this_thread() == ours
    with pytest.raises(RuntimeError, match="no such pool"):
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, "broken")
    assert fake.of_this_thread() == ours


@pytest.fixture
def installed(fake: FakePools) -> Iterator[_native.Device]:
    install(BUDGET, page_size=65536, device="cpu")
    yield devices.require()
    gc.collect()
    restore()
    assert devices.current() is None


@pytest.mark.parametrize("compiled", [True, False])
def test_segments_come_from_the_pool_and_null_says_that_there_are_none(
    installed: _native.Device, compiled: bool
) -> None:
    state = module._installed
    assert state is not None
    if compiled and state.companion is None:
        pytest.skip("there is no C++ compiler")
    functions: Any = mem_pool_route(state.companion if compiled else None, 0)._segments
    types = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, *types)(functions[0])
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *types)(functions[1])
    segment = allocate(2**21, 0, None)
    assert installed.block_size(segment) == 2**21
    assert allocate(2 * BUDGET, 0, None) is None
    assert allocate(0, 0, None) is None
    free(segment, 2**21, 0, None)
    assert installed.block_size(segment) == 0


def test_install_after_cuda_was_used(
    installed: _native.Device, fake: FakePools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `install` does with a route, on a device that is the stand-in all the same."""
    state = module._installed
    assert state is not None
    assert not reclaim()
    monkeypatch.setattr(state, "route", MemPoolRoute(1, 2, 0))
    with pytest.warns(UserWarning, match="used CUDA before"):
        install()
    first = fake.of_this_thread()
    assert first is not None
    install()  # a cell that runs again
    assert fake.of_this_thread() == first
    assert reclaim()
    assert fake.of_this_thread() not in (None, first)
    restore()
    assert fake.of_this_thread() is None


def test_a_route_that_cannot_be_opened_leaves_nothing(
    installed: _native.Device, fake: FakePools, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = patched()
    state = module._installed
    assert state is not None
    monkeypatch.setattr(state, "route", MemPoolRoute(1, 2, 0))
    with monkeypatch.context() as without:
        without.delattr(torch.cuda, "CUDAGraph")
        with pytest.raises(AttributeError, match="CUDAGraph"):
            install()
    assert patched() == before
    assert not fake.begun
    assert devices.current() is None


def test_use_of_cuda_decides_between_the_two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    from ballonet.allocator import pluggable

    monkeypatch.setattr(torch._C, "_cuda_getAllocator", lambda: None, raising=False)
    for used in (False, True):
        monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda used=used: used)
        assert pluggable.cuda_used() is used
    with pytest.raises(InstallError, match=r"ballonet\.install\(\)"):
        pluggable.check_cuda_unused()
    monkeypatch.setattr(torch._C, "_cuda_getAllocator", lambda: object(), raising=False)
    with pytest.raises(InstallError, match="pluggable CUDA allocator already"):
        pluggable.cuda_used()


# -- On a GPU ----------------------------------------------------------------------------------------------------------

LATE = """
import torch, ballonet, threading, gc, warnings
from ballonet import testing
from ballonet.allocator import devices
before = torch.ones(2**20, device="cuda")
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    ballonet.install("1GiB")
assert any("used CUDA before" in str(each.message) for each in said)
device = devices.require()

def in_pool(tensor):
    return any(low <= tensor.data_ptr() < low + size for low, size in blocks())

def blocks():
    return [(s["address"], s["total_size"]) for s in torch.cuda.memory_snapshot()
            if device.block_size(s["address"]) >= s["total_size"]]
"""


@pytest.mark.gpu
def test_gpu_what_comes_after_lies_in_the_pool() -> None:
    on_gpu(f"""{LATE}
after = torch.ones(2**22, device="cuda")
assert in_pool(after) and not in_pool(before)
assert before.sum().item() == 2**20 and after.sum().item() == 2**22
other = []
thread = threading.Thread(target=lambda: other.append(torch.ones(2**22, device="cuda")))
thread.start(); thread.join()
assert not in_pool(other[0])
used = device.snapshot()["heap"]["live"]
del after
assert device.snapshot()["heap"]["live"] == used  # torch caches it
torch.cuda.empty_cache()
assert device.snapshot()["heap"]["live"] < used
again = torch.ones(2**22, device="cuda")
assert in_pool(again)
device.check()
ballonet.restore()
assert not in_pool(torch.ones(2**22, device="cuda"))
assert again.sum().item() == 2**22
""")


@pytest.mark.gpu
def test_gpu_memory_that_runs_out_is_torchs_error() -> None:
    on_gpu(f"""{LATE}
try:
    torch.empty(2**31, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("2 GiB fitted into 1 GiB")
assert torch.ones(2**20, device="cuda").sum().item() == 2**20
""")


@pytest.mark.gpu
def test_gpu_graphs_keep_their_own_pool() -> None:
    on_gpu(f"""{LATE}
fixed = torch.zeros(2**20, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = (fixed + 1) * 2
junk = [torch.full((2**20,), -1.0, device="cuda") for _ in range(8)]
for value in (1.0, 5.0):
    fixed.fill_(value)
    graph.replay()
    junk.append(torch.full((2**20,), -1.0, device="cuda"))
    assert out.eq((value + 1) * 2).all().item()
assert in_pool(junk[0]) and not in_pool(out)
device.check()
""")


@pytest.mark.gpu
def test_gpu_a_managed_model_generates_as_stock() -> None:
    on_gpu(f"""{LATE}
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False, pad_token_id=0)
model = LlamaForCausalLM(config).eval().to("cuda")
ids = torch.randint(2, 199, (2, 9), device="cuda")
plain = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)
with testing.manage(model, chaos=3):
    assert torch.equal(model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False), plain)
    assert ballonet.stats().pages.weights > 0
device.check()
""")
