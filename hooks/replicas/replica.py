"""The main loop of a replica: handles messages of the supervisor, computes microbatches, and changes epochs.

Note [Wished pages]
    An allocation on this device that still lacks pages at level 7 of the reclaim order wishes for a drop
    (offload/manager/overview.py). Its pages are reported as pending for a while, like those of prompts that wait,
    and the controller, which knows all replicas and predicts the gain of a drop, decides.

Note [One thread]
    Everything that uses the model happens in this loop, one step after the other: a message, a microbatch, a piece of
    KV, a layer that is restored. So epochs change between two microbatches, without locks. The count of iterations
    also grows during waits for other replicas (`WatchedLink`) and moves of layers (`Piecewise`): it stands still
    only where a kernel, or the process, does.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from ...offload.policy.replicas import protocol
from ...offload.policy.replicas.groups import alone
from .channel import Wakeup
from .epochs import EpochChange, EpochState, LedRequests
from .errors import Interrupted, LinkClosed, LinkError, SupervisorLost
from .follower import OutOfStep
from .layer_moves import LayerMoves, ReplicaSetup
from .link import Link
from .messages import Counted, End, Message, Seen, Start, StartTimeline, SupervisorRestarted
from .microbatch_plan import Request
from .recording import machine
from .stage import Stage

# Seconds between two reports for /metrics of what was moved and computed: below what scrapes it. Chosen.
_COUNTING: Final = 1.0


class LoadReport:
    """Counts the iterations of the main loop, and sends the load periodically."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self._progress = 0
        self._told_at = -1.0
        self._told: protocol.Load | None = None
        self._lock = threading.Lock()
        self._wished: list[tuple[float, int]] = []  # until when, and how many pages

    def add_wish(self, pages: int) -> None:
        """Adds pages that were lacking on this device to the demand. Thread-safe. See Note [Wished pages]."""
        until = self._setup.clock() + 10 * self._setup.tuning.period  # ten looks at the load
        with self._lock:
            self._wished.append((until, pages))

    def beat(self, epoch: int, stage: Stage | None) -> None:
        """Counts an iteration, and sends the load if it is due. SupervisorLost."""
        self._progress += 1
        now = self._setup.clock()
        if epoch < 0 or not self._is_due(now):
            return
        used, free, pending = (0, 0, 0) if stage is None else stage.count_pages(self._setup.layers)
        pending += self._wishes(now)
        self._tell(protocol.Load(0.0, self._setup.me, epoch, used, free, pending, self._progress), now)

    def beat_mid_step(self) -> None:
        """Counts progress within a long iteration, and repeats the latest load if it is due: the cache and its locks
        must not be used here. SupervisorLost."""
        self._progress += 1
        now = self._setup.clock()
        if self._told is not None and self._is_due(now):
            self._tell(replace(self._told, progress=self._progress), now)

    def _is_due(self, now: float) -> bool:
        tuning = self._setup.tuning
        return now - self._told_at >= min(tuning.beat, tuning.period)

    def _tell(self, load: protocol.Load, now: float) -> None:
        self._told, self._told_at = load, now
        self._setup.supervisor.post(load)

    def _wishes(self, now: float) -> int:
        """Returns the pages that are wished for."""
        with self._lock:
            self._wished = [(until, pages) for until, pages in self._wished if until > now]
            return sum(pages for _, pages in self._wished)


class CountReport:
    """Sends `Counted` and `Seen`. Used by one thread."""

    def __init__(self, setup: ReplicaSetup, state: EpochState, moves: LayerMoves) -> None:
        self._setup = setup
        self._state = state
        self._moves = moves
        self._machine = machine()
        self._told: Counted | None = None
        self._told_at = -float("inf")

    def send(self, at_once: bool = False) -> None:
        """Sends the counts that have changed, at most once a period unless `at_once`. SupervisorLost."""
        setup, now = self._setup, self._setup.clock()
        if not at_once and now - self._told_at < _COUNTING:
            return
        self._told_at = now
        times = setup.replica.times
        if times is not None:
            times.poll()
        measured = () if times is None else (times.busy, times.open, times.error)
        held = setup.layers - len(setup.holds.dropped)
        counted = Counted(self._state.sent, self._moves.sent, held, *measured)
        if counted != self._told:
            self._told = counted
            setup.supervisor.post(counted)
        if bars := setup.notes.take():
            setup.supervisor.post(Seen(self._machine, now, bars))


_TAGS = ("handover", "pull")  # whose messages end an idle wait
_EXCHANGE_TAGS = ("kv", "arrival")  # the same, once the epoch of their links has begun: before, nobody takes them


