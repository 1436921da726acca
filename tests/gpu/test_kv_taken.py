"""Slots that layers of a cache take turns in are taken in the middle of a forward, by an operator that finds no other
pages, while copies to them and kernels that read them may be on their way: attention reads its own bytes."""

from __future__ import annotations

from typing import Any, Final, Literal

import pytest
import torch

import ballonet
from ballonet.allocator import install
from ballonet.offload.governor.governor import Governor
from ballonet.offload.governor.kv_read_plan import KVReadPlan

from .. import models
from ..kv.pressure import two_thirds
from ..tuned import tuning
from .scene import Place, everywhere, play
from .stock import differences
from .test_balloon_tokens import spilling as spilling
from .test_kv_slots import LARGE
from .test_kv_stream import LAYERS, Cache, decided
from .test_weights_streaming import streams_here

When = Literal["before", "after"]  # attention is launched
POISON: Final = 0xFF  # not a number, in every type
LEFT: Final = 16  # free pages that are not asked for at once; whoever compares afterwards has them


class Operator:
    """Allocates, in the middle of whatever this thread does, until it has half of the pages of the slots of a cache,
    every other time three quarters; and writes there at once, on a stream that waits for nobody."""

    def __init__(self, place: Place) -> None:
        self.taken: list[int] = []  # pages of slots, each time
        self._place = place
        self._lane = place.lane()
        self._held: list[torch.Tensor] = []

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def take(self, way: KVReadPlan) -> None:
        device, before = self._place.device, in_slots(way)
        left = before // (4 if len(self.taken) % 2 else 2)
        spilled = device.snapshot()["spilled"]
        assert before > 2, "of each slot the last page is nobody's, and goes first"
        self._allocate(max(1, device.available - LEFT))
        while in_slots(way) > left:
            assert device.snapshot()["spilled"] == spilled, "it got pages of the host, and there were slots"
            self._allocate(1)
        del self._held[1 : LEFT + 1]
        self.taken.append(before - in_slots(way))
        device.check()

    def give_back(self) -> None:
        """Nobody has written to what it has."""
        self._place.synchronize()
        assert all(bool(each[::61].eq(POISON).all()) for each in self._held), "somebody took it for a slot"
        self._held.clear()
        self._place.empty_cache()

    def _allocate(self, pages: int) -> None:
        with self._lane():
            size = pages * self._place.page
            self._held.append(torch.full((size,), POISON, dtype=torch.uint8, device=self._place.kind))


def in_slots(way: KVReadPlan) -> int:
    """Pages that they have."""
    return sum(each.range.backed for each in way._slots._slots)


class Interrupted(Cache):
    """Layers in whose attention an operator may need pages: before or after the kernels that read are launched."""

    def __init__(self, place: Place, when: When) -> None:
        self.operator = Operator(place)
        self._when = when
        self._due = False
        super().__init__(place)

    def interrupted(self, number: int) -> None:
        """As `update`, with the operator. What comes before it is slow to begin, so that nothing has arrived yet."""
        self._place.sleep()
        self._due = True
        self.update(number)
        self._due = False
        self.operator.give_back()

    def compare(self, found: Any, right: Any) -> None:
        if self._due and self._when == "before":
            self.operator.take(self.tier.client.way)
        super().compare(found, right)
        if self._due and self._when == "after":
            self.operator.take(self.tier.client.way)

    def fly(self) -> None:
        """Iterations until all layers do."""
        for _ in range(16):
            for number in range(LAYERS):
                self.update(number)
            if all(home.pages._extent.mover.in_slot for home in self.homes):
                return
        raise AssertionError(self.tier.client.streamed)


def taken_while_a_layer_is_read(place: Place, when: When, rounds: int) -> None:
    """Of each layer in turn; what others had in the slot is right as well."""
    with torch.no_grad(), decided(), tuning(kv_reads={"again": 1}):
        cache = Interrupted(place, when)
        for home in cache.homes:
            assert home.pages.displace(0)
        for step in range(rounds * LAYERS):
            cache.fly()
            for number in range(LAYERS):
                if number == step % LAYERS:
                    cache.interrupted(number)
                else:
                    cache.update(number)
        assert len(cache.operator.taken) == rounds * LAYERS
        cache.finish()


