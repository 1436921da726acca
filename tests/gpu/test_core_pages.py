"""Pages that change behind an address while the device works: aliases, moves beside kernels, pages of the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .scene import Captured, Place, over, scene


@scene()
def test_pages_change_beside_a_kernel(place: Place) -> None:
    """Mapping and retiring do not wait for a running kernel; moving waits for every stream that may use the page.

    That is asked of an event after the kernel, not of a clock: half a second of kernel against some calls.
    """
    busy, still = place.lane(), place.range(2)
    kept = over(still, torch.float32, place.page // 2)
    doubled = torch.empty_like(kept)
    moved = place.range(2, mapped=False)
    for step in range(4):  # the first loads the kernels, which may wait for others
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
            assert place.pages("pending_free") == 1, "a page left while a kernel that may use it was running"
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
        assert moved.leads_to(0) == moved.leads_to(1) == "none"


@scene()
def test_kv_moves_while_attention_runs(place: Place) -> None:
    """Pages of a cache go to other pages while another stream is reading all of it, again and again."""
    rounds = 100 if place.cuda else 10
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


@scene(pages=256, host_pages=128)
def test_bits_are_the_same_wherever_pages_are(place: Place) -> None:
    """A matrix product and attention over pages of the host, of the device, and of both; now, and in a graph that was
    captured before pages moved."""
    torch.manual_seed(0)
    size, dtype = 2048 if place.cuda else 256, torch.bfloat16
    heads, dim, tokens = 4, 64, 1024
    weight_range = place.range(-(-size * size * dtype.itemsize // place.page), "weights")
    kv_range = place.range(-(-2 * tokens * heads * dim * dtype.itemsize // place.page))
    weight, flat = over(weight_range, dtype, size, size), over(kv_range, dtype, tokens, 2, heads, dim)
    for tensor in (weight, flat):
        tensor.copy_(torch.randn(tensor.shape, device=place.kind))
    keys, values = (flat[None, :, side].transpose(1, 2) for side in (0, 1))  # [1, heads, tokens, dim]
    rows = [torch.randn(count, size, device=place.kind).to(dtype) for count in (1, 3, 64, 512)]
    query = torch.randn(1, heads, 1, dim, device=place.kind).to(dtype)
    mask = torch.rand(1, 1, 1, tokens, device=place.kind) < 0.7

    def compute() -> tuple[torch.Tensor, ...]:
        attended = [F.scaled_dot_product_attention(query, keys, values, attn_mask=chosen) for chosen in (None, mask)]
        return (*(F.linear(row, weight) for row in rows), *attended)

    right, graph = compute(), Captured(place, compute)
    replayed = graph.replay()
    for host in (lambda piece: True, lambda piece: piece % 2 == 0, lambda piece: False):
        for held in (weight_range, kv_range):
            for piece in range(held.pieces):
                assert held.move(piece, place.places[-1] if host(piece) else "device")
        for actual, expected in zip((*compute(), *graph.replay()), (*right, *replayed), strict=True):
            assert torch.equal(actual, expected)
    weight.add_(1)
    assert not torch.equal(graph.replay()[0], replayed[0]), "the graph does not read the weight"
