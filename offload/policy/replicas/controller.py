"""The controller of replicas: `on(event)` returns actions. A state machine without I/O and without a clock.

Note [Life of a burst]
    Replicas serve alone, each a group of one. Every period the controller adds up their memory. When it is full and
    prompts wait, `drop_plan` chooses the groups that merge, and the gate predicts whether that is worth it; if not, it
    answers `Decline`. The epoch is prepared and committed (group_changes.py). When the load has been low for a while
    (demand.py, Note [Hysteresis]) all groups pull what they dropped and split again.

Note [Fencing]
    Each replica is in one epoch, the one in which its group was formed. Its messages of another are ignored, with one
    exception: until it has entered a new epoch, its count of iterations still shows that it is alive. A replica that
    does not enter in time is fenced, as is one whose count stands still. A sender that is no member is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from .cluster import Cluster
from .demand import Calm, Growth, KVSize, Usage, is_overloaded, needed_pages, prompt_pages
from .drops import CostModel, Work, drop_plan, judge, with_growth
from .group_changes import ControllerState, EpochProposals, Failures, Kind
from .groups import Group, alone
from .protocol import (
    Action,
    Alone,
    Arrived,
    Cancel,
    Committed,
    Damaged,
    Decision,
    Decline,
    Event,
    Exchanged,
    Finished,
    Joined,
    Left,
    Load,
    Lost,
    Note,
    Prepared,
    PrepareFailed,
    PullFailed,
    Reason,
    Recompute,
    Restored,
    Setup,
    Suspected,
    Tick,
)
from .requests import RequestBook, RequestEntry
from .tuning import DEFAULT
from .tuning import ReplicaTuning as Tuning


class Controller:
    """Decides for all replicas of one model. `pages`: of each layer; `page_seconds`: to send a page of KV from one
    replica to another. See the notes above."""

    def __init__(
        self,
        pages: Sequence[int],
        kv: KVSize,
        cost: CostModel,
        tuning: Tuning = DEFAULT,
        page_seconds: float = 0.0,
    ) -> None:
        self._tuning = tuning
        self._cost = cost
        self._page_seconds = page_seconds
        self._state = ControllerState(pages, kv, tuning, cost.seconds(0, tuning.chunk))
        self._proposals = EpochProposals(self._state, tuning)
        self._failures = Failures(self._state, self._proposals, tuning)
        self._calm = Calm(tuning)
        self._growth = Growth(tuning)
        self._ticked: float | None = None

    @classmethod
    def of(cls, setup: Setup) -> Self:
        """Returns a new controller with the arguments of a log."""
        return cls(setup.pages, setup.kv, setup.cost, setup.tuning, setup.page_seconds)

    @property
    def epoch(self) -> int:
        """The latest epoch number."""
        return self._state.epoch

    @property
    def cluster(self) -> Cluster:
        return self._state.cluster

    @property
    def book(self) -> RequestBook:
        return self._state.book

    def check(self) -> None:
        """Raises ValueError unless groups, requests and the epoch in preparation agree."""
        self.cluster.check()
        self.book.check(self.cluster.groups)
        proposal = self._proposals.proposal
        if proposal is not None and not all(members in self.cluster.groups for members in proposal.old):
            raise ValueError(f"epoch {proposal.epoch} is prepared for groups that are no more")
        if self.epoch < max((group.epoch for group in self.cluster.groups.values()), default=0):
            raise ValueError("a group is in an epoch that was never given out")

    def on(self, event: Event) -> list[Action]:
        """Takes in an event, and returns the actions to perform, in order. ValueError: a request of that name has not
        ended."""
        self._state.actions = []
        at, proposals, failures = event.at, self._proposals, self._failures
        match event:
            case Tick():
                self._tick(at)
            case Load():
                self._load(event)
            case Arrived():
                self._state.start([self.book.arrive(event.request, event.prompt, event.new, self._tuning.lives)])
            case Finished():
                self.book.end(event.request)
            case Left():
                self._leave(event.request)
            case Damaged():
                self._damaged(event)
            case Joined():
                self._join(event)
            case Lost():
                failures.lose(event.member, at)
            case Suspected():
                failures.suspect(event.epoch, event.by, event.of, at)
            case Prepared():
                if proposals.prepared(event.epoch, event.member, at):
                    failures.pull_from_holders(at)
            case PrepareFailed():
                self._prepare_failed(event)
            case Committed():
                self._taken_up(event.epoch, event.member)
            case Exchanged():
                self._exchanged(event.epoch, event.member)
            case Restored():
                self._restored(event)
            case PullFailed():
                failures.pull_failed(event.epoch, event.member, event.reason, at)
            case _:
                raise TypeError(f"{event!r} is no event of the controller")
        return self._state.actions

    # Time

    def _tick(self, at: float) -> None:
        gap = 0.0 if self._ticked is None else at - self._ticked
        self._ticked = at
        if gap > self._tuning.silent / 2:  # the controller itself stood still
            self._discount_pause(gap)
        self._fence_silent(at)
        self._proposals.expire(at)
        self._failures.retry_pulls(at)
        for members, active in [*self.cluster.groups.items()]:
            if active.exchanging and at - active.since > self._tuning.bulk and members in self.cluster.groups:
                self._failures.reset(members, Reason.TIMEOUT, at)
        self._watch(at)

    def _discount_pause(self, seconds: float) -> None:
        """Moves all deadlines by so many seconds in which the controller itself did not run."""
        for replica in self.cluster.replicas.values():
            replica.heartbeat.discount(seconds)
            if replica.since is not None:
                replica.since += seconds
        for placement in self.cluster.groups.values():
            placement.since += seconds
        if self._proposals.proposal is not None:
            self._proposals.proposal.since += seconds

    def _fence_silent(self, at: float) -> None:
        for member, replica in [*self.cluster.replicas.items()]:
            if replica.heartbeat.is_dead(at):
                self._failures.fence(member, Reason.HUNG, at)
            elif replica.since is not None and at - replica.since > self._tuning.answer:
                self._failures.fence(member, Reason.BEHIND, at)

    def _watch(self, at: float) -> None:
        """Proposes a drop or a restore where the load asks for it."""
        usage = self.cluster.usage(prompt_pages((request.prompt for request in self.book.held), self.cluster.kv))
        if usage is None or not self.cluster.replicas:
            return
        proposals = self._proposals
        self._growth.observe(at, usage)
        if is_overloaded(usage, self._tuning):
            if proposals.proposal is not None and proposals.proposal.kind is Kind.RESTORE:
                proposals.discard(Reason.OVERLOAD, at)
            if proposals.proposal is None and at >= proposals.drop_after:
                self._drop(usage, at)
        dropped = [active.group for active in self.cluster.steady() if active.group.is_dropped]
        if not dropped:
            self._calm.forget()
        elif self._calm.observe(at, usage) and proposals.proposal is None and at >= proposals.restore_after:
            proposals.propose_restore(dropped, at)

    def _drop(self, usage: Usage, at: float) -> None:
        pages = self.cluster.pages
        replicas = self.cluster.replicas
        needed, growth = needed_pages(usage.pending, usage.free), self._growth.pages
        is_first = not any(active.group.is_dropped for active in self.cluster.groups.values())
        if not needed or not (is_first or growth):
            return
        groups = [
            active.group
            for active in self.cluster.steady()
            if all(replicas[member].backed for member in active.group.members)
        ]
        groups.sort(key=lambda group: -pending(group, self.cluster))  # a request that waits in a group begins there
        gross = with_growth(groups, needed, growth, pages)
        plan = drop_plan(groups, gross, pages) if gross is not None else None
        if plan is None or not plan.formed:
            self._proposals.decline(Decline(Reason.NO_PLAN), at)
            return
        group = busiest(plan.formed, self.cluster)
        members = {*group.members}
        olds = [old for old in groups if old.members[0] in members]
        parts = [work_of(old, self.cluster, self.book) for old in olds]
        verdict = judge(parts, merged_work(group, parts, self.cluster, self._page_seconds), self._cost, self._tuning)
        if verdict.helps:
            self._proposals.propose_drop(plan, at)
        else:
            self._proposals.decline(Decline(Reason.NO_GAIN, verdict), at)

    # Replicas

    def _join(self, event: Joined) -> None:
        self._failures.lose(event.member, event.at)
        epoch = self._state.next_epoch()
        self.cluster.join(event.member, event.pages, epoch, event.at)
        self._state.actions.append(Alone(epoch, event.member))
        self._state.form(alone(event.member, self.cluster.layers), epoch, event.at)
        self._state.start_held()

    def _load(self, event: Load) -> None:
        replica = self.cluster.replicas.get(event.member)
        if replica is None:
            return
        if replica.epoch == event.epoch:
            replica.heartbeat.beat(event.at, event.progress)
            replica.load = event
            self._taken_up(event.epoch, event.member)
        elif replica.since is not None:
            replica.heartbeat.beat(event.at, event.progress)

    def _taken_up(self, epoch: int, member: int) -> None:
        """Notes that a member has entered its epoch."""
        replica = self.cluster.replicas.get(member)
        if replica is not None and replica.epoch == epoch:
            replica.since = None
            if replica.suspected:
                replica.suspected = False
                self._state.refresh(member)
                self._state.start_held()

    def _prepare_failed(self, event: PrepareFailed) -> None:
        if self._proposals.concerns(event.epoch, event.member):
            if event.reason is Reason.FILE_CHANGED:
                self.cluster.replicas[event.member].backed = False
            self._proposals.discard(event.reason, event.at)

    def _exchanged(self, epoch: int, member: int) -> None:
        placement = self.cluster.placement(member)
        if placement is not None and placement.epoch == epoch:
            placement.exchanging.discard(member)

    def _restored(self, event: Restored) -> None:
        replica = self.cluster.replicas.get(event.member)
        if replica is not None and replica.epoch == event.epoch and replica.pulls:
            replica.pulls, replica.held = (), alone(event.member, self.cluster.layers).spans[0]
            self._state.refresh(event.member)
            self._state.start_held()
        self._proposals.restored(event.epoch, event.member, event.at)

    # Requests

    def _leave(self, name: str) -> None:
        group = self.book.end(name)
        if group is not None:
            self._state.actions.append(Cancel(name, self.cluster.groups[group].epoch, group))

    def _damaged(self, event: Damaged) -> None:
        """Has the group of a request whose KV arrived damaged compute it anew."""
        placement = self.cluster.placement(event.member)
        if placement is None or placement.epoch != event.epoch:
            return
        members = placement.group.members
        requests = [entry for entry in self.book.of(members) if entry.name == event.request]
        for request in self._failures.count_recomputation(requests):
            self._state.actions.append(Recompute((request.name,), placement.epoch, members))


# What the gate of drops is asked about: the work of groups


Tokens = list[tuple[int, int]]


def split(requests: Sequence[RequestEntry], used: int, pending: int, kv: KVSize) -> tuple[Tokens, Tokens]:
    """Splits a group's requests, in order, into (queued, running) of drops.Work. `used`: pages of KV; `pending`:
    pages of prompts that wait.

    The controller knows pages, not which requests wait. So the newest are assumed to wait, until their prompts make up
    what is pending, and the others to have generated the same part of their answers, so that their KV is what is used.
    """
    first = len(requests)
    while first and pending > 0:
        first -= 1
        pending -= kv.pages(requests[first].prompt + 1)
    running = requests[:first]
    prompts, new = sum(request.prompt for request in running), sum(max(1, request.new) for request in running)
    part = min(1.0, max(0.0, (used * kv.page / kv.token - prompts) / new)) if new else 0.0
    done = [round(part * max(1, request.new)) for request in running]
    return (
        [(request.prompt, request.new) for request in requests[first:]],
        [(request.prompt + some, max(1, request.new - some)) for request, some in zip(running, done, strict=True)],
    )


def work_of(group: Group, cluster: Cluster, book: RequestBook) -> Work:
    """Returns the work of a group in force."""
    loads = [load for member in group.members if (load := cluster.replicas[member].load) is not None]
    used, pending = sum(load.used for load in loads), sum(load.pending for load in loads)
    queued, running = split(book.of(group.members), used, pending, cluster.kv)
    return Work(cluster.tokens(group), group.size, queued, running)


def merged_work(group: Group, parts: Sequence[Work], cluster: Cluster, page_seconds: float) -> Work:
    """Returns the work of the group into which groups with the work `parts` merge. Each of its k members first sends
    (k - 1)/k of its KV, at `page_seconds` a page."""
    used = max((load.used for member in group.members if (load := cluster.replicas[member].load)), default=0)
    return Work(
        cluster.tokens(group),
        group.size,
        [request for work in parts for request in work.queued],
        [request for work in parts for request in work.running],
        used * (group.size - 1) / group.size * page_seconds,
    )


def busiest(groups: Sequence[Group], cluster: Cluster) -> Group:
    """Returns the group whose members have most pages pending, which a drop helps most. ValueError: no groups."""
    return max(groups, key=lambda group: (pending(group, cluster), -group.members[0]))


def pending(group: Group, cluster: Cluster) -> int:
    """Returns the pages of the prompts that wait in the present groups of these members."""
    return sum(load.pending for member in group.members if (load := cluster.replicas[member].load))


# The log


def decide(controller: Controller, event: Event, note: Note) -> tuple[Action, ...]:
    """Passes an event to a controller, logs the decision with `note`, and returns the actions."""
    actions = tuple(controller.on(event))
    note(Decision(controller.epoch, event, actions))
    return actions
