"""Microbatches of a pipeline: the queued chunks in order, cut into batches that take equally long. Pure.

Note [Look ahead]
    A stage that ends early waits for its neighbour, so batches should take equally long (KunServe §4.3). The batches
    are intervals of one row of chunks: `equal_cost` goes through it once and ends a batch where the running cost passes
    its share, in the middle of a chunk if need be (`ChunkCost.cut`). A request's tokens stay in order, and O(chunks)
    costs are computed. Where the costs of a prompt's chunks do not add up to the prompt's (`ChunkCost.square`,
    `prefix`), the last batch takes the difference.

    The paper halves recursively (`fig11`), and stops where a batch has few tokens. So two batches with equally many
    tokens, one after a long prefix, are not split further, though one takes twice as long. Two errata: the test has to
    be made for every batch, not for B[0] alone; and all leaves are visited, which is O(batches), not O(log L).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .chunk_cost import ChunkCost


class ChunkSize(NamedTuple):
    """`new` tokens of a request, after `before` earlier ones."""

    request: int
    before: int
    new: int

    def cut(self, new: int) -> tuple[ChunkSize, ChunkSize]:
        """Returns the first `new` tokens, and the others."""
        return ChunkSize(self.request, self.before, new), ChunkSize(self.request, self.before + new, self.new - new)


Batch = list[ChunkSize]


def equal_cost(chunks: Sequence[ChunkSize], batches: int, cost: ChunkCost) -> list[Batch]:
    """Returns at most `batches` batches, none empty, that take as equally long as whole tokens allow. See Note
    [Look ahead]. ValueError where `batches` is below 1."""
    if batches < 1:
        raise ValueError(f"chunks cannot be put into {batches} batches")
    share = sum(cost.added(piece.before, piece.new) for piece in chunks) / batches
    made: list[Batch] = [[] for _ in range(batches)]
    number, room = 0, share
    for chunk in chunks:
        rest = chunk
        while rest.new:
            fits = rest.new if number == batches - 1 else _fitting(rest, room, cost)
            part, rest = rest.cut(fits)
            if fits:
                made[number].append(part)
                room -= cost.added(part.before, part.new)
            if rest.new:
                number, room = number + 1, room + share
    return [batch for batch in made if batch]


def fill(chunks: Iterable[ChunkSize], room: float, cost: ChunkCost) -> Batch:
    """Returns the first chunks, the last one cut, that add as close to `room` seconds to a batch as whole tokens
    allow."""
    made: Batch = []
    for chunk in chunks:
        fits = _fitting(chunk, room, cost)
        if fits:
            made.append(chunk.cut(fits)[0])
            room -= cost.added(chunk.before, fits)
        if fits < chunk.new:
            break
    return made


def _fitting(chunk: ChunkSize, room: float, cost: ChunkCost) -> int:
    """Returns how many tokens of the chunk bring a batch closest to its share, which is `room` seconds away."""
    if cost.added(chunk.before, chunk.new) <= room:
        return chunk.new
    fits = min(cost.cut(room + cost.gamma, chunk.before), chunk.new - 1)
    below = cost.added(chunk.before, fits) if fits else 0.0
    return fits + (cost.added(chunk.before, fits + 1) + below < 2 * room)


def by_tokens(chunks: Sequence[ChunkSize], most: int) -> list[Batch]:
    """Returns batches of `most` new tokens each (Sarathi-Serve). ValueError where `most` is below
    1."""
    if most < 1:
        raise ValueError(f"a batch cannot have {most} tokens at most")
    made: list[Batch] = []
    room = 0
    for chunk in chunks:
        while chunk.new:
            if not room:
                made.append([])
                room = most
            part, chunk = chunk.cut(min(room, chunk.new))
            made[-1].append(part)
            room -= part.new
    return made


def fig11(chunks: Sequence[ChunkSize], least: int, cost: ChunkCost) -> list[Batch]:
    """Returns batches halved by cost until they have `least` tokens or fewer, as printed but for its errata (KunServe
    Fig. 11). See Note [Look ahead]."""
    if sum(chunk.new for chunk in chunks) <= max(1, least):
        return [list(chunks)] if chunks else []
    halves = equal_cost(chunks, 2, cost)
    return halves if len(halves) < 2 else [part for half in halves for part in fig11(half, least, cost)]
