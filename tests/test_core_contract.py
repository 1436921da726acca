"""What torch asks of a CUDA allocator beside blocks, of the core alone: statistics, segments, fractions, and pools with
their checkpoints."""

from __future__ import annotations

from typing import Any

import pytest

from ballonet.allocator.errors import BallonetError

from .core import PAGE, Core, opened, physical, refused, write

POOL = (0, 7)
CLASSES = ("all", "small_pool", "large_pool")


def figure(core: Core, name: str, kind: str = "all") -> dict[str, int]:
    figures: dict[str, Any] = core.device.memory_stats()[name]
    entry: dict[str, int] = figures[kind]
    return entry


def test_statistics_follow_blocks_and_pages() -> None:
    with opened(page=2**20, budget=16) as core:
        _small, large = core.device.allocate(1000), core.device.allocate(3 * 2**20)
        core.range(2, "kv", mapped=2)
        assert figure(core, "allocated_bytes")["current"] == 1024 + 5 * 2**20
        assert figure(core, "allocated_bytes", "small_pool")["current"] == 1024
        assert figure(core, "allocated_bytes", "large_pool")["current"] == 5 * 2**20
        assert figure(core, "requested_bytes", "small_pool")["current"] == 1000
        assert [figure(core, "allocation", kind)["current"] for kind in CLASSES] == [2, 1, 1]
        assert figure(core, "reserved_bytes")["current"] == physical() == 6 * 2**20
        assert figure(core, "reserved_bytes", "small_pool")["current"] == 2**20
        core.device.deallocate(large)
        assert figure(core, "allocated_bytes")["current"] == 1024 + 2 * 2**20
        assert figure(core, "allocated_bytes")["peak"] == 1024 + 5 * 2**20
        assert figure(core, "allocation") == {"current": 1, "peak": 2, "allocated": 2, "freed": 1}
        core.device.reset_peaks()
        core.device.reset_accumulated()
        assert figure(core, "allocated_bytes")["peak"] == 1024 + 2 * 2**20
        assert figure(core, "allocation") == {"current": 1, "peak": 1, "allocated": 0, "freed": 0}
        refused(lambda: core.device.allocate(15 * 2**20))
        stats = core.device.memory_stats()
        assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)


def test_a_peak_is_never_above_what_existed() -> None:
    with opened(budget=16) as core:
        core.device.deallocate(core.device.allocate(10 * PAGE))
        core.device.trim()
        core.range(12, "kv", mapped=12)
        assert figure(core, "allocated_bytes")["peak"] == 12 * PAGE


@pytest.mark.parametrize(("budget", "pages"), [(16, 8), (12, 4), (8, 0)])
def test_memory_info_says_what_can_still_be_had(budget: int, pages: int) -> None:
    with opened(budget=16) as core:
        core.range(8, "kv", mapped=8)
        core.device.set_budget(budget * PAGE)
        free, total = core.device.memory_info()
        assert free == pages * PAGE
        assert total > free


def segments_add_up(core: Core) -> None:
    """What the snapshot lists is what the statistics count."""
    sizes = dict.fromkeys(("size", "allocated", "pending"), 0)
    in_heap = 0
    for address, nbytes, _, _, blocks, _, _ in core.device.segments():
        sizes["size"] += nbytes
        at = address
        for begin, size, requested, state in blocks:
            assert begin == at
            assert requested <= size
            at += size
            if state in sizes:
                sizes[state] += size
            in_heap += core.device.block_size(begin) > 0
        assert at == address + nbytes
    assert sizes["size"] == figure(core, "reserved_bytes")["current"] == physical()
    assert sizes["allocated"] == figure(core, "allocated_bytes")["current"]
    assert sizes["allocated"] + sizes["pending"] == figure(core, "active_bytes")["current"]
    assert in_heap == figure(core, "allocation")["current"]


