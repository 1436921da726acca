"""The supervisor: it has no weights, hears replicas and clients, asks the controller, and has done what that decides.

Note [One supervisor]
    Its thread alone touches the ledger and the controller. Clients' threads leave requests in a queue. If its process
    ends, so do the replicas, and the requests: there is no election. A controller decision is O(log N) for a request
    and O(N log N) for a drop; what a replica says in a second is some hundred bytes, and its tokens.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from ...offload.policy.replicas import actions, events
from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.replicas.controller import Controller
from ...offload.policy.replicas.decisions import Note, decide
from ...offload.policy.replicas.events import Event
from ...offload.policy.replicas.replacing import Replacements
from ...offload.policy.tuning import DEFAULT, Replicas
from .bell import Bell
from .ledger import Ledger, RepeatedOtherwise
from .messages import Counted, End, Hello, Message, Record, Seen, Start, Told
from .recording import Recording
from .requests import Request


class Hears(Protocol):
    """The replicas, as the supervisor hears and tells them."""

    def take(self) -> tuple[int, Message] | None:
        """What one says next, with its number."""

    def has(self) -> bool:
        """Is anything here?"""

    def post(self, member: int, message: Message) -> None:
        """Tells one something."""


class Processes(Protocol):
    """The processes of replicas that this machine runs, one of each rank."""

    def start(self, rank: int, cost: ChunkCost | None) -> None:
        """Starts the replica of a rank. `cost`: what chunks take there; None: it measures that. OSError."""

    def ended(self) -> list[tuple[int, str]]:
        """The ranks of those that have ended since the last call, and how."""

    def end(self, rank: int) -> None:
        """Ends the one of a rank at once. Nothing where there is none."""


@dataclass(frozen=True, slots=True)
class State:
    """What is to be seen of it. `spans`: (begin, end) of each replica's layers; `moved`: bytes of KV and of layers that
    went between replicas; `drops`, `restores`: committed so far; `declined`: why replicas did not drop, and how often;
    `held`: requests that no group takes now; `replaced`: replicas that were started instead of lost ones; `layers`:
    that each replica has on its device; `busy`, `open`: seconds of the stages of pipelines; `errors` of predictions,
    by replica (stage_times.py)."""

    epoch: int
    spans: Mapping[int, tuple[int, int]]
    groups: tuple[tuple[int, ...], ...]
    drops: int
    restores: int
    discarded: int
    fenced: int
    moved: tuple[int, int]
    requests: int
    held: int
    recomputed: int
    replaced: int
    declined: Mapping[str, int]
    layers: Mapping[int, int]
    busy: float
    open: float
    errors: Mapping[int, float]

    @property
    def bubble(self) -> float:
        """Part of the time of all stages of pipelines in which they waited while there was work; 0 without any."""
        return max(0.0, 1 - self.busy / self.open) if self.open else 0.0


class Supervisor:
    """Call `start` and, at the end, `close`."""

    def __init__(
        self,
        make: Callable[[Hello], Controller],
        replicas: Hears,
        processes: Processes,
        bell: Bell,
        clock: Callable[[], float],
        told: Callable[[Request, str | None], object],
        say: Callable[[str], object],
        ranks: int = 0,
        cost: ChunkCost | None = None,
        tuning: Replicas = DEFAULT.replicas,
        note: Note = lambda entry: None,
        recording: Recording | None = None,
    ) -> None:
        """`make`: makes the controller, for the first replica that has joined; `told`: is called, on the supervisor's
        thread, with a request after each token, and with why it failed; `say`: with lines for people. `ranks`: so many
        replicas it starts, and replaces when they are lost; `cost`: what chunks take; None: the first measure that.
        `note`: is called with each decision of the controller; `recording`: keeps what happens."""
        self.ready = threading.Event()  # a replica serves
        self._make = make
        self._controller: Controller | None = None
        self._replicas = replicas
        self._processes = processes
        self._bell = bell
        self._clock = clock
        self._client_told = told
        self._say = say
        self._tuning = tuning
        self._note = note
        self._ledger = Ledger()
        self._inbox: deque[Request | str] = deque()  # new requests, and names of those that are cancelled
        self._waiting: set[str] = set()
        self._kinds: dict[int, bool] = {}  # epochs that are prepared: does one drop?
        self._hello: Hello | None = None
        self._cost = cost
        self._ranks = range(ranks)
        self._replacements = Replacements(ranks, tuning)
        self._at: dict[int, int] = {}  # members, by their ranks
        self._members_of: set[int] = set()  # of the epoch that is prepared
        self._counts: Counter[str] = Counter()
        self._declined: Counter[str] = Counter()
        self._counted: dict[int, Counted] = {}
        self._recording = recording
        self._first: dict[str, float] = {}  # when requests got their first tokens
        self._ticked = -float("inf")
        self._ending = False
        self._failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="ballonet supervisor", daemon=True)

    def start(self) -> None:
        """Begins. OSError where a process cannot be started."""
        for rank in self._ranks:
            self._processes.start(rank, self._cost)
        self._thread.start()

    def close(self) -> None:
        """Tells all clients and replicas, and ends."""
        self.tell()
        if self._thread.is_alive():
            self._thread.join()
        elif self._thread.ident is None:
            self._end()  # it never began

    def collect(self) -> None:
        """Takes in what replicas noted before they ended. After `close`, once they have."""
        while (found := self._replicas.take()) is not None:
            if self._recording is not None and isinstance(found[1], Seen):
                self._recording.seen(found[0], found[1])

    # -- for clients, on any thread

    def ask(self, request: Request) -> str | None:
        """Takes a request; says why where it does not."""
        if self._ending or self._failed is not None:
            return self._failed or "the server shuts down"
        if not request.prompt:
            return "the prompt has no tokens"
        self._waiting.add(request.name)
        self._inbox.append(request)
        self._bell.ring()
        return None

    def cancel(self, name: str) -> None:
        """The client of a request has gone away."""
        self._inbox.append(name)
        self._bell.ring()

    def tell(self) -> None:
        """Ends all requests, without waiting; their clients are told."""
        self._ending = True
        self._bell.ring()

    @property
    def failed(self) -> str | None:
        """Why nothing can be served any more; None while something can."""
        return self._failed

    @property
    def waiting(self) -> int:
        """Requests that wait for their first token."""
        return len(self._waiting)

    def state(self) -> State:
        """What is to be seen of it now."""
        controller = self._controller
        groups = [] if controller is None else [each.group for each in tuple(controller.cluster.groups.values())]
        spans = {
            member: (span.begin, span.end)
            for group in groups
            for member, span in zip(group.members, group.spans, strict=True)
        }
        counted = dict(self._counted)
        return State(
            epoch=0 if controller is None else controller.epoch,
            spans=spans,
            groups=tuple(sorted(group.members for group in groups)),
            drops=self._counts["drop"],
            restores=self._counts["restore"],
            discarded=self._counts["discard"],
            fenced=self._counts["fence"],
            moved=(sum(each.kv_bytes for each in counted.values()), sum(each.layer_bytes for each in counted.values())),
            requests=len(self._ledger),
            held=0 if controller is None else len(controller.book.held),
            recomputed=self._counts["recompute"],
            replaced=self._counts["replace"],
            declined=dict(self._declined),
            layers={member: each.layers for member, each in counted.items() if member in spans},
            busy=sum(each.busy for each in counted.values()),
            open=sum(each.open for each in counted.values()),
            errors={
                member: each.error for member, each in counted.items() if member in spans and each.error is not None
            },
        )

    # -- its thread

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
                self._bell.wait(lambda: self._has_news() or None, self._tuning.period)
        except Exception as error:
            self._failed = f"the supervisor has failed: {type(error).__name__}: {error}"
            self._say(self._failed)
            raise
        finally:
            self._end()

    def _has_news(self) -> bool:
        return self._ending or bool(self._inbox) or self._replicas.has()

    def _turn(self) -> None:
        for rank, how in self._processes.ended():
            self._gone(rank, how)
        self._replace()
        while (found := self._replicas.take()) is not None:
            self._hear(*found)
        if self._controller is None:
            return
        while self._inbox:
            self._client(self._inbox.popleft())
        now = self._clock()
        if now - self._ticked >= self._tuning.period:
            self._ticked = now
            self._on(events.Tick(now))
        self._look_for_replicas()

    def _join(self, member: int, hello: Hello) -> None:
        """A replica is there, with all layers."""
        first = self._hello = self._hello or hello
        if (hello.layers, hello.token, hello.page) != (first.layers, first.token, first.page):
            self._say(f"replica {member} is ended: its layers, KV or pages have other sizes than those of the others")
            self._replicas.post(member, End())
            return
        if hello.rank is not None and not self._replacements.joined(hello.rank, self._clock()):
            self._say(f"replica {member} is ended: no process of rank {hello.rank} runs that could have joined")
            self._replicas.post(member, End())
            return
        if self._controller is None:
            self._controller = self._make(hello)
        if hello.rank is not None:
            self._cost = self._cost or hello.cost
            self._at[hello.rank] = member
        self._failed = None
        self._say(f"replica {member} has joined, process {hello.process}")
        if self._recording is not None:
            self._replicas.post(member, Record())
        self._on(events.Joined(self._clock(), member, hello.pages))

    def _gone(self, rank: int, how: str) -> None:
        """The process of a rank has ended."""
        now = self._clock()
        member = self._at.pop(rank, None)
        who = "a replica that had not joined yet" if member is None else f"replica {member}"
        wait = self._replacements.ended(rank, now)
        then = "" if wait is None else "; another one is started" + (f" in {wait:.1f} s" if wait else "")
        self._say(f"{who} has ended: {how}{then}")
        if member is not None:
            self._on(events.Lost(now, member))
        elif self._controller is None and not self._replacements.expected:
            self._failed = f"no replica has joined, and none is left: {how}"
            self.ready.set()

    def _replace(self) -> None:
        """Starts replicas where others were lost."""
        for rank in self._replacements.due(self._clock()):
            self._counts["replace"] += 1
            try:
                self._processes.start(rank, self._cost)
            except OSError as error:
                self._gone(rank, f"it could not be started: {error}")

    def _look_for_replicas(self) -> None:
        """Nothing can be served any more once no replica is left, nor expected."""
        assert self._controller is not None
        if self._failed is None and not self._controller.cluster.replicas and not self._replacements.expected:
            self._failed = "no replica is left, and no other one is started instead: see why they ended"
            self._say(self._failed)
            for entry in self._ledger:
                self._fail(entry.request.name, self._failed)

    def _client(self, asked: Request | str) -> None:
        now = self._clock()
        if isinstance(asked, Request):
            try:
                self._ledger.accept(asked, now)
            except ValueError as error:
                self._client_told(asked, str(error))
                return
            self._on(events.Arrived(now, asked.name, len(asked.prompt), asked.new))
        elif self._finish(asked) is not None:
            self._on(events.Left(now, asked))

    def _hear(self, member: int, message: Message) -> None:
        match message:
            case Hello():
                self._join(member, message)
            case Told():
                self._take_tokens(message)
            case Seen() if self._recording is not None:
                self._recording.seen(member, message)
            case Counted():
                self._take_counts(member, message)
            case Event() if self._controller is not None:
                self._on(replace(message, at=self._clock()))

    def _take_counts(self, member: int, counted: Counted) -> None:
        before = self._counted.get(member)
        self._counted[member] = counted
        if before is not None and counted.layers > before.layers and self._hello is not None:
            self._say(f"replica {member} has {counted.layers} of {len(self._hello.layers)} layers again")

    def _take_tokens(self, told: Told) -> None:
        if told.request not in self._ledger:
            return
        try:
            new = self._ledger.deliver(told.request, told.assignment, told.before, told.tokens)
        except (RepeatedOtherwise, ValueError) as error:
            self._fail(told.request, str(error))
            return
        entry = self._ledger.entry(told.request)
        if told.error is not None and entry.assignment == told.assignment:
            self._fail(told.request, told.error)
            return
        if not new:
            return
        self._waiting.discard(told.request)
        request = entry.request
        if self._recording is not None:
            self._first.setdefault(request.name, self._clock())
        if request.over:
            self._finish(request.name)
            self._on(events.Finished(self._clock(), request.name))
        self._client_told(request, None)

    def _fail(self, name: str, why: str) -> None:
        entry = self._finish(name)
        if entry is not None:
            self._on(events.Left(self._clock(), name))
            self._client_told(entry, why)

    def _finish(self, name: str) -> Request | None:
        self._waiting.discard(name)
        entry = self._ledger.end(name)
        if entry is not None and self._recording is not None:
            self._recording.request(name, entry.came, self._first.pop(name, None))
        return None if entry is None else entry.request

    # -- the controller

    def _on(self, event: Event) -> None:
        assert self._controller is not None
        for action in decide(self._controller, event, self._note):
            self._do(action)

    def _do(self, action: actions.Action) -> None:
        match action:
            case actions.Dispatch():
                self._give((action.request,), action.epoch, action.members)
            case actions.Recompute():
                self._counts["recompute"] += len(action.requests)
                self._give(action.requests, action.epoch, action.members)
            case actions.Refuse():
                if (request := self._finish(action.request)) is not None:
                    self._client_told(request, f"no replicas can compute it: {action.reason.value}")
            case actions.Cancel():
                self._replicas.post(action.members[0], action)
            case actions.Prepare():
                self._kinds[action.epoch] = any(group.is_dropped for group in action.groups)
                self._members_of = {member for group in action.groups for member in group.members}
                self._to(self._members_of, action)
            case actions.Commit():
                self._committed(action)
            case actions.Discard():
                self._counts["discard"] += 1
                self._mark(f"epoch {action.epoch} is given up")
                self._say(f"epoch {action.epoch} is given up: {action.reason.value}")
                self._to(self._members_of, action)
            case actions.Alone():
                self._replicas.post(action.member, action)
                self.ready.set()
            case actions.StartRestore():
                comes = Counter(each.member for each in action.pulls)
                parts = ", ".join(f"{count} to replica {member}" for member, count in sorted(comes.items()))
                self._say(f"epoch {action.epoch}: layers come home: {parts}")
                self._to({each.member for each in action.pulls}, action)
            case actions.Fence():
                self._counts["fence"] += 1
                self._mark(f"replica {action.member} is ended")
                self._say(f"replica {action.member} is ended: {action.reason.value}")
                self._replicas.post(action.member, End())
                for rank, member in self._at.items():
                    if member == action.member:
                        self._processes.end(rank)
            case actions.Decline():
                self._declined[action.reason.value] += 1
            case actions.Rejoin():
                self._replicas.post(action.member, End())  # another process joins
            case actions.Hold():
                pass  # what is held waits in the controller

    def _committed(self, action: actions.Commit) -> None:
        drops = self._kinds.pop(action.epoch, True)
        self._counts["drop" if drops else "restore"] += 1
        self._mark(f"epoch {action.epoch}: {'drop' if drops else 'restore'}")
        assert self._controller is not None
        groups = [each.group for each in self._controller.cluster.groups.values() if each.epoch == action.epoch]
        for group in groups:
            parts = ", ".join(
                f"replica {member} holds layers {span.begin} to {span.end - 1}"
                for member, span in zip(group.members, group.spans, strict=True)
            )
            self._say(f"epoch {action.epoch}: {parts}")
        self._to(self._members_of, action)

    def _mark(self, what: str) -> None:
        if self._recording is not None:
            self._recording.mark(what)

    def _give(self, names: tuple[str, ...], epoch: int, members: tuple[int, ...]) -> None:
        for name in names:
            if name in self._ledger:
                entry = self._ledger.assign(name)
                request = replace(entry.request, waited=self._clock() - entry.came)
                self._replicas.post(members[0], Start(epoch, request, entry.assignment))

    def _to(self, members: set[int], message: Message) -> None:
        for member in sorted(members):
            self._replicas.post(member, message)

    def _end(self) -> None:
        why = self._failed or "the server shuts down"
        self.ready.set()  # for whoever waits for the first replica
        for entry in self._ledger:
            self._client_told(entry.request, why)
            if self._recording is not None:
                name = entry.request.name
                self._recording.request(name, entry.came, self._first.pop(name, None))
        while self._inbox:
            asked = self._inbox.popleft()
            if isinstance(asked, Request):
                self._client_told(asked, why)
        self._waiting.clear()
        for rank in self._ranks:
            if rank not in self._at:
                self._processes.end(rank)  # it starts, and cannot be told
        controller = self._controller
        for member in () if controller is None else tuple(controller.cluster.replicas):
            self._replicas.post(member, End())
