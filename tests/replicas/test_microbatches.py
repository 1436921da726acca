"""Microbatches: tokens conserved and in order, equal in cost, and the bubble of the pipeline that runs them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.hooks.server.load import read
from ballonet.offload.policy.replicas.pipeline import Batch, ChunkCost, ChunkSize, equal_cost

from .lengths import AZURE, chunks, made
from .pipeline_time import evenly, floor, pipeline_time


def by_tokens(chunks: list[ChunkSize], most: int) -> list[Batch]:
    """Batches of `most` new tokens each (Sarathi-Serve)."""
    made: list[Batch] = []
    room = 0
    for chunk in chunks:
        rest = chunk
        while rest.new:
            if not room:
                made.append([])
                room = most
            part, rest = rest.cut(min(room, rest.new))
            made[-1].append(part)
            room -= part.new
    return made


def fig11(chunks: list[ChunkSize], least: int, cost: ChunkCost) -> list[Batch]:
    """Batches halved by cost until they have `least` tokens or fewer, as printed but for its errata (KunServe Fig. 11;
    pipeline.py, Note [Look ahead])."""
    if sum(chunk.new for chunk in chunks) <= max(1, least):
        return [list(chunks)] if chunks else []
    halves = equal_cost(chunks, 2, cost)
    return halves if len(halves) < 2 else [part for half in halves for part in fig11(half, least, cost)]


COST = ChunkCost(4e-9, 1e-5, 4e-3)  # at 2,500 tokens attention to them takes as long as all else
APART = ChunkCost(4e-9, 1e-5, 4e-3, square=7e-9, prefix=1e-7, decode=ChunkCost(0.0, 2e-5, 3e-3, prefix=1e-7))
MOST = 2048  # tokens of a batch by tokens
FORMERS: dict[str, Callable[[list[ChunkSize], int], list[Batch]]] = {
    "equal": lambda queue, count: equal_cost(queue, count, COST),
    "equal, coefficients apart": lambda queue, count: equal_cost(queue, count, APART),
    "tokens": lambda queue, count: by_tokens(queue, max(1, sum(each.new for each in queue) // count)),
    "fig11": lambda queue, count: fig11(queue, max(1, sum(each.new for each in queue) // count), COST),
}
queues = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 4000)), max_size=12)


@pytest.mark.parametrize("name", FORMERS)
@given(queues, st.integers(1, 9))
def test_tokens_are_conserved_and_stay_in_order(name: str, sizes: list[tuple[int, int]], count: int) -> None:
    queue = [ChunkSize(n, *each) for n, each in enumerate(sizes)]
    batches = FORMERS[name](queue, count)
    assert all(batches), "no batch is empty"
    flat = [chunk for batch in batches for chunk in batch]
    assert [each.request for each in flat] == sorted(each.request for each in flat)
    for number, (before, new) in enumerate(sizes):
        at = before
        for each in flat:
            if each.request == number:
                assert (each.before, each.new > 0) == (at, True)
                at += each.new
        assert at == before + new
    if name.startswith("equal"):
        assert len(batches) <= count


def azure() -> list[int]:
    if not AZURE.exists():
        pytest.skip("the recorded Azure trace is not here")
    return [each.prompt for each in read(AZURE, limit=1500)]


def spread(batches: list[Batch], cost: ChunkCost = COST) -> tuple[float, float]:
    """The longest batch by the mean, and the bubble of two stages."""
    found = [cost.batch((each.before, each.new) for each in batch) for batch in batches]
    return max(found) / statistics.fmean(found), pipeline_time(evenly(found, 2)).bubble


@pytest.mark.parametrize("prompts", [azure, lambda: made(1500)], ids=["azure", "made"])
@pytest.mark.parametrize("cost", [COST, APART], ids=["Eq. 1", "coefficients apart"])
def test_batches_cost_alike_and_bubbles_are_near_the_floor(prompts: Callable[[], list[int]], cost: ChunkCost) -> None:
    queue = chunks(prompts())
    tokens = sum(each.new for each in queue)
    for at in range(0, len(queue), 75):  # bursts: what is queued at once
        burst = queue[at : at + 75]
        tokens = sum(each.new for each in burst)
        peers = [by_tokens(burst, MOST), fig11(burst, MOST, cost)]
        batches = equal_cost(burst, tokens // MOST, cost)
        longest, bubble = spread(batches, cost)
        assert longest <= 1.15
        assert bubble <= floor(len(batches), 2) + 0.03
        assert all(bubble < spread(peer, cost)[1] for peer in peers)


def test_a_batch_behind_a_long_prefix_has_fewer_tokens() -> None:
    first, second = equal_cost([ChunkSize(0, 0, 4000), ChunkSize(1, 8000, 4000)], 2, COST)
    assert sum(each.new for each in first) > sum(each.new for each in second)
    halves = fig11([ChunkSize(0, 0, 4000), ChunkSize(1, 8000, 4000)], 2600, COST)
    assert [sum(each.new for each in half) for half in halves] == [2322, 1522, 1583, 2573], "2,600 stay whole"


def test_decoding_requests_are_never_cut_and_one_that_is_dear_has_a_batch() -> None:
    queue = [ChunkSize(n, 100, 1) for n in range(7)] + [ChunkSize(7, 10**6, 1)]
    batches = equal_cost(queue, 4, COST)
    assert [len(batch) for batch in batches] == [7, 1]
    assert equal_cost([ChunkSize(0, 0, 2)], 5, COST) == [[ChunkSize(0, 0, 1)], [ChunkSize(0, 1, 1)]]


def test_batches_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 batches"):
        equal_cost([], 0, COST)
