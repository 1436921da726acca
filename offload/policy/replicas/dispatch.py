"""Which group a new request goes to: the one with most room left after the KV that it is predicted to need.

Note [Room of a group]
    Rooms are compared per replica. In a group of k, a replica keeps only its own layers, 1/k of each token's KV, so the
    same free memory is room for k times as many tokens, and a request takes 1/k of each member: what is left after a
    demand of d tokens is (room - d) / k, where `room` are the tokens that still fit into the group. For groups of the
    same size the order does not depend on d. So there is one heap for each size and capacity, which are few as replicas
    are alike: O(log N) a request.

    A request's predicted demand counts from its dispatch until it ends, so ten requests that arrive at once do not all
    go to the emptiest group. Room can be negative: then requests wait there, and the controller counts them as pending.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

Members = tuple[int, ...]  # of a group, and its key


@dataclass(slots=True)
class _Room:
    kind: tuple[int, int]  # (members, tokens of KV in all)
    room: int
    version: int = 0


class Dispatcher:
    """Groups that take requests, and the tokens of KV that are promised to requests in each."""

    def __init__(self) -> None:
        self._groups: dict[Members, _Room] = {}
        self._heaps: dict[tuple[int, int], list[tuple[int, int, Members]]] = {}  # by kind: (-room, version, group)
        self._versions = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group: Members) -> bool:
        return group in self._groups

    def add(self, group: Members, capacity: int, promised: int = 0) -> None:
        """Adds a group with room for `capacity` tokens in all, some of them promised already."""
        self._groups[group] = _Room((len(group), capacity), capacity - promised)
        self._push(group)

    def remove(self, group: Members) -> None:
        """Removes a group; what was promised there is forgotten. KeyError."""
        del self._groups[group]

    def promise(self, group: Members, demand: int) -> None:
        """Promises `demand` tokens to a request of the group. KeyError."""
        self._groups[group].room -= demand
        self._push(group)

    def release(self, group: Members, demand: int) -> None:
        """Takes back `demand` promised tokens. KeyError."""
        self.promise(group, -demand)

    def room(self, group: Members) -> int:
        """Returns the tokens that are not promised; negative where more is promised than there is. KeyError."""
        return self._groups[group].room

    def choose(self, demand: int) -> Members | None:
        """Returns the group with most room per replica after the demand, among those that could ever hold it; None
        where none could. See Note [Room of a group]."""
        best: tuple[float, Members] | None = None
        for size, capacity in sorted(self._heaps):
            group = self._top((size, capacity)) if capacity >= demand else None
            if group is None:
                continue
            left = (self._groups[group].room - demand) / size
            if best is None or left > best[0]:
                best = left, group
        return best[1] if best else None

    def _push(self, group: Members) -> None:
        room = self._groups[group]
        self._versions += 1
        room.version = self._versions
        heap = self._heaps.setdefault(room.kind, [])
        heapq.heappush(heap, (-room.room, room.version, group))
        if len(heap) > 2 * len(self._groups) + 16:  # most entries are stale
            heap[:] = [entry for entry in heap if self._is_current(entry)]
            heapq.heapify(heap)

    def _is_current(self, entry: tuple[int, int, Members]) -> bool:
        room = self._groups.get(entry[2])
        return room is not None and room.version == entry[1]

    def _top(self, kind: tuple[int, int]) -> Members | None:
        """Returns the group of that kind with most room."""
        heap = self._heaps[kind]
        while heap and not self._is_current(heap[0]):
            heapq.heappop(heap)
        if not heap:
            del self._heaps[kind]
            return None
        return heap[0][2]
