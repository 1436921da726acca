"""Something fails while a step is recorded, captured or replayed: tokens are stock's, no stream is left captured, and
the pages of graphs are given back."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch.backends import cuda

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import PoolExhausted
from ballonet.hooks.device import managers
from ballonet.hooks.pieces import attention, batch, calls, graph_pool, patches, plans, program, recipe, recorder, runner
from ballonet.offload.policy.tuning import DEFAULT

from .. import models
from ..faulting import at_each_line
from ..tuned import Clock, tuning
from .decoding import LONG, SHORT, TOKENS, answer, apart, between, by_graphs, captures, decoding, prompt, replays
from .scene import Place, scene
from .stock import small_layers

STEPS = attention, batch, calls, plans, program, recipe, recorder, patches, runner, patches, plans


def is_whole(place: Place) -> None:
    """Nothing is being captured, by any thread, and garbage is collected."""
    assert not torch.cuda.is_current_stream_capturing()
    assert gc.isenabled()
    torch.cuda.synchronize()  # refused while this thread captures
    assert not patches._recording.users, "functions of transformers are still replaced"
    place.device.check()


@contextmanager
def failing(act: Callable[[], object], at: int) -> Iterator[list[int]]:
    """Within it `act` is called before the `at`th operator that is captured; yields how many there were."""
    stock, count = program.Program._do, [0]

    def do(self: Any, op: Any) -> None:
        count[0] += 1
        if count[0] == at:
            act()
        stock(self, op)

    with mock.patch.object(program.Program, "_do", do):
        yield count


def raises(kind: type[BaseException], text: str) -> Callable[[], object]:
    def act() -> None:
        raise kind(text)

    return act


ENDS: dict[str, Callable[[], object]] = {  # in the middle of a capture
    "synchronize": torch.cuda.synchronize,
    "value": lambda: torch.ones(2, device="cuda").sum().item(),
    "pageable copy": lambda: torch.ones(2).to("cuda"),
    "not implemented": raises(NotImplementedError, "no kernel"),
    "runtime error": raises(RuntimeError, "CUDA error: operation failed"),
    "empty cache": torch.cuda.empty_cache,
}


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("what", ENDS)
@pytest.mark.parametrize("at", [2, 40])
def test_failed_capture_is_a_step_that_was_computed_eagerly(place: Place, what: str, at: int) -> None:
    """The next call, also one that draws random numbers, goes on."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected, drawn = answer(model, given), answer(model, given, mode="sampling")
    with ballonet.manage(model) as managed:
        with failing(ENDS[what], at) as count:
            assert not apart(answer(model, given), expected)
        assert count[0] >= at
        is_whole(place)
        for _ in range(3):
            assert not apart(answer(model, given, mode="sampling"), drawn)
            assert not apart(answer(model, given), expected)
        pieces = managed.report().pieces
        if what != "empty cache":
            assert "cannot be captured" in pieces.why
        if pieces.way == "eager":
            assert pieces.pages == 0


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("when", ["capture_begin", "capture_end", "instantiation", "replay"])
def test_driver_call_that_fails_is_a_step_that_was_computed_eagerly(place: Place, when: str) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected, drawn = answer(model, given), answer(model, given, mode="sampling")
    left = [3]

    class Graph(torch._C._CUDAGraph):
        def _fails(self, here: str) -> None:
            if here == when:
                left[0] -= 1
                if left[0] == 0:
                    raise RuntimeError(f"CUDA error: {here}")

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self._fails("capture_begin")
            super().capture_begin(*args, **kwargs)

        def capture_end(self) -> None:
            if when == "capture_end":
                left[0] -= 1
                if left[0] == 0:
                    with suppress(RuntimeError):
                        torch._C._cuda_synchronize()  # breaks the capture
            super().capture_end()
            self._fails("instantiation")

        def replay(self) -> None:
            self._fails("replay")
            super().replay()

    with ballonet.manage(model) as managed:
        with mock.patch.object(torch._C, "_CUDAGraph", Graph):
            assert not apart(answer(model, given), expected)
        assert left[0] <= 0, "nothing has failed"
        is_whole(place)
        for _ in range(3):
            assert not apart(answer(model, given), expected)
            assert not apart(answer(model, given, mode="sampling"), drawn)
        assert "cannot be captured" in managed.report().pieces.why


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("at", [1, 30])
def test_memory_that_runs_out_in_a_capture_is_given_back_and_captured_later(place: Place, at: int) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    with ballonet.manage(model) as managed:
        with failing(raises(torch.OutOfMemoryError, "out of memory"), at):
            assert not apart(answer(model, given), expected)
        is_whole(place)
        pieces = managed.report().pieces
        assert (pieces.way, pieces.why) == ("fine", "")
        with by_graphs(managed):
            for _ in range(2):
                assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=96)
