"""Fixtures of the tests of generation loops."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.generation.continuous_batching import continuous_api


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
