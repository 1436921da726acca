"""Layers that stream among others that do something else: other models, broken forwards, graphs, much to compute."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import DynamicCache

import ballonet
from ballonet.allocator.errors import PoolExhausted
from ballonet.hooks.device import managers

from .hold import meanwhile
from .scene import Captured, Lane, Place, scene
from .stock import LAYERS, questions, small_layers, tiny


def exhaust(place: Place) -> bool:
    """Every page that can be had is, for a moment; False where somebody had none left to give."""
    filler = place.device.reserve(place.device.budget, "kv", place.device.group())
    before = place.device.snapshot()["reclaimed"]
    with contextlib.suppress(PoolExhausted):
        for piece in range(filler.pieces):
            filler.map(piece, 1)
    filler.close()
    place.device.reap(wait=True)
    return bool(place.device.snapshot()["reclaimed"] > before)


@scene(needs_host=True, pages=256, host_pages=128)
def test_graphs_while_pages_run_out(place: Place) -> None:
    """A whole model in a graph, with the default interval: its layers stay, for whatever other threads need pages."""
    model = tiny("llama", place, layers=2 * LAYERS)
    ids = questions("llama", place.kind)["input_ids"]

    def work() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (model(ids, use_cache=False).logits,)

    eager = work()[0].clone()
    stock = Captured(place, work)  # under capture transformers masks otherwise, so the last bits may differ
    right = stock.replay()[0].clone()
    del stock
    gc.collect()
    with small_layers(), ballonet.manage(model) as managed:
        manager = managers.of(place.device)
        manager.pages.scarce = True
        manager.link.bandwidth = manager.link.bandwidth or 1e12  # what is measured later is believed

        def prepare() -> None:
            """Layers that may be taken are offered."""
            work()
            manager.reclaim.publish_now()

        prepare()
        assert place.device.published, "nothing may be taken, so that nothing is shown"
        captured = Captured(place, work)
        assert torch.equal(captured.replay()[0], right)
        assert managed.report().kept == (tuple(range(2 * LAYERS)) if place.cuda else ())
        assert not place.cuda or not place.device.published
        memory, lanes = threading.Lock(), [place.lane() for _ in range(2)]  # held by whoever needs pages

        def need() -> None:
            with memory:
                exhaust(place)
            time.sleep(0.001)

        def launch(lane: Lane, graph: Captured) -> None:
            lane.follow()
            with lane(), contextlib.nullcontext() if place.cuda else memory:
                graph.launch()
            lane.lead()

        with meanwhile(need), ThreadPoolExecutor(1) as strangers:
            for step in range(200 if place.cuda else 5):
                captured.outputs[0].zero_()
                if step % 4:
                    launch(lanes[step % 2], captured)
                else:  # on a thread that has never run the model; its current stream is this one's
                    strangers.submit(launch, lanes[0], captured).result()
                with memory:
                    assert torch.equal(captured.outputs[0], right), "while another thread takes what it can"
        for _ in range(2):
            assert torch.equal(work()[0], eager)
            assert torch.equal(captured.replay()[0], right)
        assert not place.cuda or managed.report().streamed == ()
        del captured
        gc.collect()
        prepare()
        assert managed.report().kept == ()
        if not managed.report().streamed:
            assert exhaust(place), "nothing keeps them any more"
        assert torch.equal(work()[0], eager)
        assert managed.report().streamed


@scene(pages=256)
@torch.no_grad()
def test_caches_in_graphs(place: Place) -> None:
    """What a capture makes of a cache is the graph's; what it reads of one that was there stays for as long as it."""
    model = tiny("llama", place)
    ids = questions("llama", place.kind)["input_ids"]

    def begin() -> tuple[torch.Tensor, ...]:
        return (model(ids, use_cache=True).logits,)

    def step(cache: DynamicCache) -> torch.Tensor:
        return model(ids[:, :1], past_key_values=cache).logits

    def filled(tokens: torch.Tensor) -> DynamicCache:
        return model(tokens, use_cache=True).past_key_values

    # Under capture transformers masks otherwise, so the last bits may differ from those of the same work uncaptured.
    stock = [filled(ids) for _ in range(4 if place.cuda else 1)]
    right = Captured(place, begin).replay()[0]
    captured = Captured(place, lambda: (step(stock.pop()),))
    right_step = captured.replay()[0] if place.cuda else captured.outputs[0].clone()
    del captured
    with small_layers(), ballonet.manage(model):
        whole = Captured(place, begin)
        held = [filled(ids) for _ in range(4 if place.cuda else 1)]  # one for each time that the work is done
        later = Captured(place, lambda: (step(held.pop()),))
        for _ in range(3):
            step(filled(ids.flip(1)))  # caches of others come and go where those were
            gc.collect()
            assert torch.equal(whole.replay()[0], right)
            assert torch.equal(later.replay()[0] if place.cuda else later.outputs[0], right_step)
        del whole, later
