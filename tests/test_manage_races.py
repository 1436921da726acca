"""A model that is released by one thread just as another begins to use it, at the moments at which they meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import install

from .models import build, prompts
from .pool import tiny_layers
from .portrait import none_in_pool
from .tuned import Tuned

BUDGET = 2**22
PAGE = 4096
INPUTS = prompts(batch=2, longest=9)
LONG = 60  # seconds, after which a thread hangs


@pytest.fixture(autouse=True)
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, BUDGET, PAGE):
        yield


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**INPUTS).logits
    return found


def started(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(LONG)
    return not thread.is_alive()


class Beginning:
    """A forward on a thread of its own, which stops before it has a lease until `go_on` is set."""

    def __init__(self, model: Any, managed: ballonet.Managed, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self._logits: list[torch.Tensor] = []
        reached = threading.Event()
        open_lease = managed._forwards._lease

        def stop() -> Any:
            reached.set()
            self.go_on.wait(LONG)
            return open_lease()

        monkeypatch.setattr(managed._forwards, "_lease", stop)
        self._thread = started(lambda: self._logits.append(logits(model)))
        assert reached.wait(LONG)

    def result(self) -> torch.Tensor:
        assert ended(self._thread)
        return self._logits.pop()


def managed_model(interval: int | None) -> tuple[Any, ballonet.Managed, torch.Tensor]:
    with install.stock():
        model = build("llama", num_hidden_layers=5)
        expected = logits(model)
    managed = ballonet.manage(model, interval=interval)
    logits(model)
    return model, managed, expected


@pytest.mark.parametrize("interval", [None, 2])
def test_a_forward_that_begins_takes_nothing_in_once_the_model_is_released(
    monkeypatch: pytest.MonkeyPatch, interval: int | None
) -> None:
    model, managed, expected = managed_model(interval)
    with install.stock():
        model.register_buffer("extra", torch.zeros(PAGE))
    forward = Beginning(model, managed, monkeypatch)
    managed.release()
    forward.go_on.set()
    assert torch.allclose(forward.result(), expected, atol=1e-5)
    assert none_in_pool(model)
