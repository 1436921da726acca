"""The arithmetic of KV geometry against brute force: every element of every view, by its address."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ballonet.offload.policy.geometry import ALIGNMENT, INT32, Geometry, choose, longest

PAGE = 4096
geometries = st.builds(
    Geometry,
    layers=st.integers(1, 4),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    k_dim=st.integers(1, 9),
    v_dim=st.integers(1, 9),
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    page=st.sampled_from([PAGE, 3 * PAGE]),
    tokens=st.integers(1, 12),
)


def addresses(g: Geometry, layer: int, values: bool) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """(batch, head, token, dim) -> byte address inside the range, for a whole view, from strides alone."""
    offset = g.v_offset(layer) if values else g.k_offset(layer)
    strides = g.v_strides if values else g.k_strides
    dim = g.v_dim if values else g.k_dim
    for index in itertools.product(range(g.batch), range(g.heads), range(g.tokens), range(dim)):
        yield index, (offset + sum(i * s for i, s in zip(index, strides, strict=True))) * g.itemsize


@settings(max_examples=60, deadline=None)
@given(geometries)
@example(Geometry(3, 3, 2, 5, 3, 2, PAGE, 7))
def test_no_two_elements_share_a_byte_and_none_leaves_the_range(g: Geometry) -> None:
    seen: set[int] = set()
    count = 0
    assert g.token_bytes % ALIGNMENT == g.reservation % g.page == 0
    for layer in range(g.layers):
        assert g.k_offset(layer) * g.itemsize % ALIGNMENT == g.v_offset(layer) * g.itemsize % ALIGNMENT == 0
    for layer, values in itertools.product(range(g.layers), (False, True)):
        for _, address in addresses(g, layer, values):
            assert address % g.itemsize == 0
            assert 0 <= address <= g.reservation - g.itemsize
            seen.add(address)
            count += 1
    assert len(seen) == count
    # What no view covers is the padding of the sections and the end of the range, and no more.
    padding = g.k_bytes + g.v_bytes - g.batch * g.heads * (g.k_dim + g.v_dim) * g.itemsize
    assert 0 <= padding < 2 * ALIGNMENT
    tail = g.reservation - g.tokens * g.token_bytes
    assert 0 <= tail < g.page
    assert g.reservation == count * g.itemsize + g.tokens * g.layers * padding + tail


@settings(max_examples=60, deadline=None)
@given(geometries)
def test_the_mapped_pieces_are_exactly_those_that_tokens_touch(g: Geometry) -> None:
    for length in range(g.tokens + 1):
        mapped = {piece for first, count in g.runs(0, g.pieces(length)) for piece in range(first, first + count)}
        touched = {
            address // g.page
            for layer, values in itertools.product(range(g.layers), (False, True))
            for (_, _, token, _), address in addresses(g, layer, values)
            if token < length
        }
        assert touched <= mapped
        assert len(mapped) <= length * g.token_bytes // g.page + 1
        # The last piece is there because a token is, if only for its padding.
        assert g.pieces(length) * g.page - length * g.token_bytes < g.page


@settings(max_examples=60, deadline=None)
@given(geometries, st.data())
def test_growing_maps_each_piece_once_and_in_order(g: Geometry, data: st.DataObject) -> None:
    lengths = [*sorted(data.draw(st.lists(st.integers(0, g.tokens), max_size=6))), g.tokens]
    mapped: list[int] = []
    at = 0
    for length in lengths:
        assert g.pieces(length) >= at
        for first, count in g.runs(at, g.pieces(length)):
            mapped += range(first, first + count)
        at = g.pieces(length)
        assert length <= g.capacity(at) <= g.tokens
        assert at == 0 or g.capacity(at - 1) < length
    assert len(set(mapped)) == len(mapped)
    assert set(mapped) == {
        piece for first, count in g.runs(0, g.pieces(g.tokens)) for piece in range(first, first + count)
    }
    assert max(mapped) < g.reservation // g.page


SIZES = {
    "batch": st.integers(1, 64),
    "heads": st.integers(1, 64),
    "k_dim": st.integers(1, 256),
    "itemsize": st.sampled_from([1, 2, 4]),
    "page": st.sampled_from([4096, 65536, 2**21]),
}


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries(SIZES), st.integers(1, 64), st.floats(0, 1), st.integers(1, 10**6), st.booleans())
def test_choose_never_overflows_and_groups_only_what_would_be_mostly_empty(
    sizes: dict[str, int], layers: int, share: float, expected: int, alone: bool
) -> None:
    sizes["v_dim"] = sizes["k_dim"]
    most = longest(*(sizes[name] for name in ("batch", "heads", "k_dim", "v_dim", "itemsize")))
    tokens = max(1, int(most * share))
    g = choose(layers=layers, tokens=tokens, expected=expected, alone=alone, **sizes)
    assert g.int32_ok
    assert 1 <= g.layers <= layers
    own = Geometry(1, tokens=tokens, **sizes)
    used, mapped = expected * own.token_bytes, own.pieces(expected) * sizes["page"]
    if alone or 2 * used >= mapped:
        assert g.layers == 1
    else:
        larger = Geometry(g.layers + 1, tokens=tokens, **sizes)
        assert g.layers == layers or not larger.int32_ok


def highest(g: Geometry) -> int:
    """The largest element index that any view of the geometry reaches, counted from the view's own first element."""
    return max(
        sum((size - 1) * stride for size, stride in zip((g.batch, g.heads, g.tokens, dim), strides, strict=True))
        for dim, strides in ((g.k_dim, g.k_strides), (g.v_dim, g.v_strides))
    )


