"""What happens behind the program's back: pages are unmapped late and mapped ahead of their use (eLLM §5.1)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError

from .core import (
    EVENTS,
    PAGE,
    Core,
    Gate,
    Other,
    backings,
    behind,
    calls,
    eventually,
    holds,
    library,
    make,
    maps,
    opened,
    page_calls,
    physical,
    refused,
    together,
    write,
)
from .faulting import arm, faults_at_every_call, faults_fired

THREAD = "ballonet-mapper"


def threads() -> int:
    """Threads of this process that are a mapper's."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:  # it has ended since
            continue
    return names.count(THREAD)


# -- the thread -------------------------------------------------------------------------------------------------------


def test_a_device_that_is_dropped_takes_its_thread_along() -> None:
    before = threads()
    device = make()
    some = device.reserve(PAGE, "kv", device.group())
    some.map(0, 1)
    with pytest.raises(BallonetError, match="still open"):
        device.close()
    eventually(lambda: threads() == before + 1)  # it could not be closed, and works on
    del device, some
    eventually(lambda: threads() == before)
    assert physical() == 0


def test_unmapping_is_no_business_of_who_retires(core: Core) -> None:
    some = core.range(8, "weights", mapped=8)
    unmapped, before = calls()["cuMemUnmap"], core.device.driver_ns()
    some.retire(0, 8)
    assert core.device.driver_ns() == before
    eventually(lambda: calls()["cuMemUnmap"] == unmapped + 8)
    assert core.device.driver_ns() == before


def test_an_unmap_that_fails_is_done_again(core: Core) -> None:
    some = core.range(3, "weights", mapped=3)
    fired = faults_fired()
    arm("cuMemUnmap", 2)
    some.retire(0, 3)
    eventually(lambda: faults_fired() == fired + 1 and backings(some) == ["none"] * 3)


def test_the_thread_and_the_program_may_do_the_same_at_once() -> None:
    with opened(budget=48) as core:

        def work(owner: _native.Owner) -> None:
            for turn in range(30):
                some = core.device.reserve(8 * PAGE, owner, core.device.group())
                if owner == "kv":
                    some.map_ahead(2, 6)
                some.map(0, 4)
                write(some.address, turn, 4 * PAGE)
                some.retire(2, 1)
                some.map(0, 8)
                assert holds(some.address, turn, 2 * PAGE)
                some.close()

        together(core, work, ("kv", "kv", "weights", "activations"))
        core.device.reap(wait=True)
        assert core.pages()["pending_free"] == 0


def test_while_a_stream_is_captured_the_thread_does_nothing(core: Core, gate: Gate) -> None:
    core.stream()
    late, later, kv = core.range(4, "weights"), core.range(4, "weights"), core.range(4)
    for some in (late, later):
        some.map(0, 4)
    gate.close(EVENTS)
    recorded = calls()["cuEventRecord"]
    late.retire(0, 4)
    eventually(lambda: calls()["cuEventRecord"] == recorded + 3)  # the legacy stream, this one, that of copies
    gate.capture(True)
    before = calls()
    later.retire(0, 4)
    kv.map_ahead(0, 2)
    eventually(lambda: calls()["cuStreamIsCapturing"] > before["cuStreamIsCapturing"] + 8)  # it has looked
    gate.open()
    after = calls()
    eventually(lambda: calls()["cuStreamIsCapturing"] > after["cuStreamIsCapturing"] + 8)
    unchanged = ("cuMemMap", "cuMemUnmap", "cuMemCreate", "cuMemSetAccess", "cuEventRecord")
    assert [calls()[name] for name in unchanged] == [before[name] for name in unchanged]
    assert (late.leads_to(0), later.leads_to(0), kv.leads_to(0)) == ("pending_free", "pending_free", "none")
    gate.capture(False)
    eventually(lambda: backings(late) == ["none"] * 4 and backings(kv) == ["kept"] * 2 + ["none"] * 2)
    eventually(lambda: backings(later) == ["none"] * 4)


