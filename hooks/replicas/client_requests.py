"""Requests of a supervisor's clients: taken on any thread, kept in the ledger, and their clients told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from ...offload.policy.replicas import events
from ...offload.policy.replicas.events import Event
from .ledger import Ledger, RepeatedOtherwise
from .messages import Start, Told
from .recording import Recording
from .requests import Request


class ClientRequests:
    """`ask`, `cancel` and `drop` are called on any thread, all else on the supervisor's. `waiting`: names of requests
    that wait for their first token."""

    def __init__(
        self,
        clock: Callable[[], float],
        told: Callable[[Request, str | None], object],
        tell: Callable[[Event], object],
        recording: Recording | None,
    ) -> None:
        """`told`: is called with a request after each token, and with why it failed; `tell`: with what the controller
        has to hear of."""
        self.waiting: set[str] = set()
        self._clock = clock
        self._client_told = told
        self._tell = tell
        self._recording = recording
        self._ledger = Ledger()
        self._inbox: deque[Request | str] = deque()  # new requests, and names of those that are cancelled
        self._first: dict[str, float] = {}  # when requests got their first tokens

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._ledger)

    # -- of clients

    def ask(self, request: Request) -> None:
        """A new request."""
        self.waiting.add(request.name)
        self._inbox.append(request)

    def cancel(self, name: str) -> None:
        """The client of a request has gone away."""
        self._inbox.append(name)

    @property
    def has_news(self) -> bool:
        """Is there anything to `take`?"""
        return bool(self._inbox)

    def take(self) -> None:
        """Takes in what clients have asked for since."""
        while self._inbox:
            asked, now = self._inbox.popleft(), self._clock()
            if isinstance(asked, str):
                if self._finish(asked) is not None:
                    self._tell(events.Left(now, asked))
                continue
            try:
                self._ledger.accept(asked, now)
            except ValueError as error:
                self._client_told(asked, str(error))
                continue
            self._tell(events.Arrived(now, asked.name, len(asked.prompt), asked.new))

    # -- of replicas

    def given(self, names: Iterable[str], epoch: int) -> list[Start]:
        """What tells a group to compute these requests, from what was delivered on; those that have ended are left
        out."""
        found = []
        for name in names:
            if name in self._ledger:
                entry = self._ledger.assign(name)
                request = replace(entry.request, waited=self._clock() - entry.came)
                found.append(Start(epoch, request, entry.assignment))
        return found

    def deliver(self, told: Told) -> None:
        """A replica tells tokens of an answer, or why there are none."""
        if told.request not in self._ledger:
            return
        try:
            new = self._ledger.deliver(told.request, told.assignment, told.before, told.tokens)
        except (RepeatedOtherwise, ValueError) as error:
            self.fail(told.request, str(error))
            return
        entry = self._ledger.entry(told.request)
        if told.error is not None and entry.assignment == told.assignment:
            self.fail(told.request, told.error)
            return
        if not new:
            return
        self.waiting.discard(told.request)
        request = entry.request
        if self._recording is not None:
            self._first.setdefault(request.name, self._clock())
        if request.over:
            self._finish(request.name)
            self._tell(events.Finished(self._clock(), request.name))
        self._client_told(request, None)

    # -- their ends

    def fail(self, name: str, why: str) -> None:
        """A request ends; the controller does not know yet."""
        request = self._finish(name)
        if request is not None:
            self._tell(events.Left(self._clock(), name))
            self._client_told(request, why)

    def refuse(self, name: str, why: str) -> None:
        """The controller has ended a request."""
        if (request := self._finish(name)) is not None:
            self._client_told(request, why)

    def fail_all(self, why: str) -> None:
        """No request can be served any more."""
        for entry in self._ledger:
            self.fail(entry.request.name, why)

    def end(self, why: str) -> None:
        """Tells all clients, and those whose requests were not taken in yet: nothing is served any more."""
        for entry in self._ledger:
            self._client_told(entry.request, why)
            self._record(entry.request.name, entry.came)
        self.waiting.clear()
        self.drop(why)

    def drop(self, why: str) -> None:
        """Tells those whose requests were not taken in, and will not be."""
        with suppress(IndexError):  # another thread does so, too
            while self._inbox:
                asked = self._inbox.popleft()
                if isinstance(asked, Request):
                    self.waiting.discard(asked.name)
                    self._client_told(asked, why)

    def _finish(self, name: str) -> Request | None:
        self.waiting.discard(name)
        entry = self._ledger.end(name)
        if entry is None:
            return None
        self._record(name, entry.came)
        return entry.request

    def _record(self, name: str, came: float) -> None:
        if self._recording is not None:
            self._recording.request(name, came, self._first.pop(name, None))
