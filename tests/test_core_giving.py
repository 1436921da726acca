"""What a prefill costs in driver calls where every page is taken: those of the heap that lie idle between two operators
stay where they are mapped, but for as many as are lacking."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .core import PAGE, Core, calls, opened
from .test_core_reclaim import Layer

MIB = 2**20
PIECES, LAYERS = 3, 24  # pages of a layer's keys and values
HIDDEN = 211  # hundredths of a page: the rows of a prompt


def decoder_layer(core: Core, cache: Layer, residual: int, hidden: int) -> int:
    """What a decoder layer allocates for a prompt: attention, whose keys and values come to `cache`, and an MLP four
    times as wide. Returns what the next layer begins with."""
    put, drop = core.device.allocate, core.device.deallocate

    def normed() -> int:
        square = put(hidden)
        drop(square)
        scaled, normalized = put(hidden), put(hidden)
        drop(scaled)
        return normalized

    rows = normed()
    query, key, value = put(hidden), put(hidden // 2), put(hidden // 2)
    for nbytes in (hidden, hidden // 2):
        turned, half = put(nbytes), put(nbytes // 2)
        drop(half)
        drop(turned)
    drop(rows)
    cache.range.map(0, PIECES)
    for tensor in (key, value):
        drop(tensor)
    seen = put(hidden)
    drop(query)
    summed = put(hidden)
    for tensor in (seen, residual):
        drop(tensor)
    rows = normed()
    gate, active = put(4 * hidden), put(4 * hidden)
    drop(gate)
    up, product = put(4 * hidden), put(4 * hidden)
    for tensor in (active, up):
        drop(tensor)
    down = put(hidden)
    for tensor in (product, rows):
        drop(tensor)
    output = put(hidden)
    for tensor in (down, summed):
        drop(tensor)
    return output


def prefill(core: Core, hidden: int) -> Iterator[int]:
    """Driver calls of each layer that put pages behind addresses or take them away. The keys and values of layers that
    have run may be taken."""
    groups = [core.device.group() for _ in range(LAYERS)]
    caches = [
        Layer(core, group, core.range(PIECES, "kv", group), core.range(PIECES, "kv", group), 1) for group in groups
    ]
    residual = core.device.allocate(hidden)
    for number, cache in enumerate(caches):
        core.device.publish([space.entry(n) for n, space in enumerate(caches[:number]) if space.range.backed])
        before = calls()
        residual = decoder_layer(core, cache, residual, hidden)
        after = calls()
        yield sum(after[name] - before[name] for name in ("cuMemMap", "cuMemUnmap"))
    core.device.deallocate(residual)


@pytest.mark.parametrize("page", [PAGE, MIB // 4, 2 * MIB])
def test_a_layer_whose_cache_takes_from_others_maps_no_activations_anew(page: int) -> None:
    """Pages of a cache are mapped, and those of another for which they leave; of activations one wide block moves."""
    with opened(page=page, budget=60, host_budget=PIECES * LAYERS) as core:
        counts = [*prefill(core, HIDDEN * page // 100)]
    cache = PIECES * (1 + 3)  # one that comes; one that leaves: a page of the host, which is shown in its place
    wide = -(-4 * HIDDEN // 100)
    assert counts[3:8] == [PIECES] * 5, "while there is room"
    assert max(counts[10:]) <= cache + 2 * wide


def inflated(core: Core) -> list[int]:
    """The pages that went from activations to caches, each time that there were any."""
    return [pages for _, kind, pages, *_ in core.device.events() if kind == "inflate"]


def test_what_activations_need_no_more_is_given_soon(core: Core) -> None:
    """Twice as much each time, until some of it is needed again."""
    core.device.deallocate(core.device.allocate(64 * PAGE))
    cache = core.range(64)
    for piece in range(31):
        cache.map(piece, 1)
    assert inflated(core) == [1, 2, 4, 8, 16]
    cache.retire(0, 8)
    core.device.deallocate(core.device.allocate(41 * PAGE))  # eight more than it had
    cache.map(0, 1)
    cache.map(1, 1)
    assert inflated(core) == [1, 2]
