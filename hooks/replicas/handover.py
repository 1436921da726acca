"""From old groups to new ones, over links: requests go over with their KV, one piece at a time (KunServe §4.2).

Note [Who sends what]
    The first stage of an old group tells all replicas concerned which requests it had, and how many tokens of each have
    KV. From that and the spans each works out the same list: which layers of a request go from whom to whom. A replica
    sends what it has, takes in what comes, and tells the first stage of the request's new group once it has all layers
    of its span, or that some were damaged. When all stages have told, the request goes on there, or begins again with
    all of its tokens. New requests are served meanwhile, beside it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from transformers.generation.continuous_batching.requests import RequestState

from ...offload.policy.replicas.groups import Group
from .errors import ChecksumError
from .kv_exchange import Arrivals, Piece, checksum, exported, moves, pieces
from .link import Link
from .requests import Request
from .span_cache import SpanCache
from .stage import Stage
from .stage_link import tensor_of, text_of


@dataclass(frozen=True, slots=True)
class Handed:
    """A request that goes over. `held`: its tokens that have KV; `assignment`: see ledger.py."""

    request: Request
    held: int
    assignment: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What the first stage of an old group tells the replicas concerned."""

    leader: int
    old: Group
    requests: tuple[Handed, ...]


@dataclass(slots=True)
class _Coming:
    handed: Handed
    verdicts: dict[int, bool]  # by member of its new group: did all of its layers come?


class Handover:
    """One replica's part. Used by one thread. `sent`: bytes of KV that went to others."""

    def __init__(
        self,
        me: int,
        old: SpanCache | None,
        stage: Stage,
        home: Callable[[str], Group],
        links: Mapping[int, Link],
        leaders: frozenset[int],
        took: Callable[[Handed], object],
        most: int,
    ) -> None:
        """`old`: the cache that the replica had; `stage`: its new place; `home`: the new group of a request; `leaders`:
        first stages of the old groups, all of which tell; `took`: is called on the new first stage with each request
        before it goes on there; `most`: blocks of a piece."""
        self.sent = 0
        self._me = me
        self._old = old
        self._stage = stage
        self._home = home
        self._links = links
        self._silent = set(leaders)
        self._took = took
        self._most = most
        self._arrivals = Arrivals(stage.cache)
        self._outgoing: deque[tuple[Group, Handed]] = deque()
        self._sending: Iterator[bool] = iter(())
        self._sends = False
        self._mine: set[str] = set()  # requests whose layers come to this replica, and have not
        self._coming: dict[str, _Coming] = {}  # requests that will go on here, where this one leads
        self._early: dict[str, dict[int, bool]] = {}  # verdicts that came before their request was known
        self._header: dict[int, Piece] = {}  # of a piece whose bytes have not come
        self._cancelled: set[str] = set()

    @property
    def complete(self) -> bool:
        """Has this replica sent, and got, all that it has to?"""
        return not (self._silent or self._sends or self._mine or self._coming)

    def close(self) -> None:
        """Sends no more. What is being sent refers to this, and so to both caches, whose memory is needed at once."""
        self._sending = iter(())

    def cancel(self, request: str) -> None:
        """Ends a request that may not have gone over yet."""
        self._cancelled.add(request)

    def hear(self, told: HandedOver) -> None:
        """The first stage of an old group has told."""
        self._silent.discard(told.leader)
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
                none = dict.fromkeys(home.members, False) if not handed.held else {}
                self._coming[name] = _Coming(handed, none | self._early.pop(name, {}))

    def step(self) -> bool:
        """Takes in what has come, lets requests go on, and sends one piece. Did anything happen? LinkError."""
        happened = self._take_in()
        happened = self._go_on() or happened
        return self._send_one() or happened

    # -- sending

    def _send_one(self) -> bool:
        if next(self._sending, False):
            return True
        self._sends = bool(self._outgoing)
        if not self._outgoing:
            return False
        self._sending = self._sent(*self._outgoing.popleft())
        return self._send_one()

    def _sent(self, group: Group, handed: Handed) -> Iterator[bool]:
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
                    link.send(tensor_of(piece.to_json()), "kv header")
                    link.send(tensor, "kv")
                    self.sent += tensor.nbytes
                yield True
        self._old.give(name)

    # -- taking in

    def _take_in(self) -> bool:
        happened = False
        for member, link in self._links.items():
            while True:
                if member not in self._header:
                    header = link.take("kv header") if link.has("kv header") else None
                    if header is None:
                        break
                    self._header[member] = Piece.from_json(text_of(header))
                try:
                    tensor = link.take("kv")
                except ChecksumError:
                    tensor = torch.empty(0)
                if tensor is None:
                    break
                happened = True
                self._take(self._header.pop(member), tensor)
            while link.has("verdict") and (found := link.take("verdict")) is not None:
                name, came = json.loads(text_of(found))
                self._judge(name, member, came)
                happened = True
        return happened

    def _take(self, piece: Piece, tensor: torch.Tensor) -> None:
        complete = self._arrivals.take(piece, tensor)
        lost = piece.request in self._arrivals.lost
        if complete or lost:
            self._tell(piece.request, complete, piece.held)

    def _tell(self, name: str, complete: bool, held: int) -> None:
        if name not in self._mine:
            return  # it was told when the first piece was lost
        self._mine.discard(name)
        if complete and self._stage.follower is not None:
            state = RequestState(name, [])
            state.position_offset = held
            self._stage.follower.adopt(state)
        first = self._home(name).members[0]
        if first == self._me:
            self._judge(name, self._me, complete)
        else:
            self._links[first].send(tensor_of(json.dumps([name, complete])), "verdict", urgent=True)

    def _judge(self, name: str, member: int, came: bool) -> None:
        verdicts = self._coming[name].verdicts if name in self._coming else self._early.setdefault(name, {})
        verdicts[member] = came

    # -- going on

    def _go_on(self) -> bool:
        leader = self._stage.leader
        if leader is None:
            return False
        done = [name for name, each in self._coming.items() if len(each.verdicts) == self._stage.group.size]
        for name in done:
            coming = self._coming.pop(name)
            request = coming.handed.request
            if all(coming.verdicts.values()):
                self._took(coming.handed)
                leader.adopt(request, coming.handed.held)
                if name in self._cancelled:
                    leader.cancel(name)
                continue
            leader.forget(name)
            if name not in self._cancelled:
                self._took(coming.handed)
                leader.add(request)
        return bool(done)


def _spans(group: Group) -> dict[str, range]:
    return {str(member): span.layers for member, span in zip(group.members, group.spans, strict=True)}