@pytest.mark.parametrize("waits", [True, False])
def test_an_event_that_a_capture_took_is_recorded_anew(core: Core, gate: Gate, waits: bool) -> None:
    core.stream()
    some = core.range(4, "weights", mapped=4)
    gate.library.capture_next(0)
    some.retire(0, 4)
    if waits:
        core.device.reap(wait=True)
    else:

        def gone() -> bool:
            core.device.reserve(PAGE, "weights", core.device.group()).map(0, 1)  # a program goes on
            return backings(some) == ["none"] * 4

        eventually(gone)
    assert backings(some) == ["none"] * 4


SCENE = """
    import os, sys, signal
    from ballonet.allocator import _native
    device = _native.Device(library=sys.argv[1], ordinal=0, page_size=4096, budget=2**20, host_budget=0)
    {bind}
    def some(owner):
        made = device.reserve(16 * 4096, owner, device.group())
        made.map(0, 8)
        return made
    kept = [some("kv"), some("weights")]
    some("kv").map_ahead(8, 8)
    some("weights").retire(0, 8)
    {then}
"""


@pytest.mark.parametrize("bind", ["", "device.bind()"])
@pytest.mark.parametrize(
    "then",
    [
        "sys.exit(0)",
        "os.kill(os.getpid(), signal.SIGINT)",
        # A child has no thread, and ends like any other process; so does its parent.
        "child = os.fork()\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
        "else: signal.alarm(600); kept.clear(); del device",
    ],
    ids=["exits", "is interrupted", "forks"],
)
def test_a_process_ends_whatever_the_thread_does(bind: str, then: str) -> None:
    scene = textwrap.dedent(SCENE).format(bind=bind, then=then)
    ended = subprocess.run(
        [sys.executable, "-c", scene, str(library())], timeout=600, capture_output=True, text=True, check=False
    )
    assert ended.returncode in ((1, -2, 130) if "SIGINT" in then else (0,)), ended.stderr
    assert "terminate" not in ended.stderr


# -- ahead ------------------------------------------------------------------------------------------------------------


def test_pages_mapped_ahead_are_claimed_without_the_driver(core: Core) -> None:
    some = core.range(6, mapped=2)
    some.map_ahead(2, 3)
    core.device.reap(wait=True)
    assert backings(some) == ["device", "device", "kept", "kept", "kept", "none"]
    assert (some.backed, core.ahead(), core.pages()["free"], core.pages()["kv"]) == (2, 3, 3, 2)
    pages = [some.page(piece) for piece in (2, 3)]
    assert page_calls(lambda: some.map(2, 2)) == {}
    assert [some.page(piece) for piece in (2, 3)] == pages
    assert (some.backed, core.ahead(), core.pages()["free"], core.pages()["kv"]) == (4, 1, 1, 4)
    write(some.address, 7, 4 * PAGE)
    assert physical() == 5 * PAGE
    assert len(maps(some.address, 5 * PAGE)) == 1  # neighbours in address are neighbours in the pool


def test_mapping_ahead_takes_pages_from_nobody() -> None:
    with opened(budget=8) as core:
        block = core.device.allocate(2 * PAGE)
        core.device.deallocate(block)  # idle in the heap, and the heap's
        some, other = core.range(8), core.range(4)
        other.map(0, 4)
        some.map_ahead(0, 8)
        core.device.reap(wait=True)
        assert core.ahead() == 2
        assert core.pages()["activations"] == 2
        assert backings(some)[:3] == ["kept", "kept", "none"]


def test_whoever_needs_pages_gets_those_mapped_ahead_after_all_others() -> None:
    with opened(budget=12) as core:
        some, other = core.range(4), core.range(20, "weights")
        some.map_ahead(0, 4)
        core.device.reap(wait=True)
        assert "cuMemUnmap" not in page_calls(lambda: other.map(0, 8))  # new pages
        assert core.ahead() == 4
        assert page_calls(lambda: other.map(8, 1))["cuMemUnmap"] == 1
        assert backings(some) == ["kept", "kept", "kept", "none"]  # the last one first
        other.map(9, 3)
        assert (core.ahead(), core.pages()["weights"]) == (0, 12)
        assert all(one.place is None for one in maps(some.address, some.nbytes))
        refused(lambda: some.map(0, 1))


