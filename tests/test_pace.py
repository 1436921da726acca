"""How long forwards take: the arithmetic with clocks that are set by hand, and around a real model."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ballonet.hooks.cache_argument import CACHE_NAMES
from ballonet.hooks.device import streams as marking
from ballonet.hooks.device.streams import CudaMarks, HostMarks
from ballonet.hooks.measure.pace import PENDING, Measured, Pace, point_of
from ballonet.offload.record.record import Point

from . import core, tuned
from .marks import LateMarks
from .models import build, generate, prompts

HERE = Point("decode", 1, 100)


class Clock(tuned.Clock):
    """Read in ns."""

    def __call__(self) -> int:  # type: ignore[override]
        return round(self.now * 1e9)


def forward(pace: Pace, clock: Clock, *steps: float, point: Point | None = HERE) -> None:
    """Computes, waits, computes, waits ... for so long."""
    pace.begin(point)
    for index, seconds in enumerate(steps):
        if index % 2:
            with pace.waiting():
                clock.now += seconds
        else:
            clock.now += seconds
    pace.end()


def on_the_host() -> tuple[Pace, Clock]:
    clock = Clock()
    return Pace(HostMarks(clock), clock), clock


def approximately(measured: Measured) -> Any:
    return pytest.approx(tuple(measured[1:4]))


def test_waits_are_told_from_computing() -> None:
    pace, clock = on_the_host()
    forward(pace, clock, 2, 5, 1, 4, 3)
    forward(pace, clock, 7, point=None)
    first, second = pace.drain()
    assert first.point == HERE
    assert approximately(first) == (6, 9, 15)
    assert second.point is None
    assert approximately(second) == (7, 0, 7)
    assert pace.drain() == []


def test_time_in_the_driver_is_that_of_the_forward_and_its_thread() -> None:
    clock, spent = Clock(), [10**9]
    pace = Pace(HostMarks(clock), clock, lambda: spent[0])
    for inside, after in ((5, 7), (0, 11)):
        pace.begin(HERE)
        spent[0] += inside
        pace.end()
        spent[0] += after
    assert [timing.driver for timing in pace.drain()] == [5e-9, 0.0]


def test_time_per_token_is_from_one_decode_step_to_the_next() -> None:
    pace, clock = on_the_host()

    def step(point: Point | None) -> float | None:
        clock.now += 3  # sampling
        forward(pace, clock, 1, 1, point=point)
        return pace.drain()[0].between

    assert step(Point("prefill", 2, 10)) is None
    assert step(Point("decode", 2, 10)) is None, "what comes after a prefill is its own first"
    assert step(Point("decode", 2, 11)) == pytest.approx(5)
    assert step(Point("decode", 2, 12)) == pytest.approx(5)
    assert step(Point("decode", 2, 12)) is None, "not the next token"
    assert step(Point("decode", 1, 13)) is None, "other sequences"
    assert step(None) is None
    assert step(Point("decode", 1, 14)) is None
    assert step(Point("prefill", 1, 15)) is None
    assert step(Point("prefill", 1, 16)) is None, "another prompt"


def test_a_forward_that_did_not_do_its_work_is_not_measured() -> None:
    pace, clock = on_the_host()
    pace.begin(HERE)  # interrupted: its end never comes
    forward(pace, clock, 1)
    try:
        pace.begin(HERE)
        raise ValueError
    except ValueError:
        pace.end()
    assert len(pace.drain()) == 1
    try:
        raise ValueError  # one that is handled all the time is none of its own
    except ValueError:
        forward(pace, clock, 1)
    assert len(pace.drain()) == 1
    pace.end()
    with pace.waiting():
        pass
    assert pace.drain() == []


def test_threads_do_not_meet() -> None:
    pace, clock = on_the_host()
    pace.begin(HERE)
    clock.now += 1
    other = threading.Thread(target=forward, args=(pace, clock, 2, 3))
    other.start()
    other.join()
    pace.end()
    (inner, outer) = pace.drain()
    assert approximately(inner) == (2, 3, 5)
    assert approximately(outer) == (6, 0, 6)


def on_a_device() -> tuple[Pace, Clock, LateMarks]:
    clock, marks = Clock(), LateMarks(tuned.Clock())
    return Pace(marks, clock), clock, marks


def catch_up(marks: LateMarks) -> None:
    """The device is through with all that it was given."""
    marks.clock.now = marks.free_at


def test_marks_are_used_again_without_waiting() -> None:
    pace, clock, marks = on_a_device()
    for _ in range(3):
        catch_up(marks)
        forward(pace, clock, 0, 0, 0)
        marks.launch(1)
        forward(pace, clock, 0)
        assert len(pace.drain()) == 1, "the second is not over"
        catch_up(marks)
        assert len(pace.drain()) == 1
    for _ in range(9):
        pace.begin(HERE)  # is interrupted
    assert marks.made == 6
    for _ in range(3 * PENDING):
        marks.launch(1)
        forward(pace, clock, 0)
    assert marks.made <= 2 * PENDING + 2
    catch_up(marks)
    assert len(pace.drain()) == PENDING


def test_captured_forward_is_not_measured() -> None:
    pace, clock, marks = on_a_device()
    forward(pace, clock, 1)
    marks.captures = True
    forward(pace, clock, 1)
    pace.begin(HERE)
    assert pace.drain() == []
    marks.captures = False
    pace.end()
    pace.begin(HERE)
    marks.captures = True
    pace.end()
    marks.captures = False
    assert len(pace.drain()) == 1


@pytest.mark.parametrize(
    ("launched", "stalls", "resident"),
    [
        (2, 0, 10),  # the device is the slower one
        (2, 5, 10),
        (30, 90, 30),  # the host is: while the stream waits it launches on
        (100, 90, 100),  # and nothing was lost by it
        (1000, 90, 100),  # it waited for something else
    ],
)
def test_a_forward_takes_no_less_than_its_launches(launched: float, stalls: float, resident: float) -> None:
    pace, clock, marks = on_a_device()
    pace.begin(HERE)
    marks.launch(4)
    with pace.waiting():
        marks.launch(stalls)
    marks.launch(6)
    clock.now += launched
    pace.end()
    catch_up(marks)
    (timing,) = pace.drain()
    assert (resident, stalls, 10 + stalls) == approximately(timing)


def test_listener_hears_measurements_others_drain() -> None:
    pace, clock = on_the_host()
    with pace.listening() as heard, pace.listening() as other:
        forward(pace, clock, 1)
        drained = pace.drain()
    forward(pace, clock, 1)
    pace.drain()
    assert heard == other == drained
    assert len(drained) == 1


def mode(new: int | None = None) -> int:
    """The mode of this thread: how what it does concerns captures of others. `new`: what it is from now on."""
    driver, value = core.driver(), ctypes.c_int(0 if new is None else new)
    driver.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(value))
    asked = value.value
    if new is None:
        driver.ok("cuThreadExchangeStreamCaptureMode", ctypes.byref(value))
    return asked


def test_a_thread_of_ours_breaks_no_capture_whatever_torch_does_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mode(0)  # a test of faults may have left another
    monkeypatch.setattr(marking, "_library", lambda _: str(core.library()))
    for kind, inside in (("cuda", 2), ("standin", 0)):
        with suppress(ValueError), marking.relaxed(SimpleNamespace(kind=kind)):  # type: ignore[arg-type]
            assert mode() == inside
            raise ValueError
        assert mode() == 0


def test_events_are_asked_for_where_that_breaks_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the relaxed mode, which is that of the thread's own only as long as it asks."""
    mode(0)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            made.append(self)

        def record(self, stream: object) -> None:
            assert stream == "current"

        def query(self) -> bool:
            modes.append(mode())
            return self not in made[2:]

        def elapsed_time(self, other: object) -> float:
            modes.append(mode())
            return 250.0

    made: list[Any] = []
    modes: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda ordinal: "current")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    marks = CudaMarks(0, str(core.library()))
    first, second = marks.mark(), marks.mark()
    assert marks.passed([first, second])
    assert marks.seconds(first, second) == 0.25
    assert not marks.passed([marks.mark(), first])
    assert set(modes) == {2}
    assert mode() == 0
    marks.release([first])
    assert marks.mark() is first
    assert len(made) == 3
    assert not marks.capturing()