def test_device_that_is_full_at_a_capture_decodes_eagerly(place: Place) -> None:
    """Every page is taken when the capture begins, and free again in the next call."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    filler = place.device.reserve(place.device.budget, "kv", place.device.group())
    taken = [0]
    prepare = graph_pool.GraphPool._prepare

    def fill(self: Any) -> None:
        with suppress(torch.OutOfMemoryError, PoolExhausted):
            while True:
                filler.map(taken[0], 1)
                taken[0] += 1
        prepare(self)

    with ballonet.manage(model) as managed:
        answer(model, given, 3)
        with mock.patch.object(graph_pool.GraphPool, "_prepare", fill):
            actual = answer(model, given)
        assert taken[0]
        assert not apart(actual, expected)
        is_whole(place)
        filler.close()
        with by_graphs(managed):
            for _ in range(3):
                assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
def test_shortage_keeps_graphs_away_until_it_is_over(place: Place) -> None:
    """On a square wave of pressure nothing is captured while pages are short, and once after each."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    with ballonet.manage(model) as managed:
        pieces, short = managed._pieces, [False]
        pieces._scarce = lambda: short[0]
        for wave in range(4):
            short[0] = False
            for _ in range(3):
                assert not apart(answer(model, given), expected)
            assert captures(managed) == wave + 1
            assert managed.report().pieces.pages > 0
            short[0] = True
            given_back = pieces.give_up(1)
            assert given_back > 0
            assert managed.report().pieces.pages == 0
            before = replays(managed)
            for _ in range(3):
                assert not apart(answer(model, given), expected)
            assert captures(managed) == wave + 1
            assert replays(managed) == before


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("period", [0.5, 300.0])
def test_captures_on_a_square_wave_of_pressure_are_rarer_than_one_a_second(place: Place, period: float) -> None:
    """In half of each period of so many seconds pages are short, and asked for at the end; the other half is shorter or
    longer than they have to be ample until graphs are captured again."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    clock, waves, calls_at_once = Clock(), 6, 2
    with tuning(clock=clock), small_layers(), ballonet.manage(model) as managed:

        def pass_time(_: int) -> None:
            clock.now += period / (2 * calls_at_once * TOKENS)

        for wave in range(waves):
            for is_short in (False, True):
                filler = place.device.reserve(place.device.budget, "kv", place.device.group())
                if is_short:
                    filler.map(0, place.device.available - place.device.budget // place.page // 8)
                for _ in range(calls_at_once):
                    assert not apart(answer(model, given, **between(pass_time)), expected), f"wave {wave}"
                if is_short:
                    assert managed._pages.scarce
                    assert managers.give_up(place.device, 1) or wave
                filler.close()
        assert captures(managed) < clock.now
        assert captures(managed) == (waves if period > 2 * DEFAULT.pages.forget else 1)


@scene(only="cuda", pages=128)
def test_no_garbage_is_collected_while_graphs_are_captured(place: Place) -> None:
    """Though every new object would have it collected."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given, 8)
    within, outside = [0], [0]

    def look(phase: str, _: Any) -> None:
        (within if torch.cuda.is_current_stream_capturing() else outside)[0] += 1

    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.callbacks.append(look)
    try:
        with decoding(model):
            gc.set_threshold(1)
            assert not apart(answer(model, given, 8), expected)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(look)
        gc.unfreeze()
    assert not within[0]
    assert outside[0] > 100


@scene(only="cuda", pages=128)
def test_graphs_of_a_call_that_runs_are_not_given_up(place: Place) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    with decoding(model) as managed:
        pieces, gave = managed._pieces, list[int]()
        for _ in range(2):
            actual = answer(model, given, **between(lambda _: gave.append(pieces.give_up(10))))
            assert not apart(actual, expected)
        assert not any(gave)
        assert captures(managed) == 1
        free = place.device.available
        assert pieces.give_up(10) == place.device.available - free > 0
        assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=128)
