"""What bounds a step where requests have no SLO, and whose KV on the host is read in it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.admission import LogicalBuffer
from ballonet.offload.policy.step_bound import ReadingTurns, StepBound
from ballonet.offload.policy.step_costs import Parts, Step, StepCosts
from ballonet.offload.policy.tuning import Serving

TUNING = Serving(patience=4, fading=0.5, gain=0.1, refit=1)
PARTS = Parts(8.0, 0.25, 0.0, 0.0, away=0.5)
waiting = st.dictionaries(st.text("abcdef", min_size=1, max_size=2), st.integers(1, 100), max_size=8)


def known(parts: Parts = PARTS, assumed: float = 0.0) -> StepCosts:
    """The costs of a loop that has learned such parts from its steps."""
    costs = StepCosts(TUNING, lambda: (0.0, assumed))
    for new in (1, 2, 4, 8):
        for away in (0, 10, 20, 40) if parts.away else (0,):
            step = Step(new, new, away=away)
            costs.observe(step, parts.seconds(step))
    return costs


KNOWN = known()


def test_bound_is_the_longest_step_of_late_that_read_nothing() -> None:
    bound = StepBound(TUNING)
    assert bound.seconds == math.inf, "nothing is known, and nothing is bound"
    assert not bound.observe(Step(1, 1, away=9), 1e9)
    assert bound.seconds == math.inf, "a step that reads on the host is no example"
    bound.observe(Step(2048, 2048), 8.0)
    assert bound.seconds == 8
    assert not bound.observe(Step(1, 1, away=9), 8.5), "that is noise"
    assert bound.observe(Step(1, 1, away=9), 9.0)
    for seconds in (4, 2, 1):
        bound.observe(Step(1, 1), 1.0)
        assert bound.seconds == seconds


def test_slow_steps_halve_the_buffer_and_waiting_doubles_it() -> None:
    """Algorithm 2, with the own past in the place of an SLO."""
    bound, buffer = StepBound(TUNING), LogicalBuffer(1024, 1, 1024, TUNING)
    bound.observe(Step(2048, 2048), 8.0)
    for _ in range(TUNING.violations):
        buffer.observe(tpot=bound.observe(Step(1, 1, away=9), 20.0), ttft=False)
    assert buffer.size == 512
    for _ in range(TUNING.violations):
        buffer.observe(tpot=bound.observe(Step(1, 1, away=1), 7.0), ttft=True)
    assert buffer.size == 1024


@given(waiting, st.integers(9, 60), st.booleans())
def test_reading_on_the_host_never_makes_a_step_longer_than_the_bound(
    pages: dict[str, int], seconds: int, others: bool
) -> None:
    """But for a request that reads alone, as nobody else could go on, or as it has waited for long enough."""
    costs, turns = KNOWN, ReadingTurns(TUNING)
    step = Step.of((1, 0) for _ in range(len(pages) + others))
    for waited in range(2 * TUNING.patience):
        chosen = turns.choose(pages, costs.readable(step, seconds), others)
        took = PARTS.seconds(Step(step.new, step.read, away=sum(pages[name] for name in chosen)))
        # 1e-6: the parts are fitted
        assert took <= seconds + 1e-6 or len(chosen) <= 1
        assert took <= seconds + 1e-6 or not chosen or waited >= TUNING.patience or not others
        assert chosen or others or not pages


@given(waiting, st.integers(0, 120), st.booleans())
def test_every_request_reads_after_so_many_steps(pages: dict[str, int], most: int, others: bool) -> None:
    turns, since = ReadingTurns(TUNING), dict.fromkeys(pages, 0)
    for _ in range(100):
        chosen = turns.choose(pages, most, others)
        assert chosen <= pages.keys()
        since = {name: 0 if name in chosen else steps + 1 for name, steps in since.items()}
        assert all(steps <= TUNING.patience + len(pages) for steps in since.values())


def test_all_read_where_there_is_room() -> None:
    turns = ReadingTurns(TUNING)
    assert turns.choose({"a": 3, "b": 4}, math.inf, True) == {"a", "b"}
    assert turns.choose({"a": 3, "b": 4}, 7, True) == {"a", "b"}
    assert [turns.choose({"a": 3, "b": 4}, 4, True) for _ in range(3)] == [{"a"}, {"b"}, {"a"}]


@pytest.mark.parametrize(("seconds", "pages"), [(8.25, 0), (8.0, 0), (10.25, 4), (10.6, 4)])
def test_pages_that_may_be_read_are_those_that_the_bound_leaves(seconds: float, pages: int) -> None:
    costs = known()
    assert costs.readable(Step(1, 1, away=77), seconds + 1e-9) == pages


def test_page_that_no_step_has_read_costs_what_is_assumed() -> None:
    never = Parts(8.0, 0.25, 0.0, 0.0)
    assert known(never).readable(Step(1, 1), 9.0) == math.inf
    assert known(never, assumed=0.25).readable(Step(1, 1), 9.25 + 1e-9) == 4
    assert StepCosts(TUNING, lambda: (0.0, 1.0)).readable(Step(1, 1), 9.0) == math.inf, "no step has run"
