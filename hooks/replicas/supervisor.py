"""The supervisor: takes requests of clients and messages of replicas, and performs the controller's actions.

Note [One supervisor]
    Only its thread uses the ledger and the controller; clients' threads put requests into a queue. If its process ends,
    so do processes of replicas and the requests; on Ray it is started again, and asks the replicas (on_ray.py). There
    is no election. A decision of the controller is O(log N) for a request and O(N log N) for a drop; a replica sends
    some hundred bytes per second, and its tokens.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from ...offload.policy.replicas import protocol
from ...offload.policy.replicas.controller import Controller, decide
from ...offload.policy.replicas.demand import KVSize
from ...offload.policy.replicas.groups import Group
from ...offload.policy.replicas.pipeline import ChunkCost
from ...offload.policy.replicas.processes import Replacements
from ...offload.policy.replicas.protocol import Event, Note, Setup
from ...offload.policy.replicas.tuning import DEFAULT, ReplicaTuning
from ...offload.timeline.file import check
from ...offload.timeline.fleet import write
from .channel import Members, Processes, Wakeup
from .client_requests import ClientRequests
from .messages import Counted, End, Hello, Message, Seen, StartTimeline, Told
from .microbatch_plan import Request
from .process import ReplicaOptions
from .recording import DecisionFile, Recording


@dataclass(frozen=True, slots=True)
class FleetState:
    """A snapshot. `spans`: (begin, end) of each replica's layers; `moved`: bytes of KV and of layers sent between
    replicas; `drops`, `restores`: committed so far; `declined`: number of declined drops by reason; `held`: requests
    that no group takes now; `replaced`: number of replacements for lost replicas; `layers`: resident ones of each
    replica; `busy`, `open`: seconds of the stages of pipelines; `errors`: of predictions, by replica (`StageTimes`).
    """

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
        """Fraction of the pipeline stages' time in which they waited while there was work; 0 without pipelines."""
        return max(0.0, 1 - self.busy / self.open) if self.open else 0.0


def state_of(
    controller: Controller | None,
    requests: int,
    counts: Counter[str],
    declined: Mapping[str, int],
    told: Mapping[int, Counted],
    replaced: int,
) -> FleetState:
    """Returns the present state. `controller`: None before the first replica; `requests`: number of those that have not
    ended; `counts`: of actions, by ActionPerformer's names; `told`: the latest counts of each replica, also of lost
    ones; `replaced`: number of replacements."""
    groups = [] if controller is None else [active.group for active in tuple(controller.cluster.groups.values())]
    spans = {
        member: (span.begin, span.end)
        for group in groups
        for member, span in zip(group.members, group.spans, strict=True)
    }
    return FleetState(
        epoch=0 if controller is None else controller.epoch,
        spans=spans,
        groups=tuple(sorted(group.members for group in groups)),
        drops=counts["drop"],
        restores=counts["restore"],
        discarded=counts["discard"],
        fenced=counts["fence"],
        moved=(
            sum(counted.kv_bytes for counted in told.values()),
            sum(counted.layer_bytes for counted in told.values()),
        ),
        requests=requests,
        held=0 if controller is None else len(controller.book.held),
        recomputed=counts["recompute"],
        replaced=replaced,
        declined=dict(declined),
        layers={member: counted.layers for member, counted in told.items() if member in spans},
        busy=sum(counted.busy for counted in told.values()),
        open=sum(counted.open for counted in told.values()),
        errors={
            member: counted.error for member, counted in told.items() if member in spans and counted.error is not None
        },
    )


@dataclass(frozen=True, slots=True)
class SupervisorPorts:
    """What a supervisor reaches. `notify_client`: called on its thread with a request after each token, and with an
    error message when it failed; `say`: prints a line; `clock`: in seconds."""

    replicas: Members[Any]
    processes: Processes
    wakeup: Wakeup
    notify_client: Callable[[Request, str | None], object]
    say: Callable[[str], object]
    clock: Callable[[], float] = time.monotonic