# -- points of real models


def points(model: Any, inputs: Any, mode: str = "greedy", tokens: int = 4, **more: Any) -> list[Point | None]:
    forwards: list[Point | None] = []

    def hook(_: Any, args: Any, kwargs: Any) -> None:
        forwards.append(point_of(args, kwargs))

    with model.register_forward_pre_hook(hook, with_kwargs=True):
        generate(model, mode, inputs, tokens, **more)
    return forwards


DECODING = [Point("decode", 2, length) for length in (9, 10, 11)]


@pytest.mark.parametrize(
    ("name", "held"),
    [("llama", (9, 10, 11)), ("qwen3_next", (9, 10, 11)), ("mamba", (1,) * 3), ("t5", (1, 2, 3))],
)
def test_points_of_a_generation(name: str, held: tuple[int, ...]) -> None:
    model = build(name)
    assert points(model, prompts(2, 9)) == [Point("prefill", 2, 9), *(Point("decode", 2, length) for length in held)]
    assert points(model, prompts(2, 9), "beam")[1] == Point("decode", 6, held[0])


def test_points_without_a_cache_and_with_one_of_fixed_size() -> None:
    model = build("llama")
    assert points(model, prompts(2, 9), use_cache=False) == [Point("prefill", 2, n) for n in (9, 10, 11, 12)]
    first, *others = points(model, prompts(2, 9), cache_implementation="static")
    assert first == Point("prefill", 2, 9)
    assert {other and other.phase for other in others} == {"decode"}
    assert all(other is not None and 9 <= other.length <= 64 for other in others)


