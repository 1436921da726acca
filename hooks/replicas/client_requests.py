"""The requests of a supervisor's clients: taken on any thread, kept in the ledger; clients are notified of tokens.

Note [Never twice]
    Replicas may end at any moment, and a request that is computed anew repeats tokens that its client already has. Each
    report has the number of earlier tokens, so tokens beyond the delivered ones are new, and the rest is compared:
    sampling is keyed by (seed, position), so a token that differs is an error of the group, which ends that request.
    Reports of an assignment other than the latest are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from msgspec import structs

from ...offload.policy.replicas import protocol
from ...offload.policy.replicas.protocol import Event
from ..sampling.settings import ChosenToken
from .messages import Start, Told
from .microbatch_plan import Request
from .recording import Recording


@dataclass(slots=True)
class Entry:
    """One request. `came`: when it arrived; `first`: when it got its first token, None before that."""

    request: Request
    came: float
    first: float | None = None


class RepeatedOtherwise(RuntimeError):
    """A request that was computed anew has another token than the delivered one."""


class RequestLedger:
    """The requests that have not ended. Used by one thread. See Note [Never twice]."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def accept(self, request: Request, now: float) -> None:
        """Adds a request that arrives `now`. ValueError where one of this name has not ended."""
        if request.name in self._entries:
            raise ValueError(f"a request {request.name!r} has not ended yet: give each a name of its own")
        self._entries[request.name] = Entry(request, now)

    def assign(self, name: str) -> Entry:
        """Counts that a request is given to a group, to be computed after its delivered tokens. KeyError."""
        entry = self._entries[name]
        entry.request = structs.replace(entry.request, assignment=entry.request.assignment + 1)
        return entry

    def entry(self, name: str) -> Entry:
        """Returns the entry of a request. KeyError where it has ended."""
        return self._entries[name]

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries.values()))

    def deliver(
        self, name: str, assignment: int, before: int, tokens: tuple[ChosenToken, ...]
    ) -> tuple[ChosenToken, ...]:
        """Appends reported tokens, and returns those that are new to the client; none where the request has ended, or
        has a later assignment. `before`: tokens of the answer before these. RepeatedOtherwise; ValueError where tokens
        in between are missing."""
        entry = self._entries.get(name)
        if entry is None or entry.request.assignment != assignment:
            return ()
        had = entry.request.delivered
        if before > len(had):
            raise ValueError(f"request {name}: tokens {len(had)} to {before} of its answer never came")
        again = had[before : before + len(tokens)]
        if any(old.token != new.token for old, new in zip(again, tokens, strict=False)):
            raise RepeatedOtherwise(f"request {name} was computed again, with other tokens behind {before}")
        new = tokens[len(again) :]
        for token in new:
            entry.request = entry.request.with_token(token)
        return new

    def end(self, name: str) -> Entry | None:
        """Removes a request whose client has its answer, or has gone away, and returns its entry; None where it has
        ended before."""
        return self._entries.pop(name, None)


class ClientRequests:
    """The requests of clients. `submit`, `cancel`, `drop` and `waiting` are for any thread, all else for the
    supervisor's."""

    def __init__(
        self,
        clock: Callable[[], float],
        notify_client: Callable[[Request, str | None], object],
        notify_controller: Callable[[Event], object],
        recording: Recording | None,
    ) -> None:
        """`notify_client`: called with a request after each token, and with an error message when it failed;
        `notify_controller`: called with events for the controller."""
        self._clock = clock
        self._notify_client = notify_client
        self._notify_controller = notify_controller
        self._recording = recording
        self._ledger = RequestLedger()
        self._inbox: deque[Request | str] = deque()  # new requests, and names of those that are cancelled

    def __len__(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._ledger)

    # -- from clients

    def submit(self, request: Request) -> None:
        """Queues a new request."""
        self._inbox.append(request)

    def cancel(self, name: str) -> None:
        """Queues the end of a request whose client has gone away."""
        self._inbox.append(name)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their first token."""
        queued = sum(isinstance(asked, Request) for asked in tuple(self._inbox))
        return queued + sum(not entry.request.delivered for entry in self._ledger)

    @property
    def has_news(self) -> bool:
        """Whether there is anything to `take`."""
        return bool(self._inbox)

    def take(self) -> None:
        """Takes in the queued requests and cancellations."""
        while self._inbox:
            asked, now = self._inbox.popleft(), self._clock()
            if isinstance(asked, str):
                if self._finish(asked) is not None:
                    self._notify_controller(protocol.Left(now, asked))
                continue
            try:
                self._ledger.accept(asked, now)
            except ValueError as error:
                self._notify_client(asked, str(error))
                continue
            prompt, new = (len(asked.given) - 1, 1) if asked.scored else (len(asked.prompt), asked.new)
            self._notify_controller(protocol.Arrived(now, asked.name, prompt, new))

    # -- for and from replicas

    def assign(self, names: Iterable[str], epoch: int) -> list[Start]:
        """Assigns requests to a group, and returns the messages that start them, after their delivered tokens. Leaves
        out those that have ended."""
        starts = []
        for name in names:
            if name in self._ledger:
                entry = self._ledger.assign(name)
                request = structs.replace(entry.request, waited=self._clock() - entry.came)
                starts.append(Start(epoch, request))
        return starts

    def deliver(self, told: Told) -> None:
        """Takes in a replica's report of tokens, or of an error, and notifies the client."""
        if told.request not in self._ledger:
            return
        try:
            new = self._ledger.deliver(told.request, told.assignment, told.before, told.tokens)
        except (RepeatedOtherwise, ValueError) as error:
            self.fail(told.request, str(error))
            return
        entry = self._ledger.entry(told.request)
        if told.error is not None and entry.request.assignment == told.assignment:
            self.fail(told.request, told.error)
            return
        if not new:
            return
        request = entry.request
        entry.first = self._clock() if entry.first is None else entry.first
        if request.over:
            self._finish(request.name)
            self._notify_controller(protocol.Finished(self._clock(), request.name))
        self._notify_client(request, None)

    # -- their ends

    def fail(self, name: str, why: str) -> None:
        """Ends a request with an error; notifies the controller and the client."""
        request = self._finish(name)
        if request is not None:
            self._notify_controller(protocol.Left(self._clock(), name))
            self._notify_client(request, why)

    def refuse(self, name: str, why: str) -> None:
        """Ends a request that the controller has refused; notifies the client."""
        if (request := self._finish(name)) is not None:
            self._notify_client(request, why)

    def fail_all(self, why: str) -> None:
        """Ends all requests with an error; notifies the controller and the clients."""
        for entry in self._ledger:
            self.fail(entry.request.name, why)

    def end(self, why: str) -> None:
        """Notifies all clients, also of queued requests, that their requests end with an error."""
        for entry in self._ledger:
            self._notify_client(entry.request, why)
            self._finish(entry.request.name)
        self.drop(why)

    def drop(self, why: str) -> None:
        """Notifies the clients of queued requests, which will not be served."""
        with suppress(IndexError):  # another thread may do so, too
            while self._inbox:
                asked = self._inbox.popleft()
                if isinstance(asked, Request):
                    self._notify_client(asked, why)

    def _finish(self, name: str) -> Request | None:
        entry = self._ledger.end(name)
        if entry is None:
            return None
        self._record(entry)
        return entry.request

    def _record(self, entry: Entry) -> None:
        if self._recording is not None:
            self._recording.request(entry.request.name, entry.came, entry.first)
