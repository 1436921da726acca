"""A model is managed and released while forwards and replays of it run, on the device and on another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import ballonet
from ballonet.allocator.errors import ModelInUse
from ballonet.hooks.device import streams

from .hold import held
from .scene import Captured, Place, everywhere, play
from .stock import questions
from .test_weights_streaming import tiny

ROUNDS = 3
SHORT = 1.0  # seconds in which a thread comes to where it should not


def launched_before(place: Place) -> None:
    """What was launched before weights change memory reads them where they were, whoever gets that memory."""
    model = tiny("llama", place)
    ids = questions("llama", place.kind)["input_ids"]
    lane = place.lane()
    lane.follow()

    def launch() -> torch.Tensor:
        with torch.no_grad(), lane():
            place.sleep()
            logits: torch.Tensor = model(ids, use_cache=False).logits
        return logits

    def memory_is_taken() -> list[torch.Tensor]:
        sizes = [each.numel() for each in model.parameters()]
        return [torch.full((size,), 1e9, device=place.kind) for size in sizes]

    right = launch()
    place.synchronize()
    for _ in range(ROUNDS):
        first = launch()
        with ballonet.manage(model):
            taken = memory_is_taken()
            lane.lead()
            assert torch.equal(first, right), "manage() did not wait for a forward"
            second = launch()
        taken += memory_is_taken()
        lane.lead()
        assert torch.equal(second, right), "release() did not wait for a forward"
        del first, second, taken


def no_page_is_given_back(place: Place) -> None:
    """The same of weights that share a page with others, so that nobody waits until it can be unmapped."""
    model = tiny("llama", place, layers=1)
    ballonet.manage(model).release()  # what is done once is done
    weight = model.model.norm.weight
    seen = torch.zeros_like(weight)
    place.synchronize()
    place.device.trim()
    with held(place) as hold:
        with hold.lane():
            seen.copy_(weight)
        hold.release_soon()
        managed = ballonet.manage(model)
        assert hold.released, "manage() did not wait for who reads the weights"
    managed.release()
    assert torch.equal(seen, weight)


@everywhere
@pytest.mark.parametrize("scene", [launched_before, no_page_is_given_back])
def test_weights_change_memory_after_what_was_launched(kind: str, scene: Callable[[Place], None]) -> None:
    play(scene, kind, pages=256)


def beside_forwards(place: Place, rounds: int) -> None:
    """Another thread runs the model all the while."""
    model = tiny("llama", place)
    ids = questions("llama", place.kind)["input_ids"]
    wrong, stop, failed = 0, threading.Event(), []
    with torch.no_grad():
        right = model(ids, use_cache=False).logits.clone()
    place.synchronize()
    lane = place.lane()
    lane.follow()

    def elsewhere() -> None:
        nonlocal wrong
        try:
            with torch.no_grad(), lane():
                while not stop.is_set():
                    wrong += not torch.equal(model(ids, use_cache=False).logits, right)
                    stop.wait(0.001)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    try:
        for _ in range(rounds):
            managed = ballonet.manage(model)
            taken = [torch.full_like(each, 1e9) for each in model.parameters()]
            while not managed.report().released:
                with contextlib.suppress(ModelInUse):
                    managed.release()
            del taken
    finally:
        stop.set()
        thread.join()
    assert not failed, failed
    assert not wrong


@everywhere
def test_forwards_wait_while_weights_change_memory(kind: str) -> None:
    play(beside_forwards, kind, pages=256, rounds=8 if kind == "cuda" else 3)


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


@torch.no_grad()
def begins_meanwhile(place: Place) -> None:
    """A forward that begins while weights change memory begins when they have."""
    model, began = tiny("llama", place), list[bool]()
    ids = questions("llama", place.kind)["input_ids"]
    right = model(ids, use_cache=False).logits
    forwards: list[Paused] = []

    def meanwhile() -> None:
        if not forwards:
            forwards.append(Paused(model, ids, 0))
            began.append(forwards[0].there.wait(SHORT))

    with changing(meanwhile), ballonet.manage(model):
        assert torch.equal(forwards[0].go_on(), right)
    assert began == [False], "a forward began while weights changed memory"


@torch.no_grad()
def runs_already(place: Place) -> None:
    """Weights change memory once a forward has ended that runs already, whatever layer it is at."""
    model = tiny("llama", place, layers=3)
    ids = questions("llama", place.kind)["input_ids"]
    right = model(ids, use_cache=False).logits
    for layer in range(3):
        forward, begins = Paused(model, ids, layer), threading.Event()
        forward.there.wait()
        with changing(begins.set):
            thread = threading.Thread(target=ballonet.manage, args=(model,))
            thread.start()
            began = begins.wait(SHORT)
            logits = forward.go_on()
            thread.join()
        ballonet.manage(model).release()
        assert torch.equal(logits, right)
        assert not began, f"weights changed memory while layer {layer} was about to run"


@torch.no_grad()
def pages_stay(place: Place) -> None:
    """While a forward runs, whatever layer it is at, no other thread moves pages of its weights."""
    model = tiny("llama", place, layers=3)
    ids = questions("llama", place.kind)["input_ids"]
    with ballonet.manage(model, interval=None) as managed:
        right = model(ids, use_cache=False).logits
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


@everywhere
@pytest.mark.parametrize("scene", [begins_meanwhile, runs_already, pages_stay])
def test_a_forward_is_held_open(kind: str, scene: Callable[[Place], None]) -> None:
    play(scene, kind, pages=256)


def captured(model: Any, place: Place) -> Captured:
    ids = questions("llama", place.kind)["input_ids"]

    def work() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return (model(ids, use_cache=False).logits,)

    return Captured(place, work)


def replayed_before(place: Place) -> None:
    """A replay on a stream that nothing else has used runs while its model is released."""
    model = tiny("llama", place)
    managed = ballonet.manage(model)
    graph = captured(model, place)
    right = graph.replay()[0]
    place.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if place.cuda else None):
        place.sleep()
        graph.launch()
    managed.release()
    place.device.reap()
    place.synchronize()
    assert torch.equal(graph.outputs[0], right)


def replayed_beside(place: Place, rounds: int) -> None:
    """While one thread replays a graph of a model another one moves pages of its weights whenever it may."""
    model = tiny("llama", place)
    with ballonet.manage(model) as managed:
        graph = captured(model, place)
        right = graph.replay()[0]
        ranges, stop, moves = list(managed._weights.all_ranges()), threading.Event(), 0

        def elsewhere() -> None:
            nonlocal moves
            while not stop.is_set():
                for held in ranges:
                    moves += sum(held.move(piece, "device") for piece in range(held.pieces))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        try:
            same = [torch.equal(graph.replay()[0], right) for _ in range(rounds)]
        finally:
            stop.set()
            thread.join()
        assert all(same)
        assert moves
        del graph


@everywhere
def test_a_model_is_released_after_what_was_replayed(kind: str) -> None:
    play(replayed_before, kind, pages=256)


@everywhere
def test_weights_stay_where_they_are_in_a_replay(kind: str) -> None:
    play(replayed_beside, kind, pages=256, rounds=60 if kind == "cuda" else 3)
