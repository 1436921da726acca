"""Records between stages: what is sent is what arrives."""

from __future__ import annotations

import pytest

from ballonet.hooks.replicas.kv_exchange import Handed, HandedOver, Piece
from ballonet.hooks.replicas.microbatch_plan import (
    Chunk,
    MicrobatchPlan,
    Passing,
    Request,
    Sampling,
    record_of,
    tensor_of,
)
from ballonet.offload.policy.replicas.groups import Group, Span

GROUP = Group((2, 0), (Span(0, 3), Span(3, 8)))


def test_records_arrive_as_they_were() -> None:
    plan = MicrobatchPlan(
        2,
        7,
        (Chunk("a", (3, 4, 5), 10, False), Chunk("b", (9,), 0, True)),
        (("b", Sampling(-5, 0.7, 20, 0.9)),),
        ("c",),
        ("d", "e"),
    )
    passing = Passing(2, 7, (("a", 1),), (40, 50), 2)
    answer = Passing(2, 7, (("a", 1),), (40, 50, 60), tokens=(("b", 12),))
    handed = HandedOver(2, GROUP, (Handed(Request("a", (1, 2), 5, Sampling(7, 0.5), (9,), (4,)), 4),))
    for record in (plan, MicrobatchPlan(0, 0), passing, answer, handed, Piece("a", 40, 3, 2, 5, -(2**62))):
        assert record_of(tensor_of(record), type(record)) == record


def test_a_chunk_samples_the_token_behind_it() -> None:
    assert Chunk("a", (3, 4, 5), 10, True).end == 13


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="top_p"):
        Sampling(**wrong)  # type: ignore[arg-type]
