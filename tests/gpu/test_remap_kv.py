"""A cache that finds no pages gets those of layers (Oneiros §5), while kernels may be running."""

from __future__ import annotations

import contextlib
import gc

import torch

import ballonet

from .. import models
from ..tuned import Clock
from .scene import Place, scene
from .stock import differences, questions, small_layers, tiny

PAGES = 512
LATER = 20.0  # s: pages that are free for so long go back
LAYERS = 8  # of which a model may stream a quarter where nothing was measured
TOKENS = 4
STEP = 2  # pages by which the budget shrinks


@scene(needs_host=True, pages=PAGES, host_pages=256)
def test_pages_of_layers_go_to_a_cache(place: Place) -> None:
    """The budget shrinks little by little until somebody gives. Nothing is copied before, tokens are the same in all
    that follows, and no weight goes to the host twice, but where its copy there was given up. Where there is room again
    all layers come back."""
    rows = 32 if place.cuda else 4
    three = [tiny("llama", place, layers=LAYERS) for _ in range(3)]
    inputs = questions("llama", place.kind)
    many = {name: torch.cat([tensor] * rows) for name, tensor in inputs.items()}
    expected = [models.generate(model, "greedy", inputs, TOKENS) for model in three]
    expected_of_many = models.generate(three[2], "greedy", many, TOKENS)

    def all_say_what_they_said() -> None:
        for model, right in zip(three, expected, strict=True):
            assert not differences(models.generate(model, "greedy", inputs, TOKENS), right)

    def a_large_cache() -> None:
        assert not differences(models.generate(three[2], "greedy", many, TOKENS), expected_of_many)
        gc.collect()

    clock = Clock()
    with small_layers(clock=clock), contextlib.ExitStack() as stack:
        managed = [stack.enter_context(ballonet.manage(model)) for model in three]
        all_say_what_they_said()
        a_large_cache()
        place.empty_cache()
        place.device.reset_peaks()
        a_large_cache()
        most = place.device.snapshot()["physical_peak"] // place.page
        for pages in range(most, 0, -STEP):
            assert ballonet.stats().copied.weights_h2d == 0, "something was copied, and nobody has given"
            ballonet.set_budget(pages * place.page)
            a_large_cache()
            if any(owner.report().streamed for owner in managed):
                break
        assert not any(len(owner.report().streamed) == LAYERS for owner in managed), "never a whole model"
        for _ in range(2):
            all_say_what_they_said()
            a_large_cache()
        stats = ballonet.stats()
        assert stats.copied.weights_h2d > 0
        given_up = stats.events["host copies"]["restore"].pages if "host copies" in stats.events else 0
        made = stats.copied.weights_d2h // stats.page_size
        assert made <= stats.host_pages + given_up, "a twin was made twice"
        assert sum(stats.pages.values()) <= pages
        ballonet.set_budget(PAGES * place.page)
        for _ in range(6):
            clock.now += LATER
            all_say_what_they_said()
        assert not any(model.report().streamed for model in managed)