def test_pages_of_graphs_come_back_at_release_and_with_the_model(place: Place) -> None:
    given = prompt("llama", place)
    for release in (True, False):
        model = models.build("llama").to(place.kind)
        managed = ballonet.manage(model)
        answer(model, given)
        assert replays(managed) > 0
        assert live_graphs() > 0
        if release:
            managed.release()
            assert live_graphs() == 0
            assert not apart(answer(model, given), answer(model, given))
        del model, managed
        gc.collect()
        assert live_graphs() == 0, "graphs outlive their model"
        place.synchronize()
        place.empty_cache()
        assert not graph_segments(), "memory of graphs outlives them"


def live_graphs() -> int:
    return sum(type(thing) is program.Program and bool(thing._sequence) for thing in gc.get_objects())


def graph_segments() -> list[Any]:
    """Memory that torch keeps for graphs and other pools."""
    segments = torch._C._cuda_memorySnapshot(None)["segments"]
    return [segment for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0)]


def fork(_: Any) -> None:
    if not (child := os.fork()):
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)


def change_budget(_: Any) -> None:
    device = devices.require()
    for size in (device.budget - 16 * device.page_size, device.budget):
        ballonet.set_budget(size)


BETWEEN: dict[str, Callable[[Any], object]] = {
    "empty cache": lambda managed: torch.cuda.empty_cache(),
    "garbage": lambda managed: gc.collect(),
    "fork": fork,
    "budget": change_budget,
    "release": lambda managed: managed.release(),
    "exhausted": lambda managed: setattr(managed._pieces, "exhausted", True),
    "other hooks": lambda managed: torch.nn.Linear(2, 2).register_forward_hook(print),
}


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("what", BETWEEN)
def test_call_goes_on_whatever_is_called_between_two_tokens(place: Place, what: str) -> None:
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)

    def act(managed: Any, _: int) -> None:
        BETWEEN[what](managed)

    for at in (1, 2, 3, 7):
        managed = ballonet.manage(model)
        for calls_before in (1, 0):
            if calls_before:
                answer(model, given)
            actual = answer(model, given, **between(partial(act, managed), at=at))
            assert not apart(actual, expected), f"after token {at}"
        if what == "release":
            assert live_graphs() == 0
            managed = ballonet.manage(model)
        with by_graphs(managed):
            for _ in range(2):
                assert not apart(answer(model, given), expected)
        managed.release()


@scene(only="cuda", pages=256)
def test_another_model_is_managed_between_two_tokens(place: Place) -> None:
    model, other = (models.build(name).to(place.kind) for name in ("llama", "qwen2"))
    given = prompt("llama", place)
    expected, of_other = answer(model, given), answer(other, given)
    managed: list[Any] = []

    def manage(_: int) -> None:
        managed.append(ballonet.manage(other))
        assert not apart(answer(other, given), of_other)

    with decoding(model):
        answer(model, given)
        assert not apart(answer(model, given, **between(manage, at=6)), expected)
        with by_graphs(managed[0]):
            answer(other, given)
        assert not apart(answer(model, given), expected)
        managed.pop().release()
        assert not apart(answer(model, given), expected)


@scene(only="cuda", pages=256)
@pytest.mark.parametrize("streams", [False, True])
def test_threads_that_generate_with_one_model_get_stocks_tokens(place: Place, streams: bool) -> None:
    """On one stream, or each on its own."""
    model = models.build("llama").to(place.kind)
    asked = [prompt("llama", place, longest) for longest in (LONG, SHORT)]
    expected = [answer(model, given) for given in asked]

    def say(number: int) -> list[str]:
        lane = place.lane() if streams else None
        if lane is None:
            return [apart(answer(model, asked[number]), expected[number]) for _ in range(6)]
        lane.follow()
        with lane():
            answers = [answer(model, asked[number]) for _ in range(6)]
            lane.stream.synchronize()
        return [apart(mine, expected[number]) for mine in answers]

    with ballonet.manage(model) as managed, by_graphs(managed), ThreadPoolExecutor(2) as threads:
        said = list(threads.map(say, range(2)))
        assert said == [[""] * 6] * 2


