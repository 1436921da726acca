"""Conversations go on from what is stored, with the tokens of a cache that is held by hand: turns, chaos, streams,
threads, pages that left and came back, and another process that finds them in files."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache

import ballonet
from ballonet import testing
from ballonet.allocator.errors import BudgetInUse
from ballonet.hooks.prefix import saving
from ballonet.offload.residency.prefix_files import Saved

from .. import models
from .scene import Captured, Place, everywhere, play, scene

PAGES = 512
TOKENS = 8  # of an answer
Ids = list[int]


class Talk:
    """One conversation, turn by turn: with a model that keeps prefixes, or with stock and a cache held by hand."""

    def __init__(self, model: Any, place: Place, seed: int, cache: DynamicCache | None = None) -> None:
        self._model = model
        self._place = place
        self._random = torch.Generator().manual_seed(seed)
        self._cache = cache
        self.said: Ids = []

    def turn(self, words: int) -> Ids:
        """Asks `new` tokens; returns the answer."""
        self.said += torch.randint(2, models.VOCABULARY, (words,), generator=self._random).tolist()
        ids = torch.tensor([self.said], device=self._place.kind)
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        if self._cache is not None:
            settings["past_key_values"] = self._cache
        tokens = self._model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        answer: Ids = tokens[0, ids.shape[1] :].tolist()
        self.said += answer
        return answer


def speaker(place: Place) -> Any:
    """A model whose cache takes pages of every layer, as it is on the device."""
    hidden, length = (512, 8192) if place.cuda else (64, 4096)
    wide: dict[str, Any] = {}
    if place.cuda:  # 4 KiB of a layer's KV in a token: a first turn fills two of the device's pages
        wide = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    model = models.build("llama", hidden_size=hidden, num_hidden_layers=4, max_position_embeddings=length, **wide)
    return model.to(place.kind, torch.bfloat16 if place.cuda else torch.float32)


def words(place: Place) -> tuple[int, ...]:
    """New tokens of each turn: the first one fills several blocks."""
    return (1500, 40, 300, 1, 7) if place.cuda else (600, 40, 90, 1, 7)


def expected(model: Any, place: Place, seeds: range) -> list[list[Ids]]:
    """The answers of stock, by conversation and turn."""
    talks = [Talk(model, place, seed, DynamicCache(config=model.config)) for seed in seeds]
    return [[talk.turn(count) for count in words(place)] for talk in talks]


def compare(actual: list[list[Ids]], wanted: list[list[Ids]]) -> None:
    for talk, (mine, theirs) in enumerate(zip(actual, wanted, strict=True)):
        for turn, (answer, right) in enumerate(zip(mine, theirs, strict=True)):
            assert answer == right, f"conversation {talk}, turn {turn}: {answer}, by hand {right}"


def squeeze(place: Place) -> None:
    """The budget is as small as it can be for a moment."""
    pages = sum(ballonet.stats().pages.values())
    try:
        ballonet.set_budget(max(1, pages - place.pages("kv")) * place.page)
    except BudgetInUse as error:
        if error.smallest < pages * place.page:
            ballonet.set_budget(error.smallest)
    finally:
        ballonet.set_budget(PAGES * place.page)


@scene(pages=PAGES, host_pages=PAGES)
@pytest.mark.parametrize("chaos", [None, 3])
def test_conversations_while_pages_move(place: Place, chaos: int | None) -> None:
    """Turn about, each turn on another stream than the one before, with work that is still running when it begins.
    Without chaos all that is stored leaves the device after each turn."""
    model, seeds = speaker(place), range(3)
    wanted = expected(model, place, seeds)
    managed = testing.manage(model, interval=None, prefix_cache=True, chaos=chaos)
    talks, lanes = [Talk(model, place, seed) for seed in seeds], [place.lane() for _ in range(3)]
    actual: list[list[Ids]] = [[] for _ in seeds]
    for turn, count in enumerate(words(place)):
        for number, talk in enumerate(talks):
            with lanes[(turn + number + turn // 3) % len(lanes)]():
                if turn % 2:
                    place.sleep()
                actual[number].append(talk.turn(count))
        if chaos is None:
            place.empty_cache()
            squeeze(place)
    compare(actual, wanted)
    assert managed.prefixes is not None
    assert managed.prefixes.counts.hits >= 3 * words(place)[0], "the first turn was computed again"
    assert chaos or ballonet.stats().copied.kv_d2h > 0, "nothing had to leave"


@scene(pages=PAGES, host_pages=PAGES)
def test_threads_that_talk_at_once(place: Place) -> None:
    """Threads that talk at the same time, two of them about the same."""
    model, seeds = speaker(place), range(2)
    wanted = expected(model, place, seeds)
    ballonet.manage(model, prefix_cache=True)

    def speak(number: int) -> list[Ids]:
        talk = Talk(model, place, seeds[number % 2])
        return [talk.turn(count) for count in words(place)]

    with ThreadPoolExecutor(3) as threads:
        actual = list(threads.map(speak, range(3)))
    compare(actual, [wanted[number % 2] for number in range(3)])


def in_files(place: Place, folder: str, again: bool) -> None:
    """One process writes, another one with the same model reads, to memory that the device copies from at full
    speed. What is stored is read and written behind while graphs are captured, in the mode that forbids other threads
    most."""
    model, pinned = speaker(place), list[bool]()
    wanted = expected(model, place, range(1))
    prefixes = ballonet.manage(model, prefix_cache=True, prefix_dir=folder).prefixes
    assert prefixes is not None

    class Noted(saving.SavedRun):
        def __init__(self, saved: Saved, *rest: Any) -> None:
            pinned.extend(
                torch.frombuffer(saving.data, dtype=torch.uint8).is_pinned() for saving in saved.tensors.values()
            )
            super().__init__(saved, *rest)

    talk, ones = Talk(model, place, 0), torch.ones(64, device=place.kind)
    actual: list[Ids] = []
    with patch.object(saving, "SavedRun", Noted):
        for count in words(place):
            actual.append(talk.turn(count))
            deadline, written = time.monotonic() + 600, False
            while not written:
                assert time.monotonic() < deadline
                captured = Captured(place, lambda: (ones * 3,))
                written = prefixes.flush(0)
                assert captured.replay()[0].eq(3).all().item()
                del captured
    compare([actual], wanted)
    assert pinned.count(place.cuda) == len(pinned)
    assert bool(pinned) == (prefixes.counts.on_disk >= 256) == again
    assert list(Path(folder).iterdir())


@everywhere
def test_another_process_goes_on_from_files(kind: str, tmp_path: Path) -> None:
    for again in (False, True):
        play(in_files, kind, pages=PAGES, host_pages=PAGES, folder=str(tmp_path), again=again)
