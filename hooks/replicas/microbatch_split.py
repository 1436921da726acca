"""Policies that split the chunks of an iteration into microbatches: by tokens, or by cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.microbatches import ChunkSize, equal_cost

Size = tuple[int, int]  # of a chunk: tokens of its request before it, new tokens
Piece = tuple[int, int]  # index of a chunk, and how many of its new tokens, after those of its earlier pieces
SplitPolicy = Callable[[Sequence[Size], int], list[list[Piece]]]
# (chunks, places) -> at most `places` microbatches, in the order in which they are computed; none is empty, every token
# is in one of them, and pieces of a chunk are in different ones


def split_by_tokens(chunks: Sequence[Size], places: int) -> list[list[Piece]]:
    """Returns microbatches of equally many new tokens, give or take one; the order of chunks is kept."""
    total = sum(new for _, new in chunks)
    ends = [round(total * (n + 1) / places) for n in range(places)]
    found: list[list[Piece]] = []
    done = 0
    pieces: list[Piece] = []
    for index, (_, new) in enumerate(chunks):
        left = new
        while left:
            end = next(each for each in ends if each > done)
            taken = min(left, end - done)
            pieces.append((index, taken))
            left, done = left - taken, done + taken
            if done == end:
                found.append(pieces)
                pieces = []
    return found


def split_by_cost(cost: ChunkCost) -> SplitPolicy:
    """Returns a policy that makes microbatches of equal cost (KunServe §4.3; policy/replicas/microbatches.py)."""

    def split(chunks: Sequence[Size], places: int) -> list[list[Piece]]:
        batches = equal_cost([ChunkSize(number, *size) for number, size in enumerate(chunks)], places, cost)
        return [[(each.request, each.new) for each in batch] for batch in batches]

    return split
