"""The order checker of the stand-in: what nothing orders is refused, and what is ordered is not.

`use` says that work on a stream reads or writes bytes. The reference at the end is a second, slow checker made from
sets of operations, with which random programs are compared.
"""

import ctypes
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .driver import HOST, ILLEGAL_ADDRESS, ILLEGAL_STATE, NOT_READY, SUCCESS, Driver

PAGE = 4096


def use(driver: Driver, address: int, nbytes: int, stream: int, *, write: bool) -> int:
    return driver.result("ballonet_standin_use", address, nbytes, stream, write)


def test_uses_that_nothing_orders_are_named(standin: Driver) -> None:
    address, (first, second) = standin.page(4 * PAGE), standin.streams(2)
    assert use(standin, address, 2 * PAGE, first, write=True) == SUCCESS
    assert use(standin, address + PAGE, 2 * PAGE, second, write=True) == ILLEGAL_STATE
    message = standin.violation()
    assert all(part in message for part in map(hex, (first, second, address + PAGE, address + 2 * PAGE)))
    assert use(standin, address + PAGE, PAGE, 0, write=True) == ILLEGAL_STATE
    assert "stream 0" in standin.violation()
    assert standin.result("cuMemUnmap", address, 4 * PAGE) == ILLEGAL_STATE
    message = standin.violation()
    assert all(part in message for part in map(hex, (first, address, address + 2 * PAGE)))


def test_an_event_that_has_not_passed_orders_nothing(standin: Driver) -> None:
    address, source = standin.page(PAGE), standin.page(PAGE, HOST)
    (stream,), (event,) = standin.streams(1), standin.events(1)
    with standin.held():
        standin.ok("cuMemcpyAsync", address, source, PAGE, stream)
        standin.ok("cuEventRecord", event, stream)
        assert standin.result("cuEventQuery", event) == NOT_READY
        assert standin.result("cuMemUnmap", address, PAGE) == ILLEGAL_STATE
    standin.ok("cuEventSynchronize", event)
    standin.unmap(address, PAGE)


def test_conflicts_are_seen_through_aliases_and_unmaps_are_not(standin: Driver) -> None:
    handle, here, there = standin.create(PAGE), standin.reserve(PAGE), standin.reserve(PAGE)
    first, second = standin.streams(2)
    for address in (here, there):
        standin.map(address, PAGE, handle)
    assert use(standin, here, PAGE, first, write=True) == SUCCESS
    assert use(standin, there, PAGE, second, write=False) == ILLEGAL_STATE
    standin.unmap(there, PAGE)  # nobody used it through this address
    assert standin.result("cuMemUnmap", here, PAGE) == ILLEGAL_STATE
    standin.ok("cuStreamSynchronize", first)
    standin.unmap(here, PAGE)


def test_a_refused_copy_changes_nothing(standin: Driver) -> None:
    source, target, (stream,) = standin.page(PAGE), standin.page(PAGE), standin.streams(1)
    standin.write(target, b"t" * PAGE)
    standin.ok("cuCtxSynchronize")
    assert use(standin, source, PAGE, 0, write=True) == SUCCESS
    assert standin.result("cuMemcpyAsync", target, source, PAGE, stream) == ILLEGAL_STATE
    assert ctypes.string_at(target, PAGE) == b"t" * PAGE
    assert use(standin, target, PAGE, 0, write=True) == SUCCESS  # and is no use


def test_use_of_what_is_not_mapped_is_refused(standin: Driver) -> None:
    address, handle = standin.reserve(2 * PAGE), standin.create(PAGE)
    assert use(standin, address, PAGE, 0, write=False) == ILLEGAL_ADDRESS
    standin.map(address, PAGE, handle)
    assert use(standin, address, PAGE + 1, 0, write=False) == ILLEGAL_ADDRESS
    assert hex(address + PAGE) in standin.violation()


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
    st.tuples(st.just("synchronize event"), events),
    st.tuples(st.just("synchronize"), streams),
    st.tuples(st.just("synchronize all")),
    st.tuples(st.just("unmap")),
)


@given(program=st.lists(steps, max_size=60))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_programs_are_judged_as_by_the_reference(standin: Driver, program: list[tuple]) -> None:
    made_streams, made_events, reference = [0, *standin.streams(STREAMS - 1)], standin.events(EVENTS), Reference()
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
            case ("query" | "synchronize event" as call, event):
                reference.host |= reference.events[event]
                standin.ok("cuEventQuery" if call == "query" else "cuEventSynchronize", made_events[event])
            case ("synchronize", stream):
                reference.host |= reference.past[stream]
                standin.ok("cuStreamSynchronize", made_streams[stream])
            case ("synchronize all",):
                reference.host |= set(range(len(reference.uses)))
                standin.ok("cuCtxSynchronize")
            case ("unmap",):
                allowed = reference.may_unmap(0, BYTES)
                assert standin.result("cuMemUnmap", address, PAGE) == (SUCCESS if allowed else ILLEGAL_STATE)
                if allowed:
                    standin.map(address, PAGE, handle)
    standin.clear()
