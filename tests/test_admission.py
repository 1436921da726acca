"""Which requests run next: Algorithms 1 and 2 of eLLM, against their text, and what must hold of any answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.offload.policy.admission import Admission, Demand, LogicalBuffer, Memory, Where, admit, can_ever_run
from ballonet.offload.policy.tuning import Serving

TUNING = Serving(patience=2)
RESERVE = 3
amounts = st.integers(0, 20)


@st.composite
def queues(draw: st.DrawFn) -> list[Demand]:
    return [
        Demand(str(number), draw(amounts), draw(amounts), draw(amounts), draw(st.booleans()), draw(st.integers(0, 3)))
        for number in range(draw(st.integers(0, 8)))
    ]


memories = st.builds(Memory, amounts, amounts, amounts, st.integers(0, 40), st.just(RESERVE))


def as_printed(queue: list[Demand], memory: Memory, threshold: int) -> dict[str, Where]:
    """Lines 2-22 with both errata, without staging: at the first request that does not fit the paper stops."""
    where: dict[str, Where] = {}
    kv, activations, host = 0, 0, memory.host
    for phase in (True, False):
        for demand in (one for one in queue if one.decoding is phase):
            if memory.total - (kv + activations + demand.kv + demand.activations) >= threshold:
                where[demand.request] = "device"
                kv, activations = kv + demand.kv, activations + demand.activations
            elif (
                not phase and memory.total - (kv + activations + demand.activations) >= threshold and demand.kv <= host
            ):
                where[demand.request] = "host"
                activations, host = activations + demand.activations, host - demand.kv
            else:
                return where
    return where


@given(queues(), memories)
def test_admission_is_the_papers_where_nobody_is_passed(queue: list[Demand], memory: Memory) -> None:
    queue = [replace(demand, staging=0) for demand in queue]
    admission = admit(queue, memory, replace(TUNING, patience=0))
    assert admission.where == as_printed(queue, memory, RESERVE)
    assert admission.passed == frozenset()


@given(queues(), memories)
def test_all_or_nothing_and_never_more_than_there_is(queue: list[Demand], memory: Memory) -> None:
    admission, by_name = admit(queue, memory, TUNING), {demand.request: demand for demand in queue}
    chosen = {name: by_name[name] for name in admission.where}
    on_device = [demand for name, demand in chosen.items() if admission.where[name] == "device"]
    on_host = [demand for name, demand in chosen.items() if admission.where[name] == "host"]
    assert admission.kv == sum(demand.kv for demand in on_device)
    assert admission.activations == sum(demand.activations for demand in chosen.values()) + sum(
        e.staging for e in on_host
    )
    assert not chosen or admission.kv + admission.activations + RESERVE <= max(memory.total, RESERVE)
    assert sum(demand.kv for demand in on_host) <= memory.host
    assert not any(demand.decoding for demand in on_host)


@given(queues(), memories)
def test_pools_suffice_after_the_balloon(queue: list[Demand], memory: Memory) -> None:
    """Each side takes what it lacks of what the other has too much of, and only then of others; the reserve stays.
    That the pages are there when a step of a loop wants them is in serving/test_batches.py."""
    admission = admit(queue, memory, TUNING)
    kv, activations = memory.kv - admission.kv, memory.activations - admission.activations
    lacking = max(0, -kv) + max(0, -activations) - max(0, kv) - max(0, activations)
    assert lacking + RESERVE <= memory.elsewhere or not admission.where


@given(queues(), memories)
def test_nobody_is_passed_more_often_than_patience_allows(queue: list[Demand], memory: Memory) -> None:
    admission = admit(queue, memory, TUNING)
    looked = sorted(queue, key=lambda each: not each.decoding)
    for at, demand in enumerate(looked):
        behind = {other.request for other in looked[at + 1 :]} & admission.where.keys()
        assert (demand.request in admission.passed) == (demand.request not in admission.where and bool(behind))
        assert demand.request not in admission.passed or demand.passed < TUNING.patience


@given(queues(), st.integers(0, 60), st.randoms(use_true_random=False))
def test_whoever_fits_an_empty_device_runs_in_the_end(queue: list[Demand], extra: int, random: object) -> None:
    """Every request that was admitted ends after some iterations, and gives back what it had."""
    most = max((demand.kv + demand.activations for demand in queue), default=0) + RESERVE + extra
    waiting = [replace(demand, passed=0, decoding=False) for demand in queue]
    running: list[tuple[int, Demand]] = []
    for now in range(200):
        running = [(end, demand) for end, demand in running if end > now]
        free = most - sum(demand.kv + demand.activations for _, demand in running)
        admission: Admission = admit(waiting, Memory(free, 0, reserve=RESERVE), TUNING)
        running += [(now + 1 + random.randrange(5), demand) for demand in waiting if demand.request in admission.where]  # type: ignore[attr-defined]
        waiting = [
            replace(demand, passed=demand.passed + (demand.request in admission.passed))
            for demand in waiting
            if demand.request not in admission.where
        ]
    assert not waiting


def test_preempted_request_goes_on_where_it_is_if_nobody_else_can() -> None:
    """KV of 60 bytes lies on the host, and others have the device."""
    kept, memory = Demand("kept", 62, 3, 1, decoding=True, away=60), Memory(0, 10, 0, 100)
    assert admit([kept], memory).where == {"kept": "host"}
    assert admit([kept], Memory(0, 70, 0, 100)).where == {"kept": "device"}
    assert admit([kept], Memory(0, 10, 0, 1)).where == {}, "its new tokens need room on the host"
    assert admit([Demand("runs", 2, 2, decoding=True), kept], memory).where == {"runs": "device"}
    assert admit([replace(kept, away=0)], memory).where == {}, "what it has is on the device, and stays there"


def test_requests_that_need_no_more_go_on_beside_one_that_lacks_a_page_where_they_may() -> None:
    grows, runs = Demand("grows", 20, 3, decoding=True), Demand("runs", 0, 3, decoding=True)
    assert admit([grows, runs], Memory(0, 10)).where == {}
    assert admit([grows, runs], Memory(0, 10), pass_over=True).where == {"runs": "device"}


@pytest.mark.parametrize(
    ("needed", "staging", "host", "can"),
    [(90, 0, 0, True), (91, 90, 91, True), (91, 91, 91, False), (91, 0, 90, False)],
)
def test_request_beyond_all_memory_never_runs(needed: int, staging: int, host: int, can: bool) -> None:
    assert can_ever_run(needed, staging, Memory(60, 40, host=host, reserve=10)) is can


@given(st.lists(st.tuples(st.booleans(), st.booleans())), st.integers(1, 10), st.integers(0, 200))
def test_the_buffer_follows_algorithm_2(seen: list[tuple[bool, bool]], smallest: int, most: int) -> None:
    buffer, size, recent = LogicalBuffer(most, smallest), min(smallest, most), list[tuple[bool, bool]]()
    for tpot, ttft in seen:
        recent = [*recent, (tpot, ttft)][-5:]
        if sum(slow for slow, _ in recent) >= 3:
            size, recent = max(size // 2, min(smallest, most)), []
        elif sum(slow for _, slow in recent) >= 3:
            size, recent = min(size * 2, most), []
        assert buffer.observe(tpot=tpot, ttft=ttft) == size
        assert min(smallest, most) <= buffer.size <= most


@pytest.mark.parametrize(("start", "size"), [(None, 1), (64, 64), (4096, 1024)])
def test_its_first_size_may_be_chosen(start: int | None, size: int) -> None:
    assert LogicalBuffer(1024, 1, start).size == size


def test_shrinking_evicts_nothing() -> None:
    buffer = LogicalBuffer(1024, 1, 512)
    for _ in range(3):
        buffer.observe(tpot=True, ttft=True)
    assert buffer.size == 256
    assert buffer.usable(400) == 0
    assert buffer.usable(200) == 56


def test_buffer_opens_where_nothing_runs() -> None:
    buffer = LogicalBuffer(1024, 1, 512)
    for _ in range(2):
        buffer.observe(tpot=True, ttft=False)
    assert buffer.open()
    assert not buffer.open()
    assert buffer.observe(tpot=True, ttft=False) == 1024, "what was slow before counts no more"


def test_bytes_that_others_give_count_as_far_as_the_host_has_room() -> None:
    """60 bytes are free; others would give 40, whose bytes go to the host, which has room for 10."""
    memory = Memory(0, 60, 40, host=10, dirty=40, room=10)
    assert memory.usable == 70
    assert admit([Demand("a", 65, 0)], memory, TUNING).where == {"a": "device"}
    assert admit([Demand("a", 75, 0)], memory, TUNING).where == {}
    prompts = [Demand("a", 65, 0), Demand("b", 6, 0, staging=1), Demand("c", 4, 0, staging=1)]
    assert admit(prompts, memory, TUNING).where == {"a": "device", "c": "device"}, "b would have to go where a's 5 went"
