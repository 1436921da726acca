"""The requests that a replica leads, as the first stage of its group, and reports on them to the supervisor."""

from __future__ import annotations

from ...allocator.errors import BallonetError
from .channel import SupervisorChannel
from .handover import Handed
from .leader import Leader
from .messages import Start, Told
from .requests import Request


class LedRequests:
    """Keeps the assignment of each request (request_ledger.py), and those that came before their epoch began here."""

    def __init__(self, supervisor: SupervisorChannel) -> None:
        self._supervisor = supervisor
        self._assignments: dict[str, int] = {}
        self._early: list[Start] = []
        self._news: list[Told] = []

    def start(self, start: Start, epoch: int, leader: Leader | None) -> None:
        """Starts a request with the leader of this epoch; None: not there yet, so the request waits."""
        if start.epoch < epoch:
            return  # its group has ended: the supervisor assigns it to another
        if start.epoch > epoch or leader is None:
            self._early.append(start)
            return
        self._assignments[start.request.name] = start.assignment
        try:
            leader.requests.add(start.request)
        except BallonetError as error:
            self.add_report(start.request, error)

    def start_early(self, epoch: int, leader: Leader | None) -> None:
        """Starts all requests that waited for this epoch or its leader."""
        early, self._early = self._early, []
        for each in early:
            self.start(each, epoch, leader)

    def cancel(self, request: str) -> None:
        """Forgets a request whose client has gone away."""
        self._assignments.pop(request, None)
        self._early = [each for each in self._early if each.request.name != request]

    def release_assignment(self, request: str) -> int | None:
        """Forgets a request that is handed over, and returns its assignment; None: it was cancelled, or has ended."""
        return self._assignments.pop(request, None)

    def adopt(self, handed: Handed) -> None:
        """Takes a request from another group."""
        self._assignments[handed.request.name] = handed.assignment

    def add_report(self, request: Request, error: Exception | None) -> None:
        """Queues a report: the request's new token, or why it failed."""
        assignment = self._assignments.get(request.name)
        if assignment is None:
            return
        before = len(request.delivered) - (error is None)
        tokens = request.delivered[before:]
        said = None if error is None else f"{type(error).__name__}: {error}"
        self._news.append(Told(request.name, assignment, before, tokens, said))
        if error is not None or request.over:
            self._assignments.pop(request.name, None)

    def send_reports(self) -> None:
        """Sends the queued reports of all requests in one message. SupervisorLost."""
        news, self._news = self._news, []
        if news:
            self._supervisor.post(*news)

    def forget(self) -> None:
        """Forgets all requests, as the group has ended: the supervisor has them."""
        self._assignments.clear()
