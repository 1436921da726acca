"""A budget that changes while the pool is in use: pages are back with the driver, or nothing has changed."""

from __future__ import annotations

import _thread
import contextlib
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import BudgetError, BudgetInUse, ConfigError, PoolExhausted

from .core import PAGE, Core, Gate, Other, calls, eventually, holds, opened, physical, refused, write
from .entries import Layer, keys, layer
from .pool import bytes_that_exist

LONG = 60 * 10**9  # ns; nobody waits that long in a test that goes well


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def lowered(core: Core, pages: int) -> bool:
    return core.device.budget == pages * PAGE


# -- At once ----------------------------------------------------------------------------------------------------------


def test_an_allocation_goes_on_where_the_budget_rises_meanwhile(pool: ThreadPoolExecutor) -> None:
    """Who is asked for more has none, but somebody else has raised it, such as who gave up lowering it."""
    with opened(budget=8) as core:
        device, over = core.device, threading.Event()
        device.allocate(8 * PAGE)
        device.hear_shortages(16, LONG)

        def listen() -> None:
            raised = False
            while not over.is_set():
                if device.shortage(10**6)[0]:
                    if not raised:
                        device.set_budget(9 * PAGE)
                    raised = True
                    device.answer_shortage(False)

        listening = pool.submit(listen)
        try:
            device.allocate(PAGE)
            refused(lambda: device.allocate(PAGE))
        finally:
            over.set()
        listening.result()


def test_allocation_asks_what_the_budget_may_become_before_it_is_too_large(pool: ThreadPoolExecutor) -> None:
    """The total has become more since, and becomes more again while a thread waits for an answer."""
    with opened(budget=8) as core:
        device = core.device
        device.hear_shortages(8, LONG)

        def listen() -> list[tuple[int, bool]]:
            heard = [device.shortage(LONG)]
            device.hear_shortages(16, LONG)
            device.answer_shortage(False)
            heard.append(device.shortage(LONG))
            device.hear_shortages(17, LONG)  # is no answer
            heard.append(device.shortage(10**8))
            device.set_budget(12 * PAGE)
            device.answer_shortage(True)
            return heard

        listening = pool.submit(listen)
        device.deallocate(device.allocate(12 * PAGE))
        assert listening.result() == [(0, False), (4, False), (0, False)]
        device.hear_shortages(0, 0)
        refused(lambda: device.allocate(17 * PAGE))


def test_the_error_says_what_would_do_and_survives_a_pickle() -> None:
    error = pickle.loads(pickle.dumps(BudgetInUse(5, 3, 1.5)))
    assert isinstance(error, BudgetError)
    assert (error.immovable, error.budget, error.smallest, error.required, error.waited) == (5, 3, 5, 5, 1.5)
    assert "1500 ms" in str(error)
    assert "ballonet.set_budget(5)" in str(BudgetInUse(5, 3, 0))


def test_a_host_that_has_room_for_some_of_it_only() -> None:
    with opened(budget=8, host_budget=3) as core:
        layers = [layer(core, 2, value) for value in (1, 11)]
        core.device.publish([one.entry(key) for key, one in enumerate(layers)])
        with pytest.raises(BudgetInUse) as caught:
            core.device.set_budget(0, LONG)
        assert (caught.value.immovable, keys(core)) == (2 * PAGE, [])
        refused(lambda: core.range(8).map(0, 8))
        assert keys(core) == []  # a request that all together could not meet takes none
        core.device.set_budget(2 * PAGE)
        assert (keys(core), physical()) == ([0], 2 * PAGE)
        assert all(one.intact() for one in layers)


# -- Waiting ----------------------------------------------------------------------------------------------------------


def leased(core: Core, other: Other, pieces: int = 2) -> Layer:
    one = layer(core, pieces)
    core.device.publish([one.entry(1)])
    other.does(one.group.enter)
    return one


ENDS: dict[str, Callable[[Core, Layer, int], object]] = {
    "yields": lambda core, one, block: core.device.yield_pages(),
    "leaves": lambda core, one, block: one.group.leave(),
    "frees": lambda core, one, block: core.device.deallocate(block),
}


