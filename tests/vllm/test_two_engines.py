"""Two engines of one user in two processes: their budgets are parts of one amount, which `ballonet budget` moves while
both work. What they hold together is watched from outside."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from .running import MIB, NEEDS_VLLM, PAGE, Watcher, answered, change_budget, engine

pytestmark = NEEDS_VLLM

SMALL, LARGE = 2 * MIB, 4 * MIB  # the first preempts


class Led:
    """An engine whose waves of requests the test begins. A context manager: it has ended well after it."""

    def __init__(self, model: Path, folder: Path, budget: int) -> None:
        folder.mkdir()
        command = engine(model, folder, {"budget": budget, "page_size": PAGE, "led": True})
        self.folder = folder
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.pid = self._process.pid

    def begin(self) -> None:
        """Begins the next wave."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")

    def end(self) -> None:
        """Waits until the wave is done."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("done"):
                return
        pytest.fail("the engine has ended in the middle of a wave")

    def close(self) -> dict[str, Any]:
        """What it has answered, at its end."""
        self._process.communicate()
        assert self._process.returncode == 0
        return answered(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def engines(model: Path, tmp_path: Path) -> Iterator[tuple[Led, Led]]:
    """One with the larger part, and one with the smaller."""
    with Led(model, tmp_path / "first", LARGE) as first, Led(model, tmp_path / "second", SMALL) as second:
        yield first, second


def test_together_they_stay_within_one_amount(engines: tuple[Led, Led], stock: Any) -> None:
    first, second = engines
    with Watcher([first.pid, second.pid], LARGE + SMALL) as watcher:
        first.begin()
        second.begin()
        first.end()
        second.end()
        first.begin()  # and while it works the larger part goes to the other
        assert change_budget(first.pid, SMALL)["budget"] == SMALL
        assert change_budget(second.pid, LARGE)["budget"] == LARGE
        second.begin()
        first.end()
        second.end()
        first.begin()
        second.begin()
        assert change_budget(second.pid, SMALL)["budget"] == SMALL  # and the whole is less
        watcher.allowed = 2 * SMALL
        first.end()
        second.end()
        answers = [first.close(), second.close()]
    assert [each["said"] for each in answers] == [stock, stock]
    assert watcher.looks
    assert not watcher.over, f"{watcher.together} bytes together"
    peaks = [[each["peak"] * PAGE for each in answer["pages"]] for answer in answers]
    assert SMALL < peaks[0][0] <= LARGE
    assert peaks[1][0] <= SMALL < peaks[1][1] <= LARGE  # it used what the other gave
    for pid, peak in zip(watcher.most, peaks, strict=True):
        assert SMALL < watcher.most[pid] <= peak[-1]
    assert answers[1]["pages"][2]["kv"] * PAGE <= SMALL
