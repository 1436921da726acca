"""A model is managed and released while forwards and replays of it run, on the device and on another thread."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

import ballonet
from ballonet.allocator.errors import ModelInUse

from .scene import Captured, Place, everywhere, play
from .stock import questions
from .test_weights_streaming import tiny

ROUNDS = 3


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


@everywhere
def test_weights_change_memory_after_what_was_launched(kind: str) -> None:
    play(launched_before, kind, pages=256)


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
            while not managed.released:
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
