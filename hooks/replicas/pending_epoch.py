"""An epoch in preparation, or committed and not yet entered: its groups, its links, and the handovers received."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from ...offload.policy.replicas import actions
from ...offload.policy.replicas.groups import Group
from .errors import LinkError
from .handover import Handed, HandedOver
from .led_requests import LedRequests
from .link import Link, LinkState
from .stage import Stage
from .stage_link import record_of, tensor_of


class PendingEpoch:
    """The next epoch. Used by one thread. `mine`: the new group of this replica; `pulls`: restores layers that its new
    span needs; `reported`: `Prepared` was sent; `committed`: it will be entered; `cancelled`: requests that were
    cancelled in the meantime, and may be on their way here."""

    def __init__(
        self, wanted: actions.Prepare, mine: Group, me: int, old: Group | None, links: dict[int, Link]
    ) -> None:
        """Sends all peers the leader of this replica's present group, `old`. `links`: to the peers, being formed."""
        self.epoch = wanted.epoch
        self.mine = mine
        self.links = links
        self.pulls: Iterator[object] = iter(())
        self.reported = False
        self.committed = False
        self.cancelled: set[str] = set()
        self.handed_over: list[HandedOver] = []
        self._me = me
        self._groups = wanted.groups
        self._homes: dict[str, int] = {}
        self._leaders = {me: me if old is None else old.members[0]}  # of the old groups, by member
        for link in links.values():
            with suppress(LinkError):  # a peer may have given the epoch up already: see `has_lost_link`
                link.send(tensor_of(self._leaders[me]), "old", urgent=True)

    @property
    def leaders(self) -> frozenset[int]:
        """First stages of the old groups of this replica and its peers, as far as received."""
        return frozenset(self._leaders.values())

    @property
    def has_lost_link(self) -> bool:
        """Whether a link is lost."""
        return any(link.state is LinkState.LOST for link in self.links.values())

    @property
    def is_connected(self) -> bool:
        """Whether all links are open, and all peers have sent their leader."""
        return all(link.state is LinkState.OPEN for link in self.links.values()) and len(self._leaders) > len(
            self.links
        )

    @property
    def can_enter(self) -> bool:
        """Whether the first stage of this replica's old group has sent its HandedOver, so the epoch can be entered."""
        own = self._leaders[self._me]
        return any(each.leader == own for each in self.handed_over)

    def commit(self, homes: Iterable[tuple[str, int]]) -> None:
        """Notes that the epoch is committed. `homes`: for each request, a member of its new group."""
        self.committed = True
        self._homes = dict(homes)

    def new_group_of(self, request: str) -> Group:
        """Returns the new group of a request."""
        member = self._homes.get(request)
        return self.mine if member is None else next(group for group in self._groups if member in group.members)

    def poll(self) -> None:
        """Receives the leaders of the peers and, once the epoch is committed, the handovers of the old groups."""
        for member, link in self.links.items():
            if member not in self._leaders and link.has("old") and (found := link.take("old")) is not None:
                self._leaders[member] = record_of(found, int)
        if self.committed:
            self.handed_over += receive_handovers(self.links)

    def hand_over_requests(self, stage: Stage, requests: LedRequests) -> None:
        """Sends all peers the requests of the old group, of which this replica is the first stage."""
        leader = stage.leader
        assert leader is not None
        handed = []
        for name in list(leader.requests.by_name):
            held = leader.requests.held(name)
            request = leader.requests.release(name)
            assignment = requests.release_assignment(name)
            if assignment is not None:
                handed.append(Handed(request, held, assignment))
        told = HandedOver(self._me, stage.group, tuple(handed))
        for link in self.links.values():
            link.send(tensor_of(told), "handover", urgent=True)
        self.handed_over.append(told)


def receive_handovers(links: Mapping[int, Link]) -> Iterator[HandedOver]:
    """Yields the handovers that have come over these links. LinkError."""
    for link in links.values():
        while link.has("handover") and (found := link.take("handover")) is not None:
            yield record_of(found, HandedOver)
