"""Hands requests over from old groups to new ones, with their KV, one piece at a time (KunServe §4.2).

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

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ...allocator.errors import DriverError
from ...offload.policy.replicas.groups import Group
from .errors import ChecksumError
from .kv_exchange import Arrival, Arrivals, Piece, checksum, exported, moves, pieces
from .link import Link
from .requests import Request
from .span_cache import SpanCache
from .stage import Stage
from .stage_link import record_of, tensor_of


@dataclass(frozen=True, slots=True)
class Handed:
    """A request that is handed over. `held`: its tokens that have KV; `assignment`: see request_ledger.py."""

    request: Request
    held: int
    assignment: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The message of an old group's first stage, `leader`, to the replicas concerned."""

    leader: int
    old: Group
    requests: tuple[Handed, ...]


@dataclass(slots=True)
class _Incoming:
    handed: Handed
    arrivals: dict[int, Arrival]  # by member of its new group


class Handover:
    """One replica's part of a handover. Used by one thread. `sent`: bytes of KV sent to others."""

    def __init__(
        self,
        me: int,
        old: SpanCache | None,
        stage: Stage,
        home: Callable[[str], Group],
        links: Mapping[int, Link],
        leaders: frozenset[int],
        took: Callable[[Handed], object],
        damaged: Callable[[int, str], object],
        most: int,
    ) -> None:
        """`old`: the replica's old cache; `stage`: its new stage; `home`: returns the new group of a request;
        `leaders`: first stages of the old groups, which all send a HandedOver; `took`: called on the new first stage
        with each request before it goes on; `damaged`: called there with a member whose part of a request's KV was
        damaged, and the request, once all stages are told to free it; `most`: blocks of a piece."""
        self.sent = 0
        self._me = me
        self._old = old
        self._stage = stage
        self._home = home
        self._links = links
        self._awaited = set(leaders)  # old first stages whose HandedOver has not come
        self._took = took
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
                tensor = exported(self._old, piece)
                piece = replace(piece, check=checksum(tensor))
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
                except ChecksumError:
                    tensor = torch.empty(0)
                except (torch.OutOfMemoryError, DriverError):
                    tensor = torch.empty(0)
                    self._arrivals.lose(self._header[member].request, Arrival.ABSENT)
                if tensor is None:
                    break
                happened = True
                self._take(self._header.pop(member), tensor)
            while link.has("arrival") and (found := link.take("arrival")) is not None:
                name, came = record_of(found, tuple[str, str])
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
        done = [name for name, each in self._incoming.items() if len(each.arrivals) == self._stage.group.size]
        for name in done:
            incoming = self._incoming.pop(name)
            request = incoming.handed.request
            if {*incoming.arrivals.values()} == {Arrival.COMPLETE} and name not in self._cancelled:
                self._took(incoming.handed)
                leader.adopt(request, incoming.handed.held)
                continue
            leader.forget(name)
            damaged = [member for member, each in incoming.arrivals.items() if each is Arrival.DAMAGED]
            if name in self._cancelled:
                continue
            if damaged:
                self._damaged(damaged[0], name)
                continue
            self._took(incoming.handed)
            leader.requests.add(request)
        return bool(done)


def _spans(group: Group) -> dict[str, range]:
    return {str(member): span.layers for member, span in zip(group.members, group.spans, strict=True)}
