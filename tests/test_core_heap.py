"""The caching allocator: how it packs, when it calls the driver, what streams may rely on, what it says at the end."""

from __future__ import annotations

import random
import struct

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, PoolExhausted

from .core import PAGE, Core, all_calls, calls, entry, library, opened, physical, write
from .faulting import arm

MIB = 2**20
POOL = (1, 2)


def heap(core: Core) -> dict[str, int]:
    numbers: dict[str, int] = core.device.snapshot()["heap"]
    return numbers


# -- Packing ----------------------------------------------------------------------------------------------------------


def packed(ops: list[tuple[int, int, int]]) -> bytes:
    """(1 = alloc or 2 = free, id, bytes), as `_native.replay` reads them."""
    return b"".join(struct.pack("<B7xQQQ", op, block, nbytes, 0) for op, block, nbytes in ops)


def prefills(seed: int, cached: bool, layers: int = 16, hidden: int = 2048) -> list[tuple[int, int, int]]:
    """What prefills of varied lengths allocate: weights that stay, activations, and where `cached` the stock KV cache.

    The cache is the harder case: small blocks that stay, each cut from among large ones that go.
    """
    draw = random.Random(seed)
    ops: list[tuple[int, int, int]] = []
    fresh = iter(range(10**6))

    def put(nbytes: int) -> tuple[int, int]:
        block = next(fresh), nbytes
        ops.append((1, *block))
        return block

    for _ in range(layers):
        for shape in (3 * hidden * hidden, hidden * hidden, 4 * hidden, 512):
            put(shape)
    for _ in range(10):
        tokens = draw.randint(64, 2048)
        residual, cache = put(tokens * hidden * 2), []
        for _ in range(layers):
            norm, qkv = put(tokens * hidden * 2), put(tokens * hidden * 6)
            if cached:
                cache.append(put(tokens * hidden))
            ops.append((2, *norm))
            scores = put(tokens * draw.choice([128, 512, 4096]))
            ops += [(2, *qkv), (2, *scores)]
            wide = put(tokens * hidden * 8)
            out = put(tokens * hidden * 2)
            ops += [(2, *wide), (2, *residual)]
            residual = out
        ops.append((2, *residual))
        draw.shuffle(cache)
        ops += [(2, *block) for block in cache]
    return ops


@pytest.mark.parametrize(("cached", "bound"), [(False, 1.02), (True, 1.06)])
@pytest.mark.parametrize("seed", range(3))
def test_physical_memory_follows_what_is_live(seed: int, cached: bool, bound: float) -> None:
    page = 2 * MIB
    with opened(page=page, budget=1024) as core:
        result = _native.replay(core.device, packed(prefills(seed, cached)))
        assert result["peak_live"] >= 64 * page
        assert result["peak_physical"] <= bound * result["peak_live"] + 4 * page
        assert result["peak_physical"] >= result["peak_live"]


# -- Driver calls -----------------------------------------------------------------------------------------------------


def decode_step(core: Core, live: dict[int, int], step: int) -> None:
    """One token: small and large activations that overlap, and a logits buffer that the next step frees."""
    device = core.device
    for layer in range(4):
        held = [device.allocate(size) for size in (900, 70_000, 5000, 2 * MIB, 40_000, 512)]
        for block in held[:: 1 if layer % 2 else -1]:
            device.record_stream(block, 0)  # its own: nothing to wait for
            device.deallocate(block)
    if step in live:
        device.deallocate(live.pop(step))
    live[step + 1] = device.allocate(600_000)


@pytest.mark.parametrize("weights", [0, 300])
def test_steady_state_makes_no_driver_call(weights: int) -> None:
    """The same beside a managed model: its pages are no reason to move those of the activations."""
    with opened(page=65536, budget=400) as core:
        if weights:
            core.range(weights, "weights").map(0, weights)
        live: dict[int, int] = {}
        for step in range(5):
            decode_step(core, live, step)
        before = heap(core)
        assert all_calls(lambda: [decode_step(core, live, step) for step in range(5, 50)]) == {}
        hits, allocations = (heap(core)[name] - before[name] for name in ("hits", "allocations"))
        assert hits == allocations > 0