@pytest.mark.parametrize("end", ENDS)
def test_lower_budget_waits_for_who_uses_pages_and_nothing_is_created_above_it(
    end: str, other: Other, pool: ThreadPoolExecutor
) -> None:
    with opened(budget=9) as core:
        one, kv = leased(core, other, 4), core.range(8)
        block = core.device.allocate(3 * PAGE)
        lowering = pool.submit(core.device.set_budget, 4 * PAGE, LONG)
        eventually(lambda: core.device.page_request == 3)
        refused(lambda: kv.map(0, 1))
        refused(lambda: core.device.allocate(PAGE))
        assert physical() == 7 * PAGE
        assert not lowering.done()
        other.does(lambda: ENDS[end](core, one, block))
        lowering.result()
        assert (physical(), core.device.budget) == (4 * PAGE, 4 * PAGE)
        assert end == "frees" or core.device.page_request == 0
        assert one.place == ("device" if end == "frees" else "host")
        assert one.intact()


def test_lower_budget_is_refused_where_a_lease_never_ends(other: Other) -> None:
    with opened(budget=8) as core:
        one = leased(core, other, 4)
        with pytest.raises(BudgetInUse) as caught:
            core.device.set_budget(2 * PAGE, 10**7)
        assert (caught.value.immovable, caught.value.budget) == (4 * PAGE, 2 * PAGE)
        assert caught.value.waited > 0
        assert "timeout" in str(caught.value)
        assert (core.device.budget, core.device.page_request, one.place) == (8 * PAGE, 0, "device")
        core.range(4).map(0, 4)  # up to the budget that is in force again


def test_a_capture_that_ends_meanwhile(gate: Gate, pool: ThreadPoolExecutor) -> None:
    with opened(budget=8, path=gate.path) as core:
        one = layer(core, 4)
        core.device.publish([one.entry(1)])
        kv = core.range(2, mapped=2)
        core.device.deallocate(core.device.allocate(2 * PAGE))
        gate.capture(True)
        kv.close()
        before = calls()
        lowering = pool.submit(core.device.set_budget, PAGE, LONG)
        eventually(lambda: lowered(core, 1))
        eventually(lambda: calls()["cuStreamIsCapturing"] > before["cuStreamIsCapturing"] + 50)
        for function in ("cuMemUnmap", "cuMemMap", "cuStreamSynchronize", "cuEventSynchronize", "cuMemcpyAsync"):
            assert calls()[function] == before[function], function
        assert not lowering.done()
        gate.capture(False)
        lowering.result()
        assert physical() <= PAGE
        assert one.intact()


def test_the_newest_fails_and_the_budget_before_all_of_them_is_in_force(other: Other, pool: ThreadPoolExecutor) -> None:
    with opened(budget=8) as core:
        leased(core, other, 4)
        first = pool.submit(core.device.set_budget, 2 * PAGE, LONG)
        eventually(lambda: lowered(core, 2))
        with pytest.raises(BudgetInUse):
            core.device.set_budget(PAGE, 10**7)
        with pytest.raises(BudgetInUse):
            first.result()
        assert core.device.budget == 8 * PAGE


def test_two_threads_that_lease_what_the_other_waits_for(pool: ThreadPoolExecutor) -> None:
    with opened(budget=4) as core:
        layers = [layer(core, 2, value) for value in (1, 11)]
        core.device.publish([one.entry(key) for key, one in enumerate(layers)])
        both = threading.Barrier(2)

        def model(one: Layer) -> bool:
            one.group.enter()
            both.wait()
            try:
                core.device.set_budget(0, LONG)
            except BudgetInUse:
                return False
            else:
                return True
            finally:
                one.group.leave()

        assert sorted(pool.map(model, layers)) in ([False, True], [True, True])
        assert (physical(), core.device.budget) == (0, 0)
        assert all(one.intact() for one in layers)


def test_thread_that_waits_gives_what_it_leases_itself(other: Other, pool: ThreadPoolExecutor) -> None:
    with opened(budget=8) as core:
        mine, theirs = layer(core, 2), layer(core, 4)
        core.device.publish([theirs.entry(2), mine.entry(1)])
        other.does(theirs.group.enter)
        more = core.range(4, mapped=2)

        def wait() -> None:
            mine.group.enter()
            try:
                core.device.set_budget(2 * PAGE, LONG)
            finally:
                mine.group.leave()

        waiting = pool.submit(wait)
        eventually(lambda: mine.range.leads_to(0) == "alias")
        more.retire(0, 2)
        other.does(theirs.group.leave)
        waiting.result()
        assert physical() <= 2 * PAGE
        assert mine.intact()
        assert theirs.intact()


