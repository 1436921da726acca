"""Hundreds of random conversations of several models, with chaos, adapters, files, and pages that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from ..pool import tiny_layers
from ..tuned import Clock, Tuned
from .lives import PAGE, Life

pytestmark = pytest.mark.chaos


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> Iterator[None]:
    """Small enough that pages run out now and then, which is waited for in three looks, however long these take."""
    tuned(waiting={"room": 0.1}, waits=Clock(step=0.03))
    monkeypatch.setattr(transformers.logging.get_logger("transformers.generation.utils"), "disabled", True)
    with tiny_layers(tuned, 1024 * PAGE, PAGE):
        yield


@pytest.mark.parametrize(
    ("seed", "names", "adapters", "files"),
    [
        (0, ("llama", "gpt2"), True, True),
        (1, ("falcon",), False, False),
        (2, ("qwen2", "llama"), True, False),
    ],
)
def test_random_lives_have_the_tokens_of_stock(
    seed: int, names: tuple[str, ...], adapters: bool, files: bool, tmp_path: Path
) -> None:
    life = Life(seed, names, adapters=adapters, folder=tmp_path if files else None)
    talkers = list(life.talkers)
    life.live(90)
    assert life.done["sessions"] > 30  # 39 to 56: it depends on what is in files by then
    assert life.done["answers"] > 3 * life.done["out of memory"] + 60
    assert sum(talker.hits for talker in talkers) > 100
    assert sum(talker.moves for talker in talkers) > 3
    assert sum(talker.copies for talker in talkers) > 3