@everywhere
@pytest.mark.parametrize("when", ["before", "after"])
def test_slots_are_taken_while_a_layer_is_read(kind: str, when: When) -> None:
    streams_here(kind)
    rounds = 3 if kind == "cuda" else 2
    play(taken_while_a_layer_is_read, kind, pages=256, host_pages=128, when=when, rounds=rounds)


TOKENS = 48
KEPT = 3  # tokens for which an operator needs its pages


class Decoding:
    """A model whose attention an operator interrupts, in one layer after the other, whenever that layer reads a
    slot. It keeps its pages for some tokens, in which what was taken is read in place."""

    def __init__(self, place: Place, model: Any, when: When) -> None:
        self.operator = Operator(place)
        self.layers: list[int] = []  # in which it did
        self._place = place
        self._when = when
        self._cache: Any = None
        self._number: int | None = None  # of the layer that is to be interrupted
        self._left = 0
        models.before_each_forward(model, self._begin)
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_pre_hook(lambda *_, number=number: self._enter(number))

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In the place of torch's attention."""
        number, self._number = self._number, None
        due = number is not None and self._cache.layers[number].home.pages._extent.mover.in_slot
        if due and self._when == "before":
            self._interrupt(number)
        found = _attention(*args, **kwargs)
        if due and self._when == "after":
            self._interrupt(number)
        return found

    def _begin(self, step: int, cache: Any) -> None:
        self._cache = cache if step else None
        if step == 1:
            assert all(layer.home.pages.displace(0) for layer in cache.layers)
        self._left -= 1
        if self.operator.holds and self._left <= 0:
            self.operator.give_back()

    def _enter(self, number: int) -> None:
        if self._cache is None or self.operator.holds or number != len(self.layers) % LARGE["num_hidden_layers"]:
            return
        if self._cache.layers[number].home.pages._extent.mover.in_slot:
            self._number = number
            self._place.sleep()

    def _interrupt(self, number: int | None) -> None:
        assert number is not None
        self.operator.take(self._cache.layers[number].home.pages._tier.client.way)
        self.layers.append(number)
        self._left = KEPT


_attention = torch.nn.functional.scaled_dot_product_attention


def taken_in_a_forward(place: Place, when: When) -> None:
    """Two thirds of each layer's pages fly, and nothing comes home."""
    length = 1200 if place.cuda else 100  # several pages of each layer
    dtype = torch.bfloat16 if place.cuda else torch.float32
    with pytest.MonkeyPatch.context() as patch:
        with install.stock():
            model = models.build("llama", **LARGE, max_position_embeddings=4096).to(place.kind, dtype)
            inputs = {name: each.to(place.kind) for name, each in models.prompts(3, length).items()}
            expected = models.generate(model, "greedy", inputs, TOKENS)
        place.synchronize()
        place.empty_cache()
        decoding = Decoding(place, model, when)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", decoding.attend)
        patch.setattr(KVReadPlan, "_choose", two_thirds)
        patch.setattr(Governor, "restorable_pages", lambda *_: 0)
        with tuning(kv_reads={"again": 2, "look": 8}), ballonet.manage(model, interval=None):
            found = models.generate(model, "greedy", inputs, TOKENS)
        if decoding.operator.holds:
            decoding.operator.give_back()
        assert not differences(found, expected)
        assert len(set(decoding.layers)) == LARGE["num_hidden_layers"]
        place.device.check()


@everywhere
@pytest.mark.parametrize("when", ["before", "after"])
def test_slots_are_taken_in_the_middle_of_a_forward(kind: str, when: When) -> None:
    streams_here(kind)
    pages = 256 if kind == "cuda" else 512
    play(taken_in_a_forward, kind, pages=pages, host_pages=pages, when=when)