class Replica:
    """One replica of a model."""

    def __init__(self, setup: ReplicaSetup, wakeup: Wakeup) -> None:
        """`wakeup`: is notified when a message of the supervisor or on a link has come."""
        self._setup = setup
        self._supervisor = setup.supervisor
        self._wakeup = wakeup
        self._load = LoadReport(setup)
        self._requests = LedRequests(setup.supervisor)
        self._state = EpochState(setup, self._requests, self._beat)
        self._moves = LayerMoves(setup, self._beat, self._links)
        self._change = EpochChange(setup, self._state, self._moves)
        self._counts = CountReport(setup, self._state, self._moves)
        self._ended = False
        self._stage_is_over = False  # nothing more comes in its epoch, as a peer has begun the next one
        self._rejoins: tuple[Request, ...] | None = None
        setup.holds.begin(self._load.add_wish, self._load.beat_mid_step)

    # -- the loop

    def run(self) -> tuple[Request, ...] | None:
        """Runs until the supervisor ends this replica. Returns None; where it has to join anew, without KV, the
        requests that a supervisor which was started again has to know of. SupervisorLost."""
        try:
            while not self._ended:
                self.step()
        finally:
            self._leave_all()
            self._setup.notes.close()
            with suppress(SupervisorLost):
                self._counts.send(at_once=True)
            self._state.wait_closed()
            self._setup.holds.end()
        return self._rejoins

    def step(self) -> None:
        """One iteration of the loop. Waits a little where there is nothing to do."""
        self._beat()
        self._update_timeline()
        self._counts.send()
        while not self._ended and (message := self._supervisor.take()) is not None:
            self._handle(message)
        try:
            happened = self._work()
        except Interrupted:
            happened = True  # by a message of the supervisor, which is handled next
        except LinkError as error:
            self._on_link_lost(error.peer)
            happened = True
        if not happened and not self._ended:
            self._wakeup.wait(lambda: self._has_input() or None, self._setup.tuning.beat)

    def _work(self) -> bool:
        state, moves = self._state, self._moves
        happened = self._compute()
        happened = self._change.step() or happened
        if (handover := state.handover) is not None:
            happened = state.exchange_kv() or happened
            if handover.complete:
                self._counts.send(at_once=True)
        else:
            state.drop_late_kv()
        if state.leader is not None:
            self._requests.start_early(state.epoch, state.leader)
        happened = self._pull() or happened
        moves.serve()
        return happened or (not moves.ready and moves.prepare_idle())

    def _compute(self) -> bool:
        stage, self._stage_is_over = self._state.stage, False
        try:
            return stage is not None and stage.step()
        except OutOfStep:
            assert stage is not None
            members = stage.group.members
            self._on_link_lost(members[members.index(self._setup.me) - 1])
            return False
        except LinkClosed as error:
            if not self._change.peer_has_entered(error.peer):
                raise
            self._stage_is_over = True  # the next epoch has links of its own
            return False
        finally:
            self._requests.send_reports()  # before another group may go on with a request

    def _has_input(self) -> bool:
        stage = self._state.stage
        if self._supervisor.has() or (stage is not None and not self._stage_is_over and stage.has_work()):
            return True
        waiting = [(link, _TAGS) for link in self._links()]
        waiting += [(link, _EXCHANGE_TAGS) for link in self._state.links.values()]
        return any(link.has(tag) for link, tags in waiting for tag in tags if link.error is None)

    def _links(self) -> list[Link]:
        return [*self._state.links.values(), *self._change.links.values()]

    def _update_timeline(self) -> None:
        """Records the present activities for a timeline."""
        notes, state = self._setup.notes, self._state
        if not notes.on:
            return
        me, group = self._setup.me, None if state.stage is None else state.stage.group
        where = None
        if group is not None:
            span = group.span(me)
            stage = f"stage {group.members.index(me)} of {group.size}"
            where = f"epoch {state.epoch}: {stage}, layers {span.begin} to {span.end - 1}"
        notes.now("epoch", where)
        pending = self._change.epoch
        notes.now("next epoch", None if pending is None else f"prepare epoch {pending}")
        notes.now("exchange", None if state.handover is None else f"KV into epoch {state.epoch}")
        notes.now("restore", "layers come home" if self._moves.pulling else None)

    def _beat(self) -> None:
        self._load.beat(self._state.epoch, self._state.stage)

    # -- mail

    def _handle(self, message: Message) -> None:
        state = self._state
        match message:
            case Start():
                self._requests.start(message, state.epoch, state.leader)
            case protocol.Cancel():
                self._cancel(message.request)
            case protocol.Prepare():
                self._change.prepare(message)
            case protocol.Commit():
                self._change.commit(message)
            case protocol.Discard():
                self._moves.stop(message.epoch)
                self._change.discard(message.epoch)
            case protocol.Alone():
                self._leave_all()
                state.begin_stage(alone(self._setup.me, self._setup.layers), message.epoch, {}, self._moves)
            case protocol.StartRestore():
                links = self._change.links if self._change.epoch == message.epoch else state.links
                self._moves.begin(message.epoch, message.pulls, links)
            case StartTimeline():
                self._setup.notes.on = True
            case SupervisorRestarted():
                self._ended, self._rejoins = True, self._led()
            case End():
                self._ended = True

    def _led(self) -> tuple[Request, ...]:
        """Returns the requests of the group that this replica leads."""
        leader = self._state.leader
        return () if leader is None else tuple(leader.requests.by_name.values())

    def _cancel(self, request: str) -> None:
        self._requests.cancel(request)
        if self._change.pending is not None:
            self._change.pending.cancelled.add(request)
        if self._state.handover is not None:
            self._state.handover.cancel(request)
        if self._state.leader is not None:
            self._state.leader.requests.cancel(request)

    # -- layers

    def _pull(self) -> bool:
        """Restores a layer, if any has to be. Returns whether it did."""
        moves, stage = self._moves, self._state.stage
        if not moves.pulling:
            return False
        if not moves.pull():
            if stage is not None:
                moves.release(stage.group)
            moves.post_restored()
            self._counts.send(at_once=True)
        return True

    # -- what goes wrong

    def _on_link_lost(self, peer: int) -> None:
        """Reports a lost link to the supervisor, which decides about the group. Gives up the next epoch if the link was
        of that one and it is not committed, else leaves all groups."""
        pending = self._change.pending
        is_pending = pending is not None and peer in pending.links and pending.links[peer].error is not None
        epoch = pending.epoch if pending is not None and is_pending else self._state.epoch
        self._supervisor.post(protocol.Suspected(0.0, epoch, self._setup.me, peer))
        if pending is not None and is_pending and not pending.committed:
            self._change.drop_pending()
            return
        self._leave_all()

    def _leave_all(self) -> None:
        """Leaves all groups, and drops all KV and requests."""
        self._change.drop_pending()
        self._moves.stop()
        self._state.leave()
