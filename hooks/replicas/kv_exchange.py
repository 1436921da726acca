"""Hands running requests over from old groups to new ones, with their KV, one piece at a time (KunServe §4.2).

Note [Pieces]
    The KV of a request in a layer is a row of blocks. A piece is some whole blocks of one layer, sent in one transfer,
    so an activation waits for at most one piece. Blocks have other numbers on each replica; a piece names them by their
    index in the request's row, which is the same everywhere, also where the row is the ring of a sliding window. A
    request goes on once every layer of its new spans has all of its blocks. New requests are served meanwhile, in the
    new caches.

Note [What is wrong is computed again]
    A piece with a wrong checksum, or without memory, costs the request only time: its tokens are known, so it is
    computed anew on all stages. Without memory the group's first stage decides that alone. Damage is reported to the
    supervisor, which has the request computed anew, or ends it after too many attempts.

Note [Transfers]
    The first stage of an old group tells all replicas concerned its requests, and how many tokens of each have KV. From
    that and the spans each replica derives the same list of transfers: layers, source and target. A replica sends its
    layers, receives others, and reports to the first stage of the request's new group that all layers of its span have
    come, or that they do not. When all stages have reported, the request goes on there, or is computed anew from all of
    its tokens; a damaged one waits for the supervisor. New requests are served meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ...allocator.errors import DriverError
from ...offload.policy.replicas.groups import Group
from .link import Link
from .microbatch_plan import Request, record_of, tensor_of
from .replica_model import SpanCache
from .stage import Stage


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks [first, first + count) of a request's KV in one layer. `held`: tokens of the request that have KV;
    `check`: checksum of the bytes."""

    request: str
    held: int
    layer: int
    first: int
    count: int
    check: int = 0


def moves(old: Mapping[str, range], new: Mapping[str, range]) -> list[tuple[str, str, range]]:
    """Returns (source, target, layers) so that each target gets all its `new` layers. `old`, `new`: layers by replica.
    Layers that a target already has stay there (source and target are the same); others come from the first source."""
    transfers = []
    for target, wanted in new.items():
        stays = _common(old.get(target, range(0)), wanted)
        if stays:
            transfers.append((target, target, stays))
        missing = [layer for layer in wanted if layer not in stays]
        for source, has in old.items():
            if source == target or not (layers := [layer for layer in missing if layer in has]):
                continue
            missing = [layer for layer in missing if layer not in has]
            transfers += [(source, target, run) for run in _consecutive(layers)]
        assert not missing, f"no replica has layers {missing}"
    return transfers


def pieces(cache: SpanCache, request: str, held: int, layers: range, most: int) -> Iterator[Piece]:
    """Yields the pieces of a request in these layers of a cache, of at most `most` blocks each."""
    for layer in layers:
        blocks = cache.count_blocks(request, layer)
        for first in range(0, blocks, most):
            yield Piece(request, held, layer, first, min(most, blocks - first))


class Arrival(Enum):
    """How the transfer of a request's KV to one replica ended."""

    COMPLETE = "all of it came"
    ABSENT = "there was none, or no memory for it"
    DAMAGED = "a checksum was wrong"


class Arrivals:
    """KV that arrives for one replica's new cache. `lost`: requests that have to be computed anew, and why."""

    def __init__(self, cache: SpanCache) -> None:
        self.lost: dict[str, Arrival] = {}
        self._cache = cache
        self._missing: dict[str, dict[int, set[int]]] = {}  # by request and layer: blocks that have not come

    def take(self, piece: Piece, tensor: torch.Tensor) -> bool:
        """Copies a piece into the request's blocks, which are allocated with its first piece. Returns whether the
        request is now complete, in all layers of the span."""
        name = piece.request
        if name in self.lost:
            return False
        if self._cache.checksum(tensor) != piece.check:
            self.lose(name, Arrival.DAMAGED)
            return False
        if not self._allocate(name, piece.held):
            self.lose(name, Arrival.ABSENT)
            return False
        self._cache.write_blocks(name, piece.layer, piece.first, piece.count, tensor)
        missing = self._missing[name]
        missing[piece.layer] -= set(range(piece.first, piece.first + piece.count))
        if any(missing.values()):
            return False
        del self._missing[name]
        return True

    def lose(self, request: str, why: Arrival) -> None:
        """Frees the pieces of a request that have come; later ones are dropped."""
        self.lost.setdefault(request, why)
        self._missing.pop(request, None)
        self._cache.give(request)

    def _allocate(self, name: str, held: int) -> bool:
        if name not in self._missing:
            if not self._cache.store(RequestState(name, []), held):
                return False
            cache = self._cache
            self._missing[name] = {layer: set(range(cache.count_blocks(name, layer))) for layer in cache.layers}
        return True


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), max(one.start, other.start, min(one.stop, other.stop)))


