"""What an out-of-memory error of a managed model's forward says beside the core's words: the changes of a plan."""

from __future__ import annotations

import gc
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.hooks.forward.forwards import Message, explain
from ballonet.hooks.plan import planner
from ballonet.offload.record.record import Point

from .models import build
from .pool import take_out

PAGE = 4096
BUDGET = 2**20
SAYS = "By a plan of this forward it fits with "


def tokens(batch: int, length: int = 32) -> torch.Tensor:
    with install.stock():
        return torch.ones(batch, length, dtype=torch.long)


@pytest.fixture
def model() -> Iterator[Any]:
    ballonet.install(BUDGET, page_size=PAGE, device="cpu", spill=False)
    with install.stock():
        made = build("llama", num_hidden_layers=3)
    managed = ballonet.manage(made, interval=None)
    yield made
    gc.collect()
    devices.require().check()
    managed.release()
    take_out()


def answers(model: Any, batch: int) -> torch.Tensor:
    asked = tokens(batch)
    output: torch.Tensor = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=1)
    return output


def failed(model: Any, batch: int) -> torch.OutOfMemoryError:
    """What so many sequences raise."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        answers(model, batch)
    return caught.value.with_traceback(None)


def test_out_of_memory_error_names_the_changes_of_a_plan(model: Any, tmp_path: Path) -> None:
    error = failed(model, 64)
    assert " out of memory." in error.args[0]
    assert SAYS not in "".join(error.args)
    unread = pickle.dumps(error)  # which reads it
    again, allocations = failed(model, 64), devices.require().snapshot()["heap"]["allocations"]
    said = str(again)
    assert devices.require().snapshot()["heap"]["allocations"] == allocations, "it takes memory of the pool"
    assert str(pickle.loads(unread)) == str(error)
    assert SAYS in str(error)
    assert "set_budget" in said
    with install.stock():
        model.config.save_pretrained(tmp_path)
        planned = ballonet.plan(tmp_path, context=32, prompt=32, batch=64, budget=BUDGET, page_size=PAGE)
    named = [change["text"] for change in planned["changes"]]
    assert 1 <= len(named) <= 3
    assert said.partition(SAYS)[2].split(", or ") == named
    assert str(again) == said
    assert SAYS in "".join(traceback.format_exception_only(error))


def test_advice_is_worked_out_once_when_it_is_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def changes(config: Any, **sizes: Any) -> list[str]:
        asked.append(sizes)
        return ["a", "b"]

    monkeypatch.setattr(planner, "helpful_changes", changes)
    error = failed(model, 64)
    assert asked == []
    assert str(error).endswith(f"{SAYS}a, or b")
    assert str(error).endswith("a, or b")
    assert asked == [{"batch": 64, "context": 32, "budget": BUDGET, "page_size": PAGE}]


def test_of_a_decode_step_all_tokens_count(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(planner, "helpful_changes", lambda config, **sizes: asked.append(sizes) or [])
    managed = ballonet.manage(model)
    error = torch.OutOfMemoryError("words")
    managed._point.of = Point("decode", 2, 10)
    managed._explain(error)
    assert str(error) == "words"
    assert [(sizes["batch"], sizes["context"]) for sizes in asked] == [(2, 11)]


def test_where_no_plan_can_be_made_it_says_what_the_core_says(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "plan", lambda *_, **__: 1 / 0)
    error = failed(model, 64)
    assert str(error) == "".join(error.args)
    assert "set_budget" in str(error)


def test_errors_of_others_are_left_alone(model: Any) -> None:
    """One that was raised elsewhere, and is being handled while a forward ends well."""

    def goes_on() -> None:
        try:
            torch.empty(2 * BUDGET, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            answers(model, 1)
            raise

    with pytest.raises(torch.OutOfMemoryError) as caught:
        goes_on()
    assert type(caught.value.args[0]) is str


def test_a_message_is_explained_once() -> None:
    error = torch.OutOfMemoryError("words")
    explain(error, lambda: ["one"])
    explain(error, lambda: ["two"])
    assert isinstance(error.args[0], Message)
    assert str(error) == f"words. {SAYS}one"
    bare = torch.OutOfMemoryError()
    explain(bare, lambda: ["one"])
    assert bare.args == ()
