"""Drops and restores beside what else runs: another thread that generates, and the ladder."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.hooks.device import governors
from ballonet.hooks.replicas.held_layers import HeldLayers
from ballonet.offload.policy.replicas.groups import Span

from ...models import Output
from ...streaming.conftest import BUDGET, PAGE
from ...tuned import Tuned
from .holding import Peer, pages_of, prepared, say, settled


@pytest.fixture(autouse=True)
def patient(tuned: Tuned) -> None:
    """However slow this machine is, no wait for another thread's forward times out."""
    tuned(waiting={"gate": 600.0, "slots": 600.0})


def test_generate_goes_on_beside_it(model: Any, held: HeldLayers, stock: Output, original: Any) -> None:
    """Another thread generates all the time: its answers are right, and no call fails."""
    done, failed, said = threading.Event(), list[BaseException](), 0

    def ask() -> None:
        nonlocal said
        try:
            while not done.is_set():
                assert say(model).agrees(stock)
                said += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        prepared(held)
        for cycle in range(6):
            held.drop(Span(cycle % 3, cycle % 3 + 2))
            before = said
            while said < before + 2 and not failed:
                assert not done.wait(0.01)
            list(held.restore(held.dropped, Peer(original) if cycle % 2 else None))
    finally:
        done.set()
        thread.join(120)
    assert not failed, failed
    assert said >= 12
    assert held.dropped == ()


def test_a_wish_comes_to_whoever_offered(held: HeldLayers, managed: ballonet.Managed) -> None:
    wishes: list[int] = []
    governor, pages = governors.of(devices.require()), pages_of(managed)
    held.begin(lambda pages: wishes.append(-pages), bool)
    held.begin(wishes.append, bool)
    governor.duplicates.request_drop(7)
    assert wishes == [7]
    assert governor.duplicates.pages == sum(pages) - pages[0] - max(pages)
    held.drop(Span(0, 1))
    assert governor.duplicates.pages == 0
    held.close()
    governor.duplicates.request_drop(7)
    assert wishes == [7]


def test_a_forward_that_finds_no_pages_leads_to_a_wish(host_model: Any, tuned: Tuned) -> None:
    """Nothing else can give any, as the model has a floor: a cache grows until there are none, and a drop has some."""
    tuned(waiting={"room": 0.1})
    with install.stock():
        ids = torch.arange(2 * 8).reshape(2, 8)
        expected = logits_of(host_model, ids)
    device, wishes = devices.require(), list[int]()
    with ballonet.manage(host_model, floor=BUDGET // 2) as managed:
        held = prepared(HeldLayers(managed))
        held.begin(wishes.append, bool)
        cache = ballonet.KVCache(host_model.config)
        logits_of(host_model, ids, cache)
        settled()
        filler = device.reserve((device.available - 40) * PAGE, "kv", device.group())
        filler.map(0, filler.pieces)
        with pytest.raises(torch.OutOfMemoryError):
            _ = [logits_of(host_model, ids, cache) for _ in range(64)]
        del cache
        gc.collect()
        assert torch.equal(logits_of(host_model, ids), expected)  # at the latest: an operator cannot tell of it
        assert wishes
        assert min(wishes) > 0
        freed = held.drop(Span(2, 3))
        assert freed >= sum(wishes)
        assert torch.equal(logits_of(host_model, ids), expected)
        filler.close()
        held.close()


def logits_of(model: Any, ids: torch.Tensor, cache: Any = None) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids, past_key_values=cache, use_cache=cache is not None).logits
    return found


def test_a_drop_is_an_event_of_rung_7(held: HeldLayers) -> None:
    def moved(verb: str) -> int:
        counts = devices.of().events.counts().get("duplicates", {})
        return counts[verb].pages if verb in counts else 0

    def others() -> dict[str, Any]:
        return {name: each for name, each in devices.of().events.counts().items() if "weights" in name}

    before, rest = (moved("pull"), moved("revert")), others()
    freed = held.drop(Span(0, 3))
    home = sum(each.pages for each in held.restore([3, 4, 5]))
    assert (moved("pull") - before[0], moved("revert") - before[1]) == (freed, home)
    assert others() == rest
