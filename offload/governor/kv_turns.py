"""The order in which the layers of a cache append: which one begins an iteration, and which ones only follow."""

from __future__ import annotations


class KVTurns:
    """Used by the thread that uses the cache. A layer is (number of its range, place in that)."""

    def __init__(self) -> None:
        self.layers = 0  # that append in an iteration
        self.forward = 0  # the forward whose later layers find nothing away, nor on its way; 0: there is none
        self.stream = 0  # that tokens were appended on last
        self.order: list[int] = []  # numbers of ranges, as their layers appended in the last iteration
        self._turns: list[int] = []  # in this one
        self._leader: tuple[int, int] | None = None
        self._since = 0  # appends since its last

    def follows(self, layer: tuple[int, int], forward: int, stream: int) -> bool:
        """A layer is about to append a token on `stream`, in the `forward` of that number. Is it one of the later ones
        of an iteration for which nothing is away, nor on its way? Then there is nothing else to do."""
        if forward != self.forward or layer == self._leader or self._since >= self.layers:
            return False
        self._since += 1
        self._turns.append(layer[0])
        self.stream = stream
        return True

    def begins(self, layer: tuple[int, int]) -> bool:
        """A layer is about to append: is it the first one of an iteration?"""
        self._since += 1
        if layer != self._leader and self._leader is not None and self._since <= self.layers:
            self._turns.append(layer[0])
            return False
        self._leader, self._since = layer, 0
        self.order, self._turns = self._turns, [layer[0]]
        return True

    @property
    def ran(self) -> frozenset[int]:
        """The ranges that were read in this iteration before the one that is read now."""
        return frozenset(self._turns[:-1])
