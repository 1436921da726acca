"""A model that is released by one thread just as another begins to use it, at the moment at which they meet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install

from .models import build, prompts
from .pool import tiny_layers
from .portrait import none_in_pool
from .tuned import Tuned

pytestmark = pytest.mark.chaos


PAGE = 4096
LONG = 60  # seconds, after which a thread hangs


@pytest.fixture(autouse=True)
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, 2**22, PAGE):
        yield


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**prompts(batch=2, longest=9)).logits
    return found


@pytest.mark.parametrize("interval", [None, 2])
def test_a_forward_that_begins_takes_nothing_in_once_the_model_is_released(
    monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []
    with install.stock():
        model = build("llama", num_hidden_layers=5)
        expected = logits(model)
    managed = ballonet.manage(model, interval=interval)
    logits(model)
    with install.stock():
        model.register_buffer("extra", torch.zeros(PAGE))
    open_lease = managed._forwards._lease

    def stop() -> Any:
        reached.set()
        assert go_on.wait(LONG)
        return open_lease()

    monkeypatch.setattr(managed._forwards, "_lease", stop)
    thread = threading.Thread(target=lambda: found.append(logits(model)), daemon=True)
    thread.start()
    assert reached.wait(LONG)
    managed.release()
    go_on.set()
    thread.join(LONG)
    assert torch.allclose(found.pop(), expected, atol=1e-5)
    assert none_in_pool(model)
