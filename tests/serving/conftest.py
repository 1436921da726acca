"""Fixtures of the tests of generation loops."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from transformers.generation.continuous_batching import continuous_api

from ballonet.allocator import runtime

from ..pool import take_out


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Takes the pool out at the end of a test, when no page of KV may be left."""
    yield
    gc.collect()
    if (device := runtime.current()) is not None:
        device.device.reap(wait=True)
        device.device.check()
        assert device.device.snapshot()["pages"]["kv"] == 0
    take_out()


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each step of a loop computed."""
    found: list[int] = []
    processor = continuous_api.ContinuousBatchProcessor
    step = processor._generation_step

    def watched(self: Any, model: Any) -> None:
        found.append(sum(each.query_length for each in self.inputs_and_outputs.requests_in_batch))
        step(self, model)

    monkeypatch.setattr(processor, "_generation_step", watched)
    return found