def test_growth_beside_weights_does_not_move_pages() -> None:
    """Two sizes in turn, neither of which fits where the other lies, in arenas of their own: both stay backed."""
    with opened(page=65536, budget=400) as core:
        core.range(200, "weights").map(0, 200)
        stream = core.stream()
        peak = core.device.allocate(60 * 65536)  # once so much was live
        core.device.deallocate(peak)
        core.device.trim()

        def turn() -> None:
            core.device.deallocate(core.device.allocate(20 * 65536))
            core.device.deallocate(core.device.allocate(20 * 65536, stream))

        turn()
        assert all_calls(turn) == {}


# -- Budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["cuMemRelease", "cuMemUnmap"])
def test_a_release_that_fails_once_does_not_leave_more_than_the_budget(function: str) -> None:
    with opened(budget=16) as core:
        core.device.deallocate(core.device.allocate(16 * PAGE))
        arm(function)
        core.device.set_budget(5 * PAGE)
        core.device.reap(wait=True)
        assert physical() <= 5 * PAGE


# -- Exhaustion -------------------------------------------------------------------------------------------------------


def test_the_message_names_the_budget_the_owners_and_what_to_do() -> None:
    with opened(page=65536, budget=16) as core:
        core.range(3, "weights").map(0, 3)
        core.range(5, "kv").map(0, 5)
        block = core.device.allocate(2 * 65536)
        with pytest.raises(PoolExhausted) as caught:
            core.device.allocate(8 * 65536)
        said = str(caught.value)
        for part in (
            "Tried to allocate 512.00 KiB",
            "budget 1.00 MiB in pages of 64.00 KiB",
            "weights 192.00 KiB",
            "activations 128.00 KiB (of which 128.00 KiB in live tensors)",
            "KV cache 320.00 KiB",
            "set_budget",
            "BALLONET_BUDGET",
        ):
            assert part in said
        with pytest.raises(PoolExhausted, match=r"KV cache 320\.00 KiB"):
            core.range(8, "weights").map(0, 8)
        core.device.deallocate(block)
        with pytest.raises(PoolExhausted, match="No device"):
            core.device.allocate(2**60)


# -- Numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_of_the_heap(core: Core) -> None:
    core.device.allocate(1000)
    core.device.deallocate(core.device.allocate(3 * PAGE))
    now = heap(core)
    assert now["live"] + now["cached"] == now["reserved"] == core.created() * PAGE
    assert (now["live_peak"], now["requested_peak"]) == (1024 + 3 * PAGE, 1000 + 3 * PAGE)
    core.device.reset_peaks()
    now = heap(core)
    assert (now["live_peak"], now["requested_peak"]) == (1024, 1000)


def test_addresses_and_sizes_that_make_no_sense_are_ignored_or_refused(core: Core) -> None:
    block = core.device.allocate(PAGE)
    for wrong in (0, 512, block + 512, block - 512, 2**63):
        core.device.deallocate(wrong)
        assert core.device.block_size(wrong) == 0
    assert heap(core)["blocks"] == 1
    with pytest.raises(BallonetError, match="1 blocks are still in use"):
        core.device.close()
    with pytest.raises(BallonetError, match="one byte"):
        core.device.allocate(0)
    with pytest.raises(BallonetError, match="page size"):
        _native.Device(library=str(library()), ordinal=0, page_size=5000, budget=10**6, host_budget=0)


# -- Pools -------------------------------------------------------------------------------------------------------------


def test_a_graphs_pool_keeps_its_pages_until_it_is_released_and_its_addresses_until_its_last_block_goes(
    core: Core,
) -> None:
    outside = core.device.allocate(PAGE)
    core.device.begin_pool(POOL)
    inside, last = core.device.allocate(5 * PAGE), core.device.allocate(PAGE)
    core.device.end_pool(POOL)
    assert abs(inside - outside) > 64 * PAGE, "an arena of its own"
    core.device.deallocate(inside)
    core.device.trim()
    assert core.pages()["activations"] == 7, "the graph replays from those addresses"
    other = core.device.allocate(PAGE)
    assert abs(other - outside) < 64 * PAGE
    core.device.deallocate(other)
    core.device.release_pool(POOL)
    core.device.trim()
    assert core.pages()["activations"] == 2
    write(last, 1)
    before = calls()["cuMemAddressFree"]
    core.device.deallocate(last)
    core.device.trim()
    assert core.pages()["activations"] == 1
    assert calls()["cuMemAddressFree"] == before + 1


