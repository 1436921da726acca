"""The pipeline of a group: costs of chunks and their fit, microbatches that take equally long, and the bubble of the
pipeline that runs them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.hooks.server.arrivals import read
from ballonet.offload.policy.replicas.pipeline import Batch, ChunkCost, ChunkSize, Sample, equal_cost, fit, is_decode
from ballonet.offload.policy.step_costs import Parts, Step

from .pipeline_time import evenly, floor, pipeline_time

PLAIN = ChunkCost(2e-9, 1e-5, 5e-3)
seconds = st.floats(1e-9, 1e-3)
costs = st.builds(ChunkCost, seconds, seconds, seconds, st.none() | seconds, st.just(0.0) | seconds)


def test_a_chunk_costs_what_the_equation_says() -> None:
    cost = ChunkCost(2.0, 3.0, 5.0)
    assert cost.seconds(4, 3) == 2 * (4 * 3 + (9 + 3) / 2) + 3 * 3 + 5
    assert cost.batch([]) == 0.0
    assert cost.batch([(4, 3), (0, 2)]) == cost.seconds(4, 3) + cost.seconds(0, 2) - 5
    apart = ChunkCost(2.0, 3.0, 5.0, square=10.0, prefix=7.0)
    assert apart.seconds(4, 3) == 2 * 12 + 10 * 6 + 7 * 4 + 3 * 3 + 5


@given(st.integers(0, 4000), st.lists(st.integers(1, 3000), min_size=1, max_size=6))
def test_the_chunks_of_a_prompt_add_up_to_it(before: int, chunks: list[int]) -> None:
    parts, at = [], before
    for new in chunks:
        parts.append((at, new))
        at += new
    whole = PLAIN.seconds(before, sum(chunks))
    assert PLAIN.batch(parts) == pytest.approx(whole)
    assert sum(PLAIN.seconds(*chunk) for chunk in parts) == pytest.approx(whole + (len(parts) - 1) * PLAIN.gamma)


def test_a_decoding_request_has_its_own_cost_and_the_weights_are_read_once() -> None:
    cost = ChunkCost(2.0, 3.0, 5.0, decode=ChunkCost(0.5, 1.0, 4.0))
    assert cost.seconds(10, 1) == 0.5 * 11 + 1 + 4
    assert cost.seconds(0, 1) == 2 + 3 + 5, "the first token of a prompt is no decoding one"
    assert cost.batch([(10, 1), (10, 1)]) == 2 * (0.5 * 11 + 1) + 4
    assert cost.batch([(10, 1), (0, 2)]) == 0.5 * 11 + 1 + 2 * 3 + 3 * 2 + 5


def test_a_batch_of_one_row_takes_less() -> None:
    cost = ChunkCost(2.0, 3.0, 5.0, decode=ChunkCost(0.5, 1.0, 4.0, lone=1.5), lone=1.0)
    assert cost.batch([(0, 1)]) == cost.seconds(0, 1) == 2 + 3 + 5 - 1
    assert cost.batch([(10, 1)]) == cost.seconds(10, 1) == 0.5 * 11 + 1 + 4 - 1.5
    assert cost.batch([(10, 1), (0, 1)]) == 0.5 * 11 + 1 + 2 + 3 + 5
    assert cost.batch([(10, 1)] * 2) == 2 * (0.5 * 11 + 1) + 4
    assert cost.seconds(0, 2) == 2 * 3 + 3 * 2 + 5
    with pytest.raises(ValueError, match="by more than it takes"):
        ChunkCost(2.0, 3.0, 5.0, lone=6.0)


def test_where_attention_knows_no_sequences_a_batch_takes_what_its_packed_row_does() -> None:
    parts = Parts(5.0, 3.0, 0.5, 2.0)
    cost = ChunkCost.packed(parts.fixed, parts.row, parts.key, parts.pair)
    for chunks in ([(4, 3)], [(4, 3), (0, 2)], [(10, 1), (7, 1), (0, 6)]):
        assert cost.batch(iter(chunks)) == parts.seconds(Step.of((new, before) for before, new in chunks))


@given(costs, st.integers(0, 10_000), st.floats(0, 10))
def test_a_cut_is_the_longest_chunk_within_the_time(cost: ChunkCost, before: int, target: float) -> None:
    new = cost.cut(target, before)
    slack = 1e-9 * max(target, cost.seconds(before, max(1, new)))
    assert new == 0 or cost.seconds(before, new) <= target + slack
    assert cost.seconds(before, new + 1) > target - slack


@pytest.mark.parametrize("parts", [(-1.0, 1.0, 1.0), (math.nan, 1.0, 1.0), (1.0, math.inf, 1.0)])
def test_cost_with_a_part_below_zero_or_not_finite_is_refused(parts: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="no number of seconds"):
        ChunkCost(*parts)


def test_a_cut_of_chunks_that_all_take_the_same_is_refused() -> None:
    with pytest.raises(ValueError, match="give beta or alpha"):
        ChunkCost(0.0, 0.0, 1.0).cut(2.0, 5)


def samples(cost: ChunkCost, noise: float, count: int = 200) -> list[Sample]:
    """Batches of one to four chunks, a third of them all decoding; `noise`: standard deviation of their times."""
    random, made = Random(0), []
    for _ in range(count):
        decoding = random.random() < 0.33
        chunks = []
        for _ in range(random.randrange(1, 5)):
            before = random.choice([0, 300, 1500, 6000])
            chunks.append((max(before, 200), 1) if decoding else (before, random.choice([30, 256, 700, 2048])))
        if not decoding:
            chunks += [(random.randrange(100, 3000), 1)] * random.randrange(3)
        took = cost.batch(chunks) * max(0.2, random.gauss(1, noise))
        made.append(Sample(tuple(chunks), took))
    return made


@pytest.mark.parametrize("square", [None, 9e-9])
@pytest.mark.parametrize("prefix", [0.0, 3e-7])
def test_the_fit_finds_what_made_the_samples(square: float | None, prefix: float) -> None:
    truth = ChunkCost(2e-9, 1e-5, 5e-3, square, prefix, decode=ChunkCost(0.0, 4e-5, 4e-3, prefix=2e-7))
    fitted = fit(samples(truth, 0.0))
    assert fitted.error < 1e-6
    assert (fitted.cost.square is None) == (square is None), "no coefficient that does not help"
    assert (fitted.cost.prefix > 0) == (prefix > 0)
    assert fitted.cost.alpha == pytest.approx(truth.alpha, rel=1e-3)
    assert fitted.cost.gamma == pytest.approx(truth.gamma, rel=1e-3)
    for chunk in [(0, 900), (5000, 100), (800, 1)]:
        assert fitted.cost.seconds(*chunk) == pytest.approx(truth.seconds(*chunk), rel=1e-3)


def test_the_fit_finds_pairs_of_different_requests() -> None:
    truth = ChunkCost.packed(5e-3, 1e-4, 2e-6, 3e-8)
    fitted = fit(samples(truth, 0.0))
    assert fitted.error < 1e-6
    for field in ("alpha", "beta", "gamma", "within", "prefix", "others"):
        assert getattr(fitted.cost, field) == pytest.approx(getattr(truth, field), rel=1e-3)
    assert fit(samples(truth, 0.05)).cost.others > 0, "although the times are disturbed"
    assert fit(samples(ChunkCost(2e-8, 1e-5, 5e-3, decode=ChunkCost(0.0, 4e-5, 4e-3)), 0.05)).cost.others == 0


@pytest.mark.parametrize(
    "truth",
    [
        ChunkCost.packed(5e-3, 1e-4, 2e-6, 3e-8, 2e-3),
        ChunkCost(2e-9, 1e-5, 5e-3, decode=ChunkCost(0.0, 4e-5, 4e-3, prefix=2e-7, lone=1e-3)),
    ],
    ids=["packed", "by sequence"],
)
def test_the_fit_finds_what_one_row_takes_less(truth: ChunkCost) -> None:
    taken = samples(truth, 0.0)
    fitted = fit(taken)
    assert fitted.error < 1e-6
    for chunks in ([(300, 1)], [(300, 1)] * 3, [(0, 256)]):
        assert fitted.cost.batch(chunks) == pytest.approx(truth.batch(chunks), rel=1e-3)
    several = [sample for sample in taken if len(sample.chunks) > 1]
    assert (fitted.cost.decode or fitted.cost).lone > 0
    told_nothing = fit(several).cost
    assert (told_nothing.decode or told_nothing).lone == 0.0, "no batch has one row"


def test_the_error_is_that_of_batches_that_were_held_out() -> None:
    truth = ChunkCost(2e-9, 1e-5, 5e-3, decode=ChunkCost(1e-8, 4e-5, 4e-3))
    taken = samples(truth, 0.1)
    fitted = fit(taken)
    fresh = samples(truth, 0.1, 1000)[len(taken) :]
    seen = sum(abs(fitted.cost.batch(sample.chunks) / sample.seconds - 1) for sample in fresh) / len(fresh)
    assert fitted.error == pytest.approx(seen, rel=0.35)


def test_batches_that_are_held_out_have_no_part_in_the_fit() -> None:
    taken = samples(ChunkCost(2e-9, 1e-5, 5e-3, decode=ChunkCost(1e-8, 4e-5, 4e-3)), 0.0)
    odd: list[Sample] = []
    for decoding in (False, True):
        kind = [sample for sample in taken if all(is_decode(*chunk) for chunk in sample.chunks) == decoding]
        odd += [Sample(sample.chunks, sample.seconds * (3 if n % 4 == 0 else 1)) for n, sample in enumerate(kind)]
    assert fit(odd).error == pytest.approx(2 / 3)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_no_coefficient_is_negative(noise: float) -> None:
    cost = fit(samples(ChunkCost(0.0, 1e-5, 5e-3), noise)).cost
    assert min(cost.alpha, cost.beta, cost.gamma, cost.within, cost.prefix) >= 0


def test_too_few_batches_and_batches_of_one_size_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit(samples(PLAIN, 0.0, 6))
    with pytest.raises(ValueError, match="several lengths"):
        fit([Sample(((0, 1),), 0.0 + 1e-3)] * 3 + [Sample(((0, 256),), 1e-3)] * 20)


AZURE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "azure_2023_code.csv"


def chunks(prompts: list[int]) -> list[ChunkSize]:
    """The prompts, whole, in order; every fifth behind a cached prefix of 2,000 tokens."""
    return [ChunkSize(n, 2000 if n % 5 == 4 else 0, tokens) for n, tokens in enumerate(prompts)]


def made(count: int) -> list[int]:
    """Prompts whose lengths are spread as those of the trace: a median of 1,500 tokens, one in ten above 4,500."""
    random = Random(0)
    return [min(7500, max(3, round(random.lognormvariate(7.3, 0.9)))) for _ in range(count)]


# Microbatches


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


EQ1 = ChunkCost(4e-9, 1e-5, 4e-3)  # at 2,500 tokens attention to them takes as long as all else
APART = ChunkCost(4e-9, 1e-5, 4e-3, square=7e-9, prefix=1e-7, decode=ChunkCost(0.0, 2e-5, 3e-3, prefix=1e-7))
MOST = 2048  # tokens of a batch by tokens
FORMERS: dict[str, Callable[[list[ChunkSize], int], list[Batch]]] = {
    "equal": lambda queue, count: equal_cost(queue, count, EQ1),
    "equal, coefficients apart": lambda queue, count: equal_cost(queue, count, APART),
    "tokens": lambda queue, count: by_tokens(queue, max(1, sum(chunk.new for chunk in queue) // count)),
    "fig11": lambda queue, count: fig11(queue, max(1, sum(chunk.new for chunk in queue) // count), EQ1),
}
queues = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 4000)), max_size=12)


@pytest.mark.parametrize("name", FORMERS)
@given(queues, st.integers(1, 9))
def test_tokens_are_conserved_and_stay_in_order(name: str, sizes: list[tuple[int, int]], count: int) -> None:
    queue = [ChunkSize(n, *size) for n, size in enumerate(sizes)]
    batches = FORMERS[name](queue, count)
    assert all(batches), "no batch is empty"
    flat = [chunk for batch in batches for chunk in batch]
    assert [chunk.request for chunk in flat] == sorted(chunk.request for chunk in flat)
    for number, (before, new) in enumerate(sizes):
        at = before
        for chunk in flat:
            if chunk.request == number:
                assert (chunk.before, chunk.new > 0) == (at, True)
                at += chunk.new
        assert at == before + new
    if name.startswith("equal"):
        assert len(batches) <= count


def azure() -> list[int]:
    if not AZURE.exists():
        pytest.skip("the recorded Azure trace is not here")
    return [arrival.prompt for arrival in read(AZURE, limit=1500)]


def spread(batches: list[Batch], cost: ChunkCost = EQ1) -> tuple[float, float]:
    """The longest batch by the mean, and the bubble of two stages."""
    taken = [cost.batch((chunk.before, chunk.new) for chunk in batch) for batch in batches]
    return max(taken) / statistics.fmean(taken), pipeline_time(evenly(taken, 2)).bubble


@pytest.mark.parametrize("prompts", [azure, lambda: made(1500)], ids=["azure", "made"])
@pytest.mark.parametrize("cost", [EQ1, APART], ids=["Eq. 1", "coefficients apart"])
def test_batches_cost_alike_and_bubbles_are_near_the_floor(prompts: Callable[[], list[int]], cost: ChunkCost) -> None:
    queue = chunks(prompts())
    tokens = sum(chunk.new for chunk in queue)
    for at in range(0, len(queue), 75):  # bursts: what is queued at once
        burst = queue[at : at + 75]
        tokens = sum(chunk.new for chunk in burst)
        peers = [by_tokens(burst, MOST), fig11(burst, MOST, cost)]
        batches = equal_cost(burst, tokens // MOST, cost)
        longest, bubble = spread(batches, cost)
        assert longest <= 1.15
        assert bubble <= floor(len(batches), 2) + 0.03
        assert all(bubble < spread(peer, cost)[1] for peer in peers)


def test_a_batch_behind_a_long_prefix_has_fewer_tokens() -> None:
    first, second = equal_cost([ChunkSize(0, 0, 4000), ChunkSize(1, 8000, 4000)], 2, EQ1)
    assert sum(chunk.new for chunk in first) > sum(chunk.new for chunk in second)
    halves = fig11([ChunkSize(0, 0, 4000), ChunkSize(1, 8000, 4000)], 2600, EQ1)
    assert [sum(chunk.new for chunk in half) for half in halves] == [2322, 1522, 1583, 2573], "2,600 stay whole"


def test_decoding_requests_are_never_cut_and_one_that_is_dear_has_a_batch() -> None:
    queue = [ChunkSize(n, 100, 1) for n in range(7)] + [ChunkSize(7, 10**6, 1)]
    batches = equal_cost(queue, 4, EQ1)
    assert [len(batch) for batch in batches] == [7, 1]
    assert equal_cost([ChunkSize(0, 0, 2)], 5, EQ1) == [[ChunkSize(0, 0, 1)], [ChunkSize(0, 1, 1)]]


def test_batches_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 batches"):
        equal_cost([], 0, EQ1)


# The timeline of a pipeline


grids = st.integers(1, 4).flatmap(
    lambda stages: st.lists(st.lists(st.integers(0, 9), min_size=stages, max_size=stages), max_size=9)
)


@given(grids)
def test_every_stage_waits_for_what_it_needs_and_for_nothing_else(grid: list[list[int]]) -> None:
    time = pipeline_time(grid)
    for k, row in enumerate(grid):
        for s, took in enumerate(row):
            needed = [0.0]
            needed += [time.end[k - 1][s]] if k else []
            needed += [time.end[k][s - 1]] if s else []
            needed += [time.end[k - len(row)][-1]] if s == 0 and k >= len(row) else []
            assert time.begin[k][s] == max(needed)
            assert time.end[k][s] == time.begin[k][s] + took
    assert 0 <= time.bubble < 1
    assert time.seconds == (time.end[-1][-1] if grid else 0)


@given(st.integers(1, 30), st.integers(1, 6))
def test_equal_batches_have_the_floor(microbatches: int, stages: int) -> None:
    time = pipeline_time(evenly([3.0] * microbatches, stages))
    assert time.bubble == pytest.approx(floor(microbatches, stages))
    assert time.seconds == pytest.approx(3.0 / stages * (microbatches + stages - 1))


def test_a_long_batch_keeps_the_next_waiting() -> None:
    time = pipeline_time([(1, 1), (4, 4), (1, 1)])
    assert time.begin == ((0, 1), (1, 5), (5, 9))
    assert time.bubble == pytest.approx(1 - 12 / 20)


def test_as_many_microbatches_are_under_way_as_there_are_stages() -> None:
    time = pipeline_time([(1, 5), (1, 1), (1, 1)])
    assert [begin[0] for begin in time.begin] == [0, 1, 6]


def test_stages_have_to_match() -> None:
    for grid in ([(1, 2), (1,)], [()]):
        with pytest.raises(ValueError, match="the same number"):
            pipeline_time(grid)
