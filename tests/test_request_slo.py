"""Which requests may begin, wait or are refused by what they ask of their tokens: what must hold of any answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.step_costs import NOTHING, Parts, RequestSLO, Step, may_begin, refused, tightest

PARTS = Parts(0.02, 2e-3, 1e-5, 5e-7)
slos = st.none() | st.floats(1e-3, 2.0)
requests = st.builds(RequestSLO, slos, slos, st.floats(0, 5))


@given(requests, st.integers(1, 3000), st.integers(1, 500), st.floats(5, 10))
def test_the_nearest_slo_can_be_kept(slo: RequestSLO, prompt: int, new: int, now: float) -> None:
    refusal = refused(PARTS, slo, prompt, new, 256, now)
    if refusal is None:
        return
    assert refusal.possible > refusal.asked
    asked = {"ttft": slo.ttft, "tpot": slo.tpot} | {refusal.slo: refusal.possible * (1 + 1e-9)}
    again = refused(PARTS, RequestSLO(asked["ttft"], asked["tpot"], slo.arrived), prompt, new, 256, now)
    assert again is None or again.slo != refusal.slo


def test_time_waited_counts_against_the_slo() -> None:
    slo = RequestSLO(ttft=1.0, arrived=10.0)
    seconds = PARTS.seconds(Step(200, 200))
    assert refused(PARTS, slo, 200, 10, 256, 11.0 - seconds - 1e-6) is None
    late = refused(PARTS, slo, 200, 10, 256, 11.0)
    assert late is not None
    assert late.possible == pytest.approx(1.0 + seconds)
    assert "ttft of 1 s cannot be kept" in str(late)


def test_a_long_prompt_takes_all_of_its_steps() -> None:
    seconds = sum(PARTS.seconds(Step(100, held + 100)) for held in (0, 100, 200))
    assert refused(PARTS, RequestSLO(ttft=seconds * 0.99), 300, 1, 100, 0.0) is not None
    assert refused(PARTS, RequestSLO(ttft=seconds * 1.01), 300, 1, 100, 0.0) is None


@given(st.lists(st.tuples(st.integers(1, 400), requests), max_size=12), st.integers(1, 400), requests)
def test_beginning_request_keeps_the_slos_of_others(
    running: list[tuple[int, RequestSLO]], tokens: int, slo: RequestSLO
) -> None:
    together = [*running, (tokens, slo)]
    strictest = tightest(promised for _, promised in together).tpot
    seconds = PARTS.seconds(Step.of((1, held) for held, _ in together))
    expected = strictest is None or seconds <= strictest or not running
    assert may_begin(PARTS, running, tokens, slo) == expected


def test_unmeasured_steps_refuse_no_request() -> None:
    hard = RequestSLO(1e-9, 1e-9)
    assert refused(None, hard, 1000, 1000, 256, 100.0) is None
    assert may_begin(None, [(100, hard)], 100, hard)
    assert refused(PARTS, NOTHING, 10**6, 10**6, 256, 100.0) is None
