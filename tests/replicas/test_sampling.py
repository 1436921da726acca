"""Sampling keyed by seed and position: what transformers' processors allow, the same again, as often as it should."""

from __future__ import annotations

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from ballonet.hooks.replicas.follower import sample, uniform
from ballonet.hooks.replicas.microbatch_plan import Sampling

VOCABULARY = 97


def logits(rows: int, seed: int = 3) -> torch.Tensor:
    found = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    return found.mul(4).round().div(4)  # many are equal


def probabilities(row: torch.Tensor, settings: Sampling) -> torch.Tensor:
    """Returns the probabilities after transformers' processors."""
    ids, scores = torch.zeros(1, 1, dtype=torch.long), row[None].float()
    scores = TemperatureLogitsWarper(settings.temperature)(ids, scores)
    if settings.top_k:
        scores = TopKLogitsWarper(settings.top_k)(ids, scores)
    if settings.top_p < 1:
        scores = TopPLogitsWarper(settings.top_p)(ids, scores)
    found: torch.Tensor = scores.softmax(-1)[0]
    return found


SETTINGS = [
    Sampling(1, 1.0),
    Sampling(2, 0.6),
    Sampling(3, 1.3, top_k=7),
    Sampling(4, 1.0, top_p=0.6),
    Sampling(5, 1.7, top_k=30, top_p=0.8),
    Sampling(6, 0.9, top_k=1),
    Sampling(7, 0.9, top_k=VOCABULARY + 5, top_p=0.999),
    Sampling(8, 1.0, top_p=0.01),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_come_as_often_as_transformers_processors_say(settings: Sampling) -> None:
    row, draws = logits(1)[0], 4000
    if settings.top_p < 1:  # which of equal ones goes is not said
        row = row + torch.linspace(0, 0.1, VOCABULARY)
    expected = probabilities(row, settings)
    found = sample(row.expand(draws, -1), [settings] * draws, range(draws))
    counts = torch.bincount(torch.tensor(found), minlength=VOCABULARY).double() / draws
    assert not counts[expected == 0].any()
    # a fixed sequence of numbers: no chance is involved; 5 deviations of a binomial one
    assert ((counts - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()


def test_rows_do_not_depend_on_those_beside_them() -> None:
    rows, positions = logits(len(SETTINGS)), list(range(10, 10 + len(SETTINGS)))
    together = sample(rows, SETTINGS, positions)
    alone = [sample(rows[n : n + 1], SETTINGS[n : n + 1], positions[n : n + 1])[0] for n in range(len(SETTINGS))]
    assert together == alone
    backwards = sample(rows.flip(0), SETTINGS[::-1], positions[::-1])
    assert backwards[::-1] == together


def test_without_a_temperature_the_likeliest_is_chosen() -> None:
    rows = logits(5)
    mixed = [Sampling(1), Sampling(2, 1.0), Sampling(3), Sampling(4, 2.0), Sampling(5)]
    found = sample(rows, mixed, [9] * 5)
    assert [found[0], found[2], found[4]] == rows.argmax(-1)[[0, 2, 4]].tolist()


def test_numbers_depend_on_seed_and_position_and_fill_the_interval() -> None:
    found = [uniform(seed, position) for seed in (0, 1, -1, 2**63) for position in range(500)]
    assert len(set(found)) == len(found)
    assert 0 <= min(found) < 0.01
    assert 0.99 < max(found) < 1
    assert uniform(5, 6) == uniform(5, 6) != uniform(6, 5)
