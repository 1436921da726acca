"""The log of decisions: what is kept, what is counted, and what the core's rows become."""

from __future__ import annotations

import gc
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.allocator.events import KINDS, Count, Events, LoggedEvent, Named, Row, more

EVENTS = st.lists(
    st.builds(
        LoggedEvent,
        when=st.integers(0, 9),
        source=st.sampled_from("abc"),
        verb=st.sampled_from("xy"),
        pages=st.integers(0, 9),
        predicted=st.sampled_from([1.0, 2.0]),
        measured=st.none() | st.sampled_from([0.25, 0.5]),
    ),
    max_size=30,
)


class Core:
    """Rows that come at the next call, as a device hands them over."""

    def __init__(self, *rows: Row) -> None:
        self.rows = list(rows)

    def events(self) -> list[Row]:
        rows, self.rows = self.rows, []
        return rows


@given(EVENTS)
def test_event_nobody_predicted_is_expected_to_take_as_long_as_before(events: list[LoggedEvent]) -> None:
    log = Events()
    for event in events:
        log.add(replace(event, predicted=None))
    for index, event in enumerate(log.since(0).events):
        before = [
            earlier
            for earlier in events[:index]
            if (earlier.source, earlier.verb) == (event.source, event.verb) and earlier.measured is not None
        ]
        pages = sum(earlier.pages for earlier in before)
        if event.measured is None or not pages:
            assert event.predicted is None
        else:
            seconds = sum(earlier.measured or 0.0 for earlier in before)
            assert event.predicted == pytest.approx(event.pages * seconds / pages)


@given(EVENTS, st.lists(st.integers(0, 30)), st.integers(0, 10))
def test_readers_get_each_event_once_or_learn_how_many_they_lost(
    events: list[LoggedEvent], stops: list[int], limit: int
) -> None:
    log = Events(limit=limit)
    cursor, told, begin = 0, 0, 0
    for stop in sorted({min(stop, len(events)) for stop in [*stops, len(events)]}):
        for event in events[begin:stop]:
            log.add(event)
        heard = log.since(cursor)
        assert heard.events == events[max(begin, stop - limit) : stop]
        assert heard.lost == max(0, stop - begin - limit)
        told += len(heard.events) + heard.lost
        cursor, begin = heard.cursor, stop
    assert told == len(events)
    assert log.since(cursor) == ([], cursor, 0)


@given(EVENTS, st.integers(0, 30))
def test_counts_are_of_all_that_came_and_can_be_told_from_earlier_ones(events: list[LoggedEvent], first: int) -> None:
    log = Events(limit=3)
    before = log.counts()
    for number, event in enumerate(events):
        if number == first:
            before = log.counts()
        log.add(event)
    if first >= len(events):
        before = log.counts()
    assert summed(log.counts()) == brute(events)
    assert summed(more(log.counts(), before)) == brute(events[first:])


def brute(events: list[LoggedEvent]) -> dict[tuple[str, str], Count]:
    return {
        (source, verb): Count(
            len(of := [event for event in events if (event.source, event.verb) == (source, verb)]),
            sum(event.pages for event in of),
            sum(event.measured or 0 for event in of),
        )
        for source, verb in {(event.source, event.verb) for event in events}
    }


def summed(counts: dict[str, dict[str, Count]]) -> dict[tuple[str, str], Count]:
    return {(source, verb): count for source, verbs in counts.items() for verb, count in verbs.items()}


def test_event_of_the_core_is_named_once_whoever_listens() -> None:
    here = threading.get_ident()
    core = Core(
        (5, "take", 3, 77, here, 2_000_000),
        (6, "yield", 1, 78, 12345, 0),
        (7, "spill", 2, -1, 0, 0),
        (8, "something new", 1, -1, here, 0),
        (9, "budget", 4, 16, here, 1000),
    )
    log = Events(core)
    log.naming = lambda key: Named("idle weights", f"model, layer {key - 70}", 0.5)
    log.hear()
    log.hear()
    me = threading.current_thread().name
    assert log.since().events == [
        LoggedEvent(5, "idle weights", "reclaim", 3, "model, layer 7", me, 0.5, 0.002),
        LoggedEvent(6, "idle weights", "yield", 1, "model, layer 8", "thread 12345", 0.5, None),
        LoggedEvent(7, "spill", "reclaim", 2, "", "ballonet", None, None),
        LoggedEvent(8, "something new", "reclaim", 1, "", me, None, None),
        LoggedEvent(9, "budget", "set", 4, "", me, None, 1e-6),
    ]
    assert log.counts()["idle weights"] == {"reclaim": Count(1, 3, 0.002), "yield": Count(1, 1, 0.0)}


def test_an_entry_of_nobody_has_its_number() -> None:
    log = Events(Core((5, "take", 3, 77, 0, 0)))
    log.hear()
    (event,) = log.since().events
    assert (event.source, event.what) == ("reclaim", "entry 77")


def test_every_kind_of_the_core_is_a_source_and_a_verb_and_only_entries_have_a_name() -> None:
    source = (Path(__file__).parent.parent / "allocator" / "csrc" / "pages" / "events.h").read_text()
    names = re.search(r"kNames\[\] = \{(.*?)\}", source, re.DOTALL)
    assert names is not None
    assert set(re.findall(r'"(.*?)"', names[1])) == set(KINDS)

    def refuse(key: int) -> Named:
        raise AssertionError(f"asked for {key}")

    for kind, (source, verb) in KINDS.items():
        log = Events(Core((1, kind, 1, 9, 0, 0)))
        if source:
            log.naming = refuse  # the key of a budget is another number
        log.hear()
        (event,) = log.since().events
        assert (event.source, event.verb) == (source or "reclaim", verb)


def test_a_decision_of_this_moment_is_of_the_thread_that_makes_it() -> None:
    log = Events()
    begin = time.monotonic_ns()
    log.decided("budget", "set", 3, predicted=1.0)
    log.decided("idle KV", "restore", 2, what="a cache", by="a model")
    first, second = log.since().events
    assert begin <= first.when <= second.when <= time.monotonic_ns()
    assert (first.by, first.predicted, first.measured) == (threading.current_thread().name, 1.0, None)
    assert (second.by, second.what) == ("a model", "a cache")
    assert second.to_dict()["source"] == "idle KV"


@pytest.mark.usefixtures("hasty")
def test_many_threads_add_and_one_reads() -> None:
    log = Events(limit=100_000)

    def add(number: int) -> None:
        for when in range(300):
            log.add(LoggedEvent(when, "a", str(number), 1))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    read, cursor = [], 0
    while any(thread.is_alive() for thread in threads):
        heard = log.since(cursor)
        read, cursor = read + heard.events, heard.cursor
    read += log.since(cursor).events
    assert {verb: count.events for verb, count in log.counts()["a"].items()} == {str(n): 300 for n in range(6)}
    for number in range(6):
        assert [event.when for event in read if event.verb == str(number)] == list(range(300))


def test_an_event_may_be_added_in_the_middle_of_adding_one() -> None:
    """As a finalizer or a signal handler does it: by the same thread, at any point."""
    log = Events()

    class Pages(int):
        """Adds another event when it is added up."""

        def __radd__(self, other: Any) -> int:
            log.add(LoggedEvent(2, "b", "y", 1))
            gc.collect()
            return int(self) + int(other)

        __add__ = __radd__

    log.add(LoggedEvent(1, "a", "x", Pages(5)))
    assert [event.when for event in log.since().events] == [1, 2]
    assert summed(log.counts()) == {("a", "x"): Count(1, 5, 0.0), ("b", "y"): Count(1, 1, 0.0)}
