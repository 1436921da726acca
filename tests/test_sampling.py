"""The sampler: each setting against its formula, or transformers' processor where that is the reference; draws that
depend on seed and position alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ballonet.hooks.sampling.sampler import Drawn, SampledRow, TokenCounts, draw, uniform
from ballonet.hooks.sampling.settings import ChosenToken, Sampling

VOCABULARY = 97
ANSWER = (4, 4, 9, 60, 4)
PROMPT = (9, 11, 12)


def logits(rows: int, seed: int = 3) -> torch.Tensor:
    made = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    return made.mul(4).round().div(4)  # many are equal


def sample(rows: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int], most: int = 64) -> list[int]:
    asked = [SampledRow(sampling, position) for sampling, position in zip(settings, positions, strict=True)]
    return draw(rows, asked, most).tokens.tolist()


def changed(row: torch.Tensor, asked: SampledRow) -> torch.Tensor:
    """The scores that a greedy row is chosen by, from the tokens that are chosen while the likeliest are ruled out."""
    order, bias = [], tuple(asked.sampling.bias)
    for _ in range(VOCABULARY):
        sampling = msgspec.structs.replace(asked.sampling, bias=bias + tuple((token, -1e6) for token in order))
        order += draw(row[None], [replace(asked, sampling=sampling)], 8).tokens.tolist()
    return torch.tensor(order)


def ranked(scores: torch.Tensor) -> torch.Tensor:
    return scores.sort(descending=True, stable=True).indices


# Settings that mean nothing


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.1},
        {"repetition": 0.0},
        {"bias": ((3, float("inf")),)},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="needed"):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_settings_and_tokens_travel_as_they_are() -> None:
    sampling = Sampling(-5, 0.7, 20, 0.9, 0.1, 1.0, -0.5, 1.2, ((3, -100.0),), 4, 2, "start: /a/")
    token = ChosenToken(3, -0.25, ((3, -0.25), (4, -1.5)))
    for record in (sampling, Sampling(), token, ChosenToken(7)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record)) == record


# Greedy rows


def test_without_a_temperature_the_likeliest_is_chosen() -> None:
    rows = logits(5)
    mixed = [Sampling(1), Sampling(2, 1.0), Sampling(3), Sampling(4, 2.0), Sampling(5)]
    tokens = sample(rows, mixed, [9] * 5)
    assert [tokens[0], tokens[2], tokens[4]] == rows.argmax(-1)[[0, 2, 4]].tolist()


def test_presence_and_frequency_count_the_answer_only() -> None:
    row, sampling = torch.randn(VOCABULARY), Sampling(presence=0.7, frequency=0.4)
    counts = TokenCounts(PROMPT, ANSWER, VOCABULARY, row.device)
    expected = row.clone()
    for token in set(ANSWER):
        expected[token] -= 0.7 + 0.4 * ANSWER.count(token)
    assert changed(row, SampledRow(sampling, 8, 5, counts=counts)).equal(ranked(expected))


def test_repetition_is_that_of_transformers_over_prompt_and_answer() -> None:
    row = torch.randn(VOCABULARY)
    counts = TokenCounts(PROMPT, ANSWER, VOCABULARY, row.device)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([PROMPT + ANSWER]), row[None].clone())[0]
    assert changed(row, SampledRow(Sampling(repetition=1.7), 8, 5, counts=counts)).equal(ranked(expected))


def test_counts_grow_with_drawn_tokens() -> None:
    grown, whole = (TokenCounts(PROMPT, tokens, VOCABULARY, torch.device("cpu")) for tokens in (ANSWER[:2], ANSWER))
    for token in ANSWER[2:]:
        grown.add(torch.tensor([token]))
    assert grown.answer.equal(whole.answer)
    assert grown.prompt.equal(whole.prompt)


def test_a_bias_is_added_to_the_logits() -> None:
    row, bias = torch.randn(VOCABULARY), ((3, 5.0), (8, -4.0))
    expected = row.clone()
    for token, by in bias:
        expected[token] += by
    assert changed(row, SampledRow(Sampling(bias=bias), 1)).equal(ranked(expected))


def test_ends_are_put_off_until_the_answer_is_long_enough() -> None:
    rows = logits(4)
    best = rows.argmax(-1).tolist()
    for answered in range(5):
        asked = [SampledRow(Sampling(least=3), 10 + answered, answered, (token, 0)) for token in best]
        tokens = draw(rows, asked, 8).tokens.tolist()
        assert all((token == end) == (answered >= 3) for token, end in zip(tokens, best, strict=True))


def mask_of(*tokens: int) -> torch.Tensor:
    words = [0] * -(-VOCABULARY // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - (1 << 32) * (word >> 31) for word in words], dtype=torch.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_come(temperature: float) -> None:
    rows, allowed = logits(40), (0, 31, 32, 63, 96)
    asked = [SampledRow(Sampling(n, temperature), n, allowed=lambda: mask_of(*allowed)) for n in range(40)]
    tokens = draw(rows, asked, 7).tokens.tolist()
    assert set(tokens) == set(allowed) if temperature else set(tokens) <= set(allowed)
    if not temperature:
        assert tokens == [max(allowed, key=lambda token: (row[token], -token)) for row in rows]


def test_an_end_that_alone_is_allowed_is_not_put_off() -> None:
    asked = SampledRow(Sampling(least=3, temperature=1.0), 4, 0, (7, 8), allowed=lambda: mask_of(7))
    assert draw(logits(1), [asked], 8).tokens.tolist() == [7]


# Logprobs


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_the_model_s_own(temperature: float) -> None:
    rows = logits(6)
    expected = rows.log_softmax(-1)
    changes = {"bias": ((5, 30.0),), "presence": 2.0}
    counts = [TokenCounts(PROMPT, ANSWER, VOCABULARY, rows.device) for _ in range(6)]
    wanted = [0, 3, None, 1, 200, 5]
    asked = [
        SampledRow(Sampling(n, temperature, logprobs=most, **changes), n, 5, counts=counts[n])  # type: ignore[arg-type]
        for n, most in enumerate(wanted)
    ]
    drawn = draw(rows.half(), asked, 4)
    tokens = drawn.tokens.tolist()
    for row, token, most, chosen in zip(expected, tokens, wanted, drawn.told(tokens), strict=True):
        assert chosen.token == token
        if most is None:
            assert chosen == ChosenToken(token)
            continue
        assert chosen.logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert len(chosen.likeliest) == min(most, VOCABULARY)
        values = [value for _, value in chosen.likeliest]
        assert values == pytest.approx(row.sort(descending=True).values[:most].tolist(), abs=1e-6)
        assert values == pytest.approx([float(row[likely]) for likely, _ in chosen.likeliest], abs=1e-6)


# Draws


def probabilities(row: torch.Tensor, settings: Sampling) -> torch.Tensor:
    """Returns the probabilities after transformers' processors."""
    ids, scores = torch.zeros(1, 1, dtype=torch.long), row[None].float()
    scores = TemperatureLogitsWarper(settings.temperature)(ids, scores)
    if settings.top_k:
        scores = TopKLogitsWarper(settings.top_k)(ids, scores)
    if settings.top_p < 1:
        scores = TopPLogitsWarper(settings.top_p)(ids, scores)
    if settings.min_p:
        scores = MinPLogitsWarper(settings.min_p)(ids, scores)
    chances: torch.Tensor = scores.softmax(-1)[0]
    return chances