def test_asking_threads_go_on_while_others_change_the_budget(pool: ThreadPoolExecutor) -> None:
    with opened(budget=32) as core:
        one = layer(core, 8)
        core.device.publish([one.entry(1)])
        done = threading.Event()

        def allocate(value: int) -> int:
            served = 0
            while not done.is_set() or not served:
                with contextlib.suppress(PoolExhausted):
                    block = core.device.allocate(3 * PAGE)
                    write(block, value, 3 * PAGE)
                    served += holds(block, value, 3 * PAGE)
                    core.device.deallocate(block)
            return served

        asking = [pool.submit(allocate, value) for value in (1, 2)]
        met = 0
        for pages in (12, 4, 20, 6, 32) * 6:
            with contextlib.suppress(BudgetInUse):
                core.device.set_budget(pages * PAGE, LONG)
                met += 1
                assert physical() <= pages * PAGE
        done.set()
        assert all(future.result() > 0 for future in asking)
        assert met > 6
        assert one.intact()


# -- Signals ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_while_it_waits(other: Other, pool: ThreadPoolExecutor) -> None:
    with opened(budget=8) as core:
        one = leased(core, other, 4)

        def interrupt() -> None:
            eventually(lambda: lowered(core, 2))
            _thread.interrupt_main()

        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            core.device.set_budget(2 * PAGE, LONG)
        interrupting.result()
        ((*_, took),) = (row for row in core.device.events() if row[1] == "budget refused")
        assert took < LONG
        assert (core.device.budget, core.device.page_request, one.place) == (8 * PAGE, 0, "device")


@pytest.fixture
def usr1() -> Iterator[list[object]]:
    """What is called, in order, when the signal comes; where a call raises, the error."""
    works: list[object] = []

    def handle(number: int, frame: object) -> None:
        work = works.pop(0)
        assert callable(work)
        try:
            works.append(work())
        except BudgetInUse as error:
            works.append(error)

    before = signal.signal(signal.SIGUSR1, handle)
    yield works
    signal.signal(signal.SIGUSR1, before)


def test_from_a_signal_on_the_thread_that_leases(usr1: list[object]) -> None:
    with opened(budget=4) as core:
        one = layer(core, 4)
        core.device.publish([one.entry(1)])
        one.group.enter()
        usr1.append(lambda: core.device.set_budget(PAGE, LONG))
        os.kill(os.getpid(), signal.SIGUSR1)
        eventually(lambda: usr1 == [None])
        assert (keys(core), physical()) == ([1], PAGE)
        one.group.leave()
        assert one.intact()


def test_from_a_signal_while_the_same_thread_waits(other: Other, pool: ThreadPoolExecutor, usr1: list[object]) -> None:
    """The newest counts: it neither waits for the one before it, nor does that change what it has set."""
    with opened(budget=8) as core:
        leased(core, other, 4)
        usr1.append(lambda: core.device.set_budget(6 * PAGE, LONG))

        def send() -> None:
            eventually(lambda: lowered(core, 2))
            os.kill(os.getpid(), signal.SIGUSR1)

        sending = pool.submit(send)
        with pytest.raises(BudgetInUse):
            core.device.set_budget(2 * PAGE, LONG)
        sending.result()
        assert (usr1, core.device.budget) == ([None], 6 * PAGE)


# -- Under torch ------------------------------------------------------------------------------------------------------


def test_the_facade_waits_as_long_as_it_is_told(other: Other) -> None:
    ballonet.install(budget="8MiB", host_budget="8MiB", page_size="64KiB", device="cpu")
    try:
        device = devices.require()
        group = device.group()
        range_, twin = (device.reserve(4 * 2**20, "weights", group) for _ in range(2))
        range_.map(0, range_.pieces)
        device.publish([(1, group, [(range_, 0, range_.pieces, twin, 0, [])])])
        other.does(group.enter)
        tensor = torch.ones(2**18)
        with pytest.raises(BudgetInUse) as caught:
            ballonet.set_budget("3MiB", timeout="10ms")
        assert caught.value.waited >= 0.01
        assert device.budget == 8 * 2**20
        for timeout in ("soon", -1, float("inf")):
            with pytest.raises(ConfigError, match="timeout"):
                ballonet.set_budget("3MiB", timeout=timeout)
        other.does(group.leave)
        ballonet.set_budget("3MiB")
        assert bytes_that_exist() <= 3 * 2**20
        assert tensor.numpy().sum() == 2**18
        del tensor
        range_.close()
        twin.close()
    finally:
        ballonet.restore()
