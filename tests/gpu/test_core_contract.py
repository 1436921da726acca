"""All that torch asks of its CUDA allocator, asked through torch: statistics, snapshots, history, observers, fractions,
memory pools, checkpoints of graphs' pools, the profiler. PyTorch's own tests of these are run by
tests/simgpu/torch_suite.py where they are at hand."""

from __future__ import annotations

import ctypes
import pickle
import re
import tempfile
from pathlib import Path

import pytest
import torch
from torch.cuda import _memory_viz

import ballonet

from .scene import Captured, Place, scene

pytestmark = pytest.mark.gpu
MIB = 2**20


@scene(only="cuda")
def test_statistics_are_torchs(place: Place) -> None:
    """torch's own questions about memory are answered with the pool's numbers."""
    kept = torch.ones(2**20, device="cuda")
    stats = torch.cuda.memory_stats()
    assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated() >= 2**22
    assert torch.cuda.memory_reserved() == place.device.snapshot()["created"] * place.page
    assert torch.cuda.max_memory_reserved() >= torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert "Allocated memory" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert free <= place.device.budget < total
    held = place.range(8)
    assert torch.cuda.mem_get_info()[0] == free - 8 * place.page
    assert torch.cuda.memory_allocated() >= stats["allocated_bytes.all.current"] + 8 * place.page
    held.close()
    place.device.reap(wait=True)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    calls = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.empty(10, device="cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == calls + 1
    assert kept.sum().item() == 2**20


@scene(only="cuda")
def test_snapshot_adds_up(place: Place) -> None:
    """The snapshot lists what the statistics count, block by block, pages of ranges included."""
    kept = [torch.ones(size, dtype=torch.uint8, device="cuda") for size in (100, 3 * MIB, 700, 5 * MIB)]
    place.range(3)
    del kept[1]
    torch.cuda.synchronize()
    segments, stats = torch.cuda.memory_snapshot(), torch.cuda.memory_stats()
    for kind, wanted in (("all", ("small", "large")), ("small_pool", ("small",)), ("large_pool", ("large",))):
        of = [segment for segment in segments if segment["segment_type"] in wanted]
        for name, field in (("reserved", "total"), ("allocated", "allocated"), ("active", "active")):
            assert stats[f"{name}_bytes.{kind}.current"] == sum(segment[f"{field}_size"] for segment in of), name
        assert stats[f"requested_bytes.{kind}.current"] == sum(segment["requested_size"] for segment in of)
    for segment in segments:
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    addresses = {b["address"] for s in segments for b in s["blocks"] if b["state"] == "active_allocated"}
    assert {tensor.data_ptr() for tensor in kept} <= addresses


@scene(only="cuda")
def test_history_is_recorded(place: Place) -> None:
    """Who allocated what, when it went, and what pages came and went for it; torch's own readers understand it."""

    def allocates() -> torch.Tensor:
        return torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")

    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    tensor = allocates()
    address = tensor.data_ptr()
    live = [b for s in torch.cuda.memory_snapshot() for b in s["blocks"] if b["address"] == address]
    assert "allocates" in str(live[0]["frames"])
    with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
        torch.cuda.memory._dump_snapshot(file.name)
        with Path(file.name).open("rb") as dumped:
            snapshot = pickle.load(dumped)
    assert "ballonet" in snapshot["allocator_settings"].values()
    assert re.search(r" = seg_\d+\[\d+:4\.0MiB\]", _memory_viz.trace(snapshot)), "no allocation in its segment"
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert len(plot(snapshot)) > 1000
    side = torch.cuda.Stream()
    tensor.record_stream(side)
    del tensor
    torch.cuda.synchronize()
    torch.ones(MIB, device="cuda")
    torch.cuda.empty_cache()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    of_block = [entry["action"] for entry in trace if entry["addr"] == address]
    assert of_block[-3:] == ["alloc", "free_requested", "free_completed"] or of_block[:1] == ["segment_map"], of_block
    assert trace[-1]["action"] == "segment_unmap"
    assert "empty_cache" in str(trace[-1]["frames"])
    assert torch._C._cuda_isHistoryEnabled()
    torch.cuda.memory._record_memory_history(None)
    assert not torch.cuda.memory._snapshot()["device_traces"][0]


@scene(only="cuda")
def test_a_snapshot_with_names_has_what_torch_recorded(place: Place) -> None:
    """`ballonet.snapshot()`: torch's stacks and traces, the same bytes, and whose each block is."""
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    tensor = torch.ones(4 * MIB, dtype=torch.uint8, device="cuda")
    model = torch.nn.Linear(16, 16).to("cuda")
    managed = ballonet.manage(model)
    torch.cuda.synchronize()
    snapshot, segments = ballonet.snapshot(), torch.cuda.memory_snapshot()
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == sum(
        segment["total_size"] for segment in segments
    )
    assert snapshot["device_traces"][0]
    blocks = {block["address"]: block["frames"] for segment in snapshot["segments"] for block in segment["blocks"]}
    assert blocks[tensor.data_ptr()][-1]["name"] == "activations"
    assert "test_a_snapshot_with_names" in str(blocks[tensor.data_ptr()])
    assert [frame["name"] for frame in blocks[model.weight.data_ptr()]][-2:] == ["weight", "weights"]
    for read in (_memory_viz.segsum, _memory_viz.trace, _memory_viz.trace_plot, _memory_viz.segment_plot):
        assert len(read(snapshot)) > 100
    managed.release()
    torch.cuda.memory._record_memory_history(None)


@scene(only="cuda")
def test_fractions_and_observers(place: Place) -> None:
    """A fraction refuses new pages, whoever asked to be told of it is told, and nothing else is harmed."""
    total = torch.cuda.get_device_properties(0).total_memory
    told: list[tuple[int, int]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda device, size, all_, free: told.append((device, size)))
    kept = torch.ones(MIB, device="cuda")
    torch.cuda.set_per_process_memory_fraction(20 * MIB / total)
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(20 * MIB / total)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 32\.00 MiB\. GPU 0 has"):
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert told == [(0, 32 * MIB)]
    assert torch.cuda.memory_stats()["num_ooms"] == 1
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.ones(8 * MIB, device="cuda").sum().item() == 8 * MIB == 8 * kept.sum().item()


@scene(only="cuda")
def test_pools_of_the_user(place: Place) -> None:
    """torch.cuda.MemPool(): memory of its own, counted, and given back with the pool."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.ones(3 * MIB, dtype=torch.uint8, device="cuda")
        assert pool.use_count() == 2
    outside = torch.ones(3 * MIB, dtype=torch.uint8, device="cuda")
    mine = {b["address"] for s in pool.snapshot() for b in s["blocks"]}
    assert inside.data_ptr() in mine
    assert outside.data_ptr() not in mine
    assert pool.use_count() == 1
    del inside
    address = pool.id
    del pool
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert address not in [segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()]
    with pytest.raises(RuntimeError, match=r"torch\.cuda\.MemPool\(\) works"):
        torch.cuda.MemPool(torch.cuda.memory._get_current_allocator()._allocator)


@scene(only="cuda")
def test_checkpoints_of_graphs(place: Place) -> None:
    """What inductor's graph trees do (torch.compile, mode="reduce-overhead"): tensors of a replay are taken for what
    lived when the capture ended, and come back with deleters."""
    given = torch.ones(MIB, device="cuda")
    graph = Captured(place, lambda: (given + 1, given * 3))
    pool, device = graph.pool, 0
    pointers = {tensor.data_ptr() for tensor in graph.outputs}
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, pointers)
    state = torch._C._cuda_getCheckpointState(device, pool)
    del graph.outputs
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set())
    torch._C._cuda_setCheckpointPoolState(device, state, [], [])
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, pointers)
    for pointer in pointers:
        torch._C._cuda_cudaCachingAllocator_raw_delete(pointer)
    assert torch._C._cuda_checkPoolLiveAllocations(device, pool, set())
    with pytest.raises(RuntimeError, match="invalid device pointer"):
        torch._C._cuda_cudaCachingAllocator_raw_delete(next(iter(pointers)))
    graph.launch()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="no memory pool"):
        torch._C._cuda_getCheckpointState(device, (0, 10**6))


@scene(only="cuda")
def test_accelerator_and_profiler(place: Place) -> None:
    """torch.accelerator asks the same allocator, and the profiler hears of each block."""
    kept = torch.ones(MIB, device="cuda")
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() >= kept.nbytes
    torch.empty(8 * MIB, device="cuda")
    before = place.pages("activations")
    torch.accelerator.empty_cache()
    assert place.pages("activations") < before
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        block = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
        del block
    told = [(event.name, event.self_device_memory_usage) for event in profile.events()]
    assert ("aten::empty", 4 * MIB) in told, told
    assert ("[memory]", -4 * MIB) in told, told


@scene(only="cuda")
def test_other_processes_and_devices(place: Place) -> None:
    """What cannot be shared with another process is refused with what to do; another device's tensors are copied, and
    not made."""
    with pytest.raises(RuntimeError, match="cudaIpc: copy the tensor to the CPU"):
        torch.ones(10, device="cuda").untyped_storage()._share_cuda_()
    with pytest.raises(RuntimeError, match="send the tensor through the CPU"):
        torch.UntypedStorage._new_shared_cuda(0, b"x" * 64, 1024, 0, b"", 0, b"", False)
    if torch.cuda.device_count() < 2:
        return
    with pytest.raises(RuntimeError, match=r"serves one device.*CUDA_VISIBLE_DEVICES"):
        torch.ones(3, device="cuda:1")
    runtime, address = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}"), ctypes.c_void_p()
    assert runtime.cudaSetDevice(1) == runtime.cudaMalloc(ctypes.byref(address), 4096) == runtime.cudaSetDevice(0) == 0
    storage = torch._C._construct_storage_from_data_pointer(address.value, torch.device("cuda:1"), 4096)
    there = torch.empty(0, device="cuda:1").set_(storage, 0, (1024,))
    here = torch.arange(1024.0, device="cuda")
    there.copy_(here)
    torch.cuda.synchronize(1)
    assert torch.equal(torch.zeros(1024, device="cuda").copy_(there), here)
