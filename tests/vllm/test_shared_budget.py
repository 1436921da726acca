"""Two engines of one user in two processes that share one budget: pages go to the one that has requests, the total
changes while both work, and together they never hold more, as the kernel says from outside.

How long pages take to follow the load depends on `Sharing.dwell` and on when an engine that nobody steps counts as
idle, and a wave is about as short. So the load is repeated until they have.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ballonet.__main__ import main

from ..sharing import Watcher
from .running import MIB, NEEDS_VLLM, PAGE, Led

pytestmark = NEEDS_VLLM

TOTAL, LESS = 4 * MIB, 2 * MIB  # a wave takes all of either


@pytest.fixture
def engines(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Led, Led]]:
    """Both idle."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = {"page_size": PAGE, "shared_budget": TOTAL, "patient": True}
    with Led(model, tmp_path / "first", options) as first, Led(model, tmp_path / "second", options) as second:
        first.end()
        second.end()
        yield first, second


def test_two_engines_share_one_budget(engines: tuple[Led, Led], stock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def parts(*total: int) -> dict[int, int]:
        """Bytes of each process, after the total has changed."""
        assert main(["budget", "--shared", *map(str, total), "--json"]) == 0, capsys.readouterr().err
        (row,) = json.loads(capsys.readouterr().out)
        return {part["pid"]: part["part"] for part in row["parts"]}

    with Watcher([engine.pid for engine in engines], TOTAL) as watcher:
        for engine, other in (engines, engines[::-1]):
            deadline = time.monotonic() + 120
            while not parts()[engine.pid] > TOTAL // 2 > parts()[other.pid]:
                assert time.monotonic() < deadline, "pages follow the load"
                engine.begin(0)
                engine.end()
            engine.begin(0)
            engine.end()
            assert watcher.most[engine.pid] > TOTAL // 2, "and are used"
            watcher.most = dict.fromkeys(watcher.most, 0)
        wave(engines)
        assert sum(parts(LESS).values()) <= LESS
        watcher.total = LESS
        done(engines)
        wave(engines)
        watcher.most, watcher.total = dict.fromkeys(watcher.most, 0), TOTAL
        parts(TOTAL)
        done(engines)
        answers = [engine.close() for engine in engines]
    assert [answer["said"] for answer in answers] == [[stock[wave] for wave in engine.waves] for engine in engines]
    assert watcher.looks
    assert not watcher.over, f"{watcher.together} bytes together"
    assert min(watcher.most.values()) > LESS // 2, "both grow with the total"


def wave(engines: tuple[Led, Led]) -> None:
    for engine in engines:
        engine.begin()


def done(engines: tuple[Led, Led]) -> None:
    for engine in engines:
        engine.end()
