"""Who is idle, by the progress of the device: forwards return long before they are done."""

from __future__ import annotations

import pytest

from ballonet.offload.manager.activity import Activity, Progress
from ballonet.offload.manager.memory_manager import MemoryManager, Surroundings
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.record.record import Point

from .fake_manager import LINK, FakeCache, FakeDevice, FakeModel
from .marks import LateMarks
from .tuned import Clock

PAGES = DEFAULT.pages


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream(clock: Clock) -> LateMarks:
    return LateMarks(clock)


@pytest.fixture
def activity(clock: Clock, stream: LateMarks) -> Activity:
    return Activity(Progress(stream, clock))


def forward(activity: Activity, stream: LateMarks, seconds: float) -> None:
    activity._progress.begin()
    activity.at = stream.clock.now
    stream.launch(seconds)
    activity.ended(stream.clock.now, activity._progress.end())


def test_it_is_in_use_until_the_device_is_through(activity: Activity, stream: LateMarks, clock: Clock) -> None:
    forward(activity, stream, 3.0)
    for clock.now in (0.5, 1.5, 2.9):
        assert activity.last(clock.now) == clock.now
    clock.now = 3.2
    assert activity.last(clock.now) == pytest.approx(3.0), "when it was done, and not when somebody looked"
    clock.now = 50.0
    assert activity.last(clock.now) == pytest.approx(3.0)


def test_nobody_has_to_look_at_the_right_moment(activity: Activity, stream: LateMarks, clock: Clock) -> None:
    """A model that is asked about an hour later has been idle for that long."""
    forward(activity, stream, 0.01)
    clock.now = 10.0
    forward(activity, stream, 2.0)
    forward(activity, stream, 2.0)  # the host runs ahead
    clock.now = 3600.0
    assert activity.last(clock.now) == pytest.approx(14.0)
    assert stream.in_use == 1, "the one from which time is counted"
    forward(activity, stream, 1.0)
    clock.now = 3700.0
    assert activity.last(clock.now) == pytest.approx(3601.0)
    assert stream.in_use == 1


def test_where_time_begins_in_the_middle_of_work(activity: Activity, stream: LateMarks, clock: Clock) -> None:
    """The mark that is to pass at once does not. What comes out is too early, until the device has nothing to do."""
    stream.launch(7.0)
    forward(activity, stream, 1.0)
    clock.now = 7.5
    assert activity.last(clock.now) == clock.now
    clock.now = 20.0
    assert activity.last(clock.now) == 7.5
    forward(activity, stream, 1.0)
    clock.now = 23.0
    assert activity.last(clock.now) == pytest.approx(21.0)


def test_what_is_captured_has_no_mark(activity: Activity, stream: LateMarks, clock: Clock) -> None:
    stream.captures = True
    forward(activity, stream, 5.0)
    stream.captures = False
    clock.now = 1.0
    assert activity.last(clock.now) == 0.0


def test_where_operators_are_complete_when_they_return(clock: Clock) -> None:
    activity = Activity(Progress(None, clock))
    activity.at = 1.0
    activity.ended(2.0, activity._progress.end())
    assert activity.last(9.0) == 2.0


# -- the manager's


def late(pages: int, clock: Clock, stream: LateMarks) -> tuple[FakeDevice, MemoryManager]:
    device = FakeDevice(pages)
    return device, MemoryManager(device, Surroundings(bandwidth=LINK, clock=clock, marks=stream))


def iterate(
    manager: MemoryManager, model: FakeModel, stream: LateMarks, seconds: float, cache: FakeCache | None
) -> None:
    manager.before(model, Point("decode", 1, 8))
    if cache is not None:
        manager.taken_of(cache.number)
    stream.launch(seconds)
    manager.after(model)


def test_a_model_whose_forward_takes_longer_than_the_pause_is_not_idle(clock: Clock, stream: LateMarks) -> None:
    """The weights and the KV of an idle model would be the first to go, while it computes with them."""
    device, manager = late(100, clock, stream)
    slow, fast = FakeModel(device, "slow"), FakeModel(device, "fast")
    for client in (slow, fast):
        manager.add(client)
    clock.now = 100.0
    stream.launch(0.0)
    manager.before(slow, Point("prefill", 1, 8))
    cache = FakeCache(device, manager, clock)
    manager.taken_of(cache.number)
    stream.launch(5 * PAGES.idle)
    manager.after(slow)
    clients = manager._known.clients
    for after in (0.1, 2.5, 4.9):
        clock.now = 100.0 + after * PAGES.idle
        assert clients.idleness.active(clock.now) >= {clients.of_model(slow).number, cache.number}
    clock.now = 100.0 + 5.9 * PAGES.idle
    assert clients.idleness.active(clock.now) >= {clients.of_model(slow).number, cache.number}
    clock.now = 100.0 + 6.1 * PAGES.idle
    assert not clients.idleness.active(clock.now) & {clients.of_model(slow).number, cache.number}
    assert manager._known.clients.idleness.rested(clock.now)


def test_slow_decoding_does_not_wake_it_at_each_token(clock: Clock, stream: LateMarks) -> None:
    device, manager = late(100, clock, stream)
    model = FakeModel(device, "a")
    manager.add(model)
    for _ in range(3):
        iterate(manager, model, stream, 3 * PAGES.idle, None)
        clock.now = stream.free_at  # the host waits for the token
    manager.before(model, Point("prefill", 1, 8))
    assert manager._known.clients.of_model(model).usual is None
    manager.after(model)
    clock.now += 2 * PAGES.idle
    manager.before(model, Point("prefill", 1, 8))
    assert manager._known.clients.of_model(model).usual == pytest.approx(2 * PAGES.idle)


def test_who_is_about_to_run_keeps_the_buffers_of_the_cache_that_it_used_last(clock: Clock, stream: LateMarks) -> None:
    device, manager = late(40, clock, stream)
    model, other = FakeModel(device, "a"), FakeModel(device, "b", pages=(1,) * 8)
    for client in (model, other):
        manager.add(client)
    device.kv = device.free - 2
    caches = []
    for seconds in (0.01, 0.01):
        manager.before(model, Point("decode", 1, 8))
        caches.append(cache := FakeCache(device, manager, clock))
        manager.taken_of(cache.number)
        stream.launch(seconds)
        manager.after(model)
        clock.now += 0.1
    assert manager.pages.short
    first, second = caches
    for _ in range(5):
        clock.now += 2 * PAGES.idle  # whoever reads the text takes his time
        iterate(manager, model, stream, 0.01, second)
        assert second.gave_buffers == 0, "it is about to run"
    assert first.gave_buffers >= 5
    iterate(manager, other, stream, 0.01, None)
    assert second.gave_buffers == 0, "it ran just now"
    iterate(manager, model, stream, 4 * PAGES.idle, second)
    clock.now += 3 * PAGES.idle
    iterate(manager, other, stream, 0.0, None)
    assert second.gave_buffers == 0, "it runs yet"
    clock.now += 3 * PAGES.idle
    iterate(manager, other, stream, 0.0, None)
    assert second.gave_buffers > 0