def test_thousands_of_graphs_do_not_use_up_the_addresses(core: Core) -> None:
    for number in range(1, 5000):
        core.device.begin_pool((number, 0))
        core.device.deallocate(core.device.allocate(PAGE))
        core.device.end_pool((number, 0))
        core.device.release_pool((number, 0))


# -- The entry points under torch -------------------------------------------------------------------------------------


def test_the_child_of_a_fork_has_copies_and_allocates_elsewhere() -> None:
    entry(
        """
        address = allocate(8192)
        ctypes.memset(address, 7, 8192)
        kv = device.reserve(4096, "kv", device.group())
        kv.map(0, 1)
        ctypes.memset(kv.address, 5, 4096)
        held = kv.tensor(0, (16,), (1,), 1, 8)
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            os.read(go[0], 1)  # the parent has written over its pages
            assert not core.serving()
            assert core.owns(address)
            assert ctypes.string_at(address, 8192) == b"\\7" * 8192
            assert ctypes.string_at(kv.address, 4096) == b"\\5" * 4096
            ctypes.memset(address, 9, 8192)
            ctypes.memset(kv.address, 9, 4096)
            core.deallocate(address)  # of the parent: ignored
            out = ctypes.c_void_p()
            assert core.allocate(512, 0, None, ctypes.byref(out)) == 2
            del held, kv  # neither hangs nor harms
            os.write(ready[1], b"x")
            os._exit(0)
        ctypes.memset(address, 1, 8192)
        ctypes.memset(kv.address, 2, 4096)
        os.write(go[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(ready[0], 1) == b"x"
        assert ctypes.string_at(address, 8192) == b"\\1" * 8192
        assert ctypes.string_at(kv.address, 4096) == b"\\2" * 4096
        assert core.serving()
        core.deallocate(address)
        del held, kv
        device.check()
        device.unbind()
        device.close()
        """
    )


def test_a_fork_copies_live_blocks_and_neither_what_is_free_nor_what_was_given_up() -> None:
    entry(
        """
        def present(address, size):  # pages that the process has memory for, of a private mapping
            with open("/proc/self/pagemap", "rb") as file:
                file.seek(address // 4096 * 8)
                entries = file.read(size // 4096 * 8)
            return sum(entries[7::8][i] >> 7 for i in range(size // 4096))
        live, cached, last = allocate(8192), allocate(24 * 4096), allocate(8192)
        kv = device.reserve(20 * 4096, "kv", device.group())
        kv.map(0, 20)
        held = kv.tensor(0, (4096,), (1,), 1, 8)
        for address, size in ((live, 8192), (cached, 24 * 4096), (last, 8192), (kv.address, 20 * 4096)):
            ctypes.memset(address, 7, size)
        core.deallocate(cached)  # its pages stay with the heap
        again = allocate(4096)  # cut out of it
        ctypes.memset(again, 9, 4096)
        kv.retire(1, 19)  # still mapped: nothing has waited for the streams
        child = os.fork()
        if child == 0:
            first = present(live, 8192), present(last, 8192), present(again, 4096)
            assert first == (2, 2, 1), first
            assert ctypes.string_at(live, 8192) == ctypes.string_at(last, 8192) == b"\7" * 8192
            assert ctypes.string_at(again, 4096) == b"\11" * 4096
            assert ctypes.string_at(kv.address, 4096) == b"\7" * 4096
            idle = present(cached, 24 * 4096) - present(again, 4096), present(kv.address + 4096, 19 * 4096)
            assert idle == (0, 0), idle
            ctypes.memset(cached, 1, 24 * 4096)  # it may be written to all the same
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert ctypes.string_at(cached + 4096, 4096) == b"\7" * 4096
        again_too = allocate(23 * 4096)
        ctypes.memset(again_too, 3, 23 * 4096)
        child = os.fork()  # what was idle at the fork before is live now
        if child == 0:
            assert ctypes.string_at(again_too, 23 * 4096) == b"\3" * (23 * 4096)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )


def test_reasons_of_failures_reach_the_caller() -> None:
    entry(
        """
        out = ctypes.c_void_p()
        assert core.allocate(65 * 4096, 0, None, ctypes.byref(out)) == 1
        assert b"budget 256.00 KiB" in core.last_error()
        assert core.allocate(512, 1, None, ctypes.byref(out)) == 2
        assert b"one device" in core.last_error()
        assert not core.owns(id(out))
        device.unbind()
        assert not core.serving()
        device.close()
        """
    )
