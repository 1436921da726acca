"""Room is made before it is refused: under a lower budget, and for a second model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import BudgetError, BudgetInUse
from ballonet.hooks.device import managers
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.offload.policy.tuning import DEFAULT

from .models import build, logits
from .pool import tiny_layers
from .tuned import Clock, Tuned

PAGE = 4096
BUDGET = 2**21
LAYERS = 8


@pytest.fixture(autouse=True)
def installed(tuned: Tuned) -> Iterator[None]:
    with tiny_layers(tuned, BUDGET, PAGE):
        yield


def llama() -> Any:
    with install.stock():
        return build("llama", num_hidden_layers=LAYERS)


def used() -> int:
    pages = devices.require().snapshot()["pages"]
    return int(sum(pages.values()) - pages["free"])


def test_a_lower_budget_waits_until_layers_can_leave() -> None:
    """Nothing was short, so nothing of the model is on the host when it is asked for."""
    model = llama()
    expected = logits(model)
    with ballonet.manage(model) as managed:
        assert torch.allclose(logits(model), expected, atol=1e-4)
        assert managed.report().host_pages == 0
        ballonet.set_budget(managed.report().pages * PAGE, timeout="60s")  # less than that and what is live beside it
        assert managed.report().host_pages > 0
        ballonet.set_budget(BUDGET)
        assert torch.allclose(logits(model), expected, atol=1e-4)


def test_a_lower_budget_that_cannot_be_is_refused_with_one_that_can() -> None:
    model = llama()
    expected = logits(model)
    with ballonet.manage(model):
        logits(model)
        before = used()
        with pytest.raises(BudgetInUse) as refused:
            ballonet.set_budget(4 * PAGE, timeout="60s")
        assert devices.require().budget == BUDGET
        assert refused.value.smallest < before * PAGE
        ballonet.set_budget(refused.value.smallest, timeout="60s")
        ballonet.set_budget(BUDGET)
        assert torch.allclose(logits(model), expected, atol=1e-4)


@pytest.mark.parametrize("answered", [False, True])
def test_a_budget_far_below_is_met_in_one_step(answered: bool) -> None:
    """Layers whose copies take longer than there is to compute help, too; what is computed then finds pages, too."""
    with install.stock():
        model = build("llama", num_hidden_layers=2 * LAYERS)
    expected = logits(model)
    with ballonet.manage(model) as managed:
        if answered:
            logits(model)
        pages, layer = managed.report().pages, managed._residency.plan.pages[0]
        ballonet.set_budget((pages - 10 * layer + 36) * PAGE)
        assert pages - managed.report().pages > 4 * layer, "four of sixteen hide"
        assert torch.allclose(logits(model), expected, atol=1e-4)
        ballonet.set_budget(BUDGET)
        assert torch.allclose(logits(model), expected, atol=1e-4)


def test_budget_that_nothing_could_meet_is_refused_before_the_time_is_up() -> None:
    taken = torch.ones(BUDGET // 8)
    with pytest.raises(BudgetInUse, match="cannot be moved") as refused:
        ballonet.set_budget(BUDGET // 4, timeout="60s")
    assert refused.value.waited == 0
    del taken


def test_an_idle_model_makes_room_for_a_second_one() -> None:
    first, second = llama(), llama()
    expected = logits(first)
    with ballonet.manage(first) as managed:
        logits(first)
        pages = managed.report().pages
        ballonet.set_budget((used() + 40) * PAGE)
        with pytest.raises(BudgetError) as refused:
            ballonet.manage(second, interval=None)
        assert pages * PAGE == refused.value.required, "they are alike"
        assert managed.report().streamed, "the first one has given what it may"
        ballonet.set_budget(refused.value.smallest)
        with ballonet.manage(second, interval=None):
            ballonet.set_budget(BUDGET)
            for _ in range(2):
                assert torch.allclose(logits(second), expected, atol=1e-4)
                assert torch.allclose(logits(first), expected, atol=1e-4)


def test_an_idle_model_gives_before_layers_of_the_new_one_stream(tuned: Tuned) -> None:
    clock = Clock()
    tuned(clock=clock)
    first, second = llama(), llama()
    expected = logits(first)
    ballonet.set_budget((used() + 16) * PAGE)
    with pytest.raises(BudgetError) as refused:
        ballonet.manage(second, interval=None)
    alone = refused.value.smallest - refused.value.others
    ballonet.set_budget(BUDGET)
    with ballonet.manage(first):
        logits(first)
        ballonet.set_budget(used() * PAGE + alone - 4 * PAGE)  # the first one gives a layer
        clock.now += 2 * DEFAULT.pages.idle
        candidates = managers.of(devices.require()).reclaim.candidates()
        assert any(candidate.source is PageSource.IDLE_WEIGHTS for candidate in candidates)
        with ballonet.manage(second) as other:
            assert other.report().streamed == ()
            ballonet.set_budget(BUDGET)
            assert torch.allclose(logits(second), expected, atol=1e-4)
            assert torch.allclose(logits(first), expected, atol=1e-4)


def test_the_smallest_budget_of_a_refusal_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    expected = logits(model)
    others = torch.ones(40 * PAGE // 4)
    ballonet.set_budget((used() + 16) * PAGE)
    with pytest.raises(BudgetError, match="used by others") as refused:
        ballonet.manage(model)
    error = refused.value
    assert weights <= error.required < weights + 2 * LAYERS * PAGE
    assert error.others >= others.nbytes
    assert error.smallest > devices.require().budget
    ballonet.set_budget(error.smallest)
    with ballonet.manage(model):
        assert torch.allclose(logits(model), expected, atol=1e-4)
    ballonet.set_budget(BUDGET)
    del others
