"""Recorded allocations given to torch's own allocator on a GPU: its figures are those that it told of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from .scene import execute

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch
from ballonet.allocator.config import Config
from ballonet.allocator.replay import replay

MIB = 2**20
torch._C._accelerator_setAllocatorSettings("expandable_segments:" + str({expandable}))
torch.cuda.memory._record_memory_history("all", context=None)
side = torch.cuda.Stream()
kept = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (30, 3, 21, 7, 1, 9)]
del kept[::2]
kept += [torch.empty(size * MIB + 5, dtype=torch.uint8, device="cuda") for size in (18, 12, 2)]
with torch.cuda.stream(side):
    kept.append(torch.empty(5 * MIB, dtype=torch.uint8, device="cuda"))
torch.cuda.memory._dump_snapshot({path!r})
torch.cuda.memory._record_memory_history(None)
stats, reserved = torch.cuda.memory_stats(), torch.cuda.max_memory_reserved()
del kept
torch.cuda.empty_cache()

done = replay({path!r}, Config(device="cuda", budget=256 * MIB, page_size=2 * MIB))
native, expandable, ours = done.runs
same = expandable if {expandable} else native
assert [run.source for run in done.runs] == ["run here"] * 3, done.runs
assert done.trace.reserve.kind == same.name
assert max(level for _, level in done.trace.reserve.levels) == reserved
assert same.peak == reserved, (done.runs, reserved)
assert {expandable} or native.driver_calls == stats["num_device_alloc"], (native, stats)
assert done.peak_live <= ours.peak <= min(native.peak, expandable.peak), done.runs
assert native.peak != expandable.peak
assert done.peak_live == stats["requested_bytes.all.peak"]
for run in done.runs:
    assert all(had >= live for had, live in zip(run.series, done.live)), run
assert torch.cuda.memory_allocated() == torch.cuda.memory_reserved() == 0
assert float(torch.ones(100, device="cuda").sum()) == 100

small = replay({path!r}, Config(device="cuda", budget=16 * MIB, page_size=2 * MIB))
assert not small.fits
assert small.needed >= small.peak_live
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_figures_of_torch_s_allocator_are_its_own(expandable: bool, tmp_path: Path) -> None:
    """What it reserved while it was recorded, and the same operations given to it again, with and without segments that
    expand."""
    execute(PROGRAM.format(path=str(tmp_path / "memory.pickle"), expandable=expandable), "cuda")
