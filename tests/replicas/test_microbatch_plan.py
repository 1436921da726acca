"""Records between stages: what is sent is what arrives."""

from __future__ import annotations

import pytest

from ballonet.hooks.replicas.microbatch_plan import Answer, Chunk, MicrobatchPlan, Passing, Sampling


def test_records_arrive_as_they_were() -> None:
    plan = MicrobatchPlan(
        2,
        7,
        (Chunk("a", (3, 4, 5), 10, False), Chunk("b", (9,), 0, True)),
        (("b", Sampling(-5, 0.7, 20, 0.9)),),
        ("c",),
        ("d", "e"),
    )
    assert MicrobatchPlan.from_json(plan.to_json()) == plan
    assert MicrobatchPlan.from_json(MicrobatchPlan(0, 0).to_json()) == MicrobatchPlan(0, 0)
    passing = Passing(2, 7, (("a", 1),), (40, 50), 2)
    assert Passing.from_json(passing.to_json()) == passing
    answer = Answer(2, 7, (("b", 12),), (("a", 1),), (40, 50, 60))
    assert Answer.from_json(answer.to_json()) == answer


def test_a_chunk_samples_the_token_behind_it() -> None:
    assert Chunk("a", (3, 4, 5), 10, True).end == 13


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="top_p"):
        Sampling(**wrong)  # type: ignore[arg-type]
