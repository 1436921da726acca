"""A budget that is too small, or becomes too small meanwhile, changes how long tokens take and not which they are."""

from __future__ import annotations

import gc
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from transformers import StoppingCriteria

import ballonet
from ballonet import testing
from ballonet.allocator.errors import BudgetInUse

from .. import models
from .scene import Place, scene
from .stock import differences, small_layers

PAGES = 512
TOKENS = 24
MORE = 2  # pages that a budget has beyond what is taken at most


def speaker(place: Place) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and prompts that fill several pages of its cache in every layer."""
    hidden, batch, longest = (512, 16, 512) if place.cuda else (64, 4, 120)
    model = models.build("llama", hidden_size=hidden, num_hidden_layers=4, max_position_embeddings=2048)
    return model.to(place.kind), {
        name: tensor.to(place.kind) for name, tensor in models.prompts(batch, longest).items()
    }


def smallest(place: Place, say: Any) -> int:
    """Pages that it takes at most, with nothing left over from before."""
    gc.collect()
    place.empty_cache()
    place.device.reset_peaks()
    say()
    pages: int = place.device.snapshot()["physical_peak"] // place.page
    return pages


class Shrinks(StoppingCriteria):
    """Never stops anything; has another thread change the budget while tokens come."""

    def __init__(self, budgets: list[int], threads: ThreadPoolExecutor) -> None:
        """`budgets`: bytes; one every few tokens."""
        self._budgets = budgets
        self._threads = threads
        self._tokens = 0
        self.set: list[Future[None]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._tokens += 1
        if self._tokens % 4 == 0 and self._budgets:
            self.set.append(self._threads.submit(self._set, self._budgets.pop(0)))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def _set(self, budget: int) -> None:
        with suppress(BudgetInUse):  # not every page has a twin yet, or a newer call has another wish
            ballonet.set_budget(budget)


@scene(needs_host=True, spill=True, pages=PAGES, host_pages=PAGES)
def test_a_budget_that_shrinks_meanwhile(place: Place) -> None:
    """By other threads, while a `generate()` runs: its tokens are the same, and what was promised holds."""
    model, inputs = speaker(place)
    expected = models.generate(model, "greedy", inputs, TOKENS)
    with small_layers(), ballonet.manage(model):
        for less in (2, 8):
            ballonet.set_budget(PAGES * place.page)
            models.generate(model, "greedy", inputs, TOKENS)
            least = smallest(place, lambda: models.generate(model, "greedy", inputs, TOKENS))
            gc.collect()
            ballonet.set_budget(least * place.page)
            budgets = [(least - less) * place.page, least * place.page, (least - 2 * less) * place.page]
            with ThreadPoolExecutor(3) as threads:
                shrinking = Shrinks(budgets, threads)
                actual = models.generate(model, "greedy", inputs, TOKENS, stopping_criteria=[shrinking])
            assert [future.result() for future in shrinking.set] == [None] * 3
            assert not differences(actual, expected), f"less {less}"
            place.synchronize()
            device = place.device.snapshot()
            assert device["created"] * place.page <= device["budget"]
            del actual


@scene(needs_host=True, spill=True, pages=PAGES, host_pages=PAGES)
def test_several_models_and_threads(place: Place) -> None:
    """Three models speak at once in a pool in which only some of their caches fit. Of one, pages move by chaos too."""
    spoken = [speaker(place) for _ in range(3)]
    expected = [models.generate(model, "greedy", inputs, TOKENS) for model, inputs in spoken]

    def speak(number: int) -> None:
        model, inputs = spoken[number]
        for _ in range(2 if place.cuda else 1):
            actual = models.generate(model, "greedy", inputs, TOKENS)
            assert not differences(actual, expected[number]), f"model {number}"

    with small_layers():
        managed = [
            testing.manage(model, priority=number, chaos=5 if number == 1 else None)
            for number, (model, _) in enumerate(spoken)
        ]
        least = smallest(place, lambda: speak(0))
        ballonet.set_budget((least + MORE) * place.page)
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(speak, range(3)))
        gc.collect()
        place.synchronize()
        place.device.check()
        ballonet.set_budget(PAGES * place.page)
        for owner in managed:
            owner.release()