@pytest.mark.parametrize(
    ("batch", "heads", "k_dim", "v_dim", "itemsize"),
    [
        (1, 8, 128, 128, 2),
        (8, 8, 128, 128, 2),
        (64, 8, 128, 128, 4),
        (1, 1, 8, 8, 1),
        (1, 128, 192, 128, 2),  # an MLA model's, expanded
        (1, 1, 1, 1, 4),  # sections that are mostly padding
        (3, 5, 7, 11, 2),
        (1024, 64, 128, 128, 2),  # a token of 2**24 elements
    ],
)
def test_at_below_and_above_two_to_the_31(batch: int, heads: int, k_dim: int, v_dim: int, itemsize: int) -> None:
    most = longest(batch, heads, k_dim, v_dim, itemsize)
    sizes = {"batch": batch, "heads": heads, "k_dim": k_dim, "v_dim": v_dim, "itemsize": itemsize, "page": 2**21}
    below, at, above = (Geometry(1, tokens=most + more, **sizes) for more in (-1, 0, 1))
    assert (below.int32_ok, at.int32_ok, above.int32_ok) == (True, True, False)
    assert at.tokens * at.token_stride < INT32 <= above.tokens * above.token_stride
    # What a kernel computes for the last token in 32 bits is the index of its first element, or of its last.
    assert highest(at) < INT32
    assert highest(Geometry(1, tokens=most + 2, **sizes)) >= INT32 - at.token_stride
    with pytest.raises(ValueError, match=f"at most {most} tokens"):
        choose(layers=4, tokens=above.tokens, expected=1, alone=False, **sizes)
    for layers in (1, 2, 3):
        chosen = choose(layers=layers, tokens=most // layers, expected=1, alone=False, **sizes)
        assert chosen.int32_ok
        assert highest(chosen) < INT32


@pytest.mark.parametrize(("page", "pinned"), [(8 * 2**20, 256 * 2**20), (2 * 2**20, 64 * 2**20)])
def test_a_short_conversation_of_an_eight_billion_model_fills_no_page(page: int, pinned: int) -> None:
    """While it is kept its last pages have to count as full, or none of them could leave."""
    layer = choose(32, 1, 8, 128, 128, 2, page, 131072, expected=200, alone=True)
    assert (layer.layers, layer.token_bytes) == (1, 4096)
    assert (layer.full(200), layer.pieces(200)) == (0, 1)
    assert 32 * layer.pieces(200) * page == pinned
    assert (layer.full(page // 4096), layer.full(page // 4096 - 1)) == (1, 0)


def test_an_eight_billion_model_keeps_its_layers_apart_and_a_small_one_shares() -> None:
    llama = {"heads": 8, "k_dim": 128, "v_dim": 128, "itemsize": 2, "page": 2**21, "alone": False}
    assert choose(layers=32, batch=1, tokens=8192, expected=1024, **llama).layers == 1
    # FACTS of the int32 bound: 32 layers in one stride overflow at batch 8 and 4,096 tokens.
    assert not Geometry(32, 8, 8, 128, 128, 2, 2**21, 4096).int32_ok
    small = {"heads": 3, "k_dim": 64, "v_dim": 64, "itemsize": 2, "page": 2**21}
    assert choose(layers=30, batch=1, tokens=8192, expected=500, alone=False, **small).layers == 30
    assert choose(layers=30, batch=1, tokens=8192, expected=500, alone=True, **small).layers == 1


@pytest.mark.parametrize(
    "wrong", [{"layers": 0}, {"tokens": 0}, {"itemsize": 3}, {"page": 1000}, {"page": 0}, {"v_dim": 0}, {"batch": -1}]
)
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    sound = dict.fromkeys(("layers", "batch", "heads", "k_dim", "v_dim", "tokens"), 1) | {"itemsize": 2, "page": PAGE}
    with pytest.raises(ValueError, match=r"geometry|itemsize"):
        Geometry(**sound | wrong)