def test_segments_show_every_page_once() -> None:
    with opened(budget=40) as core:
        kept = [core.device.allocate(size) for size in (100, 3 * PAGE, 700, 20 * PAGE)]
        segments_add_up(core)
        core.device.deallocate(kept.pop(1))
        segments_add_up(core)
        kv = core.range(4, "kv")
        kv.map(1, 2)
        segments_add_up(core)
        kv.close()
        core.device.reap(wait=True)
        core.device.begin_pool(POOL)
        kept.append(core.device.allocate(5 * PAGE))
        core.device.end_pool(POOL)
        assert [row[2] for row in core.device.segments()].count(POOL) == 1
        segments_add_up(core)
        for block in kept:
            core.device.deallocate(block)
        core.device.release_pool(POOL)
        core.device.trim()
        assert core.device.segments() == []


def test_a_fraction_refuses_new_pages_and_takes_none_away() -> None:
    with opened(budget=64, host_budget=64, spill=True) as core:
        total = core.device.memory_info()[1]
        block = core.device.allocate(10 * PAGE)
        core.device.fraction = 0.0
        assert core.device.fraction == 0.0
        write(block, 1, 10 * PAGE)
        refused(lambda: core.device.allocate(PAGE))
        core.device.deallocate(block)
        core.device.reap(wait=True)
        assert physical() == 0
        core.device.fraction = 20 * PAGE / total
        core.device.set_budget(32 * PAGE)
        blocks = [core.device.allocate(PAGE) for _ in range(20)]
        refused(lambda: core.device.allocate(PAGE))
        core.device.fraction = 1.0
        blocks.extend(core.device.allocate(PAGE) for _ in range(12))
        assert core.device.snapshot()["spilled"] == 0
        blocks.append(core.device.allocate(PAGE))
        assert core.device.snapshot()["spilled"] == 1


def test_a_checkpoint_brings_back_the_same_blocks(core: Core) -> None:
    """As inductor's graph trees use it: what lived after the first graph lives again, what came since is freed."""
    core.device.begin_pool(POOL)
    first = [core.device.allocate(size) for size in (512, 3 * PAGE, 512, 2 * PAGE, 4096)]
    for index in (3, 1, 0):
        core.device.deallocate(first.pop(index))
    before = core.device.segments()
    state = core.device.checkpoint(POOL)
    core.device.deallocate(first[0])
    later = [core.device.allocate(size) for size in (1024, 5 * PAGE, 100)]
    freed, created = core.device.restore_checkpoint(state)
    assert sorted(freed) == sorted([first[1], *later])
    assert sorted(created) == sorted(first)
    kept = {row[0]: row for row in core.device.segments()}
    for address, _, pool, _, blocks, _, _ in before:
        if pool == POOL:
            assert [b for b in kept[address][4] if b[3] == "allocated"] == [b for b in blocks if b[3] == "allocated"]
    core.device.check()
    core.device.end_pool(POOL)
    again = core.device.restore_checkpoint(state)
    assert sorted(again[0]) == sorted(again[1]) == sorted(first)
    segments_add_up(core)
    for address in first:
        core.device.deallocate(address)
    core.device.release_pool(POOL)
    core.device.trim()
    assert physical() == 0
    with pytest.raises(BallonetError, match="released"):
        core.device.restore_checkpoint(state)
    with pytest.raises(BallonetError, match="no memory pool"):
        core.device.checkpoint(POOL)


def test_a_checkpoint_leaves_others_alone(core: Core) -> None:
    outside = core.device.allocate(2 * PAGE)
    core.device.begin_pool(POOL)
    inside = core.device.allocate(2 * PAGE)
    core.device.end_pool(POOL)
    state = core.device.checkpoint(POOL)
    write(outside, 5, 2 * PAGE)
    assert core.device.restore_checkpoint(state) == ([inside], [inside])
    assert core.device.block_size(outside) == 2 * PAGE
    for address in (inside, outside):
        core.device.deallocate(address)
    core.device.release_pool(POOL)
