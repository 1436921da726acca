"""Two engines of one user in two processes that share one budget: pages go to the one that has requests, the total
changes while both work, and together they never hold more, as the kernel says from outside."""

from __future__ import annotations

import json
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


def test_they_share_one_budget(engines: tuple[Led, Led], stock: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def parts(*total: int) -> dict[int, int]:
        """Bytes of each process, after the total has changed."""
        assert main(["budget", "--shared", *map(str, total), "--json"]) == 0, capsys.readouterr().err
        (found,) = json.loads(capsys.readouterr().out)
        return {each["pid"]: each["part"] for each in found["parts"]}

    with Watcher([each.pid for each in engines], TOTAL) as watcher:
        for each, other in (engines, engines[::-1]):
            each.begin()
            each.end()
            found = parts()
            assert found[each.pid] > TOTAL // 2 > found[other.pid], "pages follow the load"
            assert watcher.most[each.pid] > TOTAL // 2
            watcher.most = dict.fromkeys(watcher.most, 0)
        wave(engines)
        assert sum(parts(LESS).values()) <= LESS
        watcher.total = LESS
        done(engines)
        wave(engines)
        watcher.most, watcher.total = dict.fromkeys(watcher.most, 0), TOTAL
        parts(TOTAL)
        done(engines)
        answers = [each.close() for each in engines]
    assert [each["said"] for each in answers] == [stock, stock]
    assert watcher.looks
    assert not watcher.over, f"{watcher.together} bytes together"
    assert min(watcher.most.values()) > LESS // 2, "both grow with the total"


def wave(engines: tuple[Led, Led]) -> None:
    for each in engines:
        each.begin()


def done(engines: tuple[Led, Led]) -> None:
    for each in engines:
        each.end()
