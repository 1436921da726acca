"""Requests that have not ended, and the group that a new one goes to: that with most room left after the KV that the
request is predicted to need.

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
from collections.abc import Iterable
from dataclasses import dataclass, field

from .groups import Members


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


@dataclass(slots=True)
class RequestEntry:
    """A request. Tokens: of its `prompt`, and `new` that it is expected to generate. `group`: None if held; `number`:
    in the order of arrival; `lives`: times that it may still be computed anew; `started`: it was in a group, so the
    ledger may have tokens; `told`: a `Hold` was returned for it."""

    name: str
    prompt: int
    new: int
    number: int
    lives: int
    group: Members | None = None
    started: bool = False
    told: bool = False

    @property
    def demand(self) -> int:
        """Tokens of KV that the request is predicted to have at its end."""
        return self.prompt + max(1, self.new)


@dataclass(slots=True)
class _Place:
    capacity: int
    promised: int = 0
    requests: dict[str, RequestEntry] = field(default_factory=dict)


class RequestBook:
    """Requests by group, and which groups take new ones. Moving a request also moves the tokens promised to it."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestEntry] = {}
        self._places: dict[Members, _Place] = {}
        self._held: dict[str, RequestEntry] = {}  # in the order in which they are to start
        self._dispatcher = Dispatcher()
        self._arrived = 0

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    @property
    def held(self) -> tuple[RequestEntry, ...]:
        return tuple(self._held.values())

    def of(self, group: Members) -> tuple[RequestEntry, ...]:
        """Returns the requests of a group, in the order of their arrival. KeyError."""
        return tuple(sorted(self._places[group].requests.values(), key=lambda request: request.number))

    def arrive(self, name: str, prompt: int, new: int, lives: int) -> RequestEntry:
        """Adds a request, held at first, and returns it. ValueError: it is here already, or has no prompt."""
        if name in self._requests:
            raise ValueError(f"request {name!r} has arrived already and has not ended")
        if prompt < 1:
            raise ValueError(f"request {name!r} has a prompt of {prompt} tokens: it needs one")
        self._arrived += 1
        entry = self._requests[name] = self._held[name] = RequestEntry(name, prompt, new, self._arrived, lives)
        return entry

    def end(self, name: str) -> Members | None:
        """Removes a request. Returns the group that had it; None where it was held, or had ended before."""
        request = self._requests.pop(name, None)
        if request is None:
            return None
        group = request.group
        self._leave(request)
        return group

    def hold(self, request: RequestEntry) -> None:
        """Takes a request out of its group, and holds it."""
        self._leave(request)
        self._held[request.name] = request

    def put(self, request: RequestEntry, group: Members) -> None:
        """Puts the request into a group. KeyError."""
        self._leave(request)
        place = self._places[group]
        place.requests[request.name] = request
        place.promised += request.demand
        request.group, request.started, request.told = group, True, False
        if group in self._dispatcher:
            self._dispatcher.promise(group, request.demand)

    def choose(self, request: RequestEntry) -> Members | None:
        """Returns the group that the request should go to; None where no open group can hold it."""
        return self._dispatcher.choose(request.demand)

    def add(self, group: Members, capacity: int) -> None:
        """Adds a closed group with room for `capacity` tokens of KV."""
        self._places[group] = _Place(capacity)

    def open(self, group: Members) -> None:
        """Has a group take requests. KeyError."""
        place = self._places[group]
        if group not in self._dispatcher:
            self._dispatcher.add(group, place.capacity, place.promised)

    def close(self, group: Members) -> None:
        """Has a group take no requests until it is opened."""
        if group in self._dispatcher:
            self._dispatcher.remove(group)

    def remove(self, group: Members) -> tuple[RequestEntry, ...]:
        """Removes a group; its requests are held, and returned. KeyError."""
        entries = self.of(group)
        self.close(group)
        for entry in entries:
            self.hold(entry)
        del self._places[group]
        return entries

    def all_open(self) -> bool:
        """Returns whether there is a group, and all groups take requests."""
        return 0 < len(self._places) == len(self._dispatcher)

    def check(self, groups: Iterable[Members]) -> None:
        """Raises ValueError unless the book has these groups, each request is in one or held, and promises add up."""
        if {*groups} != {*self._places}:
            raise ValueError("the book has other groups than the controller")
        seen = [*self._held, *(name for place in self._places.values() for name in place.requests)]
        if sorted(seen) != sorted(self._requests):
            raise ValueError("a request is in two places, or in none")
        for group, place in self._places.items():
            promised = sum(request.demand for request in place.requests.values())
            if any(request.group != group for request in place.requests.values()) or place.promised != promised:
                raise ValueError(f"group {group} has promised {place.promised} tokens, its requests need {promised}")
            if group in self._dispatcher and self._dispatcher.room(group) != place.capacity - promised:
                raise ValueError(f"group {group} has {place.capacity - promised} tokens of room, not what is told")

    def _leave(self, request: RequestEntry) -> None:
        """Takes the request out of its group, or of those held."""
        self._held.pop(request.name, None)
        if request.group is None:
            return
        place = self._places[request.group]
        del place.requests[request.name]
        place.promised -= request.demand
        if request.group in self._dispatcher:
            self._dispatcher.release(request.group, request.demand)
        request.group = None
