"""Two engines of one user in two processes: their budgets are parts of one amount, which `ballonet budget` moves while
both work. What they hold together is watched from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..sharing import Watcher
from .running import MIB, NEEDS_VLLM, PAGE, Led, budget

pytestmark = NEEDS_VLLM

SMALL, LARGE = 2 * MIB, 4 * MIB  # the first preempts


@pytest.fixture
def engines(model: Path, tmp_path: Path) -> Iterator[tuple[Led, Led]]:
    """One with the larger part, and one with the smaller."""
    with (
        Led(model, tmp_path / "first", {"budget": LARGE, "page_size": PAGE}) as first,
        Led(model, tmp_path / "second", {"budget": SMALL, "page_size": PAGE}) as second,
    ):
        first.end()
        second.end()
        yield first, second


def test_together_they_stay_within_one_amount(engines: tuple[Led, Led], stock: Any) -> None:
    first, second = engines
    with Watcher([first.pid, second.pid], LARGE + SMALL) as watcher:
        first.begin()
        second.begin()
        first.end()
        second.end()
        first.begin()  # and while it works the larger part goes to the other
        assert budget(first.pid, SMALL)["budget"] == SMALL
        assert budget(second.pid, LARGE)["budget"] == LARGE
        second.begin()
        first.end()
        second.end()
        first.begin()
        second.begin()
        assert budget(second.pid, SMALL)["budget"] == SMALL  # and the whole is less
        watcher.total = 2 * SMALL
        first.end()
        second.end()
        answers = [first.close(), second.close()]
    assert [answer["said"] for answer in answers] == [stock, stock]
    assert watcher.looks
    assert not watcher.over, f"{watcher.together} bytes together"
    peaks = [[pages["peak"] * PAGE for pages in answer["pages"]] for answer in answers]
    assert SMALL < peaks[0][0] <= LARGE
    assert peaks[1][0] <= SMALL < peaks[1][1] <= LARGE  # it used what the other gave
    for pid, peak in zip(watcher.most, peaks, strict=True):
        assert SMALL < watcher.most[pid] <= peak[-1]
    assert answers[1]["pages"][2]["kv"] * PAGE <= SMALL
