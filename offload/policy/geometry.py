"""KV geometry: where the keys and values of a token lie inside a range, as a value.

Words
    group    the layers that share a range: one, or several whose keys and values have the same shapes
    token    what all layers of the group store for one position of every sequence
    section  the keys, or the values, of one layer inside a token
    piece    a page-sized part of a range, as in the native core

Note [Token-major]
    A token is contiguous, and token follows token:

        [token][layer][K: batch, head, dim | V: batch, head, dim]

    so that one more token touches the tail of the range and nothing else: pages are mapped as tokens come and leave
    when the tail is cut. A layer's keys are a strided view [batch, heads, tokens, dim] of that, so are its values.
    Sections start at multiples of `ALIGNMENT`, as every row of a tensor of torch's own does for usual head sizes.

Note [int32]
    With a mask, or in float32, the memory-efficient attention kernel multiplies the index of a key by the token stride
    in 32 bits. So tokens x token stride must stay below 2**31 elements: `Geometry.int32_ok`. More layers in a group, or
    more sequences side by side, make the stride longer; `choose` keeps the group small enough, and `longest` is the
    number of tokens at which one layer alone reaches the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

ALIGNMENT: Final = 16  # bytes; what the widest vector load of an attention kernel asks for
INT32: Final = 2**31  # elements


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Geometry:
    """The layout of one range. Sizes without a unit are bytes; strides and offsets for views are elements."""

    layers: int  # layers in the group
    batch: int  # sequences
    heads: int  # key/value heads
    k_dim: int  # elements of one key
    v_dim: int  # elements of one value
    itemsize: int  # bytes of an element, a divisor of 16
    page: int  # bytes of a page, a multiple of 4096
    tokens: int  # most tokens per sequence

    def __post_init__(self) -> None:
        if min(self.layers, self.batch, self.heads, self.k_dim, self.v_dim, self.page, self.tokens) < 1:
            raise ValueError(f"every size of a geometry is at least 1: {self}")
        if self.itemsize not in (1, 2, 4, 8, 16) or self.page % 4096:
            raise ValueError(f"itemsize must divide 16 and page be a multiple of 4096: {self}")

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of the section of keys, padded to `ALIGNMENT`."""
        return _up(self.batch * self.heads * self.k_dim * self.itemsize, ALIGNMENT)

    @cached_property
    def v_bytes(self) -> int:
        return _up(self.batch * self.heads * self.v_dim * self.itemsize, ALIGNMENT)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes from one token to the next."""
        return self.layers * (self.k_bytes + self.v_bytes)

    @property
    def reservation(self) -> int:
        """Bytes of addresses that the range takes."""
        return _up(self.tokens * self.token_bytes, self.page)

    @property
    def parts(self) -> int:
        """Parts of the range that grow by themselves."""
        return 1

    @cached_property
    def token_stride(self) -> int:
        """Elements from one token to the next."""
        return self.token_bytes // self.itemsize

    @property
    def int32_ok(self) -> bool:
        """Do token offsets fit 32 bits? See Note [int32]."""
        return self.tokens * self.token_stride < INT32

    def _strides(self, dim: int) -> tuple[int, int, int, int]:
        return self.heads * dim, dim, self.token_stride, 1

    @cached_property
    def k_strides(self) -> tuple[int, int, int, int]:
        """The strides of a layer's keys as [batch, heads, tokens, k_dim]."""
        return self._strides(self.k_dim)

    @cached_property
    def v_strides(self) -> tuple[int, int, int, int]:
        return self._strides(self.v_dim)

    def k_offset(self, layer: int) -> int:
        """The first element of the keys of `layer` (0 <= layer < layers)."""
        return layer * (self.k_bytes + self.v_bytes) // self.itemsize

    def v_offset(self, layer: int) -> int:
        return self.k_offset(layer) + self.k_bytes // self.itemsize

    def pieces(self, length: int) -> int:
        """Pieces that `length` tokens need."""
        return -(-length * self.token_bytes // self.page)

    def full(self, length: int) -> int:
        """Pieces on which nothing but the first `length` tokens lies."""
        return length * self.token_bytes // self.page

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """(first piece, count) of what is added when the range grows from `start` to `end` pieces, if anything is."""
        return [(start, end - start)] if end > start else []

    def capacity(self, pieces: int) -> int:
        """Tokens that lie wholly on the first `pieces` pieces."""
        return min(pieces * self.page // self.token_bytes, self.tokens)


def longest(batch: int, heads: int, k_dim: int, v_dim: int, itemsize: int) -> int:
    """Tokens that one layer alone can hold of each of `batch` sequences; see Note [int32]."""
    one = Geometry(1, batch, heads, k_dim, v_dim, itemsize, 4096, 1)
    return (INT32 - 1) // one.token_stride


def choose(
    layers: int,
    batch: int,
    heads: int,
    k_dim: int,
    v_dim: int,
    itemsize: int,
    page: int,
    tokens: int,
    *,
    expected: int,
    alone: bool,
) -> Geometry:
    """Chooses the geometry for up to `layers` layers of one shape that may share a range.

    `tokens`: the most to make room for; `expected`: those that are likely to come. `alone`: something acts on single
    layers (streams, offloads or drops them). Raises ValueError where one layer alone breaks the bound of Note [int32].

    One layer per range is the default. Several share one when nothing needs them alone and the pages of a layer of its
    own would be mostly empty at the expected length: all of them, or as many as the bound allows.
    """
    one = Geometry(1, batch, heads, k_dim, v_dim, itemsize, page, tokens)
    if not one.int32_ok:
        raise ValueError(
            f"{tokens} tokens of {one.token_stride} elements reach 2**31, where attention kernels overflow: at most "
            f"{(INT32 - 1) // one.token_stride} tokens fit this batch"
        )
    mostly_empty = 2 * expected * one.token_bytes < one.pieces(expected) * page
    if alone or not mostly_empty:
        return one
    return replace(one, layers=min(layers, (INT32 - 1) // (tokens * one.token_stride)))