def test_no_more_is_mapped_ahead_than_fifty_megabytes() -> None:
    page = 2**24
    with opened(page=page, budget=8) as core:
        some, other = core.range(4), core.range(4)
        some.map_ahead(0, 4)
        core.device.reap(wait=True)
        assert core.ahead() == 50_000_000 // page == 2
        other.map_ahead(0, 1)
        core.device.reap(wait=True)
        assert core.ahead() == 2
        some.map(0, 1)
        other.map_ahead(0, 4)
        core.device.reap(wait=True)
        assert (core.ahead(), backings(other)[0]) == (2, "kept")


def test_retiring_gives_up_what_was_mapped_ahead_and_makes_room_for_more() -> None:
    page = 2**25
    with opened(page=page, budget=4) as core:
        some, other = core.range(2), core.range(2)
        some.map_ahead(0, 1)
        core.device.reap(wait=True)
        assert core.ahead() == 1
        some.retire(0, 2)
        assert core.ahead() == 0
        other.map_ahead(0, 1)
        core.device.reap(wait=True)
        assert (core.ahead(), backings(other)) == (1, ["kept", "none"])


def test_bad_requests_are_refused(core: Core) -> None:
    some = core.range(4)
    for first, count in [(0, 5), (5, 0), (4, 1), (2**63, 2**63)]:
        with pytest.raises(BallonetError, match="outside"):
            some.map_ahead(first, count)
    with pytest.raises(TypeError):
        some.map_ahead(-1, 1)
    with pytest.raises(BallonetError, match="KV and of weights"):
        core.range(4, "activations").map_ahead(0, 1)
    some.map_ahead(4, 0)
    core.device.reap(wait=True)
    assert core.ahead() == 0


def test_a_fault_ends_a_request_and_nobody_hears_of_it() -> None:
    def prepare(core: Core) -> tuple[Core, _native.Range]:
        some = core.range(6, mapped=1)
        return core, some

    def work(scene: tuple[Core, _native.Range]) -> None:
        core, some = scene
        some.map_ahead(1, 3)
        core.device.reap(wait=True)

    for (core, some), _ in faults_at_every_call(prepare, work, budget=6):
        for piece in range(6):
            if some.leads_to(piece) == "kept":
                assert behind(some.address + piece * PAGE)[:2] == ("device", "rw-s")
        some.map(0, 4)
        write(some.address, 5, 4 * PAGE)
        core.range(6, "weights").map(0, 2)
        assert holds(some.address, 5, 4 * PAGE)


# -- time -------------------------------------------------------------------------------------------------------------


def test_time_in_the_driver_is_counted_where_it_is_spent(core: Core, other: Other) -> None:
    def elsewhere() -> int:
        core.range(4, "weights", mapped=4)
        return core.device.driver_ns()

    before, numbers = core.device.driver_ns(), core.device.snapshot()["driver_ns"]
    spent = other.does(elsewhere)
    assert spent > 0
    assert core.device.driver_ns() == before
    assert core.device.snapshot()["driver_ns"]["callers"] - numbers["callers"] == spent


@pytest.mark.parametrize(
    ("work", "counts"),
    [
        (lambda core, some: core.range(3), True),
        (lambda core, some: some.map(0, 1), True),
        (lambda core, some: core.device.trim(), True),
        (lambda core, some: core.device.synchronize(), False),
        (lambda core, some: core.device.snapshot(), False),
        (lambda core, some: core.device.free_memory(), False),
    ],
    ids=["reserve", "map", "release", "synchronize", "snapshot", "memory"],
)
def test_only_page_tables_count(core: Core, work: Callable[[Core, _native.Range], object], counts: bool) -> None:
    some = core.range(3, "weights")
    other = core.range(1, "weights", mapped=1)
    other.retire(0, 1)
    core.device.reap(wait=True)
    before = core.device.driver_ns()
    work(core, some)
    assert (core.device.driver_ns() > before) is counts
