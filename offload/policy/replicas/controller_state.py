"""The state that the parts of the controller share: cluster, requests, the epoch, and the actions of this event."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..tuning import Replicas as Tuning
from .actions import Action, Cancel, Dispatch, Hold, Recompute, Refuse
from .cluster import ActiveGroup, Cluster
from .demand import KVSize
from .dispatch import Members
from .events import Reason
from .groups import Group
from .request_book import RequestBook, RequestEntry


class ControllerState:
    """Groups and their requests, which change together: groups are formed and ended only here."""

    def __init__(self, pages: Sequence[int], kv: KVSize, tuning: Tuning, full: float = 0.0) -> None:
        """`full`: predicted seconds of a full batch, see Heartbeat."""
        self.cluster = Cluster(pages, kv, tuning, full)
        self.book = RequestBook()
        self.epoch = 0
        self.actions: list[Action] = []

    def next_epoch(self) -> int:
        """Returns a new epoch number, larger than all before."""
        self.epoch += 1
        return self.epoch

    def form(self, group: Group, epoch: int, at: float, exchanging: Iterable[int] = ()) -> None:
        """Puts a group in force. `exchanging`: members that have to exchange KV first."""
        self.cluster.place(ActiveGroup(group, epoch, at, {*exchanging}))
        self.book.add(group.members, self.cluster.tokens(group))
        self._open_or_close(group)

    def end(self, members: Members) -> tuple[RequestEntry, ...]:
        """Ends a group; its requests are held, and returned. KeyError."""
        self.cluster.displace(members)
        return self.book.remove(members)

    def refresh(self, member: int) -> None:
        """Opens or closes the group of a replica whose state has changed. Starts no held requests."""
        placement = self.cluster.placement(member)
        if placement is not None:
            self._open_or_close(placement.group)

    def start(self, requests: Iterable[RequestEntry]) -> None:
        """Starts held requests, new ones and those that are computed anew, in the groups with most room."""
        again: dict[Members, list[str]] = {}
        for request in requests:
            started = request.started
            group = self.book.choose(request)
            if group is None:
                self._hold_or_refuse(request)
                continue
            self.book.put(request, group)
            if started:
                again.setdefault(group, []).append(request.name)
            else:
                self.actions.append(Dispatch(request.name, self.cluster.groups[group].epoch, group))
        for group, names in again.items():
            self.actions.append(Recompute(tuple(names), self.cluster.groups[group].epoch, group))

    def start_held(self) -> None:
        """Starts all held requests that fit somewhere."""
        self.start(self.book.held)

    def refuse(self, request: RequestEntry, reason: Reason) -> None:
        """Ends a request with an error, and its computation where a group has it."""
        group = self.book.end(request.name)
        self.actions.append(Refuse(request.name, reason))
        if group is not None:
            self.actions.append(Cancel(request.name, self.cluster.groups[group].epoch, group))

    def _hold_or_refuse(self, request: RequestEntry) -> None:
        """Handles a request that fits no open group: refuses it if all groups are open, else holds it."""
        if self.book.all_open():
            self.refuse(request, Reason.TOO_LONG)
        elif not request.told:
            request.told = True
            self.actions.append(Hold(request.name))

    def _open_or_close(self, group: Group) -> None:
        if self.cluster.takes_requests(group):
            self.book.open(group.members)
        else:
            self.book.close(group.members)
