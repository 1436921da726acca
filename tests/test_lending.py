"""Models that lend each other KV pages: the unit, Algorithm 1, the window; and both together over random requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.lending import (
    Account,
    Unit,
    Window,
    due,
    resized,
    unit,
    unit_within,
)

from .swiftcache import block_bytes

MIB = 2**20
SIZES = st.integers(1, 60)


def test_lwm_with_qwen3_14b() -> None:
    """Block 16: 32 layers with 32 heads against 40 with 8: 5 and 16 blocks, 40 MiB (SwiftCache §3.4)."""
    lwm = block_bytes(layers=32, tokens=16, heads=32, dim=128, itemsize=2)
    qwen = block_bytes(layers=40, tokens=16, heads=8, dim=128, itemsize=2)
    assert (lwm, qwen) == (8 * MIB, 5 * MIB // 2)
    assert unit(worker=qwen, master=lwm) == Unit(40 * MIB, worker=16, master=5)
    assert unit(worker=qwen, master=lwm, page=2 * MIB) == Unit(40 * MIB, worker=16, master=5)
    assert unit(worker=qwen, master=lwm, page=32 * MIB) == Unit(160 * MIB, worker=64, master=20)


@given(SIZES, SIZES, SIZES)
def test_the_unit_is_the_least_that_is_whole_for_both(worker: int, master: int, page: int) -> None:
    least = unit(worker, master, page)
    assert least.worker * worker == least.master * master == least.size
    assert least.size == next(n for n in range(1, 60**3 + 1) if not n % worker and not n % master and not n % page)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_unit_of_nothing(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        unit(*sizes)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 9), st.integers(1, 9))
def test_up_is_rounded_up_and_down_is_rounded_down(blocks: int, needed: int, worker: int, block: int) -> None:
    after = resized(blocks * block, block, needed * block, Unit(worker * block, worker, 1))
    up = next(k for k in range(101) if blocks + k * worker >= needed)
    down = max(k for k in range(101) if k == 0 or blocks - k * worker >= needed)
    assert after == (blocks + up * worker - down * worker) * block
    assert not (up and down)


# -- the window


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.booleans()), max_size=40), st.integers(0, 12))
def test_the_window_against_all_that_ever_was(steps: list[tuple[int, int, bool]], seconds: int) -> None:
    window, now = Window(seconds), 0
    told = [(0, 0)]
    for passed, blocks, asked in steps:
        now += passed
        if asked:
            ends = [*(when for when, _ in told[1:]), now]
            seen = [used for (_, used), end in zip(told, ends, strict=True) if end >= now - seconds]
            assert window.most(now) == max(seen)
        else:
            window.use(now, blocks)
            told.append((now, blocks))
    assert len(window._falling) <= 10, "each is less than the one before"


# -- several models in one pool


def test_a_unit_is_no_larger_than_a_part_of_the_pool() -> None:
    """Models with 32 and 36 ranges: 288 pages, or where that is too much a block of the worker's, and what covers
    it."""
    assert unit_within(32, 36, 288) == Unit(288, worker=9, master=8)
    assert unit_within(32, 36, 287) == Unit(32, worker=1, master=1)
    assert unit_within(36, 8, 40) == Unit(36, worker=1, master=5)


@given(SIZES, SIZES, st.integers(1, 4000))
def test_a_unit_is_whole_blocks_on_either_side(worker: int, master: int, most: int) -> None:
    least = unit_within(worker, master, most)
    assert least.worker * worker == least.size
    assert 0 <= least.master * master - least.size < master
    assert least.size <= max(most, worker)


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 9), st.integers(0, 300))
def test_a_reserve_follows_what_is_needed(reserve: int, block: int, master: int, needed: int) -> None:
    size = unit(block, master)
    before = -(-reserve // block) * block
    after = resized(reserve, block, needed, size)
    assert after >= needed
    assert after % block == 0
    assert (after - before) % size.size == 0
    assert after == before or after - needed < size.size + block, "and no more than a unit beyond"
    assert abs(after - before) <= abs(before - needed) + size.size + block


ACCOUNTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 20), st.integers(0, 60), st.integers(-1, 1)), max_size=4
).map(
    lambda rows: [Account(n, block, blocks * block, held, rank) for n, (block, blocks, held, rank) in enumerate(rows)]
)


@given(ACCOUNTS, st.integers(0, 80), st.integers(1, 40))
def test_dues_make_reserves_whole_and_take_no_more(accounts: list[Account], free: int, most: int) -> None:
    """By all amounts that those who borrow could give, one after the other: the first that makes reserves whole."""
    dues = due(accounts, free, most)
    missing = max(0, sum(max(0, account.reserve - account.held) for account in accounts) - free)
    order = sorted(accounts, key=lambda account: (account.priority, -account.borrowed, account.number))
    lent = {account.number: max(0, account.held - account.reserve) for account in accounts}
    assert sum(dues.values()) >= min(missing, sum(lent.values())), "all that is lacking, or all that is borrowed"
    assert all(0 < pages <= lent[number] for number, pages in dues.items()), "nothing of anyone's reserve"
    left = missing
    for account in order:
        if left <= 0:
            assert account.number not in dues, "others have given enough"
        elif lent[account.number]:
            pages = dues[account.number]
            assert pages == lent[account.number] or pages >= left
            worker = max(accounts, key=lambda one: (one.lacking, -one.number))
            more = (
                max(unit_within(worker.block, account.block, most).size, worker.block)
                + account.block * 2
                + worker.block
            )
            assert pages < left + more * (1 + left // worker.block)
            left -= pages


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["use", "keep", "rest"]), st.integers(0, 40)), max_size=60),
    st.lists(st.integers(1, 6), min_size=3, max_size=3),
)
def test_lending_over_random_traces_takes_no_page_in_use(trace: list[tuple[int, str, int]], blocks: list[int]) -> None:
    """Three models in a pool of 120 pages: requests come and go, what they leave is kept. What is in use is never
    taken; a request gets its pages unless others use them; and what is kept lies in nobody's reserve."""
    total, most = 120, 15
    used, kept, reserve = [0, 0, 0], [0, 0, 0], [0, 0, 0]
    windows, now = [Window(5) for _ in blocks], 0

    def settle() -> None:
        for n, block in enumerate(blocks):
            windows[n].use(now, used[n])
            reserve[n] = resized(reserve[n], block, windows[n].most(now), unit_within(block, blocks[n - 1], most))
            assert reserve[n] >= used[n]
            assert reserve[n] % block == 0
        accounts = [Account(n, block, reserve[n], used[n] + kept[n]) for n, block in enumerate(blocks)]
        free = total - sum(used) - sum(kept)
        for n, pages in due(accounts, free, most).items():
            assert pages <= kept[n], "what is borrowed is what is kept: the reserve covers what is used"
            kept[n] -= pages
        free = total - sum(used) - sum(kept)
        lacking = sum(max(0, reserve[n] - used[n] - kept[n]) for n in range(3))
        assert lacking <= free or not any(kept[n] + used[n] > reserve[n] for n in range(3))

    for n, what, pages in trace:
        now += 1
        if what == "use":
            wanted = min(pages, total - sum(used))
            before = list(used)
            used[n] += wanted
            windows[n].use(now, used[n])
            # the exchange comes before the pages are asked for; whoever owns what is left of them gives its own
            accounts = [
                Account(k, block, max(reserve[k], -(-used[k] // block) * block), before[k] + kept[k])
                for k, block in enumerate(blocks)
            ]
            for k, given_back in due(accounts, total - sum(before) - sum(kept), most).items():
                kept[k] -= given_back
                assert kept[k] >= 0
            while sum(used) + sum(kept) > total:  # the reclaim order: prefixes go before anybody is refused
                kept[max(range(3), key=lambda k: kept[k])] -= 1
        elif what == "keep":
            kept[n] += used[n]
            used[n] = 0
        else:
            now += 6
        settle()
        assert sum(used) + sum(kept) <= total
        assert min(*used, *kept) >= 0
