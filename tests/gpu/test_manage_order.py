"""A model is managed and released while forwards and replays of it run, on the device and on another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

import ballonet
from ballonet.hooks.device import streams

from .hold import held, meanwhile
from .scene import Captured, Place, scene
from .stock import questions, tiny

SHORT = 0.5  # seconds in which a thread comes to where it should not


@scene(pages=256)
def test_weights_change_memory_after_who_reads_them(place: Place) -> None:
    """Weights, too, that share a page with others, so that nobody waits until it can be unmapped."""
    model = tiny("llama", place, layers=1)
    ballonet.manage(model).release()  # what is done once is done
    right = model.model.norm.weight.clone()
    managed: Any = None
    for _ in range(2):
        weight = model.model.norm.weight
        seen = torch.zeros_like(weight)
        place.synchronize()
        place.device.trim()
        with held(place) as hold:
            with hold.lane():
                seen.copy_(weight.detach())
            del weight
            hold.release_soon()
            if managed is None:
                managed = ballonet.manage(model)
            else:
                managed.release()
            assert hold.released, "manage() or release() did not wait for who reads the weights"
        assert torch.equal(seen, right)


class Paused:
    """A forward on another thread that stops before a layer, until it may go on."""

    def __init__(self, model: Any, ids: torch.Tensor, layer: int) -> None:
        self.there, self._go = threading.Event(), threading.Event()
        self.logits: torch.Tensor | None = None
        self._handle = model.model.layers[layer].register_forward_pre_hook(self._pause)
        self._thread = threading.Thread(target=self._run, args=(model, ids))
        self._thread.start()

    @torch.no_grad()
    def _run(self, model: Any, ids: torch.Tensor) -> None:
        self.logits = model(ids, use_cache=False).logits

    def _pause(self, *_: object) -> None:
        self.there.set()
        self._go.wait()

    def go_on(self) -> torch.Tensor | None:
        """To its end."""
        self._go.set()
        self._thread.join()
        self._handle.remove()
        return self.logits


@contextlib.contextmanager
def changing(act: Callable[[], object]) -> Iterator[None]:
    """`act` is called when a model's weights are about to change memory."""
    wait = streams.wait_for_work

    def waited(device: Any) -> None:
        act()
        wait(device)

    with mock.patch.object(streams, "wait_for_work", waited):
        yield


def asked(place: Place, layers: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A model, what it is asked, and what it answers."""
    model, ids = tiny("llama", place, layers=layers), questions("llama", place.kind)["input_ids"]
    return model, ids, model(ids, use_cache=False).logits


@scene(pages=256)
@torch.no_grad()
def test_a_forward_begins_when_weights_have_changed_memory(place: Place) -> None:
    model, ids, right = asked(place, layers=1)
    forwards, began = list[Paused](), list[bool]()

    def begin() -> None:
        if not forwards:
            forwards.append(Paused(model, ids, 0))
            began.append(forwards[0].there.wait(SHORT))

    with changing(begin), ballonet.manage(model):
        assert torch.equal(forwards[0].go_on(), right)
    assert began == [False], "a forward began while weights changed memory"


@scene(pages=256)
@torch.no_grad()
def test_pages_stay_while_a_forward_runs(place: Place) -> None:
    """Whatever layer it is at, no other thread moves pages of its weights."""
    model, ids, right = asked(place, layers=3)
    with ballonet.manage(model, interval=None) as managed:
        ranges = list(managed._weights.all_ranges())

        def moves() -> int:
            return sum(held.move(piece, "device") for held in ranges for piece in range(held.pieces))

        for layer in range(3):
            forward = Paused(model, ids, layer)
            forward.there.wait()
            moved = moves()
            assert torch.equal(forward.go_on(), right)
            assert not moved, f"the lease of a forward was not asked for, before layer {layer}"
        assert moves() == sum(held.pieces for held in ranges)


def captured(model: Any, place: Place) -> tuple[Captured, torch.Tensor]:
    """A forward in a graph, and what it answers."""
    ids = questions("llama", place.kind)["input_ids"]

    def work() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (model(ids, use_cache=False).logits,)

    graph = Captured(place, work)
    return graph, graph.replay()[0]


@scene(pages=256)
def test_a_model_is_released_after_what_was_replayed(place: Place) -> None:
    """On a stream that nothing else has used."""
    model = tiny("llama", place)
    managed = ballonet.manage(model)
    graph, right = captured(model, place)
    place.synchronize()
    with place.lane(known=False)():
        place.sleep()
        graph.launch()
    managed.release()
    place.device.reap()
    place.synchronize()
    assert torch.equal(graph.outputs[0], right)


@scene(pages=256)
def test_weights_stay_where_they_are_in_a_replay(place: Place) -> None:
    """While one thread replays a graph of a model another one moves pages of its weights whenever it may."""
    model, moves = tiny("llama", place), 0
    with ballonet.manage(model) as managed:
        graph, right = captured(model, place)
        ranges = list(managed._weights.all_ranges())

        def move() -> None:
            nonlocal moves
            moves += sum(held.move(piece, "device") for held in ranges for piece in range(held.pieces))

        with meanwhile(move):
            same = [torch.equal(graph.replay()[0], right) for _ in range(60 if place.cuda else 3)]
        assert all(same)
        assert moves
        del graph
