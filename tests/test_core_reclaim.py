"""The reclaim list: who gives pages when there are none, in which order, and that bytes stay where they are read."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, BudgetInUse, DriverError, PoolExhausted

from .core import PAGE, Core, Gate, make, opened, physical, refused, write
from .entries import Layer, fill, keys, layer
from .faulting import arm, faults_at_every_call


@pytest.fixture
def memory() -> Iterator[tuple[mmap.mmap, bytes]]:
    data = bytes(value % 251 for value in range(3 * PAGE))
    one = mmap.mmap(-1, 4 * PAGE)
    one[: len(data)] = data
    yield one, data
    gc.collect()
    one.close()


def test_a_twin_is_made_from_its_sources(memory: tuple[mmap.mmap, bytes]) -> None:
    """Sources are registered memory, at any byte of it, and of the part itself; only what the twin lacks."""
    held, data = memory
    with opened(budget=3) as core:
        source = _native.HostMemory(core.device, held, 0, 4 * PAGE)
        one = layer(core, 3, value=50)
        one.twin.map_host(1, 1)
        write(one.twin.address + PAGE, 60)
        parts = [
            (0, source.address + 100, PAGE + 7),
            (PAGE + 7, source.address, 5),
            (2 * PAGE, one.range.address + 2 * PAGE, 512),
            (2 * PAGE + 512, source.address + 3, PAGE - 512),
        ]
        core.device.publish([one.entry(1, parts)])
        core.range(1).map(0, 1)
        assert keys(core) == [1]
        shown = ctypes.string_at(one.range.address, 3 * PAGE)
        assert shown[:PAGE] == data[100 : 100 + PAGE]
        assert shown[PAGE : 2 * PAGE] == bytes([60]) * PAGE
        assert shown[2 * PAGE : 2 * PAGE + 512] == bytes([52]) * 512
        assert shown[2 * PAGE + 512 :] == data[3 : 3 + PAGE - 512]
        assert core.copied() == {"weights_d2h": 512}
        source.close()


def test_a_source_that_is_not_registered_any_more_makes_the_entry_void(memory: tuple[mmap.mmap, bytes]) -> None:
    held, _ = memory
    with opened(budget=2) as core:
        source = _native.HostMemory(core.device, held, 0, 2 * PAGE)
        one = layer(core)
        core.device.publish([one.entry(1, [(0, source.address, 2 * PAGE)])])
        assert core.device.published == [1]
        source.close()
        assert core.device.published == []
        refused(lambda: core.range(1).map(0, 1))


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_page_that_moved_is_the_same_page_and_is_copied_apart_from_those_beside_it(moved: int) -> None:
    with opened(budget=6) as core:
        one = layer(core, 3)
        core.device.publish([one.entry(1)])
        assert one.range.move(moved, "device")
        assert core.device.published == [1]
        assert one.range.move(moved, "host")
        assert core.device.published == [1]
        core.device.publish([one.entry(1)])
        core.range(6, mapped=6)
        assert core.device.taken()[0][1:] == (1, 2), "the other was on the host"
        assert one.intact()
        assert one.place == "host"


def test_entries_that_make_no_sense_are_refused_and_the_old_list_stays(memory: tuple[mmap.mmap, bytes]) -> None:
    held, _ = memory
    stranger = make(PAGE, 2)
    with opened(budget=6) as core:
        one, two = layer(core), layer(core)
        far = stranger.reserve(2 * PAGE, "weights", stranger.group())
        source = _native.HostMemory(core.device, held, 0, PAGE)
        core.device.publish([one.entry(1)])
        range_, twin, group = one.range, one.twin, one.group
        outside = ctypes.create_string_buffer(2 * PAGE)
        for match, entries in {
            "two entries have the key 3": [one.entry(3), two.entry(3)],
            "another group": [(2, core.device.group(), [(range_, 0, 2, twin, 0, [])])],
            "two parts share pieces": [(2, group, [(range_, 0, 1, twin, 0, []), (range_, 1, 1, twin, 0, [])])],
            "two parts share": [(2, group, [(range_, 1, 1, twin, 1, [])]), (3, group, [(range_, 0, 2, far, 0, [])])],
            "parts share pieces": [(2, group, [(range_, 0, 2, range_, 1, [])])],
            "pieces 1 to 3 lie outside": [(2, group, [(range_, 1, 2, twin, 0, [])])],
            "pieces 2 to 3 lie outside": [(2, group, [(range_, 0, 1, twin, 2, [])])],
            "another device": [(2, group, [(range_, 0, 2, far, 0, [])])],
            "outside a part": [(2, group, [(range_, 1, 1, twin, 0, [(1, source.address, PAGE)])])],
            "neither in registered memory": [(2, group, [(range_, 0, 2, twin, 0, [(0, source.address + 1, PAGE)])])],
            "neither in registered": [(2, group, [(range_, 0, 2, twin, 0, [(0, ctypes.addressof(outside), PAGE)])])],
            "neither in": [(2, group, [(range_, 1, 1, twin, 0, [(0, range_.address, PAGE)])])],
        }.items():
            with pytest.raises(BallonetError, match=match):
                core.device.publish([*entries, two.entry(9)])
            assert core.device.published == [1]
        source.close()
        far.close()
    stranger.close()


def test_withdrawing_waits_for_what_is_being_taken() -> None:
    with opened(budget=2, link_latency_ns=100_000_000) as core:
        one = layer(core)
        core.device.publish([one.entry(1)])
        thread = threading.Thread(target=lambda: core.range(1).map(0, 1))
        thread.start()
        while thread.is_alive() and not physical("host"):
            threading.Event().wait(0.001)
        core.device.withdraw([1])
        assert keys(core) == [1], "by now it has been"
        assert one.place == "host"
        assert one.intact()
        thread.join()


def test_events_beyond_what_is_kept_push_out_the_oldest() -> None:
    count = 4096 + 20
    with opened(budget=count, host_budget=count) as core:
        one = core.range(count, "weights", group := core.device.group())
        twin = core.range(count, "weights", group)
        one.map(0, count)
        twin.map_host(0, count)
        core.device.publish([(key, group, [(one, key, 1, twin, key, [])]) for key in range(count)])
        core.range(count).map(0, count)
        assert keys(core) == list(range(20, count))
        assert core.device.snapshot()["reclaimed"] == count
        assert core.device.taken() == []


@dataclass
class Taking:
    """An entry of two parts whose twins are made from it, and who asks."""

    core: Core

    def __post_init__(self) -> None:
        group = self.core.device.group()
        self.one, self.two = layer(self.core, 2, 10, group), layer(self.core, 1, 20, group)
        self.one.twin.map_host(1, 1)
        write(self.one.twin.address + PAGE, 11)
        self.kv = self.core.range(3)
        self.entry: _native.Entry = (1, group, [*self.one.entry(0)[2], *self.two.entry(0)[2]])
        self.core.device.publish([self.entry])

    def ask(self) -> None:
        self.kv.map(0, 3)

    def untouched(self) -> bool:
        return (self.one.place, self.two.place) == ("device", "device") and not self.two.twin.backed

    def intact(self) -> bool:
        self.core.device.check()
        assert physical() == self.core.created() * PAGE
        return self.one.intact() and self.two.intact()


@pytest.mark.parametrize("times", [1, 2])
def test_a_fault_at_every_driver_call_of_a_take(times: int) -> None:
    """The entry is taken as a whole, or is as it was and is taken by the next who asks."""
    for taking, done in faults_at_every_call(Taking, Taking.ask, times, budget=3):
        assert taking.intact()
        if not done:
            if not taking.core.device.snapshot()["reclaimed"]:
                assert taking.untouched()
                assert taking.core.device.published == [1]
            taking.ask()
        assert taking.intact()
        assert (taking.one.place, taking.two.place) == ("host", "host")
        assert keys(taking.core) == [1]


def test_a_take_that_fails_twice_says_why_and_leaves_the_entry() -> None:
    with opened(budget=3) as core:
        taking = Taking(core)
        for ask, error in ((taking.ask, DriverError), (lambda: core.device.allocate(3 * PAGE), PoolExhausted)):
            arm("cuMemcpyAsync", 1)
            arm("cuMemcpyAsync", 2)
            with pytest.raises(error, match=r"cuMemcpyAsync.*filling a twin"):
                ask()
            assert taking.untouched()
            assert taking.intact()
            assert core.device.published == [1]
        core.device.set_budget(0)
        assert keys(core) == [1]


def test_another_entry_stands_in_for_one_that_fails() -> None:
    with opened(budget=4) as core:
        one, two = layer(core, value=10), layer(core, value=20).clean()
        core.device.publish([one.entry(1), two.entry(2)])
        arm("cuMemcpyAsync", 1)
        arm("cuMemcpyAsync", 2)
        core.range(2).map(0, 2)
        assert keys(core) == [2]
        assert core.device.published == [1]
        core.range(2).map(0, 2)
        assert keys(core) == [1]
        assert one.intact()


def test_entries_stay_while_a_graph_is_captured(gate: Gate) -> None:
    with opened(budget=4, path=gate.path) as core:
        one = layer(core)
        core.range(2, mapped=2)
        core.device.publish([one.entry(1)])
        gate.capture(True)
        for ask in (lambda: core.range(1).map(0, 1), lambda: core.device.allocate(PAGE)):
            refused(ask)
        with pytest.raises(BudgetInUse):
            core.device.set_budget(3 * PAGE)
        assert (keys(core), core.device.published, one.place) == ([], [1], "device")
        gate.capture(False)
        core.range(1).map(0, 1)
        assert keys(core) == [1]


def test_pages_taken_beyond_the_need_of_one_thread_serve_another() -> None:
    """Several ask at the same moment and there is one entry, with a page for each."""
    threads = 4
    with opened(budget=threads) as core, ThreadPoolExecutor(threads) as pool:
        one, start = layer(core, threads, value=40).clean(), threading.Barrier(threads)
        asking = [core.range(1) for _ in range(threads)]

        def ask(kv: _native.Range) -> None:
            start.wait(600)
            kv.map(0, 1)

        for number in range(60):
            core.device.publish([one.entry(number)])
            list(pool.map(ask, asking))
            assert keys(core) == [number]
            assert one.intact()
            for kv in asking:
                kv.retire(0, 1)
            assert one.range.own(0, threads)
            fill(one.range, 40)


# -- divisible entries


def where(*layers: Layer) -> list[str]:
    """Where each piece of each is: device or alias, by the first letter."""
    return ["".join(layer.range.leads_to(piece)[0] for piece in range(layer.range.pieces)) for layer in layers]


def divisible(core: Core, *layers: Layer, limit: int = 99) -> None:
    """One entry of all, with the key 7."""
    parts = [(layer.range, 0, layer.range.pieces, layer.twin, 0, []) for layer in layers]
    core.device.publish([(7, layers[0].group, parts)], {7: limit})


def three(core: Core, pieces: int = 4) -> list[Layer]:
    group = core.device.group()
    return [layer(core, pieces, value, group) for value in (10, 20, 30)]


def test_as_many_go_as_the_host_has_room_for_and_clean_ones_need_none(core: Core) -> None:
    layers = three(core)
    layers[2].clean()
    numbers = core.device.snapshot()
    room = numbers["host_budget"] // PAGE - numbers["host_pages"] + numbers["host_free"]
    hog = core.range(room - 2)
    hog.map_host(0, room - 2)
    divisible(core, *layers)
    assert core.device.take([7]) == 6
    assert where(*layers) == ["addd", "addd", "aaaa"]
    assert all(layer.intact() for layer in layers)


def test_divisible_entry_with_a_buffer_is_refused(core: Core) -> None:
    one = layer(core)
    with pytest.raises(BallonetError, match="divisible"):
        core.device.publish([(7, one.group, [(one.range, 0, 2, None, 0, [])])], {7: 1})


def test_a_fault_while_some_of_it_is_taken_leaves_every_byte() -> None:
    def prepare(core: Core) -> list[Layer]:
        layers = three(core)
        divisible(core, *layers)
        return layers

    for layers, _ in faults_at_every_call(prepare, lambda layers: layers[0].core.device.take([7], 4)):
        assert all(layer.intact() for layer in layers)