class Ranks:
    """Starts and replaces replicas. Used by one thread. `replaced`: number of replacements so far."""

    def __init__(self, count: int, ports: SupervisorPorts, tuning: ReplicaTuning) -> None:
        """`count`: of ranks."""
        self.replaced = 0
        self._ranks = range(count)
        self._processes = ports.processes
        self._clock = ports.clock
        self._say = ports.say
        self._replacements = Replacements(count, tuning)
        self._members: dict[int, int] = {}  # by rank

    @property
    def expected(self) -> bool:
        """Whether a replica is starting, or will be started."""
        return self._replacements.expected

    def start(self) -> None:
        """Starts the replicas of all ranks. OSError where a process cannot be started."""
        for rank in self._ranks:
            self._processes.start(rank)

    def joined(self, rank: int, member: int) -> bool:
        """Notes that the replica of a rank has joined as a member. False where that cannot be: no process of the rank
        runs, or its replica has joined already."""
        if not self._replacements.joined(rank, self._clock()):
            return False
        self._members[rank] = member
        return True

    def lost(self) -> Iterator[tuple[int | None, str]]:
        """Yields the members whose processes have ended, and how; None: the replica had not joined. Starts the
        replacements that are due."""
        for rank, how in self._processes.ended():
            yield self._gone(rank, how)
        for rank in self._replacements.due(self._clock()):
            self.replaced += 1
            try:
                self._processes.start(rank)
            except OSError as error:
                yield self._gone(rank, f"it could not be started: {error}")

    def end(self, member: int) -> None:
        """Kills the process of a member, if there is one."""
        for rank, its in self._members.items():
            if its == member:
                self._processes.end(rank)

    def end_starting(self) -> None:
        """Kills the processes of replicas that have not joined, and so cannot be sent a message."""
        for rank in self._ranks:
            if rank not in self._members:
                self._processes.end(rank)

    def _gone(self, rank: int, how: str) -> tuple[int | None, str]:
        member = self._members.pop(rank, None)
        who = "a replica that had not joined yet" if member is None else f"replica {member}"
        wait = self._replacements.ended(rank, self._clock())
        if wait is None:
            self._processes.end(rank, for_good=True)
        then = "" if wait is None else "; another one is started" + (f" in {wait:.1f} s" if wait else "")
        self._say(f"{who} has ended: {how}{then}")
        return member, how


class ActionPerformer:
    """Performs actions. Used by one thread. `counts`: of actions, by name; `declined`: declined drops, by reason."""

    def __init__(
        self,
        ports: SupervisorPorts,
        clients: ClientRequests,
        ranks: Ranks,
        ready: threading.Event,
        recording: Recording | None,
    ) -> None:
        """`ready`: is set once a replica serves."""
        self.counts: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self._replicas = ports.replicas
        self._clients = clients
        self._ranks = ranks
        self._ready = ready
        self._say = ports.say
        self._recording = recording
        self._prepared: tuple[Group, ...] = ()  # of the latest epoch in preparation

    def perform(self, action: protocol.Action) -> None:
        """Performs an action."""
        match action:
            case protocol.Dispatch():
                self._give((action.request,), action.epoch, action.members)
            case protocol.Recompute():
                self.counts["recompute"] += len(action.requests)
                self._give(action.requests, action.epoch, action.members)
            case protocol.Refuse():
                self._clients.refuse(action.request, f"no replicas can compute it: {action.reason.value}")
            case protocol.Cancel():
                self._replicas.post(action.members[0], action)
            case protocol.Prepare():
                self._prepared = action.groups
                self._to_prepared(action)
            case protocol.Commit():
                self._committed(action)
            case protocol.Discard():
                self.counts["discard"] += 1
                self._mark(f"epoch {action.epoch} is given up")
                self._say(f"epoch {action.epoch} is given up: {action.reason.value}")
                self._to_prepared(action)
            case protocol.Alone():
                self._replicas.post(action.member, action)
                self._ready.set()
            case protocol.StartRestore():
                comes = Counter(pull.member for pull in action.pulls)
                parts = ", ".join(f"{count} to replica {member}" for member, count in sorted(comes.items()))
                self._say(f"epoch {action.epoch}: layers come home: {parts}")
                self._to({pull.member for pull in action.pulls}, action)
            case protocol.Fence():
                self.counts["fence"] += 1
                self._fence(action)
            case protocol.Decline():
                self.declined[action.reason.value] += 1
            case protocol.Hold():
                pass  # the request waits in the controller

    def _fence(self, action: protocol.Fence) -> None:
        """Kills the process of a replica. One that cannot be reached now ends when it reads the message."""
        self._ranks.end(action.member)
        what = f"replica {action.member} is ended"
        self._mark(what)
        self._say(f"{what}: {action.reason.value}")
        self._replicas.post(action.member, End())

    def _committed(self, action: protocol.Commit) -> None:
        drops = any(group.is_dropped for group in self._prepared)
        self.counts["drop" if drops else "restore"] += 1
        self._mark(f"epoch {action.epoch}: {'drop' if drops else 'restore'}")
        for group in self._prepared:
            parts = ", ".join(
                f"replica {member} holds layers {span.begin} to {span.end - 1}"
                for member, span in zip(group.members, group.spans, strict=True)
            )
            self._say(f"epoch {action.epoch}: {parts}")
        self._to_prepared(action)

    def _mark(self, what: str) -> None:
        if self._recording is not None:
            self._recording.mark(what)

    def _give(self, names: tuple[str, ...], epoch: int, members: tuple[int, ...]) -> None:
        for start in self._clients.assign(names, epoch):
            self._replicas.post(members[0], start)

    def _to_prepared(self, message: Message) -> None:
        self._to({member for group in self._prepared for member in group.members}, message)

    def _to(self, members: set[int], message: Message) -> None:
        for member in sorted(members):
            self._replicas.post(member, message)