SETTINGS = [
    Sampling(1, 1.0),
    Sampling(2, 0.6),
    Sampling(3, 1.3, top_k=7),
    Sampling(4, 1.0, top_p=0.6),
    Sampling(5, 1.7, top_k=30, top_p=0.8),
    Sampling(6, 0.9, top_k=1),
    Sampling(7, 0.9, top_k=VOCABULARY + 5, top_p=0.999),
    Sampling(8, 1.0, top_p=0.01),
    Sampling(9, 1.2, min_p=0.2),
    Sampling(10, 1.4, top_k=40, top_p=0.9, min_p=0.05),
    Sampling(11, 1.0, min_p=1.0),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_come_as_often_as_transformers_processors_say(settings: Sampling) -> None:
    row, draws = logits(1)[0], 4000
    if settings.top_p < 1:  # which of equal ones goes is not said
        row = row + torch.linspace(0, 0.1, VOCABULARY)
    expected = probabilities(row, settings)
    tokens = sample(row.expand(draws, -1), [settings] * draws, range(draws), most=1000)
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCABULARY).double() / draws
    assert not counts[expected == 0].any()
    # a fixed sequence of numbers: no chance is involved; 5 deviations of a binomial one
    assert ((counts - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()


def test_rows_do_not_depend_on_those_beside_them() -> None:
    settings = [*SETTINGS, Sampling(), Sampling(12, 1.0, logprobs=3), Sampling(bias=((9, 30.0),))]
    rows, positions = logits(len(settings)), list(range(10, 10 + len(settings)))
    together = sample(rows, settings, positions)
    alone = [sample(rows[n : n + 1], settings[n : n + 1], positions[n : n + 1])[0] for n in range(len(settings))]
    assert together == alone
    assert sample(rows.flip(0), settings[::-1], positions[::-1])[::-1] == together
    assert sample(rows, settings, positions, most=1) == together


def test_rows_behind_those_that_are_asked_for_get_the_likeliest() -> None:
    rows = logits(5)
    assert draw(rows, [SampledRow(SETTINGS[0], 3)], 8).tokens[1:].equal(rows[1:].argmax(-1))


def test_a_draw_depends_on_seed_and_position() -> None:
    row = torch.zeros(1, VOCABULARY)
    tokens = {(seed, at): sample(row, [Sampling(seed, 1.0)], [at])[0] for seed in range(8) for at in range(8)}
    assert len(set(tokens.values())) > VOCABULARY / 4
    assert tokens == {(seed, at): sample(row, [Sampling(seed, 1.0)], [at])[0] for seed, at in tokens}


def test_a_temperature_next_to_none_chooses_the_likeliest() -> None:
    rows = logits(6) * 100 + torch.linspace(0, 1, VOCABULARY)
    assert sample(rows, [Sampling(n, 1e-45) for n in range(6)], range(6)) == rows.argmax(-1).tolist()


def test_a_model_without_numbers_gets_a_token_of_its_vocabulary() -> None:
    tokens = sample(torch.full((3, VOCABULARY), torch.nan), [*SETTINGS[:2], Sampling()], range(3))
    assert all(0 <= token < VOCABULARY for token in tokens)


def test_numbers_depend_on_seed_and_position_and_fill_the_interval() -> None:
    numbers = [uniform(seed, position) for seed in (0, 1, -1, 2**63) for position in range(500)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert uniform(5, 6) == uniform(5, 6) != uniform(6, 5)


def test_told_tokens_have_the_order_of_rows() -> None:
    rows = logits(9)
    wanted: list[int | None] = [2, None, 1, 0, None, 2, 3, None, 1]
    asked = [SampledRow(Sampling(n, (n % 2) * 1.0, logprobs=most), n) for n, most in enumerate(wanted)]
    drawn: Drawn = draw(rows, asked, 2)
    assert [chosen.token for chosen in drawn.told(drawn.tokens.tolist())] == drawn.tokens.tolist()
    assert [len(chosen.likeliest) for chosen in drawn.told(drawn.tokens.tolist())] == [most or 0 for most in wanted]
    pairs = itertools.pairwise(drawn.told(drawn.tokens.tolist())[0].likeliest)
    assert all(one[1] >= other[1] for one, other in pairs)
