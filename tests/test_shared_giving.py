"""A process that is to give while its model runs: what the model needs before it can give is not refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import BudgetInUse
from ballonet.hooks.device import shared
from ballonet.hooks.device.shared import Share
from ballonet.offload.policy.tuning import DEFAULT

from .models import build, prompts
from .pool import take_out
from .tuned import Tuned

PAGE = 4096
TOTAL = 16 * 2**20  # of which the model takes a fourth


@pytest.fixture
def share(tmp_path: Path, tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> Iterator[Share]:
    """The part of this process, which has all that there is."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tuned(weights={"large": 2**11})
    ballonet.install(64 * 2**20, page_size=PAGE, host_budget="64MiB", device="cpu", spill=False)
    shared.join(devices.of(), TOTAL, 0, 0, replace(DEFAULT.sharing, patience=300.0))
    part = devices.of().shared
    assert isinstance(part, Share)
    yield part
    take_out()


def test_an_allocation_in_a_forward_goes_before_what_others_ask(share: Share) -> None:
    model = build("llama", num_hidden_layers=8, hidden_size=64, intermediate_size=512)
    expected = model(**prompts(2, 16)).logits
    refused, given = list[BudgetInUse](), list[torch.Tensor]()

    def give() -> None:
        try:
            share.give(share.floor, 600.0)
        except BudgetInUse as error:
            refused.append(error)

    def in_the_middle(*_: Any) -> None:
        device = devices.require()
        while device.available:
            given.append(torch.empty(PAGE, dtype=torch.uint8))
        giving = threading.Thread(target=give)
        giving.start()
        while device.budget == share.part:
            pass
        given.append(torch.empty(PAGE, dtype=torch.uint8))
        giving.join()
        assert device.budget == share.part
        given.clear()

    with ballonet.manage(model):
        model(**prompts(2, 16))
        layer = model.model.layers[4].self_attn
        hook = layer.register_forward_hook(in_the_middle)
        assert torch.equal(model(**prompts(2, 16)).logits, expected)
        hook.remove()
        assert refused
        share.give(TOTAL // 2, 10.0)
        assert share.part == TOTAL // 2, "once it rests"
