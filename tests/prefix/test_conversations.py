"""Tokens with a store of prefixes are those of stock with the same cache held by hand, whatever was kept before."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from ..pool import tiny_layers
from ..tuned import Tuned
from .conversations import sides, words

PAGE = 4096


@pytest.fixture(autouse=True)
def device(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**25, PAGE):
        yield


def test_a_conversation_goes_on_where_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch) as both:
        ids = words(generator, 20)
        for turn in range(8):
            before = ids.shape[1]
            ids = both.ask(ids)
            assert both.reused == (before - 8 if turn else 0)  # all but the last token generated, and 7 new ones
            ids = torch.cat([ids, words(generator, 7)], 1)
        assert both.store.counts.moves == 7
        assert both.store.counts.copies == 0


@pytest.mark.parametrize("seed", range(4))
def test_conversations_that_branch(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = ["llama", "qwen2", "falcon", "gpt2"][seed % 4]
    with sides(monkeypatch, name, chaos=seed, block=draw.choice((4, 8))) as both:
        system = words(generator, 11)
        talks = [system]
        for _ in range(24):
            talk = draw.choice(talks)
            if draw.random() < 0.4:  # edited, or asked again
                talk = talk[:, : draw.randint(1, talk.shape[1])]
            talk = torch.cat([talk, words(generator, draw.randint(1, 9))], 1)
            talk = both.ask(talk, max_new_tokens=(new := draw.randint(1, 8)), min_new_tokens=new)
            both.check()
            if talk.shape[1] < 120:
                talks.append(talk)
        assert both.store.counts.copies > 3
        assert both.store.counts.moves > 3


def test_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with different prefixes, of different lengths; each is a sequence of its own afterwards."""
    draw, generator = random.Random(3), torch.Generator().manual_seed(3)
    with sides(monkeypatch, chaos=3) as both:
        talks = [words(generator, draw.randint(4, 30))[0].tolist() for _ in range(3)]
        for _ in range(12):
            rows = [
                talk[: draw.randint(max(1, len(talk) - 9), len(talk))]
                + words(generator, draw.randint(1, 7))[0].tolist()
                for talk in draw.sample(talks, 3)
            ]
            columns = max(map(len, rows))
            ids = torch.tensor([[0] * (columns - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
            tokens = both.ask(ids, attention_mask=mask)
            talks += [row[columns - len(old) :] for old, row in zip(rows, tokens.tolist(), strict=True)]
            talks = [talk for talk in talks if len(talk) < 90][-8:]
            single = draw.choice(talks)
            both.ask(torch.tensor([[*single, 3]]))
        assert both.store.counts.copies > 6


def test_a_row_with_more_pads_than_what_is_stored_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(9)
    with sides(monkeypatch) as both:
        ids = torch.cat([both.ask(words(generator, 20)), words(generator, 40)], 1)
        padded = torch.cat([torch.zeros(1, 60, dtype=torch.int64), words(generator, ids.shape[1] - 60)], 1)
        both.ask(torch.cat([ids, padded]), attention_mask=torch.cat([torch.ones_like(ids), (padded != 0).long()]))
        assert both.reused == 25


@pytest.mark.parametrize(
    "options",
    [
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"return_dict_in_generate": True},
        {"do_sample": True, "temperature": 1.5},
    ],
    ids=lambda options: ",".join(options),
)
def test_ways_of_choosing_tokens(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(1)
    with sides(monkeypatch) as both:
        ids = both.ask(words(generator, 30))
        for _ in range(4):
            ids = torch.cat([ids[:1], words(generator, 5)], 1)
            ids = both.ask(ids, **options)
            assert both.reused >= 29
