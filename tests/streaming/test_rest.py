"""What an idle model has outside of its layers goes where those are not enough, and comes back when it runs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import PoolExhausted
from ballonet.hooks.device import managers
from ballonet.hooks.managed import residency_of, weights_of
from ballonet.offload.manager.client import OUTSIDE_LAYERS
from ballonet.offload.policy.reclaim_order import PageSource
from ballonet.testing.sources import sources

from ..models import Output, build
from ..tuned import Clock, Tuned
from .conftest import INPUTS, PAGE, as_stock, full, say

pytestmark = pytest.mark.chaos
IDS = INPUTS["input_ids"]
PROMPT = torch.arange(2 * 120).reshape(2, 120) % 190


@pytest.fixture
def clock(tuned: Tuned) -> Clock:
    """The manager's: next to nothing passes unless a test says so."""
    clock = Clock(step=1e-6)
    tuned(clock=clock)
    return clock


@pytest.fixture(autouse=True)
def manager(clock: Clock) -> Iterator[Any]:
    """Whose link hides every copy."""
    ours = managers.of(devices.require())
    ours.link.bandwidth = 1e12
    yield ours
    gc.collect()
    devices.require().check()


def rest_pages(managed: ballonet.Managed) -> int:
    return sum(opened.backed for opened in weights_of(managed).ranges[None])


def is_away(managed: ballonet.Managed) -> bool:
    return residency_of(managed).rest.away


def take(manager: Any, clock: Clock, managed: ballonet.Managed) -> None:
    """Has the core take all that the model, which has run, offers while it is idle."""
    clock.now += 5
    source = next(of for of in sources(manager, devices.require(), spill=False) if of.source is PageSource.IDLE_WEIGHTS)
    assert source.reclaim(source.would_free()) > 0
    assert is_away(managed)


def forward(model: Any, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(IDS, **more).logits
        return logits


@pytest.mark.parametrize("floor", [False, True], ids=["no floor", "a floor of all"])
def test_an_idle_model_gives_embeddings_and_head_where_its_layers_are_not_enough(
    model: Any, larger: Any, stock: Output, clock: Clock, floor: bool
) -> None:
    ours = managers.of(devices.require())
    ours.link.bandwidth = 1e12
    with install.stock(), torch.no_grad():
        idle, expected = copy.deepcopy(larger), say(larger)
        long = model(PROMPT).logits
    with ballonet.manage(idle) as other:
        whole = other.report().pages
    with ballonet.manage(idle, floor=whole * PAGE if floor else 0) as other, ballonet.manage(model) as active:
        say(idle)
        clock.now += 5
        say(model)
        offered = ours.reclaim.candidates()
        idle_ones = [candidate for candidate in offered if candidate.source is PageSource.IDLE_WEIGHTS]
        if floor:
            assert not idle_ones
            return
        rest = next(candidate for candidate in offered if candidate.index == OUTSIDE_LAYERS)
        assert idle_ones[-1] is rest, "behind its layers"
        assert rest.pages == rest_pages(other)
        before = sum(candidate.pages for candidate in offered[: offered.index(rest)])
        with full(but=0):
            wanted = torch.empty(before * PAGE, dtype=torch.uint8)
            assert not is_away(other), "what costs less is enough"
            more = torch.empty(PAGE, dtype=torch.uint8)
            assert is_away(other)
            assert not is_away(active), "it runs"
            del wanted, more
        with torch.no_grad():
            assert torch.equal(model(PROMPT, use_cache=True).logits, long)
        assert say(model).agrees(stock)
        for _ in range(3):
            clock.now += 20
            assert say(idle).agrees(expected)
            assert not is_away(other)
            assert say(model).agrees(stock)
        assert other.report().pages == whole
        counts = devices.of().events.counts()["idle weights"]
        assert counts["restore"].pages >= rest_pages(other)


def test_model_with_a_small_floor_keeps_no_more_than_that(model: Any, larger: Any, manager: Any, clock: Clock) -> None:
    with install.stock():
        idle = copy.deepcopy(larger)
    with ballonet.manage(idle) as other:
        floor = other.report().pages - rest_pages(other) - 2
    with ballonet.manage(idle, floor=floor * PAGE) as other, ballonet.manage(model):
        say(idle)
        take(manager, clock, other)
        assert other.report().pages >= floor


def test_interval_none_and_slos_keep_all_of_an_idle_model(
    model: Any, manager: Any, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ballonet.hooks.profile.cache_dir", lambda settings: tmp_path)
    for options in ({"interval": None}, {"ttft_slo": 100.0}):
        with install.stock():
            it = copy.deepcopy(model)
        with ballonet.manage(it, **options):
            say(it)
            clock.now += 5
            manager.reclaim.publish_now()
            assert not [found for found in manager.reclaim.candidates() if found.index == OUTSIDE_LAYERS]


@pytest.mark.parametrize("rows", [1, 0], ids=["one row", "all rows"])
def test_head_comes_back_before_a_forward_that_reads_many_rows_else_with_the_next(
    model: Any, manager: Any, clock: Clock, rows: int
) -> None:
    with ballonet.manage(model) as managed:
        wanted = forward(model, logits_to_keep=rows)
        take(manager, clock, managed)
        assert torch.equal(forward(model, logits_to_keep=rows), wanted)
        assert is_away(managed) == bool(rows)
        assert torch.equal(forward(model, logits_to_keep=rows), wanted)
        assert not is_away(managed)
        assert residency_of(managed).arrangement.read_in_place == 0


def test_a_tower_outside_of_layers_comes_back_before_the_next_forward(model: Any, manager: Any, clock: Clock) -> None:
    """A tower of images reads all of its weights many times in a forward."""
    model.model.tower = torch.nn.Linear(64, 64)
    with ballonet.manage(model) as managed:
        forward(model)
        take(manager, clock, managed)
        forward(model, logits_to_keep=1)
        assert not is_away(managed)


def with_gradients(model: Any) -> Any:
    grads = torch.autograd.grad(model(IDS).logits.sum(), model.get_output_embeddings().weight)[0]
    return grads.clone()


def written(model: Any) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)


def replaced(model: Any) -> None:
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach() * 3, requires_grad=False)


