"""A KV cache in use whose pages are on the host, or on a peer: what is copied to where attention reads waits for those
who read before, and who reads waits for what is copied, whatever streams they are on, and whoever takes the slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, Literal
from unittest import mock

import torch
from transformers.cache_utils import DynamicLayer

from ballonet.hooks.kv.layer import ElasticLayer
from ballonet.hooks.kv.ranges import CacheRanges
from ballonet.offload.manager import kv_read_plan
from ballonet.offload.manager.memory_manager import MemoryManager
from ballonet.offload.policy.kv_pages import Choice, Way
from ballonet.offload.residency.kv_extent import KVExtent
from ballonet.testing.movable import MovableKV

from ..tuned import tuning
from .hold import Hold, held_copies
from .scene import Lane, Place, scene

LAYERS = 4
PAGES = 8  # of each layer
AWAY = 6  # of these
LEFT = 40  # tokens for which there is room in the last one
IN_SLOTS = Choice(Way.STREAMED, AWAY, 2, 0, 0.0, 0.0)  # of which there are two
IN_PLACE = Choice(Way.ZERO_COPY, AWAY, 0, 0, 0.0, 0.0)
When = Literal["before", "after"]  # attention is launched
POISON: Final = 0xFF  # not a number, in every type
SPARE: Final = 16  # free pages that are not asked for at once; whoever compares afterwards has them


def oldest(tensors: Any) -> list[torch.Tensor]:
    """Copies of the first token, which is on a page that is away first."""
    return [tensor[:, :, 0].clone() for tensor in tensors]


class Cache:
    """Layers, each beside a stock one. Of what reads them some begins at once and some is slow to begin; at the end it
    says whether it was right."""

    def __init__(self, place: Place) -> None:
        heads, dim, self._dtype = (8, 128, torch.bfloat16) if place.cuda else (2, 16, torch.float32)
        self._shape = 2, heads, dim
        self._place = place
        tokens = PAGES * place.page // (2 * 2 * heads * dim * self._dtype.itemsize) - LEFT  # some will come
        ranges = CacheRanges(layers=LAYERS, expected=tokens + LEFT, alone=True)
        self.pairs = [(ElasticLayer(ranges), DynamicLayer()) for _ in range(LAYERS)]
        self.wrong = torch.zeros((), dtype=torch.int64, device=place.kind)
        for number in range(LAYERS):
            self.update(number, tokens)

    def drawn(self, tokens: int = 1) -> torch.Tensor:
        """What comes next."""
        batch, heads, dim = self._shape
        return torch.randn(batch, heads, tokens, dim, device=self._place.kind).to(self._dtype)

    def read(self, number: int, new: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
        """Appends to one layer, on the current stream; what it shows, and its oldest token, read at once."""
        read = self.pairs[number][0].update(new, -new)
        return read, oldest(read)

    def check(self, number: int, new: torch.Tensor, read: Any, early: list[torch.Tensor]) -> None:
        """Compares with the stock layer; `found` may be None."""
        right = self.pairs[number][1].update(new, -new)
        if self._place.cuda:
            torch.cuda._sleep(2_000_000)
        if read is not None:
            self.compare(read, right)
        self.wrong += sum((mine != theirs).sum() for mine, theirs in zip(early, oldest(right), strict=True))

    def update(self, number: int, tokens: int = 1) -> None:
        """Appends to one layer, on the current stream, and computes its attention."""
        new = self.drawn(tokens)
        self.check(number, new, *self.read(number, new))

    def pass_late(self, lane: Lane, copies: AbstractContextManager[Hold]) -> None:
        """All layers, which wait for copies that are held."""
        drawn = [self.drawn() for _ in self.pairs]
        lane.follow()
        with copies as hold, lane():  # and nothing beside them, as an allocation may wait for what others have left
            early = [self.read(*pair)[1] for pair in enumerate(drawn)]
            hold.keeps(lane.done)
        with lane():
            for number, new in enumerate(drawn):
                self.check(number, new, None, early[number])

    def compare(self, actual: Any, right: Any) -> None:
        for mine, theirs in zip(actual, right, strict=True):
            self.wrong += (mine != theirs).sum()

    @property
    def kv_ranges(self) -> list[Any]:
        return [elastic.kv_range for elastic, _ in self.pairs]

    @property
    def tier(self) -> Any:
        return self.kv_ranges[0].pages._tier

    def finish(self) -> None:
        self._place.synchronize()
        assert self.wrong.item() == 0
        for elastic, stock in self.pairs:
            assert torch.equal(elastic.keys, stock.keys)
            assert torch.equal(elastic.values, stock.values)


@contextmanager
def decided(choice: Choice = IN_SLOTS) -> Iterator[None]:
    """Nothing is restored by itself. `choice`: how what is away is read."""
    with (
        mock.patch.object(kv_read_plan, "choose", return_value=choice),
        mock.patch.object(MemoryManager, "restorable_pages", return_value=0),
    ):
        yield


@scene(needs_host=True, pages=256, host_pages=64)
def test_layers_take_turns_in_slots(place: Place) -> None:
    """Layers take turns in slots; streams change between iterations, and in some of them between layers. In one
    more no copy to a slot begins before all is launched."""
    steps = 30 if place.cuda else 6
    with torch.no_grad(), decided():
        cache = Cache(place)
        for kv_range in cache.kv_ranges:
            assert MovableKV(kv_range.pages).displace(0)
        lanes = [place.lane() for _ in range(3)]
        before: Lane | None = None
        for step in range(steps):
            for number in range(LAYERS):
                lane = lanes[(step + (number if step % 3 == 2 else 0)) % len(lanes)]
                lane.follow(before)
                with lane():
                    cache.update(number)
                before = lane
            if step == steps // 2 and before is not None:
                cache.pass_late(before, held_copies(place, "device"))
        streamed = cache.tier.client.streamed
        assert streamed.way is Way.STREAMED
        assert streamed.slots == 2
        assert streamed.away >= LAYERS * AWAY
        assert streamed.copied >= (steps - 2) * LAYERS * AWAY * place.page
        assert before is not None
        before.lead()
        cache.finish()


@contextmanager
def late(place: Place, soon: bool) -> Iterator[list[Hold]]:
    """What is restored gets pages at once, and its bytes once the hold is released that is in the list then: by itself
    for who waits with the host (`soon`)."""
    fetch, holds = KVExtent.fetch, list[Hold]()
    with ExitStack() as stack:

        def fetched(*args: Any) -> None:
            if not holds:
                holds.append(stack.enter_context(held_copies(place, "device")))
                if soon:
                    holds[0].release_soon()
            fetch(*args)

        with mock.patch.object(KVExtent, "fetch", fetched):
            yield holds


@scene(needs_host=True, pages=256, host_pages=64)
def test_pages_are_restored_while_layers_compute(place: Place) -> None:
    """Pages are restored while the layers compute, one after the other. In most rounds somebody holds what a layer has
    shown, and reads it on a stream that waits for nobody; copies to the host go on beside it. In the first rounds what
    is restored is late."""
    rounds = 10 if place.cuda else 3
    with torch.no_grad(), decided():
        cache = Cache(place)
        elsewhere, computing = place.lane(), place.lane()
        for step in range(rounds):
            for kv_range in cache.kv_ranges:
                assert sum(MovableKV(kv_range.pages).displace(piece) for piece in range(AWAY)) == AWAY
            shown = cache.pairs[step % LAYERS : step % LAYERS + 1] if step % 3 else []
            held = [tensor for elastic, _ in shown for tensor in (elastic.keys, elastic.values)]
            right = [tensor for _, stock in shown for tensor in (stock.keys, stock.values)]
            drawn = [cache.drawn() for _ in range(LAYERS)]
            place.synchronize()
            computing.follow()
            with late(place, soon=bool(held)) if step < 3 else nullcontext([]) as holds:
                with computing():
                    if place.cuda:
                        torch.cuda._sleep(20_000_000)
                    assert cache.tier.restore(LAYERS * AWAY, cache.kv_ranges[0].pages.stream) == LAYERS * AWAY
                assert all(hold.released or not held for hold in holds), "what somebody holds was not there yet"
                with elsewhere():
                    apart = oldest(held)
                elsewhere.lead()
                same = [torch.equal(mine, theirs) for mine, theirs in zip(apart, oldest(right), strict=True)]
                assert all(same), "what somebody holds was not there yet"
                del held, right, apart, shown
                with computing():
                    reads = [cache.read(*pair) for pair in enumerate(drawn)]
                for hold in holds:
                    hold.keeps(computing.done)
            with computing():
                for number in range(LAYERS):
                    cache.check(number, drawn[number], *reads.pop(0))
                cache.tier.client.write_behind(LAYERS)
            computing.lead()
        cache.finish()


@scene(needs_host=True, pages=256, host_pages=64, peer="auto", peer_pages=12)
def test_kv_goes_to_the_peer_and_on_to_the_host_and_is_restored(place: Place) -> None:
    """The older pages of each layer leave for the peer, those that find no room there for the host; then some go on to
    the host, once copies have passed that run beside attention; then all are restored."""
    shown = place.device.snapshot()
    assert shown["peer"], place.device.peer_refused
    room = shown["peer_budget"] // place.page
    with torch.no_grad(), decided(IN_PLACE):
        cache, lanes = Cache(place), [place.lane() for _ in range(2)]
        before: Lane | None = None
        for _ in range(3):
            for kv_range in cache.kv_ranges:
                assert sum(MovableKV(kv_range.pages).displace(piece) for piece in range(AWAY)) == AWAY
            near = cache.tier.extents.near
            with held_copies(place, "host") as hold:
                cache.tier.client.demote(room // 4)
                cache.tier.client.write_behind(0)
                assert hold.released or cache.tier.client.leaving_peer == min(near, room // 4), (
                    "it did not wait for the copies"
                )
            for lane in lanes:
                for number in range(LAYERS):
                    lane.follow(before)
                    with lane():
                        cache.update(number)
                    before = lane
            assert before is not None
            before.lead()
            place.device.synchronize()
            cache.tier.client.write_behind(0)
            assert cache.tier.client.leaving_peer == 0
            assert cache.tier.extents.near == near - min(near, room // 4)
            assert cache.tier.restore(AWAY * LAYERS, cache.kv_ranges[0].pages.stream) == AWAY * LAYERS
        assert near < room <= AWAY * LAYERS
        copied = place.device.snapshot()["copied"]
        assert min(copied["kv_d2p"], copied["kv_p2d"], copied["kv_p2h"], copied["kv_d2h"]) > 0
        cache.finish()


class Interrupted(Cache):
    """Layers in whose attention an operator needs pages, before or after the kernels that read are launched. It
    allocates until it has half of the pages of the slots, every other time three quarters, and writes there at once, on
    a stream that waits for nobody."""

    def __init__(self, place: Place) -> None:
        self.taken = 0  # times
        self._lane = place.lane()
        self._held: list[torch.Tensor] = []
        self._when: When | None = None
        super().__init__(place)

    def interrupted(self, number: int, when: When) -> None:
        """As `update`, with the operator. What comes before it is slow to begin, so that nothing has arrived yet."""
        self._place.sleep()
        self._when = when
        self.update(number)
        self._when = None
        self._place.synchronize()
        assert all(bool(memory[::61].eq(POISON).all()) for memory in self._held), "somebody took it for a slot"
        self._held.clear()
        self._place.empty_cache()

    def compare(self, actual: Any, right: Any) -> None:
        if self._when == "before":
            self._take()
        super().compare(actual, right)
        if self._when == "after":
            self._take()

    @property
    def in_slots(self) -> int:
        """Pages that they have."""
        return sum(slot.range.backed for slot in self.tier.client.way.kv_slots._slots)

    def _take(self) -> None:
        device, before = self._place.device, self.in_slots
        left = before // (4 if self.taken % 2 else 2)
        spilled = device.snapshot()["spilled"]
        assert before > 2, "of each slot the last page is nobody's, and goes first"
        self._allocate(max(1, device.available - SPARE))
        while self.in_slots > left:
            assert device.snapshot()["spilled"] == spilled, "it got pages of the host, and there were slots"
            self._allocate(1)
        del self._held[1 : SPARE + 1]
        self.taken += 1
        device.check()

    def _allocate(self, pages: int) -> None:
        with self._lane():
            size = pages * self._place.page
            self._held.append(torch.full((size,), POISON, dtype=torch.uint8, device=self._place.kind))

    def fly(self) -> None:
        """Iterations until all layers do."""
        for _ in range(16):
            for number in range(LAYERS):
                self.update(number)
            if all(kv_range.pages._extent.mover.in_slot for kv_range in self.kv_ranges):
                return
        raise AssertionError(self.tier.client.streamed)


@scene(needs_host=True, spill=True, pages=256, host_pages=128)
def test_slots_are_taken_while_a_layer_is_read(place: Place) -> None:
    """Slots of each layer in turn; what others had in the slot is right as well."""
    times = 4 * LAYERS
    with torch.no_grad(), decided(), tuning(kv_reads={"again": 1}):
        cache = Interrupted(place)
        for kv_range in cache.kv_ranges:
            assert MovableKV(kv_range.pages).displace(0)
        for time in range(times):
            cache.fly()
            for number in range(LAYERS):
                if number == time % LAYERS:
                    cache.interrupted(number, "after" if time % 8 < LAYERS else "before")
                else:
                    cache.update(number)
        assert cache.taken == times
        cache.finish()
