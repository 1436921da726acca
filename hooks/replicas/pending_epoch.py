"""An epoch that is prepared, or about to be taken up: its groups, its links, and what is heard over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from ...offload.policy.replicas import actions
from ...offload.policy.replicas.groups import Group
from .errors import LinkError
from .handover import Handed, HandedOver
from .led_requests import LedRequests
from .link import Link
from .messages import decoded, encoded
from .pending_send import LinkState
from .stage import Stage
from .stage_link import tensor_of, text_of


class PendingEpoch:
    """Used by one thread. `mine`: the group that this replica will be in; `pulls`: layers that come home before it is
    ready; `told`: the supervisor has been told that it is; `committed`: it will be taken up; `cancelled`: requests that
    were meanwhile, and may be on their way here."""

    def __init__(
        self, wanted: actions.Prepare, mine: Group, me: int, old: Group | None, links: dict[int, Link]
    ) -> None:
        """Tells all peers who leads the group that this replica is in now, which is `old`."""
        self.epoch = wanted.epoch
        self.mine = mine
        self.links = links
        self.pulls: Iterator[object] = iter(())
        self.told = False
        self.committed = False
        self.cancelled: set[str] = set()
        self.heard: list[HandedOver] = []
        self._me = me
        self._groups = wanted.groups
        self._homes: dict[str, int] = {}
        self._leaders = {me: me if old is None else old.members[0]}  # of the old groups, by member
        for link in links.values():
            with suppress(LinkError):  # a peer may have given the epoch up already: see `lost`
                link.send(tensor_of(str(self._leaders[me])), "old", urgent=True)

    @property
    def leaders(self) -> frozenset[int]:
        """First stages of the old groups of this replica and its peers, as far as they have said."""
        return frozenset(self._leaders.values())

    @property
    def lost(self) -> bool:
        """Is a link lost?"""
        return any(link.state is LinkState.LOST for link in self.links.values())

    @property
    def joined(self) -> bool:
        """Are all links open, and have all peers said who leads them?"""
        return all(link.state is LinkState.OPEN for link in self.links.values()) and len(self._leaders) > len(
            self.links
        )

    @property
    def released(self) -> bool:
        """Has the first stage of this replica's own old group told what goes over? Then the epoch can be taken up."""
        own = self._leaders[self._me]
        return any(each.leader == own for each in self.heard)

    def commit(self, homes: Iterable[tuple[str, int]]) -> None:
        """The epoch will be taken up. `homes`: of each request, a member of the group that it goes to."""
        self.committed = True
        self._homes = dict(homes)

    def home(self, request: str) -> Group:
        """The new group of a request."""
        member = self._homes.get(request)
        return self.mine if member is None else next(group for group in self._groups if member in group.members)

    def listen(self) -> None:
        """Takes in who leads the peers and, once it is committed, what the old groups hand over."""
        for member, link in self.links.items():
            if member not in self._leaders and link.has("old") and (found := link.take("old")) is not None:
                self._leaders[member] = int(text_of(found))
        if self.committed:
            self.heard += heard(self.links)

    def hand_over(self, stage: Stage, requests: LedRequests) -> None:
        """Tells all which requests the old group had, of which this replica is the first stage."""
        leader = stage.leader
        assert leader is not None
        handed = []
        for name in list(leader.requests.by_name):
            held = leader.requests.held(name)
            request = leader.requests.release(name)
            assignment = requests.give(name)
            if assignment is not None:
                handed.append(Handed(request, held, assignment))
        told = HandedOver(self._me, stage.group, tuple(handed))
        for link in self.links.values():
            link.send(tensor_of(encoded(told)), "handover", urgent=True)
        self.heard.append(told)


def heard(links: Mapping[int, Link]) -> Iterator[HandedOver]:
    """What old groups have handed over, as far as it has come. LinkError."""
    for link in links.values():
        while link.has("handover") and (found := link.take("handover")) is not None:
            told = decoded(text_of(found))
            assert isinstance(told, HandedOver)
            yield told