def _consecutive(layers: list[int]) -> list[range]:
    runs: list[range] = []
    for layer in layers:
        if runs and runs[-1].stop == layer:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return runs


@dataclass(frozen=True, slots=True)
class Handed:
    """A request that is handed over. `held`: its tokens that have KV."""

    request: Request
    held: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The message of an old group's first stage, `leader`, to the replicas concerned."""

    leader: int
    old: Group
    requests: tuple[Handed, ...]


@dataclass(frozen=True, slots=True)
class Regrouping:
    """Who hands requests over to whom. `me`: the number of this replica; `home`: returns the new group of a request;
    `links`: to the members of its old and new group; `leaders`: first stages of the old groups, which all send a
    HandedOver."""

    me: int
    home: Callable[[str], Group]
    links: Mapping[int, Link]
    leaders: frozenset[int]


@dataclass(slots=True)
class _Incoming:
    handed: Handed
    arrivals: dict[int, Arrival]  # by member of its new group


class Handover:
    """One replica's part of a handover. Used by one thread. `sent`: bytes of KV sent to others."""

    def __init__(
        self,
        regrouping: Regrouping,
        old: SpanCache | None,
        stage: Stage,
        damaged: Callable[[int, str], object],
        most: int,
    ) -> None:
        """`old`: the replica's old cache; `stage`: its new stage; `damaged`: called on the new first stage with a
        member whose part of a request's KV was damaged, and the request, once all stages are told to free it; `most`:
        blocks of a piece."""
        self.sent = 0
        self._me = regrouping.me
        self._old = old
        self._stage = stage
        self._home = regrouping.home
        self._links = regrouping.links
        self._awaited = set(regrouping.leaders)  # old first stages whose HandedOver has not come
        self._damaged = damaged
        self._most = most
        self._arrivals = Arrivals(stage.cache)
        self._outgoing: deque[tuple[Group, Handed]] = deque()
        self._sending: Iterator[bool] = iter(())
        self._sends = False
        self._mine: set[str] = set()  # requests whose KV for this replica is not complete
        self._incoming: dict[str, _Incoming] = {}  # requests that will go on here, if this replica leads
        self._early: dict[str, dict[int, Arrival]] = {}  # reports of members that came before the request was known
        self._header: dict[int, Piece] = {}  # by member: header of a piece whose bytes have not come
        self._cancelled: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether this replica has sent and received everything."""
        return not (self._awaited or self._sends or self._mine or self._incoming)

    def close(self) -> None:
        """Stops sending: the generator refers to this object, and so to both caches, whose memory is needed at once."""
        self._sending = iter(())

    def cancel(self, request: str) -> None:
        """Ends a request that may still be on its way."""
        self._cancelled.add(request)

    def take_in(self, told: HandedOver) -> None:
        """Takes in the message of an old group's first stage."""
        self._awaited.discard(told.leader)
        for handed in told.requests:
            name, home = handed.request.name, self._home(handed.request.name)
            if handed.held and self._me in told.old.members:
                self._outgoing.append((told.old, handed))
                self._sends = True
            if self._me not in home.members:
                continue
            if handed.held:
                self._mine.add(name)
            if self._me == home.members[0]:
                none = dict.fromkeys(home.members, Arrival.ABSENT) if not handed.held else {}
                self._incoming[name] = _Incoming(handed, none | self._early.pop(name, {}))

    def step(self) -> bool:
        """Receives pieces and reports, resumes complete requests, and sends one piece. Returns whether it did anything.
        LinkError."""
        happened = self._receive()
        happened = self._resume() or happened
        return self._send_one() or happened

    # -- sending

    def _send_one(self) -> bool:
        if next(self._sending, False):
            return True
        self._sends = bool(self._outgoing)
        if not self._outgoing:
            return False
        self._sending = self._send(*self._outgoing.popleft())
        return self._send_one()

    def _send(self, group: Group, handed: Handed) -> Iterator[bool]:
        assert self._old is not None
        name = handed.request.name
        for source, target, layers in moves(_spans(group), _spans(self._home(name))):
            if source != str(self._me):
                continue
            for piece in pieces(self._old, name, handed.held, layers, self._most):
                tensor = self._old.read_blocks(name, piece.layer, piece.first, piece.count)
                piece = replace(piece, check=self._old.checksum(tensor))
                if target == source:
                    self._take(piece, tensor)
                else:
                    link = self._links[int(target)]
                    link.send(tensor_of(piece), "kv header")
                    link.send(tensor, "kv")
                    self.sent += tensor.nbytes
                yield True
        self._old.give(name)

    # -- receiving

    def _receive(self) -> bool:
        happened = False
        for member, link in self._links.items():
            while True:
                if member not in self._header:
                    header = link.take("kv header") if link.has("kv header") else None
                    if header is None:
                        break
                    self._header[member] = record_of(header, Piece)
                try:
                    tensor = link.take("kv")
                except (torch.OutOfMemoryError, DriverError):
                    tensor = torch.empty(0)
                    self._arrivals.lose(self._header[member].request, Arrival.ABSENT)
                if tensor is None:
                    break
                happened = True
                self._take(self._header.pop(member), tensor)
            while link.has("arrival") and (report := link.take("arrival")) is not None:
                name, came = record_of(report, tuple[str, str])
                self._add_report(name, member, Arrival(came))
                happened = True
        return happened

    def _take(self, piece: Piece, tensor: torch.Tensor) -> None:
        complete = self._arrivals.take(piece, tensor)
        arrival = Arrival.COMPLETE if complete else self._arrivals.lost.get(piece.request)
        if arrival is not None:
            self._report(piece.request, arrival, piece.held)

    def _report(self, name: str, arrival: Arrival, held: int) -> None:
        if name not in self._mine:
            return  # reported when the first piece was lost
        self._mine.discard(name)
        if arrival is Arrival.COMPLETE and self._stage.follower is not None:
            state = RequestState(name, [])
            state.position_offset = held
            self._stage.follower.adopt(state)
        first = self._home(name).members[0]
        if first == self._me:
            self._add_report(name, self._me, arrival)
        else:
            self._links[first].send(tensor_of((name, arrival.value)), "arrival", urgent=True)

    def _add_report(self, name: str, member: int, arrival: Arrival) -> None:
        arrivals = self._incoming[name].arrivals if name in self._incoming else self._early.setdefault(name, {})
        arrivals[member] = arrival

    # -- resuming

    def _resume(self) -> bool:
        leader = self._stage.leader
        if leader is None:
            return False
        done = [name for name, coming in self._incoming.items() if len(coming.arrivals) == self._stage.group.size]
        for name in done:
            incoming = self._incoming.pop(name)
            request = incoming.handed.request
            if {*incoming.arrivals.values()} == {Arrival.COMPLETE} and name not in self._cancelled:
                leader.adopt(request, incoming.handed.held)
                continue
            leader.forget(name)
            damaged = [member for member, arrival in incoming.arrivals.items() if arrival is Arrival.DAMAGED]
            if name in self._cancelled:
                continue
            if damaged:
                self._damaged(damaged[0], name)
                continue
            leader.requests.add(request)
        return bool(done)


def _spans(group: Group) -> dict[str, range]:
    return {str(member): span.layers for member, span in zip(group.members, group.spans, strict=True)}
