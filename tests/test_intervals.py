"""How long iterations take is the device's time, whatever the host's clock says meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from ballonet.offload.manager.activity import Intervals

PENDING = 16


class Device:
    """Marks of a device that works for so many seconds between two marks, and is told how far it is."""

    def __init__(self, work: float) -> None:
        self.work = work
        self.made = 0
        self.reached = 0
        self.held: set[int] = set()
        self.captures = False

    def capturing(self) -> bool:
        return self.captures

    def mark(self) -> int:
        self.held.add(self.made)
        self.made += 1
        return self.made - 1

    def passed(self, marks: Iterable[int]) -> bool:
        return all(mark < self.reached for mark in marks)

    def seconds(self, first: int, last: int) -> float:
        assert self.passed([first, last]), "asked before it has passed"
        return (last - first) * self.work

    def release(self, marks: Iterable[int]) -> None:
        self.held -= {*marks}


def test_interval_is_unknown_before_the_device_gets_there() -> None:
    device = Device(work=0.25)
    intervals = Intervals[str](device, lambda: 0.0, PENDING)
    assert [intervals.begin(name) for name in "abcd"] == [[]] * 4  # the host runs ahead
    device.reached = 3
    assert intervals.begin("e") == [("a", 0.25), ("b", 0.25)]
    device.reached = 5
    assert intervals.begin("f") == [("c", 0.25), ("d", 0.25)]
    assert device.held == {4, 5}


def test_a_device_that_stays_behind_costs_no_memory() -> None:
    device = Device(work=1.0)
    intervals = Intervals[int](device, lambda: 0.0, PENDING)
    for number in range(10 * PENDING):
        assert intervals.begin(number) == []
    assert len(device.held) <= PENDING
    device.reached = device.made
    assert [tag for tag, _ in intervals.begin(-1)][-1] == 10 * PENDING - 2
    intervals.forget()
    assert not device.held


def test_no_mark_is_asked_for_within_a_capture() -> None:
    device = Device(work=1.0)
    intervals = Intervals[str](device, lambda: 0.0, PENDING)
    intervals.begin("a")
    device.captures, device.reached = True, 1
    assert intervals.begin("captured") == []
    device.captures = False
    assert not device.held, "nor is an interval known that a capture lies in"
    intervals.begin("b")
    device.reached = 9
    assert intervals.begin("c") == [("b", 1.0)]


def test_the_host_tells_where_operators_are_complete_when_they_return() -> None:
    now = iter([1.0, 1.5, 3.5])
    intervals = Intervals[str](None, lambda: next(now), PENDING)
    assert intervals.begin("a") == []
    assert intervals.begin("b") == [("a", 0.5)]
    assert intervals.begin("c") == [("b", 2.0)]
