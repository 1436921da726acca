"""How the chunks of an iteration become microbatches: the interface of a policy, and a plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.microbatches import Chunk, equal_cost

Size = tuple[int, int]  # of a chunk: tokens of its request before it, new tokens
Piece = tuple[int, int]  # which chunk, and how many of its new tokens, those that follow on its piece before
SplitPolicy = Callable[[Sequence[Size], int], list[list[Piece]]]
# (chunks, places) -> at most so many microbatches, in the order in which they are computed; none is empty, every token
# is in one of them, and pieces of a chunk are in different ones


def split_by_tokens(chunks: Sequence[Size], places: int) -> list[list[Piece]]:
    """Microbatches of equally many new tokens, give or take one; the order of chunks is kept."""
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
    """Microbatches of equal cost (KunServe §4.3; offload/policy/replicas/microbatches.py)."""

    def form(chunks: Sequence[Size], places: int) -> list[list[Piece]]:
        batches = equal_cost([Chunk(number, *size) for number, size in enumerate(chunks)], places, cost)
        return [[(each.request, each.new) for each in batch] for batch in batches]

    return form
