"""The order in which the layers of a cache append: which one begins an iteration, and which ones only follow."""

from __future__ import annotations


class KVTurns:
    """Used by the thread that uses the cache. A layer is (number of its range, place in that).

    One of the later layers of an iteration, in the forward for which nothing is away nor on its way, only follows:
    `KVRange.append_next` notes that itself, as each layer of each token pays for it."""

    def __init__(self) -> None:
        self.layers = 0  # that append in an iteration
        self.forward = 0  # the forward whose later layers find nothing away, nor on its way; 0: there is none
        self.stream = 0  # that tokens were appended on last
        self.order: list[int] = []  # numbers of ranges, as their layers appended in the last iteration
        self.turns: list[int] = []  # in this one
        self.leader: tuple[int, int] | None = None  # the layer that began it
        self.since = 0  # appends since its last

    def begins(self, layer: tuple[int, int]) -> bool:
        """A layer is about to append: is it the first one of an iteration?"""
        self.since += 1
        if layer != self.leader and self.leader is not None and self.since <= self.layers:
            self.turns.append(layer[0])
            return False
        self.leader, self.since = layer, 0
        self.order, self.turns = self.turns, [layer[0]]
        return True

    @property
    def ran(self) -> frozenset[int]:
        """The ranges that were read in this iteration before the one that is read now."""
        return frozenset(self.turns[:-1])
