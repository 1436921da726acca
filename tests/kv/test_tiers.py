"""Where pages of KV are, and what is offered, copied and brought back when."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer

import ballonet
from ballonet.allocator import devices
from ballonet.allocator._native import Device
from ballonet.hooks.device import managers
from ballonet.hooks.forward.lease import ForwardLease
from ballonet.hooks.kv import pages as find_pages
from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.offload.manager import kv_client
from ballonet.offload.policy.kv_pages import AHEAD, ROWS, ahead, window
from ballonet.testing.movable import MovableKV

from .. import pool
from ..test_kv import BATCH, HEADS, K_DIM, V_DIM, kv_pages, tokens
from ..threads import elsewhere
from ..tuned import Clock, Tuned
from .pressure import hog, poison, press, started, tiers

PAGE = 4096
BUDGET = 96
HOST = 128
PER_PAGE = PAGE / (BATCH * HEADS * (K_DIM + V_DIM) * 4)  # tokens


@pytest.fixture(params=[{}])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    settings = {"budget": BUDGET * PAGE, "host_budget": HOST * PAGE, "page_size": PAGE, **request.param}
    with started(spill=True, **settings) as opened:
        yield opened


class Pair:
    """An elastic layer and a stock one, alike."""

    def __init__(self, count: int = 0, ranges: CacheRanges | None = None) -> None:
        self.elastic, self.stock = ElasticLayer(ranges), DynamicLayer()
        self.seed = 0
        if count:
            self.update(count)

    def update(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.seed += 1
        pair, expected = (layer.update(*tokens(count, self.seed)) for layer in (self.elastic, self.stock))
        assert all(map(torch.equal, pair, expected))
        return pair

    def both(self, act: Callable[[Any], object]) -> None:
        act(self.elastic)
        act(self.stock)
        self.check()

    def check(self) -> None:
        assert torch.equal(self.elastic.keys, self.stock.keys)
        assert torch.equal(self.elastic.values, self.stock.values)

    @property
    def kv_range(self) -> Any:
        return self.elastic._range

    @property
    def tier(self) -> Any:
        (tier,) = tiers([self.kv_range])
        return tier

    def places(self) -> str:
        """Where each page is: device, host or alias, by the first letter."""
        return "".join(self.kv_range.range.leads_to(piece)[0] for piece in range(self.kv_range._most))

    def offers(self) -> list[tuple[int, bool]]:
        """(piece, clean) of what is offered, and can be published."""
        entries = [(self.tier.client.entry(offer.index), offer.clean) for offer in self.tier.client.offers()]
        return [
            (piece, clean)
            for entry, clean in entries
            if entry is not None
            for _, first, count, *_ in entry[1]
            for piece in range(first, first + count)
        ]


def kv_copied(device: Device, way: str = "d2h") -> int:
    copied: int = device.snapshot()["copied"][f"kv_{way}"]
    return copied // PAGE


def test_full_pages_lie_on_the_host_once_taken_and_on_the_device_once_back(device: Device) -> None:
    pair = Pair(60)  # 4.2 pages
    assert pair.places() == "ddddd"
    assert press(device, 3) == 3
    assert pair.places() == "aaadd"
    pair.check()
    by = pool.mapped()
    address = pair.kv_range.range.address
    assert [pool.covered(address + n * PAGE, address + (n + 1) * PAGE, by) for n in range(5)] == [False] * 3 + [
        True
    ] * 2
    assert kv_copied(device) == 3
    pair.update(1)
    assert press(device, 3) == 0  # the tail is not full: there is one page at most
    assert pair.tier.client.displaced == 3
    assert pair.tier.restore(2, 0) == 2  # the newest first
    assert pair.places() == "adddd"
    assert kv_copied(device, "h2d") == 2
    pair.check()
    assert press(device, 3) == 3
    assert kv_copied(device) == 3 + 1  # clean ones are not copied again, and go first
    pair.check()
    device.check()


def test_pages_copied_behind_are_clean_and_written_ones_dirty(device: Device) -> None:
    pair = Pair(60)
    assert pair.offers() == [(0, False), (1, False), (2, False), (3, False)]
    pair.tier.client.write_behind(2)
    device.synchronize()
    pair.tier.client.write_behind(0)
    assert pair.offers() == [(0, True), (1, True), (2, False), (3, False)]
    assert kv_copied(device) == 2
    pair.both(lambda layer: layer.crop(-40))  # into the second page
    assert pair.offers() == [(0, True)]
    pair.update(40)
    assert pair.offers() == [(0, True), (1, False), (2, False), (3, False)]
    pair.both(lambda layer: layer.reorder_cache(torch.tensor([1, 0])))
    assert pair.offers() == [(0, False), (1, False), (2, False), (3, False)]
    pair.tier.client.write_behind(9)  # not again at once: whoever reorders does it in every step
    assert kv_copied(device) == 2
    pair.update(20)
    pair.tier.client.write_behind(9)
    assert kv_copied(device) > 2
    device.synchronize()  # what is being copied is not offered
    assert press(device, 5) == 5
    pair.check()
    pair.both(lambda layer: layer.reorder_cache(torch.tensor([1, 1])))
    assert "a" in pair.places()


def test_the_last_page_of_what_is_kept_leaves_too_and_is_appended_to_again(device: Device) -> None:
    """A short conversation fills no page: it could never leave."""
    for count in (3, 20, 60):
        pair = Pair(count)
        pages = len(pair.places())
        assert press(device, pages) == 0 or count > 3
        pair.tier.restore(99, 0)
        pair.kv_range.keep(True)
        pair.tier.client.only_cached = True
        assert press(device, pages) == pages
        assert pair.places() == "a" * pages
        pair.check()
        pair.tier.client.only_cached = False
        pair.kv_range.keep(False)
        for _ in range(20):  # where it lies, and beyond
            pair.update(1)
        pair.tier.restore(99, 0)
        assert "a" not in pair.places()
        pair.update(1)
        pair.check()
        device.check()


def test_a_kept_page_that_was_copied_behind_is_dirty_once_it_may_grow(device: Device) -> None:
    pair = Pair(20)
    pair.kv_range.keep(True)
    pair.tier.client.write_behind(9)
    device.synchronize()
    pair.tier.client.write_behind(0)
    assert pair.offers() == [(0, True), (1, True)]
    pair.kv_range.keep(False)
    assert pair.offers() == [(0, True)]
    pair.update(1)
    pair.kv_range.keep(True)
    assert pair.offers() == [(0, True), (1, False)]
    assert press(device, 2) == 2
    pair.check()


@pytest.mark.parametrize("device", [{"link_bandwidth": 2**18}], indirect=True)
def test_page_taken_while_it_is_copied_waits_for_the_copy(device: Device) -> None:
    pair = Pair(60)
    pair.tier.client.write_behind(4)  # takes 60 ms
    copied = kv_copied(device)
    assert pair.offers() == [(0, True), (1, True), (2, True), (3, True)]
    assert press(device, 4) == 4
    assert kv_copied(device) == copied, "no page is copied twice"
    pair.check()


@pytest.mark.parametrize("device", [{"link_bandwidth": 2**18}], indirect=True)
def test_a_lower_budget_waits_for_what_is_being_copied(device: Device) -> None:
    pair = Pair(120)
    device.trim()
    used = sum(pages for owner, pages in device.snapshot()["pages"].items() if owner != "free")
    pair.tier.client.write_behind(8)  # takes 120 ms
    ballonet.set_budget((used - 4) * PAGE, timeout=600)
    assert pair.places() == "aaaaddddd"
    pair.check()


def test_caches_are_copied_behind_one_after_the_other(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one within the other: there may be more of them than calls fit on a stack."""
    pairs = [Pair(60) for _ in range(3)]
    copying: list[Any] = []
    most, write_behind = [], kv_client.KVClient.write_behind

    def copy(tier: Any, pages: int) -> None:
        copying.append(tier)
        most.append(len(copying))
        write_behind(tier, pages)
        copying.remove(tier)

    monkeypatch.setattr(kv_client.KVClient, "write_behind", copy)
    other = hog(device, device.available - 2)  # few are free
    for pair in pairs:
        pair.tier.manager.client_changed(pair.tier.number)
    assert kv_copied(device) > 0
    assert {*most} == {1}
    other.close()


