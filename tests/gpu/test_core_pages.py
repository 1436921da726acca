"""Pages that change behind an address while the device works: aliases, moves beside kernels, pages of the host."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from ballonet.allocator import _native

from .scene import Captured, Place, everywhere, over, play


def aliases_are_read_in_stream_order(place: Place, rounds: int) -> None:
    """Written through one address, read through the other by the next kernel of the stream, and of another stream."""
    slot, layer = place.range(2, "weights"), place.range(2, "weights", mapped=False)
    layer.alias(0, slot, 0, 2)
    words = place.page // 4
    one, other = over(slot, torch.int32, 2 * words), over(layer, torch.int32, 2 * words)
    counted = torch.arange(2 * words, dtype=torch.int32, device=place.kind)
    wrong = torch.zeros((), dtype=torch.int64, device=place.kind)
    reader = place.lane()
    for step in range(rounds):
        writes, reads = (one, other) if step % 2 else (other, one)
        torch.add(counted, step, out=writes)
        if step % 4 < 2:
            wrong += (reads != counted + step).sum()
            continue
        reader.follow()
        with reader():
            wrong += (reads != counted + step).sum()
        reader.lead()
    assert wrong.item() == 0
    del one, other, writes, reads
    layer.close()
    slot.close()
    place.device.reap(wait=True)


@everywhere
def test_aliases_are_read_in_stream_order(kind: str) -> None:
    play(aliases_are_read_in_stream_order, kind, rounds=400 if kind == "cuda" else 20)


def pages_change_beside_a_kernel(place: Place, rounds: int) -> None:
    """Mapping and retiring do not wait for a running kernel; moving waits for every stream that may use the page.

    That is asked of an event after the kernel, not of a clock: half a second of kernel against some calls.
    """
    busy, still = place.lane(), place.range(2)
    kept = over(still, torch.float32, place.page // 2)
    doubled = torch.empty_like(kept)
    moved = place.range(2, mapped=False)
    for step in range(rounds + 1):  # the first loads the kernels, which may wait for others
        kept.fill_(float(step))
        busy.follow()
        with busy():
            place.sleep()
            torch.mul(kept, 2, out=doubled)
            kept.add_(1)
            done = torch.cuda.Event() if place.cuda else None
            if done is not None:
                done.record()

        def running(done: torch.cuda.Event | None = done, step: int = step) -> bool:
            return done is None or step == 0 or not done.query()

        moved.map(0, 2)
        assert running(), "mapping waited for a kernel"
        ours = over(moved, torch.int32, place.page // 2)
        ours.fill_(step)
        assert running(), "a kernel over new pages waited for another stream"
        del ours
        moved.retire(1, 1)
        assert running(), "retiring waited for a kernel"
        if place.cuda and step:
            assert place.pages("retiring") == 1, "a page left while a kernel that may use it was running"
            assert place.device.reap() == 0
        moved.map(1, 1)  # takes back what was about to go, bytes and all
        assert running(), "taking a page back waited for a kernel"
        before = moved.page(0)
        assert moved.move(0, "device")
        assert moved.page(0) != before
        assert done is None or done.query(), "a page moved while a kernel that may use it was running"
        busy.lead()
        assert doubled.eq(2.0 * step).all().item()
        assert kept.eq(step + 1.0).all().item()
        ours = over(moved, torch.int32, place.page // 2)
        assert ours.eq(step).all().item()
        del ours
        moved.retire(0, 2)
        place.device.reap(wait=True)
        assert moved.backing(0) == moved.backing(1) == "none"
    del kept
    still.close()
    moved.close()
    place.device.reap(wait=True)


@everywhere
def test_pages_change_beside_a_kernel(kind: str) -> None:
    play(pages_change_beside_a_kernel, kind, rounds=3)


def host_pages_give_the_same_bits(place: Place, size: int) -> None:
    """A matrix product and attention over pages of the host, of the device, and of both."""
    torch.manual_seed(0)
    dtype = torch.bfloat16
    weight_range = place.range(-(-size * size * dtype.itemsize // place.page), "weights")
    weight = over(weight_range, dtype, size, size)
    weight.copy_(torch.randn(size, size, device=place.kind))
    rows = [torch.randn(count, size, device=place.kind).to(dtype) for count in (1, 3, 64, 512)]
    expected = [F.linear(row, weight) for row in rows]

    heads, dim, tokens = 4, 64, 1024
    kv_range = place.range(-(-2 * tokens * heads * dim * dtype.itemsize // place.page))
    flat = over(kv_range, dtype, tokens, 2, heads, dim)
    flat.copy_(torch.randn(flat.shape, device=place.kind))
    keys, values = (flat[None, :, side].transpose(1, 2) for side in (0, 1))  # [1, heads, tokens, dim]
    query = torch.randn(1, heads, 1, dim, device=place.kind).to(dtype)
    mask = torch.rand(1, 1, 1, tokens, device=place.kind) < 0.7

    def attend(keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        return [F.scaled_dot_product_attention(query, keys, values, attn_mask=each) for each in (None, mask)]

    attended = attend(keys, values)
    for where in ("all on the host", "every other on the host", "all on the device"):
        for held in (weight_range, kv_range):
            for piece in range(held.pieces):
                host = where.startswith("all on the host") or (where.startswith("every other") and piece % 2 == 0)
                wanted: Literal["device", "host"] = "host" if host else "device"
                assert held.backing(piece) == wanted or held.move(piece, wanted)
                assert held.backing(piece) == wanted
        for row, product in zip(rows, expected, strict=True):
            assert torch.equal(F.linear(row, weight), product), f"{where}: a product of {len(row)} rows"
        for found, right in zip(attend(keys, values), attended, strict=True):
            assert torch.equal(found, right), f"{where}: attention"
    del flat, keys, values, weight
    weight_range.close()
    kv_range.close()
    place.device.reap(wait=True)


@everywhere
def test_host_pages_give_the_same_bits(kind: str) -> None:
    if kind == "cuda" and not _native.probe("libcuda.so.1", 0)["host_pages"]:
        pytest.skip("this device cannot map host pages")
    play(host_pages_give_the_same_bits, kind, pages=256, host_pages=128, size=4096 if kind == "cuda" else 512)


def kv_moves_while_attention_runs(place: Place, rounds: int) -> None:
    """Pages of a cache go to other pages while another stream is reading all of it, again and again."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    heads, dim = 4, 64
    tokens = 8 * place.page // (2 * heads * dim * 4)
    held = place.range(8)
    flat = over(held, torch.float32, tokens, 2, heads, dim)
    flat.copy_(torch.randn(flat.shape, device=place.kind))
    keys, values = (flat[None, :, side].transpose(1, 2) for side in (0, 1))
    query = torch.randn(1, heads, 1, dim, device=place.kind)
    right = F.scaled_dot_product_attention(query, keys, values)
    wrong = torch.zeros((), dtype=torch.int64, device=place.kind)
    decoding = place.lane()
    decoding.follow()
    moves = 0
    for _ in range(rounds):
        with decoding():
            for _ in range(8):
                wrong += (F.scaled_dot_product_attention(query, keys, values) != right).sum()
        for _ in range(2):
            piece = int(torch.randint(8, (), generator=generator))
            where = place.places[int(torch.randint(len(place.places), (), generator=generator))]
            moves += held.move(piece, where)
    decoding.lead()
    assert wrong.item() == 0
    assert moves > rounds
    del flat, keys, values
    held.close()
    place.device.reap(wait=True)