class Supervisor:
    """A supervisor. Call `start` and, at the end, `close`."""

    def __init__(
        self,
        ports: SupervisorPorts,
        ranks: int,
        cost: ChunkCost | None = None,
        tuning: ReplicaTuning = DEFAULT,
        note: Note = lambda entry: None,
        recording: Recording | None = None,
        replacing: ReplicaTuning | None = None,
    ) -> None:
        """`ranks`: number of replicas to start and to replace; `cost`: of chunks; None: the first replicas measure it;
        `note`: called with each decision of the controller; `recording`: of a timeline; `replacing`: tuning of
        replacements, where it is another one."""
        self.ready = threading.Event()  # a replica serves, or none ever will
        self._controller: Controller | None = None
        self._replicas = ports.replicas
        self._replicas.cost = cost
        self._wakeup = ports.wakeup
        self._clock = ports.clock
        self._say = ports.say
        self._tuning = tuning
        self._note = note
        self._clients = ClientRequests(ports.clock, ports.notify_client, self._on, recording)
        self._ranks = Ranks(ranks, ports, replacing or tuning)
        self._actions = ActionPerformer(ports, self._clients, self._ranks, self.ready, recording)
        self._hello: Hello | None = None
        self._counted: dict[int, Counted] = {}
        self._recording = recording
        self._ticked = -float("inf")
        self._ending = False
        self._ended = False  # all clients were notified
        self._failed: str | None = None
        self._thread = threading.Thread(target=self.run, name="ballonet supervisor", daemon=True)

    def start(self) -> None:
        """Starts the replicas, and a thread that runs. OSError where a process cannot be started."""
        self.start_replicas()
        self._thread.start()

    def start_replicas(self) -> None:
        """Starts the replicas. OSError where a process cannot be started."""
        self._ranks.start()

    def close(self) -> None:
        """Ends all requests and replicas, and the thread."""
        self.end_requests()
        if self._thread.is_alive():
            self._thread.join()
        elif self._thread.ident is None:
            self._end()  # it never began

    # -- for clients, on any thread

    def submit(self, request: Request) -> str | None:
        """Takes a request. Returns why it is refused; None: it is taken."""
        if self._ending or self._failed is not None:
            return self._why
        if not request.prompt:
            return "the prompt has no tokens"
        self._clients.submit(request)
        self._wakeup.notify()
        if self._ended:
            self._clients.drop(self._why)  # it came after the others were notified
        return None

    def cancel(self, name: str) -> None:
        """Cancels a request whose client has gone away."""
        self._clients.cancel(name)
        self._wakeup.notify()

    def end_requests(self) -> None:
        """Begins to end all requests, and notifies their clients. Does not wait."""
        self._ending = True
        self._wakeup.notify()

    @property
    def failed(self) -> str | None:
        """Why nothing can be served; None while requests can be."""
        return self._failed

    @property
    def cost(self) -> ChunkCost | None:
        """The cost of chunks; None where it is not known yet."""
        return self._replicas.cost

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their first token."""
        return self._clients.waiting

    def state(self) -> FleetState:
        """Returns a snapshot of the replicas and their counts."""
        counted = dict(self._counted)
        return state_of(
            self._controller,
            len(self._clients),
            self._actions.counts,
            self._actions.declined,
            counted,
            self._ranks.replaced,
        )

    # -- its thread

    def run(self) -> None:
        """Runs until `end_requests`."""
        try:
            while not self._ending:
                self._turn()
                self._wakeup.wait(lambda: self._has_news() or None, self._tuning.period)
        except Exception as error:
            self._failed = f"the supervisor has failed: {type(error).__name__}: {error}"
            self._say(self._failed)
            raise
        finally:
            self._end()

    def _has_news(self) -> bool:
        return self._ending or self._clients.has_news or self._replicas.has()

    def _turn(self) -> None:
        for member, how in self._ranks.lost():
            self._lost(member, how)
        while (received := self._replicas.take()) is not None:
            self._hear(*received)
        if self._controller is None:
            return
        self._clients.take()
        now = self._clock()
        if now - self._ticked >= self._tuning.period:
            self._ticked = now
            self._on(protocol.Tick(now))
        self._look_for_replicas()

    def _join(self, member: int, hello: Hello) -> None:
        """Adds a replica that has joined, with all layers; ends it where it does not match the others."""
        first = self._hello = self._hello or hello
        if (hello.layers, hello.token, hello.page) != (first.layers, first.token, first.page):
            self._say(f"replica {member} is ended: its layers, KV or pages have other sizes than those of the others")
            self._replicas.post(member, End())
            return
        if not self._ranks.joined(hello.rank, member):
            self._say(f"replica {member} is ended: no process of rank {hello.rank} runs that could have joined")
            self._replicas.post(member, End())
            return
        if self._controller is None:
            self._replicas.cost = self._replicas.cost or hello.cost
            self._controller = controller_of(hello, self._tuning, self._note)
        self._failed = None
        self._say(f"replica {member} has joined, process {hello.process} on {hello.host}")
        if self._recording is not None:
            self._replicas.post(member, StartTimeline())
        self._on(protocol.Joined(self._clock(), member, hello.pages))

    def _lost(self, member: int | None, how: str) -> None:
        """Handles the end of a replica's process. `member`: None if it had not joined."""
        if member is not None:
            self._on(protocol.Lost(self._clock(), member))
        elif self._controller is None and not self._ranks.expected:
            self._failed = f"no replica has joined, and none is left: {how}"
            self.ready.set()

    def _look_for_replicas(self) -> None:
        """Fails all requests once no replica is left, nor expected."""
        assert self._controller is not None
        if self._controller.cluster.replicas or self._ranks.expected:
            return
        if self._failed is None:
            self._failed = "no replica is left, and no other one is started instead: see why they ended"
            self._say(self._failed)
        self._clients.fail_all(self._failed)  # in each iteration, as more requests may come

    def _hear(self, member: int, message: Message) -> None:
        match message:
            case Hello():
                self._join(member, message)
            case Told():
                self._clients.deliver(message)
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

    # -- the controller

    def _on(self, event: Event) -> None:
        assert self._controller is not None
        for action in decide(self._controller, event, self._note):
            self._actions.perform(action)

    @property
    def _why(self) -> str:
        return self._failed or "the server shuts down"

    def _end(self) -> None:
        self.ready.set()  # ends a wait for the first replica
        self._ended = True
        self._clients.end(self._why)
        self._ranks.end_starting()
        controller = self._controller
        for member in () if controller is None else tuple(controller.cluster.replicas):
            self._replicas.post(member, End())


