"""Costs of chunks: parts of a prompt add up, the fit finds the cost of the samples, cuts take the given time."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.replicas.pipeline import ChunkCost, Sample, fit, is_decode
from ballonet.offload.policy.step_costs import Parts, Step

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
    assert sum(PLAIN.seconds(*each) for each in parts) == pytest.approx(whole + (len(parts) - 1) * PLAIN.gamma)


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
def test_what_is_no_cost_is_refused(parts: tuple[float, float, float]) -> None:
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
    found = fit(samples(truth, 0.0))
    assert found.error < 1e-6
    assert (found.cost.square is None) == (square is None), "no coefficient that does not help"
    assert (found.cost.prefix > 0) == (prefix > 0)
    assert found.cost.alpha == pytest.approx(truth.alpha, rel=1e-3)
    assert found.cost.gamma == pytest.approx(truth.gamma, rel=1e-3)
    for chunk in [(0, 900), (5000, 100), (800, 1)]:
        assert found.cost.seconds(*chunk) == pytest.approx(truth.seconds(*chunk), rel=1e-3)


def test_the_fit_finds_pairs_of_different_requests() -> None:
    truth = ChunkCost.packed(5e-3, 1e-4, 2e-6, 3e-8)
    found = fit(samples(truth, 0.0))
    assert found.error < 1e-6
    for field in ("alpha", "beta", "gamma", "within", "prefix", "others"):
        assert getattr(found.cost, field) == pytest.approx(getattr(truth, field), rel=1e-3)
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
    found = fit(taken)
    assert found.error < 1e-6
    for chunks in ([(300, 1)], [(300, 1)] * 3, [(0, 256)]):
        assert found.cost.batch(chunks) == pytest.approx(truth.batch(chunks), rel=1e-3)
    several = [each for each in taken if len(each.chunks) > 1]
    assert (found.cost.decode or found.cost).lone > 0
    told_nothing = fit(several).cost
    assert (told_nothing.decode or told_nothing).lone == 0.0, "no batch has one row"


def test_the_error_is_that_of_batches_that_were_held_out() -> None:
    truth = ChunkCost(2e-9, 1e-5, 5e-3, decode=ChunkCost(1e-8, 4e-5, 4e-3))
    taken = samples(truth, 0.1)
    found = fit(taken)
    fresh = samples(truth, 0.1, 1000)[len(taken) :]
    seen = sum(abs(found.cost.batch(each.chunks) / each.seconds - 1) for each in fresh) / len(fresh)
    assert found.error == pytest.approx(seen, rel=0.35)
    assert found.decode_error is not None


def test_batches_that_are_held_out_have_no_part_in_the_fit() -> None:
    taken = samples(ChunkCost(2e-9, 1e-5, 5e-3, decode=ChunkCost(1e-8, 4e-5, 4e-3)), 0.0)
    odd: list[Sample] = []
    for decoding in (False, True):
        kind = [each for each in taken if all(is_decode(*chunk) for chunk in each.chunks) == decoding]
        odd += [Sample(each.chunks, each.seconds * (3 if n % 4 == 0 else 1)) for n, each in enumerate(kind)]
    found = fit(odd)
    assert (found.prefill_error, found.decode_error) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_no_coefficient_is_negative(noise: float) -> None:
    cost = fit(samples(ChunkCost(0.0, 1e-5, 5e-3), noise)).cost
    assert min(cost.alpha, cost.beta, cost.gamma, cost.within, cost.prefix) >= 0


def test_too_few_batches_and_batches_of_one_size_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit(samples(PLAIN, 0.0, 6))
    with pytest.raises(ValueError, match="several lengths"):
        fit([Sample(((0, 1),), 0.0 + 1e-3)] * 3 + [Sample(((0, 256),), 1e-3)] * 20)
