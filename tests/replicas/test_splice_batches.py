"""Continuous batching over spans: layers that do not run never touch the paged cache, and tokens are the whole's."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor

import ballonet
from ballonet.allocator import devices
from ballonet.hooks.splice import splice as splicing
from ballonet.hooks.splice.splice import Splice
from ballonet.offload.policy.replicas.groups import Span

from ..models import build
from ..pool import take_out
from ..serving.batches import answers, prompts, stock

ASKED = prompts(5, 30)
STEP = ContinuousBatchProcessor._generation_step


class InParts:
    """Called as the model, runs its layers span by span."""

    def __init__(self, splice: Splice, spans: list[Span]) -> None:
        self.splice = splice
        self.spans = spans
        self.steps = 0
        self.updated: list[set[int]] = [set() for _ in spans]

    def __call__(self, **inputs: Any) -> Any:
        cache, given = inputs["cache"], None
        attention = self.splice.model.config._attn_implementation
        update, signature = cache.update, inspect.signature(cache.update)

        for number, span in enumerate(self.spans):
            self.splice.span = span

            def noting(*args: Any, number: int = number, **kwargs: Any) -> Any:
                self.updated[number].add(signature.bind(*args, **kwargs).arguments["layer_idx"])
                return update(*args, **kwargs)

            cache.update = noting
            try:
                given = self.splice.run(inputs, given)
            finally:
                del cache.update
        assert self.splice.model.config._attn_implementation == attention  # also after the proof
        self.steps += 1
        assert given is not None
        return SimpleNamespace(logits=given[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.splice.model, name)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> list[InParts]:
    """Has whatever is batched run in these parts."""
    found: list[InParts] = []
    monkeypatch.setattr(ContinuousBatchProcessor, "_generation_step", lambda self, model: STEP(self, found[0]))
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    if (found := devices.current()) is not None:
        found.device.check()
        del found
        take_out()


@pytest.mark.parametrize("managed", [False, True], ids=["stock", "managed"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "mixtral"])
def test_a_batch_in_parts_is_the_whole(name: str, managed: bool, in_parts: list[InParts], monkeypatch: Any) -> None:
    monkeypatch.setattr(splicing, "_known", {})  # the proof is made with the attention of batches
    model = build(name, num_hidden_layers=4, **({"layer_types": ["full_attention"] * 4} if name == "gpt_oss" else {}))
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(ContinuousBatchProcessor, "_generation_step", STEP)
        expected = stock(model, ASKED)
    assert not any(each.error for each in expected)
    splice = Splice(model)
    parts = InParts(splice, [Span(0, 1), Span(1, 3), Span(3, 4)])
    in_parts.append(parts)
    if managed:
        ballonet.install(2**24, page_size=65536, host_budget=2**24, device="cpu")
        with ballonet.manage(model):
            found = answers(model, ASKED)
    else:
        found = answers(model, ASKED, num_blocks=16 * len(ASKED))  # not what is known of it
    splice.close()
    assert found == expected
    assert parts.steps > 5
    assert parts.updated == [{0}, {1, 2}, {3}]
