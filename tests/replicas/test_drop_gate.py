"""Whether a drop pays: memory-bound loads drop, compute-bound ones do not, and the replay against sums by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.replicas.drops import Work, _dealt, drain_seconds, judge
from ballonet.offload.policy.tuning import Replicas

TUNING = Replicas(chunk=512, bubble=0.1, gain=0.05)


class Linear:
    """`token` seconds for each token of a prompt, `step` for each microbatch, `old` for each token before a chunk."""

    def __init__(self, token: float = 0.0, step: float = 0.0, old: float = 0.0) -> None:
        self.token, self.step, self.old = token, step, old
        self.batches = 0

    def seconds(self, before: int, new: int) -> float:
        return self.step + self.old * before + self.token * new

    def batch(self, chunks: Iterable[tuple[int, int]]) -> float:
        self.batches += 1
        return self.step + sum(self.old * before + self.token * new for before, new in chunks)


def test_prompts_that_fit_take_their_chunks() -> None:
    """600 and 400 tokens: 512 and 488 in two rounds; while the second runs no request decodes."""
    work = Work(10_000, 1, [(600, 10), (400, 10)])
    assert drain_seconds(work, Linear(token=0.001, step=0.1), TUNING) == pytest.approx(1.0 + 0.2)


def test_a_prompt_waits_until_one_that_runs_ends() -> None:
    """One that runs has 50 tokens to go, 0.1 s each; then a round for the prompt."""
    work = Work(1000, 1, [(500, 100)], [(800, 50)])
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(5.0 + 0.1)


def test_those_that_end_at_different_times_make_room_one_by_one() -> None:
    """300 + 100 tokens fit after the second has ended: 200 are free after 10 rounds, 400 after 30."""
    work = Work(1000, 1, [(300, 100)], [(190, 10), (170, 30), (100, 500)])
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(3.0 + 0.1)


def test_a_pipeline_shares_the_cost_of_its_microbatches() -> None:
    """1,024 tokens in two microbatches of 0.6 s each, on two stages: 0.6 s, and a tenth more for the bubble."""
    work = Work(10_000, 2, [(1024, 1)])
    assert drain_seconds(work, Linear(token=0.001, step=0.088), TUNING) == pytest.approx(0.6 * 1.1)


def test_tokens_before_a_chunk_cost() -> None:
    work = Work(10_000, 1, [(1024, 1)])
    assert drain_seconds(work, Linear(old=1.0), TUNING) == pytest.approx(512.0)


def test_those_whose_kv_is_exchanged_wait() -> None:
    """The requests have 10 tokens to go, from 2 s on; the prompt needs what they hold."""
    work = Work(1000, 1, [(500, 100)], [(800, 10)], stall=2.0)
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(2.0 + 1.0 + 0.1)
    fits = Work(2000, 1, [(500, 100)], [(800, 10)], stall=2.0)
    assert drain_seconds(fits, Linear(step=0.1), TUNING) == pytest.approx(0.1)


def test_who_runs_during_an_exchange_is_joined_by_the_others_when_it_is_over() -> None:
    """The first prompt runs at once and would decode for 400 rounds; after 2 s those that were stalled run too."""
    work = Work(1000, 1, [(200, 400), (300, 60)], [(300, 5)], stall=2.0)
    assert drain_seconds(work, Linear(step=0.1), TUNING) == pytest.approx(2.0 + 0.5 + 0.1)


def test_a_prompt_that_never_fits_takes_for_ever() -> None:
    assert drain_seconds(Work(100, 1, [(200, 1)]), Linear(step=0.1), TUNING) == math.inf
    assert drain_seconds(Work(100, 1, []), Linear(step=0.1), TUNING) == 0.0


def test_a_load_that_waits_for_memory_drops() -> None:
    """Two replicas of 1,000 tokens, of which the model took as much: 3,000 together. Decoding takes long."""
    cost = Linear(token=0.0001, step=0.05)
    apart = Work(1000, 1, [(400, 100)], [(500, 400)])
    both = Work(3000, 2, [(400, 100)] * 2, [(500, 400)] * 2, stall=1.0)
    verdict = judge([apart, apart], both, cost, TUNING)
    assert verdict.helps
    assert verdict.dropped < verdict.kept / 10


def test_a_load_that_waits_for_its_prompts_to_be_computed_does_not() -> None:
    """As much is queued, and what runs is nearly done: memory is there before the prompts are computed."""
    cost = Linear(token=0.01, step=0.001)
    apart = Work(1000, 1, [(400, 1)] * 8, [(500, 2)])
    both = Work(3000, 2, [(400, 1)] * 16, [(500, 2)] * 2, stall=1.0)
    verdict = judge([apart, apart], both, cost, TUNING)
    assert not verdict.helps
    assert verdict.dropped > verdict.kept


def test_two_that_never_end_are_no_gain() -> None:
    never = Work(100, 1, [(200, 1)])
    assert not judge([never], never, Linear(step=1.0), TUNING).helps
    assert judge([never], Work(300, 2, [(200, 1)]), Linear(step=1.0), TUNING).helps


def test_groups_count_for_their_replicas() -> None:
    cost = Linear(step=0.1)
    fast, slow = Work(1000, 1, [(500, 100)], [(900, 90)]), Work(2000, 3, [(500, 100)], [(1000, 500)])
    verdict = judge([fast, slow], Work(3000, 4, []), cost, TUNING)
    each = [drain_seconds(work, cost, TUNING) for work in (fast, slow)]
    assert each[0] < TUNING.dwell < each[1]
    assert verdict.kept == pytest.approx((each[0] + 3 * each[1]) / 4)


def test_a_short_queue_is_no_reason_where_a_pipeline_is_slower_for_what_follows() -> None:
    """Prompts are what takes time, so a pair is slower by the bubble; but two queues that differ are drained sooner by
    both, and the memory that one waits for is there."""
    cost = Linear(token=0.002)
    long, idle = Work(1000, 1, [(300, 1)] * 3, [(900, 2)]), Work(1000, 1, [])
    both = Work(3000, 2, long.queued, long.running)
    assert drain_seconds(both, cost, TUNING) < 0.6 * drain_seconds(long, cost, TUNING)
    verdict = judge([long, idle], both, cost, TUNING)
    assert not verdict.helps
    assert verdict.kept > 0.5 * TUNING.dwell, "as if demand went on"
    memory = Linear(step=0.1)  # but where a step takes as long whatever is in it, twice the memory is
    held, more = Work(1000, 1, [(300, 20)] * 3, [(900, 9)]), Work(3000, 2, [(300, 20)] * 6, [(900, 9)] * 2)
    assert judge([held, held], more, memory, TUNING).helps


def test_demand_that_goes_on_is_dealt_out_by_replicas() -> None:
    """Each replica gets as much of it, so a group of two gets twice what one gets, and each request is in one."""
    parts = [Work(100, 1, [(10, 1)]), Work(100, 2, [(20, 1)]), Work(100, 1, [])]
    found = _dealt(parts, [(n, 1) for n in range(30, 50)])
    assert sorted(each for work in found for each in work.queued) == [
        (10, 1),
        (20, 1),
        *((n, 1) for n in range(30, 50)),
    ]
    assert [len(work.queued) for work in found] == [1 + 5, 1 + 10, 5]
    assert found[0].queued[0] == (10, 1)


REQUESTS = st.lists(st.tuples(st.integers(1, 900), st.integers(0, 60)), max_size=8)


@given(REQUESTS, REQUESTS, st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 3))
def test_more_memory_never_takes_for_ever_where_less_does_not(
    queued: list[tuple[int, int]], running: list[tuple[int, int]], capacity: int, more: int, stages: int
) -> None:
    cost = Linear(token=0.001, step=0.01)
    seconds = drain_seconds(Work(capacity, stages, queued, running), cost, TUNING)
    if max((prompt + max(1, new) for prompt, new in queued), default=0) <= capacity:
        assert seconds < math.inf
        assert drain_seconds(Work(capacity + more, stages, queued, running), cost, TUNING) < math.inf
    tokens = sum(prompt for prompt, _ in queued)
    assert seconds >= tokens * 0.001 / stages - 1e-9  # never faster than its prompts alone


def test_a_prediction_costs_few_evaluations() -> None:
    """256 that run and 64 that wait: not a round for each of 1,000 tokens."""
    cost = Linear(token=0.0001, step=0.01)
    work = Work(256 * 2000, 1, [(1500, 400)] * 64, [(1000, 1000 - each) for each in range(256)])
    drain_seconds(work, cost, TUNING)
    assert cost.batches < 1000
