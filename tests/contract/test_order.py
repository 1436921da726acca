"""The order checker of the stand-in: what nothing orders is refused, and what is ordered is not.

`use` says that work on a stream reads or writes bytes. The reference at the end is a second, slow checker made from
sets of operations, with which random programs are compared.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .driver import HOST, ILLEGAL_ADDRESS, ILLEGAL_STATE, NOT_READY, SUCCESS, Driver

PAGE = 4096


def use(driver: Driver, address: int, nbytes: int, stream: int, *, write: bool) -> int:
    return driver.result("ballonet_standin_use", address, nbytes, stream, write)


def test_two_streams_that_write_need_an_order(standin: Driver) -> None:
    with standin.mapped(4 * PAGE) as address, standin.stream() as first, standin.stream() as second:
        assert use(standin, address, 2 * PAGE, first, write=True) == SUCCESS
        assert use(standin, address + PAGE, 2 * PAGE, second, write=True) == ILLEGAL_STATE
        message = standin.violation()
        for part in (hex(first), hex(second), hex(address + PAGE), hex(address + 2 * PAGE)):
            assert part in message


@pytest.mark.parametrize(
    ("before", "after", "refused"),
    [("read", "read", False), ("read", "write", True), ("write", "read", True), ("write", "write", True)],
)
def test_only_two_reads_go_together(standin: Driver, before: str, after: str, refused: bool) -> None:
    with standin.mapped(PAGE) as address, standin.stream() as first, standin.stream() as second:
        assert use(standin, address, PAGE, first, write=before == "write") == SUCCESS
        assert use(standin, address, PAGE, first, write=before == "write") == SUCCESS
        expected = ILLEGAL_STATE if refused else SUCCESS
        assert use(standin, address, PAGE, second, write=after == "write") == expected


def test_bytes_side_by_side_do_not_conflict(standin: Driver) -> None:
    with standin.mapped(PAGE) as address, standin.stream() as first, standin.stream() as second:
        assert use(standin, address, 100, first, write=True) == SUCCESS
        assert use(standin, address + 100, 100, second, write=True) == SUCCESS
        assert use(standin, address + 99, 1, second, write=False) == ILLEGAL_STATE


def test_stream_zero_is_ordered_by_events_like_any_other(standin: Driver) -> None:
    with standin.mapped(PAGE) as address, standin.stream() as stream, standin.event() as event:
        assert use(standin, address, PAGE, 0, write=True) == SUCCESS
        assert use(standin, address, PAGE, stream, write=True) == ILLEGAL_STATE
        assert "stream 0" in standin.violation()
        standin.ok("cuEventRecord", event, 0)
        standin.ok("cuStreamWaitEvent", stream, event, 0)
        assert use(standin, address, PAGE, stream, write=True) == SUCCESS
        assert use(standin, address, PAGE, 0, write=False) == ILLEGAL_STATE
        standin.ok("cuEventRecord", event, stream)
        standin.ok("cuStreamWaitEvent", 0, event, 0)
        assert use(standin, address, PAGE, 0, write=False) == SUCCESS


def test_an_event_orders_only_what_came_before_it(standin: Driver) -> None:
    with (
        standin.mapped(2 * PAGE) as address,
        standin.stream() as first,
        standin.stream() as second,
        standin.event() as event,
    ):
        assert use(standin, address, PAGE, first, write=True) == SUCCESS
        standin.ok("cuEventRecord", event, first)
        assert use(standin, address + PAGE, PAGE, first, write=True) == SUCCESS
        standin.ok("cuStreamWaitEvent", second, event, 0)
        assert use(standin, address, PAGE, second, write=True) == SUCCESS
        assert use(standin, address + PAGE, PAGE, second, write=True) == ILLEGAL_STATE


def test_order_is_handed_on(standin: Driver) -> None:
    with (
        standin.mapped(PAGE) as address,
        standin.stream() as a,
        standin.stream() as b,
        standin.stream() as c,
        standin.event() as event,
    ):
        assert use(standin, address, PAGE, a, write=True) == SUCCESS
        for earlier, later in ((a, b), (b, c)):
            standin.ok("cuEventRecord", event, earlier)
            standin.ok("cuStreamWaitEvent", later, event, 0)
        assert use(standin, address, PAGE, c, write=True) == SUCCESS


def synchronize_stream(driver: Driver, stream: int, event: int) -> None:
    driver.ok("cuStreamSynchronize", stream)


def synchronize_context(driver: Driver, stream: int, event: int) -> None:
    driver.ok("cuCtxSynchronize")


def synchronize_event(driver: Driver, stream: int, event: int) -> None:
    driver.ok("cuEventRecord", event, stream)
    driver.ok("cuEventSynchronize", event)


def query_event(driver: Driver, stream: int, event: int) -> None:
    driver.ok("cuEventRecord", event, stream)
    assert driver.result("cuEventQuery", event) == SUCCESS


@pytest.mark.parametrize("wait", [synchronize_stream, synchronize_context, synchronize_event, query_event])
def test_what_the_host_waited_for_may_be_unmapped(standin: Driver, wait: Callable[[Driver, int, int], None]) -> None:
    address, handle = standin.reserve(PAGE), standin.create(PAGE)
    standin.map(address, PAGE, handle)
    with standin.stream() as stream, standin.event() as event:
        assert use(standin, address + 10, 20, stream, write=False) == SUCCESS
        assert standin.result("cuMemUnmap", address, PAGE) == ILLEGAL_STATE
        message = standin.violation()
        assert all(part in message for part in (hex(stream), hex(address + 10), hex(address + 30)))
        wait(standin, stream, event)
        standin.unmap(address, PAGE)
    standin.ok("cuMemRelease", handle)
    standin.ok("cuMemAddressFree", address, PAGE)


def test_the_calling_threads_use_must_be_waited_for_too(standin: Driver) -> None:
    address, handle = standin.reserve(PAGE), standin.create(PAGE)
    standin.map(address, PAGE, handle)
    assert use(standin, address, PAGE, 0, write=False) == SUCCESS
    assert standin.result("cuMemUnmap", address, PAGE) == ILLEGAL_STATE
    with standin.event() as event:
        query_event(standin, 0, event)
    standin.unmap(address, PAGE)
    standin.ok("cuMemRelease", handle)
    standin.ok("cuMemAddressFree", address, PAGE)


def test_an_event_that_has_not_passed_orders_nothing(standin: Driver) -> None:
    address, handle = standin.reserve(PAGE), standin.create(PAGE)
    standin.map(address, PAGE, handle)
    with standin.mapped(PAGE, HOST) as source, standin.stream() as stream, standin.event() as event:
        standin.configure(latency_ns=1_000_000_000)
        standin.ok("cuMemcpyAsync", address, source, PAGE, stream)
        standin.ok("cuEventRecord", event, stream)
        assert standin.result("cuEventQuery", event) == NOT_READY
        assert standin.result("cuMemUnmap", address, PAGE) == ILLEGAL_STATE
        standin.ok("cuEventSynchronize", event)
        standin.unmap(address, PAGE)
    standin.ok("cuMemRelease", handle)
    standin.ok("cuMemAddressFree", address, PAGE)


def test_conflicts_are_seen_through_aliases_and_unmaps_are_not(standin: Driver) -> None:
    handle, here, there = standin.create(PAGE), standin.reserve(PAGE), standin.reserve(PAGE)
    for address in (here, there):
        standin.map(address, PAGE, handle)
    with standin.stream() as first, standin.stream() as second:
        assert use(standin, here, PAGE, first, write=True) == SUCCESS
        assert use(standin, there, PAGE, second, write=False) == ILLEGAL_STATE
        standin.unmap(there, PAGE)  # nobody used it through this address
        assert standin.result("cuMemUnmap", here, PAGE) == ILLEGAL_STATE
        standin.ok("cuStreamSynchronize", first)
        standin.unmap(here, PAGE)
    standin.ok("cuMemRelease", handle)
    for address in (here, there):
        standin.ok("cuMemAddressFree", address, PAGE)


def test_a_page_that_came_back_is_nobodys(standin: Driver) -> None:
    address, handle = standin.reserve(PAGE), standin.create(PAGE)
    with standin.stream() as first, standin.stream() as second:
        for stream in (first, second, first):
            standin.map(address, PAGE, handle)
            assert use(standin, address, PAGE, stream, write=True) == SUCCESS
            standin.ok("cuStreamSynchronize", stream)
            standin.unmap(address, PAGE)
    standin.ok("cuMemRelease", handle)
    standin.ok("cuMemAddressFree", address, PAGE)


def test_a_refused_copy_changes_nothing(standin: Driver) -> None:
    with standin.mapped(PAGE) as source, standin.mapped(PAGE) as target, standin.stream() as stream:
        standin.write(target, b"t" * PAGE)
        standin.ok("cuCtxSynchronize")
        assert use(standin, source, PAGE, 0, write=True) == SUCCESS
        assert standin.result("cuMemcpyAsync", target, source, PAGE, stream) == ILLEGAL_STATE
        assert ctypes.string_at(target, PAGE) == b"t" * PAGE
        assert use(standin, target, PAGE, 0, write=True) == SUCCESS  # and is no use


def test_use_of_what_is_not_mapped_is_refused(standin: Driver) -> None:
    address = standin.reserve(2 * PAGE)
    assert use(standin, address, PAGE, 0, write=False) == ILLEGAL_ADDRESS
    handle = standin.create(PAGE)
    standin.map(address, PAGE, handle)
    assert use(standin, address, PAGE + 1, 0, write=False) == ILLEGAL_ADDRESS
    assert hex(address + PAGE) in standin.violation()
    standin.unmap(address, PAGE)
    standin.ok("cuMemRelease", handle)
    standin.ok("cuMemAddressFree", address, 2 * PAGE)


# -- random programs against a reference -------------------------------------------------------------------------------

STREAMS, EVENTS, BYTES = 4, 3, 48


@dataclass
class Reference:
    """Happens-before as sets: what an operation comes after is a set of earlier operations, no clocks."""

    # (stream, from, to, write); the index is the operation's id
    uses: list[tuple[int, int, int, bool]] = field(default_factory=list)
    past: list[set[int]] = field(default_factory=lambda: [set() for _ in range(STREAMS)])
    host: set[int] = field(default_factory=set)
    events: list[set[int]] = field(default_factory=lambda: [set() for _ in range(EVENTS)])

    def use(self, stream: int, start: int, end: int, write: bool) -> bool:
        """Whether the use is ordered; if so it has happened."""
        self.past[stream] |= self.host
        for i, (_, other_start, other_end, other_write) in enumerate(self.uses):
            if other_start < end and start < other_end and (write or other_write) and i not in self.past[stream]:
                return False
        self.past[stream].add(len(self.uses))
        self.uses.append((stream, start, end, write))
        return True

    def may_unmap(self, start: int, end: int) -> bool:
        return all(i in self.host or b <= start or end <= a for i, (_, a, b, _) in enumerate(self.uses))


streams, events = st.integers(0, STREAMS - 1), st.integers(0, EVENTS - 1)
spans = st.tuples(st.integers(0, BYTES - 1), st.integers(1, BYTES)).map(lambda s: (s[0], min(BYTES, s[0] + s[1])))
steps = st.one_of(
    st.tuples(st.just("use"), streams, spans, st.booleans()),
    st.tuples(st.just("use"), streams, spans, st.booleans()),
    st.tuples(st.just("record"), streams, events),
    st.tuples(st.just("wait"), streams, events),
    st.tuples(st.just("query"), events),
    st.tuples(st.just("synchronize"), streams),
    st.tuples(st.just("unmap")),
)


@given(program=st.lists(steps, max_size=60))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_programs_are_judged_as_by_the_reference(standin: Driver, program: list[tuple]) -> None:
    made_streams, made_events = [0], []
    for _ in range(STREAMS - 1):
        standin.ok("cuStreamCreate", ctypes.byref(stream := ctypes.c_void_p()), 1)
        made_streams.append(stream.value)
    for _ in range(EVENTS):
        standin.ok("cuEventCreate", ctypes.byref(event := ctypes.c_void_p()), 2)
        made_events.append(event.value)
    reference = Reference()
    handle, address = standin.create(PAGE), standin.reserve(PAGE)
    standin.map(address, PAGE, handle)
    for step in program:
        match step:
            case ("use", stream, (start, end), write):
                expected = SUCCESS if reference.use(stream, start, end, write) else ILLEGAL_STATE
                assert use(standin, address + start, end - start, made_streams[stream], write=write) == expected, step
            case ("record", stream, event):
                reference.past[stream] |= reference.host
                reference.events[event] = set(reference.past[stream])
                standin.ok("cuEventRecord", made_events[event], made_streams[stream])
            case ("wait", stream, event):
                reference.past[stream] |= reference.events[event]
                standin.ok("cuStreamWaitEvent", made_streams[stream], made_events[event], 0)
            case ("query", event):
                reference.host |= reference.events[event]
                standin.ok("cuEventQuery", made_events[event])
            case ("synchronize", stream):
                reference.host |= reference.past[stream]
                standin.ok("cuStreamSynchronize", made_streams[stream])
            case ("unmap",):
                allowed = reference.may_unmap(0, BYTES)
                assert standin.result("cuMemUnmap", address, PAGE) == (SUCCESS if allowed else ILLEGAL_STATE)
                if allowed:
                    standin.map(address, PAGE, handle)
    standin.ok("cuCtxSynchronize")
    standin.unmap(address, PAGE)
    standin.ok("cuMemRelease", handle)
    standin.ok("cuMemAddressFree", address, PAGE)
    for event in made_events:
        standin.ok("cuEventDestroy", event)
    for stream in made_streams[1:]:
        standin.ok("cuStreamDestroy", stream)
