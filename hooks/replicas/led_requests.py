"""Requests that a replica leads, as the first stage of its group, and what the supervisor hears of them."""

from __future__ import annotations

from ...allocator.errors import BallonetError
from .handover import Handed
from .leader import Leader
from .messages import Start, Told
from .replica_setup import SupervisorChannel
from .requests import Request


class LedRequests:
    """Remembers the assignment of each (ledger.py), and those that were given before their epoch has begun here."""

    def __init__(self, supervisor: SupervisorChannel) -> None:
        self._supervisor = supervisor
        self._assignments: dict[str, int] = {}
        self._early: list[Start] = []
        self._news: list[Told] = []

    def start(self, start: Start, epoch: int, leader: Leader | None) -> None:
        """Gives a request to the leader of this epoch; None: it is not there yet, so the request waits for it."""
        if start.epoch < epoch:
            return  # of a group that is no more: the supervisor gives it to another
        if start.epoch > epoch or leader is None:
            self._early.append(start)
            return
        self._assignments[start.request.name] = start.assignment
        try:
            leader.requests.add(start.request)
        except BallonetError as error:
            self.told(start.request, error)

    def start_early(self, epoch: int, leader: Leader | None) -> None:
        """The same with all that wait."""
        early, self._early = self._early, []
        for each in early:
            self.start(each, epoch, leader)

    def cancel(self, request: str) -> None:
        """Ends its part in a request whose client does not want it, whether it waits or runs."""
        self._assignments.pop(request, None)
        self._early = [each for each in self._early if each.request.name != request]

    def give(self, request: str) -> int | None:
        """Ends its part in a request, and returns the assignment; None: the supervisor waits for it no more."""
        return self._assignments.pop(request, None)

    def take(self, handed: Handed) -> None:
        """A request has come from another group."""
        self._assignments[handed.request.name] = handed.assignment

    def told(self, request: Request, error: Exception | None) -> None:
        """Notes for `tell` a new token, or why the request failed."""
        assignment = self._assignments.get(request.name)
        if assignment is None:
            return
        before = len(request.delivered) - (error is None)
        tokens = request.delivered[before:]
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._news.append(Told(request.name, assignment, before, tokens, said))
        if error is not None or request.over:
            self._assignments.pop(request.name, None)

    def tell(self) -> None:
        """Tells the supervisor what is new of all requests, at once. SupervisorLost."""
        news, self._news = self._news, []
        if news:
            self._supervisor.post(*news)

    def forget(self) -> None:
        """Ends its part in all: the group is no more, and the supervisor has the requests."""
        self._assignments.clear()