ACTS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "write": written,
    "replace": replaced,
    "tower": lambda model: model.model.add_module("tower", torch.nn.Linear(64, 64)),
    "half": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "a tied head"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("then", ["run", "sleep", "release"])
def test_tokens_are_stocks_whatever_is_done_while_the_head_is_away(
    manager: Any, clock: Clock, tied: bool, act: str, then: str
) -> None:
    with install.stock():
        original = build("llama", num_hidden_layers=4, tie_word_embeddings=tied)
        model = copy.deepcopy(original)
    expected = as_stock(original, ACTS[act])
    managed = ballonet.manage(model)
    say(model)
    take(manager, clock, managed)
    ACTS[act](model)
    if then == "sleep":
        managed.sleep()
    elif then == "release":
        managed.release()
    assert say(model).agrees(expected)
    assert say(model).agrees(expected)
    if then != "release":
        assert not is_away(managed)
    managed.release()
    assert say(model).agrees(expected)
    assert ballonet.stats().pages.weights == 0


def test_gradients_are_stocks_while_it_is_away(model: Any, original: Any, manager: Any, clock: Clock) -> None:
    expected = as_stock(original, ask=with_gradients)
    with ballonet.manage(model) as managed:
        forward(model)
        take(manager, clock, managed)
        assert torch.allclose(with_gradients(model), expected)
        assert not is_away(managed)


def test_level_2_and_waking_are_right_after_it_was_taken(
    original: Any, stock: Output, tmp_path: Path, manager: Any, clock: Clock
) -> None:
    with install.stock():
        original.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with ballonet.manage(loaded) as managed:
        for wakes in (True, False):
            say(loaded)
            take(manager, clock, managed)
            managed.sleep(2)
            if wakes:
                managed.wake()
                assert not is_away(managed)
            assert say(loaded).agrees(stock)


def test_a_model_that_is_collected_while_it_is_away_leaves_nothing(model: Any, manager: Any, clock: Clock) -> None:
    with install.stock():
        it = copy.deepcopy(model)
    managed = ballonet.manage(it)
    say(it)
    take(manager, clock, managed)
    held = it.get_input_embeddings().weight
    before = held.detach().clone()
    del it, managed
    gc.collect()
    assert torch.equal(held, before), "who holds a weight reads it"
    del held
    gc.collect()
    devices.require().reap(wait=True)
    assert ballonet.stats().pages.weights == 0


def test_without_room_it_is_read_on_the_host_and_tried_again(
    model: Any, stock: Output, manager: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ballonet.manage(model) as managed:
        say(model)
        take(manager, clock, managed)
        with monkeypatch.context() as patched:

            def refused(*_: object) -> None:
                raise PoolExhausted("none left")

            patched.setattr("ballonet.hooks.streaming.rest.bring_back", refused)
            assert say(model).agrees(stock)
            assert is_away(managed)
        for _ in range(manager.tuning.weights.again):
            forward(model)
        assert not is_away(managed)
        assert say(model).agrees(stock)


def test_head_waits_while_somebody_reads_weights_by_reference(model: Any, manager: Any, clock: Clock) -> None:
    with ballonet.manage(model) as managed:
        wanted = forward(model)
        clock.now += 5
        with managed.resident():
            assert residency_of(managed).entry(OUTSIDE_LAYERS) is None
        take(manager, clock, managed)
        with managed.resident():
            assert torch.equal(forward(model), wanted)
            assert is_away(managed)
        assert torch.equal(forward(model), wanted)
        assert not is_away(managed)
