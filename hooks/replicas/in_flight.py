"""Microbatches of a group that are planned or in flight, and the memory that followers have left for more."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from transformers.generation.continuous_batching.requests import RequestState

from .microbatch_plan import Answer, Chunk
from .microbatch_split import SplitPolicy


@dataclass(slots=True)
class Microbatch:
    """A microbatch. `states`: of the requests of its chunks. `answer`: set where the first stage is also the last."""

    chunks: Sequence[Chunk]
    states: Sequence[RequestState]
    number: int = -1
    answer: Answer | None = None

    def without(self, gone: Sequence[bool]) -> Microbatch:
        """Returns the microbatch without the chunks for which `gone` is true."""
        kept = [n for n, each in enumerate(gone) if not each]
        return Microbatch([self.chunks[n] for n in kept], [self.states[n] for n in kept])


def split_iteration(
    chunks: Sequence[Chunk], states: Sequence[RequestState], split: SplitPolicy, places: int
) -> list[Microbatch]:
    """Returns the microbatches of an iteration, at most `places`, in order."""
    done = [0] * len(chunks)
    found = []
    for pieces in split([(chunk.before, len(chunk.ids)) for chunk in chunks], places):
        cut = []
        for index, new in pieces:
            chunk, first = chunks[index], done[index]
            done[index] += new
            ends = done[index] == len(chunk.ids)
            ids = chunk.ids[first : first + new]
            cut.append(Chunk(chunk.request, ids, chunk.before + first, chunk.samples and ends))
        found.append(Microbatch(cut, [states[index] for index, _ in pieces]))
    assert done == [len(chunk.ids) for chunk in chunks], "a token is in no microbatch"
    return found


class FollowerRoom:
    """Tokens for which followers have memory: as of the last answer, less those planned since."""

    def __init__(self, rooms: Sequence[int]) -> None:
        """`rooms`: tokens for which each follower has memory at first."""
        self._rooms = tuple(rooms)
        self._planned: deque[tuple[int, int]] = deque()  # microbatch, tokens of its new blocks

    @property
    def least(self) -> float:
        """Tokens for which every follower has memory; infinity without followers."""
        return min(self._rooms, default=math.inf) - sum(tokens for _, tokens in self._planned)

    def planned(self, number: int, tokens: int) -> None:
        """Notes that a microbatch takes blocks for so many tokens on every stage."""
        self._planned.append((number, tokens))

    def answered(self, number: int, rooms: Sequence[int]) -> None:
        """Takes in the followers' room after this microbatch."""
        self._rooms = tuple(rooms)
        while self._planned and self._planned[0][0] <= number:
            self._planned.popleft()