def test_forward_without_tokens_has_no_point() -> None:
    ids, states = torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, 7, 8)
    assert point_of((), {"input_ids": ids, "decoder_input_ids": ids[:, :3]}) == Point("prefill", 2, 7)
    assert point_of((ids,), {}) == Point("prefill", 2, 7)
    assert point_of((), {"input_ids": None, "inputs_embeds": states}) == Point("prefill", 2, 7)
    cache = SimpleNamespace(get_seq_length=lambda: 5)
    for name in CACHE_NAMES:
        assert point_of((ids,), {name: cache}) == Point("prefill", 2, 7), "several new tokens"
        assert point_of((ids[:, :1],), {name: cache}) == Point("decode", 2, 5)
    assert point_of((), {"cu_seq_lens_q": ids, "input_ids": ids}) is None
    for wrong in ((), (states,), (states[0],), (ids[0],), (ids[:, :0],), ("a",), (None,)):
        assert point_of(wrong, {}) is None
    assert point_of((), {"pixel_values": states}) is None
    assert point_of((), {"input_ids": [[1, 2]]}) is None, "the model is to say what is wrong with it"


def test_the_device_is_not_asked() -> None:
    """A number that lies on a device stays there."""

    class Distant(torch.Tensor):
        def __index__(self) -> int:
            raise AssertionError("the host would wait")

        __int__ = __bool__ = __index__  # type: ignore[assignment]

    ids = torch.zeros(2, 1, dtype=torch.long)
    cache = SimpleNamespace(get_seq_length=lambda: torch.tensor(5).as_subclass(Distant))
    mask = torch.zeros(2, 1, 1, 64).as_subclass(Distant)
    given: dict[str, Any] = {"input_ids": ids, "past_key_values": cache}
    assert point_of((), given | {"attention_mask": mask}) == Point("decode", 2, 64)
    assert point_of((), given | {"attention_mask": {"full": mask, "other": None}}) == Point("decode", 2, 64)
    assert point_of((), given) == Point("decode", 2, 1)


def test_around_a_real_model() -> None:
    """Ends by an exception are told from others where torch calls its hooks."""
    model = build("llama", num_hidden_layers=2)
    pace, clock = on_the_host()

    def begin(_: Any, args: Any, kwargs: Any) -> None:
        pace.begin(point_of(args, kwargs))

    def end(*_: Any) -> None:
        pace.end()

    def layer(*_: Any) -> None:
        with pace.waiting():
            clock.now += 1

    def fail(*_: Any) -> None:
        raise ValueError("no")

    with (
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, always_call=True),
        model.model.layers[0].register_forward_pre_hook(layer),
    ):
        generate(model, "greedy", prompts(2, 9), 4)
        timings = pace.drain()
        assert [timing.point for timing in timings] == [Point("prefill", 2, 9), *DECODING]
        assert all(approximately(timing) == (0, 1, 1) for timing in timings)
        with model.model.layers[1].register_forward_pre_hook(fail), pytest.raises(ValueError, match="no"):
            model(**prompts(2, 9))
        assert pace.drain() == []
        model(**prompts(2, 9))
        assert len(pace.drain()) == 1


def test_a_forward_by_graphs_is_timed_as_one_or_forgotten() -> None:
    clock = Clock()
    pace = Pace(HostMarks(clock), clock)
    for pieces, forgotten in ((True, False), (True, True), (False, False)):
        pace.begin(HERE)
        clock.now += 0.007
        if forgotten:
            pace.forget()
        elif pieces:
            pace.replayed()
        pace.end()
    pace.replayed()
    assert [timing.pieces for timing in pace.drain()] == [True, False], "no forward had begun at the last"
    assert not pace.listeners
    with pace.listening():
        assert pace.listeners