@scene(only="cuda", pages=256)
def test_two_models_at_once_get_stocks_tokens(place: Place) -> None:
    both = [models.build(name).to(place.kind) for name in ("llama", "gemma3_text")]
    given = prompt("llama", place)
    expected = [answer(model, given, 20) for model in both]

    def say(number: int) -> list[str]:
        return [apart(answer(both[number], given, 20), expected[number]) for _ in range(5)]

    managed = [ballonet.manage(model) for model in both]
    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(say, range(2)))
    assert said == [[""] * 5] * 2
    assert all(replays(owner) for owner in managed)
    pools = [owner._pieces._pool for owner in managed]
    assert pools[0].handle != pools[1].handle, "steps of two models overlap on one stream"
    assert pools[0]._pool != pools[1]._pool, "two models share a pool"
    for owner in managed:
        owner.release()


@scene(only="cuda", pages=128)
def test_step_for_another_stream_waits_until_the_last_ones_logits_are_copied(place: Place) -> None:
    """Logits are copied late, on the stream of their caller, when another one asks."""
    model = models.build("llama").to(place.kind)
    asked = [prompt("llama", place, longest) for longest in (LONG, SHORT)]
    expected = [answer(model, given) for given in asked]
    first, second = place.lane(), place.lane()
    output = program.Program.output
    inner: list[models.Output] = []

    def late(self: Any, forward: Any) -> Any:
        if torch.cuda.current_stream() == first.stream:
            place.sleep()
        return output(self, forward)

    def ask(_: int) -> None:
        with second():
            inner.append(answer(model, asked[1]))

    with decoding(model):
        for lane in (first, second):
            lane.follow()
            with lane():
                answer(model, asked[0])
        place.synchronize()
        with first(), mock.patch.object(program.Program, "output", late):
            actual = answer(model, asked[0], **between(ask, at=4))
        place.synchronize()
        assert not apart(actual, expected[0])
        assert not apart(inner[0], expected[1])


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("where", ["steps", "memory"])
def test_calls_that_are_interrupted_anywhere_leave_nothing_behind(place: Place, where: str) -> None:
    """Ctrl-C between any two lines of a step that is recorded, captured, compared or replayed."""
    model = models.build("llama", num_hidden_layers=1).to(place.kind)
    given = prompt("llama", place, rows=1)
    expected = answer(model, given, 6)

    @contextmanager
    def begin() -> Iterator[Any]:
        with ballonet.manage(model) as managed:
            yield managed

    def act(managed: Any) -> None:
        answer(model, given, 6)

    for managed, _ in at_each_line(begin, act, *(STEPS if where == "steps" else (graph_pool,)), most=60):
        is_whole(place)
        assert not managed._pieces._running
        assert not any(call.runs for call in managed._pieces.calls.values())
        for _ in range(2):
            assert not apart(answer(model, given, 6), expected)
        with by_graphs(managed):
            answer(model, given, 6)


@scene(only="cuda", pages=128)
@pytest.mark.parametrize("at", [3, 60])
def test_graphs_that_compute_something_else_are_never_replayed(place: Place, at: int) -> None:
    """A kernel that does something else under capture: the next way is taken, with one warning."""
    model = models.build("llama").to(place.kind)
    given = prompt("llama", place)
    expected = answer(model, given)
    stock, count, done = program.Program._do, [0], list[str]()

    def do(self: Any, op: Any) -> None:
        stock(self, op)
        count[0] += 1
        changed = self.tensors[op.results[0]]
        if not done and count[0] >= at and changed.is_floating_point() and changed.numel() > 8:
            changed.mul_(1.001)
            done.append(str(op))

    with ballonet.manage(model) as managed:
        with mock.patch.object(program.Program, "_do", do), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                count[0] = 0
                assert not apart(answer(model, given), expected)
        assert done, "nothing was changed"
        pieces = managed.report().pieces
        assert "fine: graphs and eager code differ in" in pieces.why
        assert pieces.way != "fine"
        assert len([warning for warning in caught if "fewer graphs" in str(warning.message)]) == 1


@scene(only="cuda", pages=128)
def test_manage_and_release_that_are_interrupted_leave_cudnn_s_attention_on(place: Place) -> None:
    model = models.build("llama", num_hidden_layers=1).to(place.kind)

    def act(_: Any) -> None:
        ballonet.manage(model).release()

    for _ in at_each_line(nullcontext, act, calls):
        act(None)
        assert cuda.cudnn_sdp_enabled()
        assert not calls._users.users
