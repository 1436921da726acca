"""What the core does while a stream is being captured."""

from __future__ import annotations

import time

import torch

from ballonet.allocator._native import Transfer

from .scene import Place, over, scene


@scene()
def test_a_capture_and_a_copy(place: Place) -> None:
    """What is captured reads what a copy brings that was submitted meanwhile and is waited for by the host: the capture
    goes on, and its graph waits for nothing."""
    source, target = place.range(4), place.range(4)
    words = place.page
    given, read = over(source, torch.int32, words), over(target, torch.int32, words)
    copy = torch.zeros_like(read)
    busy, transfer = place.lane(), Transfer(place.device)
    copy.copy_(read)  # kernels are loaded
    place.sleep()
    busy.follow()

    def bring() -> None:
        stream = place.current
        with busy():
            place.sleep()
            given.fill_(7)
            copied = transfer.copy(
                [(target.address, source.address, words * 4)], after=place.current, owner="kv", to="device"
            )
        copied.before(stream)
        assert copied.passed() or not place.cuda, "what is captured would wait for it"

    given.fill_(3)
    read.fill_(5)
    place.synchronize()
    if not place.cuda:
        bring()
        copy.copy_(read)
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            bring()
            copy.copy_(read)
        assert read.eq(7).all().item()
        for value in (9, 7):
            read.fill_(value)
            graph.replay()
            assert copy.eq(value).all().item()
    assert copy.eq(7).all().item()


@scene(only="cuda")
def test_capture_that_may_begin_ends_all_looks(place: Place) -> None:
    """A thread that begins a capture says from what memory first: from then on no event is recorded for pages that wait
    to be unmapped, as it might be on its stream."""
    held = place.range(1)
    place.device.reap(wait=True)
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        held.retire(0, 1)
        assert place.device.reap() == 0
        time.sleep(0.1)
        assert held.leads_to(0) == "pending_free"
    place.device.reap(wait=True)
    assert held.leads_to(0) == "none"
