"""A fleet on Ray: the supervisor and its replicas are actors, and front ends, which are not, call the supervisor.

Note [Calls to the supervisor]
    Replicas and front ends call the supervisor, and nobody calls them: `hear` takes their messages, and `news` returns
    those to them, at once or when there are some. Ray does not order the calls of such an actor, and a call that failed
    may have arrived. So what is sent has a number, counted from 1 by each end of each session, and is taken in order
    and once. Messages are encoded structs, as between processes.

Note [Who ends]
    A replica: Ray starts it again, and the supervisor learns it from a call that waits for its end. A front end: its
    requests are computed on, and are another's once that is asked for them by the same names, or are cancelled after a
    while. The supervisor: Ray starts it again, with nothing; a new session tells replicas and front ends, whose calls
    are repeated until then. Replicas join anew with the requests that they were computing, which are recomputed after
    the tokens that were delivered, and front ends ask again for theirs. Links form in the new supervisor's store, as
    the old one has ended with its process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import ray
from msgspec import structs
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ...allocator.config import change_environment
from ...allocator.errors import ManageError
from ...offload.policy.replicas.pipeline import ChunkCost
from ...offload.policy.replicas.tuning import ReplicaTuning
from .channel import InOrder, Members, ToSupervisor, Wakeup
from .errors import SupervisorLost
from .messages import (
    Ask,
    Forget,
    Join,
    Line,
    Message,
    SupervisorRestarted,
    Told,
    decoded,
    encoded,
)
from .microbatch_plan import Request
from .pair import Store
from .process import ReplicaOptions, installed, run
from .ray_node import RayNode
from .supervisor import Fleet, FleetState, FleetSupervisor, SupervisorPorts, state_of

if TYPE_CHECKING:
    from .frontend import FleetEngine

_NAMESPACE: Final = "ballonet"
_FOREVER: Final = -1  # restarts of an actor
# Seconds after which a front end that asked for no news is gone; its requests too; a fleet without any. Chosen: another
# may be started meanwhile, and clients ask again.
_FRONT_GONE: Final = 3.0
_ORPHANED: Final = 120.0
_UNATTENDED: Final = 300.0
# A call for news returns after so many seconds without any; one that failed is made again after so many. Chosen.
_NEWS: Final = 1.0
_RETRY: Final = 0.1
# Calls at the same time, two of each replica and front end, and lines that a first front end is told later. Chosen.
_CALLS: Final = 10_000
_UNSAID: Final = 99
_FRONT: Final = "front"  # the names of front ends begin so; those of replicas are their ranks and sessions
# of both kinds of actors; a message whose call failed is sent again here, see Note [Calls to the supervisor]
_KEPT: Final = {"namespace": _NAMESPACE, "lifetime": "detached", "max_restarts": _FOREVER, "max_task_retries": 0}


class ActorWire:
    """One end's calls to the supervisor, on two threads. See Note [Calls to the supervisor]."""

    def __init__(
        self,
        fleet: str,
        me: str,
        heard: Callable[[Sequence[Message]], object],
        restarted: Callable[[], object],
        lost: Callable[[], object],
    ) -> None:
        """`fleet`: the supervisor's name; `me`: of this end. Called on threads of this object: `heard` with messages;
        `restarted` once the supervisor has lost all that was said; `lost` once it has ended. SupervisorLost."""
        self._fleet = fleet
        self._me = me
        self._heard = heard
        self._restarted = restarted
        self._lost = lost
        self._supervisor = _actor(fleet)
        if self._supervisor is None:
            raise SupervisorLost(f"no supervisor of {fleet} runs on this Ray: start a server with --replicas")
        self._session = 1  # of this end: one more for each supervisor
        self._theirs: str | None = None  # that of the supervisor
        self._queue: list[Message] = []
        self._number = 0
        self._sending = self._closing = False
        self._changed = threading.Condition()
        self._threads = [threading.Thread(target=act, daemon=True) for act in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def post(self, *messages: Message) -> None:
        """Sends messages, without waiting. Thread-safe."""
        with self._changed:
            self._queue += messages
            self._changed.notify_all()

    def close(self, patience: float) -> None:
        """Ends once everything was sent, or after so many seconds. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._queue or self._sending), patience)
            self._closing = True
            self._changed.notify_all()

    def _send(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                messages, self._queue, self._sending = self._queue, [], True
                self._number += 1
                session, number = self._session, self._number
            answer = self._call("hear", session, number, encoded(*messages))
            if answer is None:
                return
            self._is_current(answer, session)

    def _receive(self) -> None:
        session, inbox, last = 0, InOrder(), 0
        while not self._closing:
            with self._changed:
                if session != self._session:
                    session, inbox, last = self._session, InOrder(), 0
            news = self._call("news", session, last)
            if news is None:
                return
            theirs, packed = news
            if not self._is_current(theirs, session):
                continue
            for number, message in packed:
                last = max(last, number)
                if messages := inbox.take(number, message):
                    self._heard(messages)

    def _is_current(self, theirs: str, session: int) -> bool:
        """Takes in the session of the supervisor that has answered a call of `session`. Returns whether both are the
        present ones; the first answer of a supervisor that was started again begins a session."""
        with self._changed:
            if session != self._session:
                return False
            if self._theirs in (None, theirs):
                self._theirs = theirs
                return True
            self._theirs, self._number, self._queue = theirs, 0, []
            self._session += 1
        self._restarted()
        return False

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls the supervisor until it answers, and returns that; None: it, or this end, has ended."""
        while not self._closing:
            try:
                return ray.get(getattr(self._supervisor, method).remote(self._me, *arguments))
            except RayError:
                if _actor(self._fleet) is None:
                    break
                time.sleep(_RETRY)
        if not self._closing:
            self._closing = True
            self._lost()
        with self._changed:
            self._sending = False
            self._changed.notify_all()
        return None


class RayToSupervisor(ToSupervisor):
    """A replica's end of its calls to the supervisor."""

    def __init__(self, fleet: str, rank: int, session: str, wakeup: Wakeup, patience: float) -> None:
        """`fleet`: the supervisor's name; `session`: of this process."""
        super().__init__(wakeup, patience)
        self._patience = patience
        self._wire = ActorWire(fleet, f"{rank} {session}", self.arrive, self._restart, self.lose)

    def post(self, *messages: Message) -> None:
        """Sends messages to the supervisor. SupervisorLost."""
        if self._lost:
            raise SupervisorLost("the supervisor has ended. Its replicas end with it")
        self._wire.post(*messages)

    def close(self) -> None:
        """Ends once the supervisor has everything. Idempotent."""
        self._wire.close(self._patience)

    def _restart(self) -> None:
        self.arrive([SupervisorRestarted()])


class ReplicaActor:
    """A replica. Ray calls the constructor again when its process has ended."""

    def __init__(self, options: ReplicaOptions, fleet: str, rank: int) -> None:
        """Puts the pool under torch, and begins to serve beside the calls. `fleet`: the supervisor's name."""
        import torch

        change_environment(options.environment)
        torch.set_num_threads(int(options.environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        device = installed(options)
        self._how = "it ended"
        self._ended = threading.Event()
        channel = RayToSupervisor(fleet, rank, secrets.token_hex(8), Wakeup(), options.tuning.joining)
        options = replace(options, say=lambda line: channel.post(Line(line)))

        def serve() -> None:
            try:
                run(options, device, rank, channel)
            except Exception as error:
                self._how = f"{type(error).__name__}: {error}"
                with suppress(SupervisorLost):
                    options.say(self._how)
            channel.close()
            self._ended.set()
            if _actor(fleet) is None:  # nobody is left to end this process
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

        threading.Thread(target=serve, name="ballonet replica", daemon=True).start()

    def process(self) -> int:
        """Returns the id of this process."""
        return os.getpid()

    def ended(self) -> str:
        """Waits until the replica has ended, and returns how."""
        self._ended.wait()
        return self._how


class RayProcesses:
    """The actors of replicas, a channel.Processes. Used by one thread."""

    def __init__(self, fleet: Fleet, name: str, wakeup: Wakeup) -> None:
        """`name`: of the supervisor; `wakeup`: notified when one has ended."""
        self._fleet = fleet
        self._name = name
        self._wakeup = wakeup
        self._group: Any = None
        self._actors: dict[int, Any] = {}  # by rank
        self._ended: deque[tuple[int, str]] = deque()
        self._watched: set[int] = set()
        self._idle: dict[int, int] = {}  # by rank: a process whose replica has ended

    def place(self) -> None:
        """Reserves GPUs and processors of the fleet. ManageError where Ray lacks some."""
        gpus, name = self._fleet.gpus, f"{self._name} places"
        with suppress(ValueError):
            self._group = ray.util.get_placement_group(name)  # of a supervisor that was started before
            return
        bundle = {"CPU": 1.0} | ({"GPU": gpus} if gpus else {})
        self._group = placement_group([bundle] * self._fleet.replicas, "PACK", name=name, lifetime="detached")
        if not self._group.wait(self._fleet.options.tuning.joining):
            remove_placement_group(self._group)
            raise ManageError(
                f"Ray has no room for {self._fleet.replicas} replicas with a processor and {gpus:g} GPUs each, but "
                f"{ray.available_resources()}: start fewer"
            )

    def start(self, rank: int) -> None:
        """Starts the replica of a rank, or waits for Ray to do so again."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        placed = {"num_cpus": 1, "num_gpus": self._fleet.gpus, "scheduling_strategy": strategy}
        more = {"name": f"{self._name} replica {rank}", "get_if_exists": True, "max_concurrency": 4}
        made: Any = ray.remote(ReplicaActor)
        self._actors[rank] = made.options(**_KEPT, **placed, **more).remote(self._fleet.options, self._name, rank)
        if rank in self._idle:
            self.end(rank)
        self._watched.add(rank)
        threading.Thread(target=self._watch, args=(rank, self._actors[rank]), daemon=True).start()

    def ended(self) -> list[tuple[int, str]]:
        """Returns the ranks of the replicas that have ended since the last call, and how each did."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    @property
    def running(self) -> bool:
        """Whether any replica has not ended."""
        return bool(self._watched)

    @property
    def has_ended(self) -> bool:
        """Whether `ended` would return any."""
        return bool(self._ended)

    def end(self, rank: int, for_good: bool = False) -> None:
        """Kills the process of a rank, which Ray starts again unless it is `for_good`."""
        if rank in self._actors:
            with suppress(RayError):
                ray.kill(self._actors[rank], no_restart=for_good)

    def close(self) -> None:
        """Ends all actors, and gives back what they had."""
        for rank in self._actors:
            self.end(rank, for_good=True)
        if self._group is not None:
            remove_placement_group(self._group)

    def _watch(self, rank: int, actor: Any) -> None:
        """Waits for the end of a replica's process, or of what it does."""
        how = None
        while how is None:
            try:
                process = ray.get(actor.process.remote())
                if process == self._idle.get(rank):
                    time.sleep(_RETRY)  # it is being killed
                    continue
                self._idle.pop(rank, None)
                how = self._ended_as(rank, process, actor)
            except RayError as error:  # it is not there yet, or will not be
                if _actor(f"{self._name} replica {rank}") is None:
                    how = _first_line(error)
                else:
                    time.sleep(_RETRY)
        self._watched.discard(rank)
        self._ended.append((rank, how))
        self._wakeup.notify()

    def _ended_as(self, rank: int, process: int, actor: Any) -> str:
        """Waits for the end of a replica that runs, and returns how it was."""
        try:
            how = str(ray.get(actor.ended.remote()))
        except RayError as error:
            return _first_line(error)
        self._idle[rank] = process
        return how


@dataclass(slots=True)
class _Caller:
    """A replica or front end that calls the supervisor. `sent`: messages to it that it may not have; `called`: when it
    asked for news."""

    session: int
    inbox: InOrder = field(default_factory=InOrder)
    sent: deque[tuple[int, bytes]] = field(default_factory=deque)
    number: int = 0
    called: float = field(default_factory=time.monotonic)  # it may be heard before it asks for news
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def is_gone(self, now: float, patience: float) -> bool:
        """Has it asked for no news for longer than `patience`, in seconds?"""
        return now - self.called > patience


@dataclass(slots=True)
class _Route:
    """Where the answer to a request goes. `front`: its front end; None: it is gone since `since`."""

    request: Request
    front: str | None
    since: float
    told: int
    error: str | None = None


class _ActorMembers(Members[str]):
    """The replicas that call a supervisor, by the names with which they call."""

    def __init__(self, supervisor: SupervisorActor, processes: RayProcesses, *arguments: Any) -> None:
        """`arguments`: of Members."""
        super().__init__(*arguments)
        self._supervisor = supervisor
        self._processes = processes

    def send(self, sender: str, message: Message) -> None:
        """Sends a message to a replica, with the answer to its next call."""
        self._supervisor.send(sender, message)

    def take(self) -> tuple[int, Message] | None:
        """Removes and returns the next message; None where none has come, or a replica has ended, of which the
        supervisor has to know first."""
        return None if self._processes.has_ended else super().take()

    def has(self) -> bool:
        """Returns whether a message has come, or a replica has ended."""
        return super().has() or self._processes.has_ended


class SupervisorActor:
    """The supervisor of a fleet. All `async` methods are Ray's calls, on its event loop; the supervisor has a
    thread."""

    def __init__(self, fleet: Fleet, name: str) -> None:
        """Starts the replicas, or finds those of a supervisor that has ended. `name`: of this actor."""
        self._session = secrets.token_hex(8)
        self._name = name
        self._fleet = fleet
        self._tuning = fleet.options.tuning
        self._lock = threading.RLock()  # of callers and routes
        self._callers: dict[str, _Caller] = {}
        self._routes: dict[str, _Route] = {}
        self._unsaid: list[str] = []  # lines for the first front end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: str | None = None
        self._attended = time.monotonic()
        self._closed = threading.Event()
        self._wakeup = Wakeup()
        host = ray.util.get_node_ip_address()
        self._links = Store.host(host, timeout=self._tuning.store)  # ends with this process
        self._processes = RayProcesses(fleet, name, self._wakeup)
        self._members = _ActorMembers(self, self._processes, host, self._links.port, self._wakeup)
        ports = SupervisorPorts(self._members, self._processes, self._wakeup, self._deliver, self._say)
        self._supervisor = FleetSupervisor(fleet, ports)
        threading.Thread(target=self._run, name="ballonet fleet", daemon=True).start()

    # -- calls

    async def hear(self, who: str, session: int, number: int, packed: bytes) -> str:
        """Takes in messages of a replica or front end. Returns the session of this supervisor."""
        with self._lock:
            messages = self._caller(who, session).inbox.take(number, packed)
        for message in messages if self._callers[who].session == session else ():
            self._hear(who, message)
        self._wakeup.notify()
        return self._session

    async def news(self, who: str, session: int, last: int) -> tuple[str, list[tuple[int, bytes]]]:
        """Returns the session of this supervisor, and the messages to a replica or front end after the `last` that it
        has, with their numbers; waits a while where there are none."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            caller = self._caller(who, session)
            caller.called = time.monotonic()
            while caller.sent and caller.sent[0][0] <= last:
                caller.sent.popleft()
            if not caller.sent:
                caller.news.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(caller.news.wait(), _NEWS)
        with self._lock:
            caller.called = time.monotonic()
            return self._session, [*caller.sent]

    async def ready(self) -> tuple[str | None, ChunkCost | None, int]:
        """Waits until a replica serves. Returns why none will, the cost of chunks, and the id of this process."""
        while self._failed is None and not self._supervisor.ready.is_set():
            await asyncio.sleep(_RETRY)
        return self._failed or self._supervisor.failed, self._supervisor.cost, os.getpid()

    async def state(self) -> FleetState:
        """Returns a snapshot of the replicas and their counts."""
        return self._supervisor.state()

    async def close(self) -> None:
        """Ends all requests and replicas, and waits until front ends have heard what is said of that."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)
        until = time.monotonic() + _NEWS
        while any(caller.sent for caller in self._callers.values()) and time.monotonic() < until:
            await asyncio.sleep(_RETRY)

    # -- on the event loop

    def _caller(self, who: str, session: int) -> _Caller:
        """Returns the caller of a session; for one that is over, a caller that nobody hears."""
        caller = before = self._callers.get(who)
        if caller is None or caller.session < session:
            caller = self._callers[who] = _Caller(session)
            self._members.leave(who)
            if who.startswith(_FRONT):
                early = [message for _, packed in before.sent for message in decoded(packed)] if before else []
                unsaid, self._unsaid = self._unsaid, []
                for message in [*early, *map(Line, unsaid)]:
                    self.send(who, message)
        return caller if caller.session == session else _Caller(session)

    def _hear(self, who: str, message: Message) -> None:
        match message:
            case Ask():
                self._ask(who, message.request)
            case Forget():
                with self._lock:
                    self._routes.pop(message.request, None)
                self._supervisor.cancel(message.request)
            case Line():
                self._say(message.text)
            case Join():
                self._members.hear(who, [message])
                self._resume(message.requests)
            case _:
                self._members.hear(who, [message])

    def _resume(self, requests: Sequence[Request]) -> None:
        """Takes requests that a replica of a supervisor that has ended was computing."""
        for request in requests:
            with self._lock:
                known = request.name in self._routes
                if not known:
                    self._routes[request.name] = _Route(request, None, time.monotonic(), len(request.delivered))
            if not known:
                self._supervisor.submit(structs.replace(request, waited=0.0))

    def _ask(self, front: str, request: Request) -> None:
        """Takes a request of a front end, or gives it the answer to one whose front end is gone."""
        name, had = request.name, len(request.delivered)
        with self._lock:
            route = self._routes.get(name)
            if route is None:
                self._routes[name] = _Route(request, front, 0.0, had)
            elif not self._is_gone(route.front) or route.request.given != request.given:
                self.send(front, Told(name, 0, had, (), f"a request {name!r} has not ended yet: give another name"))
            else:
                route.front, route.told = front, had
                self._tell(route)
        if route is None and (why := self._supervisor.submit(request)) is not None:
            self._deliver(request, why)

    def _is_gone(self, front: str | None) -> bool:
        caller = None if front is None else self._callers.get(front)
        return caller is None or caller.is_gone(time.monotonic(), _FRONT_GONE)

    # -- to front ends, on any thread

    def _deliver(self, request: Request, error: str | None) -> None:
        with self._lock:
            route = self._routes.get(request.name)
            if route is not None:
                route.request, route.error = request, error
                self._tell(route)

    def _tell(self, route: _Route) -> None:
        """Sends a front end what it has not of an answer; forgets an answer that it has."""
        request = route.request
        if route.front is None:
            return
        told, route.told = route.told, max(route.told, len(request.delivered))
        self.send(route.front, Told(request.name, request.assignment, told, request.delivered[told:], route.error))
        if request.over or route.error is not None:
            self._routes.pop(request.name, None)

    def _say(self, line: str) -> None:
        with self._lock:
            fronts = [who for who in self._callers if who.startswith(_FRONT)]
            for who in fronts:
                self.send(who, Line(line))
            if not fronts:
                self._unsaid = [*self._unsaid[-_UNSAID:], line]

    def send(self, who: str, message: Message) -> None:
        """Sends a message to a replica or front end, on any thread."""
        with self._lock:
            caller = self._callers[who]
            caller.number += 1
            caller.sent.append((caller.number, encoded(message)))
        if self._loop is not None:
            self._loop.call_soon_threadsafe(caller.news.set)

    # -- its own thread

    def _run(self) -> None:
        """Starts the replicas, and looks after front ends."""
        try:
            self._processes.place()
            self._supervisor.start()
        except Exception as error:
            self._failed = f"{type(error).__name__}: {error}"
        while not self._closed.wait(_NEWS):
            if self._forget_fronts():
                self._close()
                ray.kill(_actor(self._name), no_restart=True)

    def _forget_fronts(self) -> bool:
        """Cancels the requests of front ends that are gone. Returns whether there was none for long."""
        now = time.monotonic()
        with self._lock:
            fronts = [who for who in self._callers if who.startswith(_FRONT)]
            gone = [who for who in fronts if self._is_gone(who)]
            if len(gone) < len(fronts):
                self._attended = now
            for who in gone:
                del self._callers[who]
            late = []
            for name, route in self._routes.items():
                if route.front is not None and route.front not in self._callers:
                    route.front, route.since = None, now
                if route.front is None and now - route.since > _ORPHANED:
                    late.append(name)
            for name in late:
                del self._routes[name]
        for name in late:
            self._supervisor.cancel(name)
        return now - self._attended > _UNATTENDED

    def _close(self) -> None:
        self._closed.set()

        def end() -> None:
            until = time.monotonic() + self._tuning.joining
            while self._processes.running and time.monotonic() < until:
                time.sleep(_RETRY)
            self._processes.close()

        self._supervisor.end(end)


class RayFleet:
    """A fleet as one of its front ends has it, a replica_server.ServedFleet and a RequestSink. See Note [Who ends]."""

    def __init__(
        self, model: str, fleet: Fleet | None, node: RayNode, say: Callable[[str], None], tuning: ReplicaTuning
    ) -> None:
        """`fleet`: is started unless it runs, and ends with this object; None: it is another's; `node`: is closed with
        this object; `say`: prints a line."""
        self.cost: ChunkCost | None = None if fleet is None else fleet.cost
        self.clients = self
        self._name = f"ballonet {model}"
        self._fleet = fleet
        self._say = say
        self._tuning = tuning
        self._node = node
        self._front: FleetEngine | None = None
        self._wire: ActorWire | None = None
        self._state = state_of(None, 0, Counter(), {}, {}, 0)
        self._open: dict[str, Request] = {}
        self._why: str | None = None  # nothing is taken any more
        self._lock = threading.Lock()  # of the open requests

    def start(self, front: FleetEngine) -> None:
        """Starts the fleet, or finds it, and waits until a replica serves. ManageError, SupervisorLost."""
        self._front = front
        if self._fleet is not None:
            self._make(self._fleet)
        me = f"{_FRONT} {secrets.token_hex(8)}"
        self._wire = ActorWire(self._name, me, self._heard, self._again, self._lose)
        while (supervisor := _actor(self._name)) is not None:
            try:
                why, self.cost, process = ray.get(supervisor.ready.remote())
                self._say(f"the supervisor is process {process}")
                break
            except RayError:  # it is being started again
                time.sleep(_RETRY)
        else:
            why = "its supervisor has ended"
        if why is not None:
            raise ManageError(why)

    def _make(self, fleet: Fleet) -> None:
        gpus = 0.0
        if fleet.devices:
            gpus = min(1.0, int(1e4 * ray.cluster_resources().get("GPU", 0.0) / fleet.replicas) / 1e4)
        place = {
            "num_cpus": 0,
            "num_gpus": 0,
            "name": self._name,
            "get_if_exists": True,
            "max_concurrency": _CALLS,
        }
        self._say(f"{fleet.replicas} replicas start on Ray, at {ray.get_runtime_context().gcs_address}")
        made: Any = ray.remote(SupervisorActor)
        made.options(**_KEPT, **place).remote(replace(fleet, gpus=gpus), self._name)

    # -- for clients

    @property
    def waiting(self) -> int:
        """Number of requests of this front end that wait for their first token."""
        with self._lock:
            return sum(not request.delivered for request in self._open.values())

    def submit(self, request: Request) -> str | None:
        """Takes a request. Returns why it is refused; None: it is taken."""
        with self._lock:
            if self._why is not None or self._wire is None:
                return self._why or "the server starts"
            self._open[request.name] = request
        self._wire.post(Ask(request))
        return None

    def cancel(self, name: str) -> None:
        """Cancels a request whose client has gone away."""
        with self._lock:
            known = self._open.pop(name, None)
        if known is not None and self._wire is not None:
            self._wire.post(Forget(name))

    @property
    def failed(self) -> str | None:
        """Why nothing can be served; None while requests can be."""
        return self._why

    def end_requests(self) -> None:
        """Ends all requests of this front end, and notifies their clients."""
        self._end("the server shuts down")

    def state(self) -> FleetState:
        """Returns a snapshot of the replicas and their counts; the latest one while the supervisor is started again."""
        with suppress(RayError, AttributeError):
            self._state = ray.get(_actor(self._name).state.remote())
        return self._state

    def close(self) -> None:
        """Ends the requests of this front end, the fleet if this started it, and leaves Ray. Idempotent."""
        self.end_requests()
        supervisor = _actor(self._name) if ray.is_initialized() else None
        if self._fleet is not None and supervisor is not None:
            with suppress(RayError):
                ray.get(supervisor.close.remote())
        if self._wire is not None:
            self._wire.close(self._tuning.joining)
        if self._fleet is not None and supervisor is not None:
            with suppress(RayError):
                ray.kill(supervisor, no_restart=True)
        self._node.close()

    # -- on the wire's threads

    def _heard(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if isinstance(message, Line):
                self._say(message.text)
            elif isinstance(message, Told):
                self._take(message)

    def _take(self, told: Told) -> None:
        with self._lock:
            request = self._open.get(told.request)
            if request is None:
                return
            for token in told.tokens[max(0, len(request.delivered) - told.before) :]:
                request = request.with_token(token)
            self._open[told.request] = request
            if request.over or told.error is not None:
                del self._open[told.request]
        if self._front is not None:
            self._front.deliver(request, told.error)

    def _again(self) -> None:
        """Asks for all requests again: the supervisor was started again."""
        self._say("the supervisor was started again")
        with self._lock:
            asked = [*self._open.values()]
        if self._wire is not None:
            self._wire.post(*map(Ask, asked))

    def _lose(self) -> None:
        self._end("the supervisor has ended")

    def _end(self, why: str) -> None:
        with self._lock:
            self._why = self._why or why
            ended, self._open = self._open, {}
        for request in ended.values():
            if self._wire is not None:
                self._wire.post(Forget(request.name))
            if self._front is not None:
                self._front.deliver(request, self._why)


def _actor(name: str) -> Any:
    """Returns the actor of a name, also one that is being started again; None where there is none."""
    try:
        return ray.get_actor(name, namespace=_NAMESPACE)
    except (ValueError, RayError):
        return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
