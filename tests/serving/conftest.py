"""Fixtures of the tests of generation loops."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers.generation.continuous_batching import continuous_api

from .batches import TOGETHER


@pytest.fixture(autouse=True)
def _together() -> Iterator[None]:
    """Requests that are asked for at once come to the loop at once, however the threads run: which of them share a step
    decides what the step needs."""

    def locked(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with TOGETHER:
                return stock(*args, **kwargs)

        return call

    manager = continuous_api.ContinuousBatchingManager
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "add_requests", locked(manager.add_requests))
        if (drain := vars(continuous_api).get("drain_queue")) is not None:  # in newer transformers
            patch.setattr(continuous_api, "drain_queue", locked(drain))
        yield


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens that each step of a loop computed."""
    lengths: list[int] = []
    processor = continuous_api.ContinuousBatchProcessor
    step = processor._generation_step

    def watched(self: Any, model: Any) -> None:
        lengths.append(sum(request.query_length for request in self.inputs_and_outputs.requests_in_batch))
        step(self, model)

    monkeypatch.setattr(processor, "_generation_step", watched)
    return lengths


@pytest.fixture
def at_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[None]], None]:
    """Has the thread of a loop go on with a generator before each of its steps: however late the thread of the test is,
    no request ends meanwhile."""
    acts: deque[Iterator[None]] = deque(maxlen=1)
    processor = continuous_api.ContinuousBatchProcessor
    step = processor._generation_step

    def acting(self: Any, model: Any) -> None:
        for act in tuple(acts):
            next(act, None)
        step(self, model)

    monkeypatch.setattr(processor, "_generation_step", acting)
    return acts.append
