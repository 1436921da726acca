"""How KV on the host serves attention: as much of it as by Eq. 1-5, and which way is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.kv_pages import (
    Choice,
    LayerReads,
    Way,
    choose,
    fewest_streamed,
    needed,
)
from ballonet.offload.policy.tuning import KVReads

from .swiftcache import Split, block_bytes, split

# -- Eq. 1-5


def test_the_worked_example() -> None:
    """17 + 8 = 25 blocks where a cache without streaming has 10 (SwiftCache §3.2)."""
    block = block_bytes(tokens=16, heads=8, dim=128, itemsize=2)
    assert block == 2 * 16 * 8 * 128 * 2
    parts = split(10, block, 100 * block, [9 * 10 * block, 8 * 10 * block])
    assert (parts, parts.blocks) == (Split(17, 8), 25)
    assert split(10, block, 100 * block, []) == Split(0, 10)


@given(st.integers(1, 6), st.integers(0, 60), st.integers(0, 80), st.integers(1, 3))
def test_fewest_streamed_stores_what_the_equations_do(layers: int, device: int, host: int, slots: int) -> None:
    """Bytes are pages here, and a block has one of each layer."""
    slots = min(slots, layers)  # more would serve nothing

    def fits(blocks: int) -> bool:
        streamed = fewest_streamed([blocks] * layers, device, slots)
        return streamed is not None and streamed * layers <= host

    stored = split(layers, 1, device, [host], slots).blocks
    assert [blocks for blocks in range(stored + 20) if fits(blocks)] == [*range(stored + 1)]


# -- how many pages stream

AWAY = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(AWAY, st.integers(0, 40), st.integers(0, 3))
def test_no_fewer_pages_could_stream(away: list[int], free: int, slots: int) -> None:
    fits = [w for w in range(max(away) + 1) if slots * w + sum(max(0, pages - w) for pages in away) <= free]
    assert fewest_streamed(away, free, slots) == min(fits, default=None)


# -- which way

LINK = 50e9
PAGE = 2**21
SECONDS = PAGE / LINK  # to copy a page


def chosen(layers: list[LayerReads], free: int, rows: int = 1, copy: float = 0.0, in_place: float = 0.9) -> Choice:
    return choose(layers, page=PAGE, link=LINK, free=free, rows=rows, tuning=KVReads(copy=copy, in_place=in_place))


def test_pages_that_fit_are_restored_and_nothing_waits_for_them() -> None:
    layers = [LayerReads(4, rest=8 * SECONDS)] * 10
    choice = chosen(layers, free=40)
    assert (choice.way, choice.streamed, choice.slots, choice.pages) == (Way.RESIDENT, 0, 0, 40)
    assert choice.seconds == pytest.approx(80 * SECONDS)
    assert choice.exposed == pytest.approx(0)


def test_small_pieces_are_read_in_place_rather_than_copied_one_by_one() -> None:
    layers = [LayerReads(1, rest=SECONDS)] * 10
    assert chosen(layers, free=2, copy=2 * SECONDS).way is Way.ZERO_COPY
    assert chosen(layers, free=2, copy=2 * SECONDS, rows=64).way is Way.ZERO_COPY
    assert chosen(layers, free=2, copy=2 * SECONDS, rows=65).way is Way.STREAMED


def simulated(layers: list[LayerReads], streamed: int, slots: int) -> float:
    """The same in small steps of time, as an engine would find out: who may go on does."""
    copies = [j for j, layer in enumerate(layers) if min(layer.pages, streamed)]
    step = {"link": 0, "layer": 0}
    copied: dict[int, int] = {}
    attended: dict[int, int] = {}
    busy = compute = now = 0
    while step["layer"] < len(layers):
        if busy <= now and step["link"] < len(copies):
            j = copies[step["link"]]
            if j < slots or attended.get(j - slots, now + 1) <= now:
                busy = copied[j] = now + min(layers[j].pages, streamed)
                step["link"] += 1
        j = step["layer"]
        if compute <= now and (j not in copies or copied.get(j, now + 1) <= now):
            attended[j] = now + int(layers[j].attention)
            compute = attended[j] + int(layers[j].rest)
            step["layer"] += 1
            continue
        now += 1
    return compute


@given(
    st.lists(st.builds(LayerReads, st.integers(0, 4), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(0, 24),
    st.integers(1, 400),
)
@settings(max_examples=200, deadline=None)
def test_seconds_are_those_of_a_pass_and_the_least_of_all_that_fits(
    layers: list[LayerReads], free: int, rows: int
) -> None:
    choice = choose(layers, page=1, link=1.0, free=free, rows=rows, tuning=KVReads(copy=0.0))
    away = [layer.pages for layer in layers]
    compute = sum(layer.rest + layer.attention for layer in layers)
    assert choice.pages == needed(away, choice.streamed, choice.slots) <= free
    assert choice.exposed == pytest.approx(choice.seconds - compute)
    ways = [
        (simulated(layers, streamed, slots), Way.STREAMED)
        for slots in (1, 2)
        for streamed in range(1, max(away) + 1)
        if needed(away, streamed, slots) <= free
    ]
    if sum(away) <= free:
        assert (choice.way, choice.seconds) == (Way.RESIDENT, compute)
        return
    if rows <= 64 or not ways:
        passes = -(-rows // 256)
        least = min(streamed for streamed in range(max(away) + 1) if needed(away, streamed, 0) <= free)
        ways.append((compute + passes * sum(min(least, pages) for pages in away) / 0.9, Way.ZERO_COPY))
    assert choice.seconds == pytest.approx(min(seconds for seconds, _ in ways))
    assert any(choice.way is way and choice.seconds == pytest.approx(seconds) for seconds, way in ways)


@pytest.mark.parametrize(
    "wrong", [{"page": 0}, {"link": 0.0}, {"free": -1}, {"rows": 0}, {"tuning": KVReads(in_place=0.0)}], ids=str
)
def test_no_such_machine(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="more than nothing"):
        choose([LayerReads(1, 1.0)], **({"page": 1, "link": 1.0, "free": 1, "rows": 1} | wrong))  # type: ignore[arg-type]