def controller_of(hello: Hello, tuning: ReplicaTuning, note: Note) -> Controller:
    """Returns the controller of replicas like the one that has sent this, and notes what it is made with."""
    setup = Setup(hello.layers, KVSize(hello.token, hello.page), hello.cost, tuning, hello.page / tuning.link)
    note(setup)
    return Controller.of(setup)


# Bytes of a file of the log of decisions, of which two are kept. Measured: 2 kB a second of a replica, so five have
# half a day in each.
_LOG_BYTES: Final = 2**29


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas of a server. `replicas`: number of them; `devices`: GPUs of this machine, which processes share;
    `gpus`: of each actor on Ray; `cost`: of chunks; None:
    the first replicas measure it; `log`: file of the controller's decisions; `timeline`: file of the timeline of all
    processes, written at the end."""

    replicas: int
    options: ReplicaOptions
    devices: int = 0
    gpus: float = 0.0
    cost: ChunkCost | None = None
    log: Path | None = None
    timeline: str | None = None


class FleetSupervisor(Supervisor):
    """The supervisor of a fleet, with what it writes down. Call `end` at the end."""

    def __init__(self, fleet: Fleet, ports: SupervisorPorts) -> None:
        """ManageError, ConfigError where a file cannot be written."""
        if fleet.timeline is not None:
            check(fleet.timeline)
        self._timeline = fleet.timeline
        tuning = fleet.options.tuning
        self._log = None if fleet.log is None else DecisionFile(fleet.log, ports.say, _LOG_BYTES)
        recording = None if fleet.timeline is None else Recording(ports.clock)
        note = self._log or (lambda entry: None)
        super().__init__(ports, fleet.replicas, fleet.cost, tuning, note, recording)

    def end(self, end_processes: Callable[[], object]) -> None:
        """Ends all requests, the replicas and the supervisor. `end_processes`: waits for the processes. Idempotent."""
        self.close()
        end_processes()
        path, self._timeline = self._timeline, None
        if path is not None and self._recording is not None:
            while (received := self._replicas.take()) is not None:
                if isinstance(received[1], Seen):
                    self._recording.seen(received[0], received[1])
            write(self._recording.recording(), path)
            self._say(f"the timeline is in {path}")
        if self._log is not None:
            self._log.close()
