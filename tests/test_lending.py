"""Models that lend each other KV pages: the unit, Algorithm 1, the window; and both together over random requests."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.decide.lending import Exchange, Unit, Window, block_bytes, scale_down, scale_up, unit

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


def test_two_types_are_compared_in_bytes() -> None:
    half, whole = (block_bytes(2, 16, 4, 8, itemsize) for itemsize in (2, 4))
    assert unit(half, whole) == Unit(whole, worker=2, master=1)


@given(SIZES, SIZES, SIZES)
def test_the_unit_is_the_least_that_is_whole_for_both(worker: int, master: int, page: int) -> None:
    found = unit(worker, master, page)
    assert found.worker * worker == found.master * master == found.nbytes
    assert found.nbytes == next(n for n in range(1, 60**3 + 1) if not n % worker and not n % master and not n % page)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_no_unit_of_nothing(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        unit(*sizes)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 9), st.integers(1, 9))
def test_up_is_rounded_up_and_down_is_rounded_down(blocks: int, needed: int, worker: int, master: int) -> None:
    size = Unit(1, worker, master)
    up, down = scale_up(blocks, needed, size), scale_down(blocks, needed, size)
    units = range(101)
    assert up == next(Exchange(k, k * worker, k * master) for k in units if blocks + k * worker >= needed)
    fits = [Exchange(k, k * worker, k * master) for k in units if k == 0 or blocks - k * worker >= needed]
    assert down == fits[-1]
    assert not (up.units and down.units)


def test_numbers_of_algorithm_1() -> None:
    size = Unit(40 * MIB, worker=16, master=5)
    assert scale_up(100, 133, size) == Exchange(3, 48, 15)
    assert scale_up(100, 132, size) == Exchange(2, 32, 10)
    assert scale_down(100, 53, size) == Exchange(2, 32, 10)
    assert scale_down(100, 52, size) == Exchange(3, 48, 15)


# -- the window


def test_what_counts_is_what_is_in_use_at_once() -> None:
    """Two requests of 30 blocks side by side need 60, where the paper's longest request says 30."""
    window = Window(60)
    window.use(0, 30)
    window.use(1, 60)
    window.use(2, 30)
    window.use(3, 0)
    assert window.most(3) == 60
    assert window.most(62) == 60, "it was in use until 2"
    assert window.most(62.5) == 30
    assert window.most(64) == 0


def test_what_goes_on_is_not_forgotten() -> None:
    window = Window(10)
    window.use(0, 7)
    assert window.most(1000) == 7
    window.use(1000, 0)
    assert (window.most(1010), window.most(1011)) == (7, 0)
    assert Window(5).most(3) == 0


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


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.integers(1, 30)), max_size=40), SIZES, SIZES)
def test_a_worker_always_has_what_its_requests_need(
    requests: list[tuple[int, int, int]], worker: int, master: int
) -> None:
    """Requests come, overlap and end; the worker lends what it can spare each time, and takes back what it lacks."""
    size = unit(worker, master)
    total = ceil(200 / size.worker) * size.worker
    blocks, lent = total, 0
    window, now = Window(8), 0
    running: list[tuple[int, int]] = []  # (end, blocks)
    for passed, takes, needs in requests:
        now += passed
        running = [(end, used) for end, used in running if end > now]
        if sum(used for _, used in running) + needs > total:
            continue
        running.append((now + takes, needs))
        used = sum(used for _, used in running)
        back = scale_up(blocks, used, size)
        blocks, lent = blocks + back.worker, lent - back.units
        assert blocks >= used
        assert lent >= 0, "no more is taken back than was lent"
        window.use(now, used)
        spare = scale_down(blocks, window.most(now), size)
        blocks, lent = blocks - spare.worker, lent + spare.units
        assert blocks >= used
        assert blocks + lent * size.worker == total
        assert lent * size.nbytes == lent * size.master * master
