"""Who waits for whom where layers stream through slots: a layer for its copy, the next copy for who reads the slot, one
that was made ahead for who writes on the host, new pages for who reads the addresses that get them."""

from __future__ import annotations

from typing import Any

import torch

import ballonet
from ballonet.allocator._native import Done, Transfer

from .hold import Hold, held, held_copies
from .scene import Place, over, scene
from .stock import LAYERS, questions, small_layers, tiny

PAGES = 4


def made(place: Place) -> tuple[Any, torch.Tensor]:
    return tiny("llama", place), questions("llama", place.kind)["input_ids"]


@torch.no_grad()
def answer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids, use_cache=False).logits
    return logits


def another_copy(place: Place) -> Done:
    """A copy of pages of its own, which waits for nothing but the copies before it."""
    one, other = place.range(1), place.range(1)
    copies = [(one.address, other.address, place.page)]
    return Transfer(place.device).copy(copies, after=place.lane().handle, owner="kv", to="device")


@scene(needs_host=True, pages=256, host_pages=128)
def test_layers_wait_for_their_copies(place: Place) -> None:
    model, ids = made(place)
    right, lane = answer(model, ids), place.lane()
    lane.follow()
    with small_layers(), ballonet.manage(model, interval=1):
        with lane():
            answer(model, ids)  # memory is there
        place.synchronize()
        with held_copies(place, "device") as hold:
            with lane():
                actual = answer(model, ids)
            hold.keeps(lane.done)
        lane.lead()
        assert torch.equal(actual, right)


@scene(needs_host=True, pages=256, host_pages=128)
def test_copies_wait_for_layers(place: Place) -> None:
    """A layer computes late: no copy overtakes it that comes after one to its slot."""
    model, ids = made(place)
    right, lane = answer(model, ids), place.lane()
    lane.follow()
    holds: list[Hold] = []
    for layer in range(2):  # which another one follows in its slot
        with small_layers(), ballonet.manage(model, interval=1):
            with lane():
                answer(model, ids)
            place.synchronize()
            handle = model.model.layers[layer].register_forward_pre_hook(lambda *_: holds.append(Hold(place, lane)))
            with lane():
                actual = answer(model, ids)
            handle.remove()
            done = another_copy(place)
            holds[-1].keeps(done.passed)
            holds[-1].close()
            lane.lead()
            assert torch.equal(actual, right), f"layer {layer} was overwritten before it computed"
            done.wait()


@scene(needs_host=True, pages=256, host_pages=128)
def test_copies_wait_for_every_reader(place: Place) -> None:
    """Two layers have a slot each, which two streams read one after the other, the first of them late. Then one of the
    layers is written to, and copied again."""
    model, ids = made(place)
    right = answer(model, ids)
    late, early = sorted((place.lane(), place.lane()), key=lambda lane: lane.handle)
    with small_layers(), ballonet.manage(model, interval=LAYERS // 2) as managed:
        layer, _ = managed.report().streamed
        for lane in (late, early):
            lane.follow()
            with lane():
                answer(model, ids)  # memory is there
        place.synchronize()
        holds: list[Hold] = []
        handle = model.model.layers[layer].register_forward_pre_hook(lambda *_: holds.append(Hold(place, late)))
        with late():
            actual = answer(model, ids)
        handle.remove()
        with early():
            answer(model, ids)
            model.model.layers[layer].mlp.down_proj.weight.data.mul_(1.5)
            answer(model, ids)
        done = another_copy(place)
        holds[0].keeps(done.passed)
        holds[0].close()
        late.lead()
        assert torch.equal(actual, right), "a layer was copied again while a stream read it"
        done.wait()
        place.synchronize()


@scene(needs_host=True, pages=256, host_pages=128)
def test_weight_written_between_passes_is_copied_again(place: Place) -> None:
    """Somebody who holds weights writes to them between two passes, in a way that nobody counts."""
    model, ids = made(place)
    stock, _ = made(place)
    with small_layers(), ballonet.manage(model, interval=1):
        for layer in range(LAYERS):
            weight, right = (owner.model.layers[layer].mlp.down_proj.weight for owner in (model, stock))
            for _ in range(2):
                answer(model, ids)
                for parameter in (weight, right):
                    parameter.data.mul_(1.5)
                assert torch.equal(answer(model, ids), answer(stock, ids)), f"layer {layer} is what it was before"


@scene(needs_host=True, pages=256, host_pages=128)
def test_addresses_that_get_pages_wait_for_who_reads(place: Place) -> None:
    """Addresses that lead to the host get pages with the same bytes, while slow work reads there."""
    group = place.device.group()
    range_, twin, spare = (place.device.reserve(PAGES * place.page, "weights", group) for _ in range(3))
    (twin.map_host if place.device.host_pages else twin.map)(0, PAGES)
    spare.map(0, PAGES)
    for memory in (twin, spare):
        over(memory, torch.uint8, PAGES * place.page).fill_(7)
    assert range_.alias(0, twin, 0, PAGES)
    shown = over(range_, torch.uint8, PAGES * place.page)
    seen = torch.empty_like(shown)
    place.synchronize()
    with held(place) as hold:
        with hold.lane():
            seen.copy_(shown)
        hold.release_soon()
        assert range_.adopt(0, spare, 0, PAGES)
        assert hold.released, "pages changed while they were read"
    hold.lane.lead()
    assert seen.eq(7).all().item()
    assert shown.eq(7).all().item()
