"""Stacks of other threads, as they are at one moment."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, cast

import pytest

from ballonet.hooks.forward import stacks

from .faulting import before_line

LONG = 60  # seconds, after which a thread hangs


class Running:
    """A thread in a generator until `go_on`, and then out of it until `stop`."""

    def __init__(self) -> None:
        self.inside, self.go_on, self.outside, self.stop = (threading.Event() for _ in range(4))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.inside.wait(LONG)

    def numbers(self) -> Iterator[int]:
        self.inside.set()
        self.go_on.wait(LONG)
        yield 1

    def run(self) -> None:
        numbers = self.numbers()
        next(numbers)
        self.outside.set()
        self.stop.wait(LONG)


def test_a_stack_is_seen_whole_while_its_thread_goes_on() -> None:
    """A generator that yields while its stack is walked has no caller any more."""
    for at in range(1, 12):
        running, found = Running(), list[FrameType]()

        def go_on() -> None:
            running.go_on.set()  # noqa: B023
            assert running.outside.wait(LONG)  # noqa: B023

        thread = cast(int, running.thread.ident)
        before_line(lambda: found.extend(stacks.stack_of(thread)), at, go_on, stacks)  # noqa: B023
        assert "run" in [frame.f_code.co_name for frame in found], at
        running.go_on.set()
        running.stop.set()
        running.thread.join(LONG)


@pytest.mark.parametrize("allowed", [True, False])
def test_no_garbage_is_collected_while_stacks_are_looked_at(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """Python 3.11 collects it wherever frames are made, and lets others run while it holds a lock that they want."""
    seen: list[bool] = []

    class Frame:
        """One of three."""

        def __init__(self, left: int = 2) -> None:
            self.left = left

        @property
        def f_back(self) -> Frame | None:
            seen.append(gc.isenabled())
            return Frame(self.left - 1) if self.left else None

    def frames() -> dict[int, Any]:
        seen.append(gc.isenabled())
        return {1: Frame()}

    monkeypatch.setattr(sys, "_current_frames", frames)
    (gc.enable if allowed else gc.disable)()
    try:
        assert [frame.left for frame in cast(Any, stacks.stack_of(1))] == [2, 1, 0]
        assert gc.isenabled() == allowed
        assert stacks.stack_of(2) == []
        assert stacks.threads() == [1]
        assert gc.isenabled() == allowed
    finally:
        gc.enable()
    assert seen == [False] * (4 + 1 + 1)
