"""Python's calls, counted: of tests that hold what a step costs in them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def each_call(count: Callable[[FrameType], None]) -> Iterator[None]:
    """Within it `count(frame)` is told of each call of a Python function on this thread, and no garbage is collected: a
    finalizer is somebody else's."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            count(frame)

    gc.collect()
    gc.disable()
    try:
        sys.setprofile(profile)
        yield
    finally:
        sys.setprofile(None)
        gc.enable()
