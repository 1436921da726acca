"""The order in which the layers of a cache append, and which append begins an iteration."""

from __future__ import annotations


class KVTurns:
    """The order of appends, used by the cache's thread. A layer is (number of its range, place in that).

    In a forward for which nothing is away or being restored, `KVRange.append_next` notes layers after the first itself,
    as each layer of each token pays for it."""

    def __init__(self) -> None:
        self.layers = 0  # number of layers that append in an iteration
        self.forward = 0  # the forward for which nothing is away or being restored; 0: there is none
        self.stream = 0  # the stream of the last append
        self.order: list[int] = []  # numbers of ranges, as their layers appended in the last iteration
        self.appended: list[int] = []  # the same, in this iteration
        self.first: tuple[int, int] | None = None  # the layer that began this iteration
        self.since = 0  # appends since the last one of `first`

    def begins(self, layer: tuple[int, int]) -> bool:
        """Notes that a layer is about to append. Is it the first one of an iteration?"""
        self.since += 1
        if layer != self.first and self.first is not None and self.since <= self.layers:
            self.appended.append(layer[0])
            return False
        self.first, self.since = layer, 0
        self.order, self.appended = self.appended, [layer[0]]
        return True

    @property
    def ran(self) -> frozenset[int]:
        """The ranges that were read in this iteration before the one that is read now."""
        return frozenset(self.appended[:-1])