@everywhere
def test_kv_moves_while_attention_runs(kind: str) -> None:
    play(kv_moves_while_attention_runs, kind, rounds=100 if kind == "cuda" else 10)


def graphs_read_what_is_there_now(place: Place, size: int) -> None:
    """A graph that reads a weight and a cache gives the same bits wherever their pages are at its replay."""
    torch.manual_seed(0)
    heads, tokens, dim, dtype = 8, 512, 64, torch.bfloat16
    weight_range = place.range(-(-size * size * 2 // place.page), "weights")
    kv_range = place.range(-(-heads * tokens * dim * 2 // place.page))
    weight, cache = over(weight_range, dtype, size, size), over(kv_range, dtype, 1, heads, tokens, dim)
    for each in (weight, cache):
        each.copy_(torch.randn(each.shape, device=place.kind))
    x = torch.randn(8, size, device=place.kind).to(dtype)
    query = torch.randn(1, heads, 1, dim, device=place.kind).to(dtype)

    def compute(weight: torch.Tensor = weight, cache: torch.Tensor = cache) -> tuple[torch.Tensor, ...]:
        return F.linear(x, weight), F.scaled_dot_product_attention(query, cache, cache)

    graph = Captured(place, compute)
    right = graph.replay()
    for where in (*reversed(place.places), "device", "device"):
        for held in (weight_range, kv_range):
            for piece in range(held.pieces):
                assert held.move(piece, where)
        for found, expected in zip(graph.replay(), right, strict=True):
            assert torch.equal(found, expected), where
    weight.add_(1)
    assert not torch.equal(graph.replay()[0], right[0]), "the graph does not read the weight"
    del graph, compute, weight, cache, each
    weight_range.close()
    kv_range.close()
    place.device.reap(wait=True)


@everywhere
def test_graphs_read_what_is_there_now(kind: str) -> None:
    play(graphs_read_what_is_there_now, kind, pages=256, host_pages=128, size=1024 if kind == "cuda" else 256)