def test_the_host_is_filled_no_further_than_allowed(device: Device) -> None:
    pair = Pair(200)
    other = hog(device, HOST - 3, "host")
    pair.tier.client.write_behind(9)
    device.synchronize()
    pair.tier.client.write_behind(0)
    assert sum(clean for _, clean in pair.offers()) == 3
    assert not MovableKV(pair.kv_range.pages).displace(9)
    assert press(device, 4) == 0
    assert press(device, 3) == 3
    pair.check()
    other.close()


def test_pages_of_the_host_are_the_last_resort_and_are_restored(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []
    other = hog(device, BUDGET - 2)
    monkeypatch.setattr(find_pages, "spilled", lambda: said.append(True))
    pair = Pair(60)
    assert said == [True]
    assert pair.places() == "hhhhh"
    pair.update(30)
    assert pair.places().startswith("hhhhh")
    other.close()
    device.reap(wait=True)
    assert pair.tier.restore(99, 0) >= 5
    assert set(pair.places()) == {"d"}
    pair.check()


def test_a_page_that_chaos_moves_counts_where_it_is(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    other = hog(device, BUDGET - 2)
    monkeypatch.setattr(find_pages, "spilled", lambda: None)
    pair = Pair(60)
    other.close()
    device.reap(wait=True)
    client = pair.tier.client
    assert (client.displaced, client.device_pages) == (5, 0)
    assert MovableKV(pair.kv_range.pages).move(1, "device")
    assert pair.places() == "hdhhh"
    assert (client.displaced, client.device_pages) == (4, 1)
    assert MovableKV(pair.kv_range.pages).move(1, "host")
    assert (client.displaced, client.device_pages) == (5, 0)
    assert pair.tier.restore(99, 0) == 5
    pair.check()


def test_each_move_of_pages_is_an_event(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_pages, "spilled", lambda: None)
    pair = Pair(60)
    pair.tier.manager.link.bandwidth = 2.0**20  # a page takes 1/256 s
    pair.tier.client.write_behind(3)
    device.synchronize()
    pair.tier.client.write_behind(0)
    assert press(device, 3) == 3
    devices.of().events.hear()
    assert pair.tier.restore(2, 0) == 2
    other = hog(device, device.available)
    pair.tier.manager.remove_client(pair.tier.number)  # so that it has nothing to give
    pair.update(30)
    other.close()
    me = threading.current_thread().name
    events = [
        (event.source, event.verb, event.pages, event.predicted, event.measured is not None)
        for event in devices.of().events.since().events
        if event.what == pair.tier.client.name and event.by == me
    ]
    assert events[0] == ("write-behind", "reclaim", 3, 3 / 256, False)
    assert events[1][:4] == ("running KV", "reclaim", 3, 0.0), "they were clean"
    assert events[2] == ("running KV", "restore", 2, 2 / 256, True)
    assert [event[:2] for event in events[3:]] == [("spill", "reclaim")]


def test_refused_append_names_the_budget_that_would_do(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managers.of(device), "spill", False)
    other = hog(device, BUDGET - 3)
    with pytest.raises(torch.OutOfMemoryError, match=rf"set_budget\({(BUDGET + 2) * PAGE}\)"):
        ElasticLayer().update(*tokens(60))
    other.close()


def test_pages_that_another_thread_leases_are_demanded_and_waited_for(
    device: Device, monkeypatch: pytest.MonkeyPatch, tuned: Tuned
) -> None:
    tuned(waiting={"room": 60})
    pairs: list[Pair] = []
    go, asked, done = threading.Event(), threading.Event(), threading.Event()
    manager = managers.of(device)
    wait = manager.pages.wait
    monkeypatch.setattr(manager.pages, "wait", lambda timeout: asked.set() or wait(timeout))

    def other() -> None:
        lease = ForwardLease().open()
        pairs.append(Pair(int(80 * PER_PAGE)))
        go.set()
        while not done.is_set():  # its next layers
            if asked.is_set() and device.page_request:
                device.yield_pages()
        lease.close()

    thread = threading.Thread(target=other)
    thread.start()
    go.wait()
    mine = Pair(int(40 * PER_PAGE))
    done.set()
    thread.join()
    assert "h" not in mine.places()  # they were given
    assert pairs[0].places().count("a") >= 24
    (waited,) = (
        event for event in devices.of().events.since().events if (event.source, event.verb) == ("wait", "restore")
    )
    assert waited.pages > 0
    assert waited.measured is not None
    assert waited.what == mine.tier.client.name
    for pair in (mine, *pairs):
        pair.check()
    pairs.clear()


def test_between_its_calls_no_other_thread_takes_from_a_cache_that_is_used_by_hand(device: Device) -> None:
    """Attention reads after `update` has returned, outside of any lease."""
    pair = Pair(60)
    assert elsewhere(lambda: press(device, 3)) == 0
    assert pair.places() == "ddddd"
    assert device.page_request == 3
    pair.update(1)  # gives what is demanded
    assert pair.places() == "aaadd"
    assert press(device, 1) == 1  # the thread itself may take at any time: its kernels come after
    lease = ForwardLease().open()
    pair.update(1)
    lease.close()
    assert elsewhere(lambda: press(device, 1)) == 0  # one is left, and it is not full
    pair.update(30)  # by hand again
    kv_range = pair.kv_range
    assert kv_range.group.leases == 1
    elsewhere(lambda: pair.update(1) is None)  # whoever uses it has the lease
    assert kv_range.group.leases == 1
    assert press(device, 1) == 0
    pair.elastic.reset()
    pair.stock.reset()
    del kv_range


@pytest.mark.parametrize("act", [copy.deepcopy, pickle.dumps, lambda layer: layer.batch_repeat_interleave(2)])
def test_no_other_thread_takes_from_a_cache_while_it_is_copied(
    device: Device, monkeypatch: pytest.MonkeyPatch, act: Callable[[Any], object]
) -> None:
    lease = ForwardLease().open()
    pair = Pair(60)
    lease.close()
    kv_range = pair.kv_range
    taken: list[int] = []

    class Press(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reads = [arg for arg in args if isinstance(arg, torch.Tensor)]
            first = kv_range.range.address
            if any(0 <= read.data_ptr() - first < kv_range.range.nbytes for read in reads) and "view" not in str(func):
                taken.append(kv_range.group.leases)
            return func(*args, **(kwargs or {}))

    with Press():
        act(pair.elastic)
    assert taken
    assert all(taken)


@pytest.mark.filterwarnings("ignore:ballonet. the device budget is used up:RuntimeWarning")
def test_thread_that_gives_nothing_is_waited_for_once(device: Device, tuned: Tuned) -> None:
    tuned(waiting={"room": 0.3, "room_look": 0.01}, waits=Clock(step=0.01))  # seconds pass at looks alone
    pairs: list[Pair] = []
    go, done = threading.Event(), threading.Event()

    def other() -> None:
        pairs.append(Pair(int(80 * PER_PAGE)))
        go.set()
        done.wait()
        pairs[0].update(1)  # gives what is demanded

    thread = threading.Thread(target=other)
    thread.start()
    go.wait()
    mine = Pair(1)
    assert mine.tier.last_wait_succeeded
    mine.update(int(40 * PER_PAGE))  # nobody gives
    assert "h" in mine.places()
    assert not mine.tier.last_wait_succeeded
    done.set()
    thread.join()
    mine.update(int(4 * PER_PAGE))
    for pair in (mine, *pairs):
        pair.check()
    assert "a" in pairs[0].places()
    pairs.clear()


def test_many_rows_read_copies_of_what_is_away(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(60)
    monkeypatch.setattr(type(pair.tier.manager), "restorable_pages", lambda *_: 0)
    assert not pair.kv_range.pages.worth_copying(ROWS + 1)  # it is all here
    assert press(device, 3) == 3
    flat = pair.kv_range.shown.mapped.flat
    assert all(part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for part in pair.update(ROWS))
    copies = pair.update(ROWS + 1)
    for part, shown in zip(copies, (pair.elastic.keys, pair.elastic.values), strict=True):
        assert part.untyped_storage().data_ptr() != shown.untyped_storage().data_ptr()
        assert part.stride() == shown.stride()
    assert copies[0].data_ptr() % 512 == 0
    pair.check()
    pages = pair.kv_range.pages
    assert not pages.worth_copying(ROWS)
    assert pages.worth_copying(ROWS + 1)
    del copies, part, shown
    other = hog(device, BUDGET - kv_pages(device) - 9)
    shown = pair.update(ROWS + 1)  # no room for copies of eleven pages
    assert shown[0].data_ptr() == pair.elastic.keys.data_ptr()
    del shown
    other.close()


class Copies(TorchDispatchMode):
    """The addresses (begin, end) that copies between contiguous tensors read: one call of the driver each."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].is_contiguous() and args[1].is_contiguous():
            begin = args[1].data_ptr()
            self.read.append((begin, begin + args[1].nbytes))
        return func(*args, **(kwargs or {}))


def test_no_copy_reads_pages_of_the_device_and_of_the_host(device: Device) -> None:
    pair = Pair(100)
    for piece in (0, 1, 3):
        assert MovableKV(pair.kv_range.pages).displace(piece)
    with Copies() as copies:
        pair.update(ROWS + 1)
    kv_range = pair.kv_range.range
    reads = [(begin - kv_range.address, end - kv_range.address) for begin, end in copies.read]
    ours = [(begin, end) for begin, end in reads if 0 <= begin < kv_range.nbytes]
    assert [begin // PAGE for begin, _ in ours] == [0, 2, 3, 4]
    assert sum(end - begin for begin, end in ours) == 165 * pair.kv_range.geometry.token_bytes


def test_a_layer_that_moved_out_holds_no_page_of_the_others_back(device: Device) -> None:
    ranges = CacheRanges(layers=2, expected=1)
    stays, moves = Pair(1, ranges), Pair(1, ranges)
    stays.update(59)
    assert stays.offers() == []  # the other one may write to all of them
    moves.both(lambda layer: layer.batch_repeat_interleave(2))
    assert moves.kv_range is not stays.kv_range
    stays.update(1)
    assert [piece for piece, _ in stays.offers()] == [*range(8)]


def test_a_layer_moves_where_a_tensor_still_shows_what_was_taken(device: Device) -> None:
    ranges = CacheRanges(layers=2, expected=1)
    long, short = Pair(1, ranges), Pair(3, ranges)
    assert long.kv_range is short.kv_range
    long.update(59)
    kv_range = long.kv_range
    assert all(MovableKV(kv_range.pages).displace(piece) for piece in range(1, 5))
    view, expected = long.elastic.keys, long.stock.keys.clone()
    long.both(lambda layer: layer.crop(-58))
    assert kv_range.range.leads_to(4) == "alias"  # shown by the view
    short.update(70)
    assert short.kv_range is not kv_range
    poison(device)
    assert torch.equal(view, expected)
    short.check()
    long.update(70)
    assert torch.equal(view, expected)


@pytest.mark.parametrize("layers", [1, 3, 32])
@pytest.mark.parametrize("width", [1, 2, 25])
def test_pages_lie_ahead_just_in_time_and_never_more_than_allowed(layers: int, width: int) -> None:
    waiting: set[int] = set()
    missed = 0
    for step in range(60):
        took, takes = step % 6 == 5, step % 6 == 4
        for layer in range(layers):
            if took:
                missed += layer not in waiting
                waiting.discard(layer)
            waiting.update(ahead(layer, layers, width, took=took, next_takes=takes))
            assert len(waiting) <= width
    assert missed == 0
    assert window(2 * 2**20, AHEAD) == 23
    assert window(2**30, AHEAD) == 1


def test_the_next_page_is_mapped_before_it_is_needed(device: Device) -> None:
    pair = Pair(13)
    device.reap(wait=True)
    pair.update(1)  # the page is full
    device.reap(wait=True)
    assert device.snapshot()["ahead"] == 1
    assert pair.kv_range.range.leads_to(1) == "kept"
    before = device.driver_ns()
    pair.update(1)
    assert device.driver_ns() == before
    assert pair.places() == "dd"
