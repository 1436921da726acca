"""The controller of replicas: `on(event)` returns what is to be done. A state machine without I/O, without a clock.

Note [Life of a burst]
    Replicas serve on their own, each a group of one. Every period the monitor adds up their memory. When it is full and
    prompts wait, `drop_plan` says who merges, and the gate whether that is worth it; if not, `Decline` tells the ladder
    to find memory elsewhere. The epoch is prepared and committed (changes.py). When the load has calmed down
    (overload.py) all groups pull what they dropped and part again.

Note [Fencing]
    Each replica is in one epoch, the one in which its group was formed. What it says in another is ignored, with one
    exception: until it has taken up a new epoch, its count of iterations still shows that it lives. Who does not take
    it up in time is fenced, as is one whose count stands still. Whoever speaks and is no member is told to join anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..tuning import DEFAULT
from ..tuning import Replicas as Tuning
from .actions import Action, Alone, Cancel, Decline, Recompute, Rejoin
from .changes import Changes, Kind
from .cluster import Cluster
from .demand import KVSize, needed_pages, prompt_pages
from .drop_plan import drop_plan, net_freed, with_growth
from .events import (
    Arrived,
    Committed,
    Damaged,
    Event,
    Exchanged,
    Finished,
    Joined,
    Left,
    Load,
    Lost,
    Prepared,
    PrepareFailed,
    PullFailed,
    Reason,
    Restored,
    Suspected,
    Tick,
)
from .failures import Failures
from .forecast import busiest, merged_work, pending, work_of
from .gate import ChunkCost, judge
from .groups import alone
from .overload import Calm, Growth, Usage, is_overloaded
from .requests import RequestBook
from .state import State


class Controller:
    """Decides for all replicas of one model. `pages` of each layer; `page_seconds` that a page of KV takes from one
    replica to another. See the notes above."""

    def __init__(
        self,
        pages: Sequence[int],
        kv: KVSize,
        cost: ChunkCost,
        tuning: Tuning = DEFAULT.replicas,
        page_seconds: float = 0.0,
    ) -> None:
        self._tuning = tuning
        self._cost = cost
        self._page_seconds = page_seconds
        self._state = State(pages, kv, tuning, cost.seconds(0, tuning.chunk))
        self._changes = Changes(self._state, tuning)
        self._failures = Failures(self._state, self._changes, tuning)
        self._calm = Calm(tuning)
        self._growth = Growth(tuning)
        self._ticked: float | None = None

    @property
    def epoch(self) -> int:
        """The last epoch that was given out."""
        return self._state.epoch

    @property
    def preparing(self) -> int | None:
        """The epoch in preparation."""
        return self._changes.proposal.epoch if self._changes.proposal else None

    @property
    def cluster(self) -> Cluster:
        return self._state.cluster

    @property
    def book(self) -> RequestBook:
        return self._state.book

    @property
    def freed(self) -> int:
        """Pages that the groups in force have freed against undropped replicas."""
        return net_freed((each.group for each in self.cluster.groups.values()), self.cluster.pages)

    def check(self) -> None:
        """Raises ValueError unless groups, requests and the epoch in preparation agree."""
        self.cluster.check()
        self.book.check(self.cluster.groups)
        proposal = self._changes.proposal
        if proposal is not None and not all(members in self.cluster.groups for members in proposal.old):
            raise ValueError(f"epoch {proposal.epoch} is prepared for groups that are no more")
        if self.epoch < max((each.epoch for each in self.cluster.groups.values()), default=0):
            raise ValueError("a group is in an epoch that was never given out")

    def on(self, event: Event) -> list[Action]:
        """What is to be done now, in order. ValueError: a request that is here already."""
        self._state.actions = []
        at, changes, failures = event.at, self._changes, self._failures
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
                if changes.prepared(event.epoch, event.member, at):
                    failures.source_again(at)
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
        if gap > self._tuning.late:
            self._excuse(gap)
        self._fence_silent(at)
        self._changes.expire(at)
        self._failures.pull_again(at)
        for members, each in [*self.cluster.groups.items()]:
            if each.exchanging and at - each.since > self._tuning.bulk and members in self.cluster.groups:
                self._failures.reset(members, Reason.TIMEOUT, at)
        self._watch(at)

    def _excuse(self, seconds: float) -> None:
        """The controller itself stood still: what nobody could say meanwhile counts for nothing."""
        for replica in self.cluster.replicas.values():
            replica.heart.excuse(seconds)
            if replica.since is not None:
                replica.since += seconds
        for placement in self.cluster.groups.values():
            placement.since += seconds
        if self._changes.proposal is not None:
            self._changes.proposal.since += seconds

    def _fence_silent(self, at: float) -> None:
        for member, replica in [*self.cluster.replicas.items()]:
            if replica.heart.is_dead(at):
                self._failures.fence(member, Reason.HUNG, at)
            elif replica.since is not None and at - replica.since > self._tuning.answer:
                self._failures.fence(member, Reason.BEHIND, at)

    def _watch(self, at: float) -> None:
        """Looks at the load, and drops or restores."""
        usage = self.cluster.usage(prompt_pages((each.prompt for each in self.book.held), self.cluster.kv))
        if usage is None or not self.cluster.replicas:
            return
        changes = self._changes
        self._growth.look(at, usage)
        if is_overloaded(usage, self._tuning):
            if changes.proposal is not None and changes.proposal.kind is Kind.RESTORE:
                changes.discard(Reason.OVERLOAD, at)
            if changes.proposal is None and at >= changes.drop_after:
                self._drop(usage, at)
        dropped = [each.group for each in self.cluster.steady() if each.group.is_dropped]
        if not dropped:
            self._calm.forget()
        elif self._calm.look(at, usage) and changes.proposal is None and at >= changes.restore_after:
            changes.propose_restore(dropped, at)

    def _drop(self, usage: Usage, at: float) -> None:
        pages = self.cluster.pages
        replicas = self.cluster.replicas
        needed, growth = needed_pages(usage.pending, usage.free), self._growth.pages
        is_first = not any(each.group.is_dropped for each in self.cluster.groups.values())
        if not needed or not (is_first or growth):
            return
        groups = [
            each.group
            for each in self.cluster.steady()
            if all(replicas[member].backed for member in each.group.members)
        ]
        groups.sort(key=lambda group: -pending(group, self.cluster))  # what waits in a group begins there
        gross = with_growth(groups, needed, growth, pages)
        plan = drop_plan(groups, gross, pages) if gross is not None else None
        if plan is None or not plan.formed:
            self._changes.decline(Decline(Reason.NO_PLAN), at)
            return
        group = busiest(plan.formed, self.cluster)
        members = {*group.members}
        olds = [each for each in groups if each.members[0] in members]
        parts = [work_of(each, self.cluster, self.book) for each in olds]
        verdict = judge(parts, merged_work(group, parts, self.cluster, self._page_seconds), self._cost, self._tuning)
        if verdict.helps:
            self._changes.propose_drop(plan, at)
        else:
            self._changes.decline(Decline(Reason.NO_GAIN, verdict), at)

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
            self._state.actions.append(Rejoin(event.member))
        elif replica.epoch == event.epoch:
            replica.heart.beat(event.at, event.progress)
            replica.load = event
            self._taken_up(event.epoch, event.member)
        elif replica.since is not None:
            replica.heart.beat(event.at, event.progress)

    def _taken_up(self, epoch: int, member: int) -> None:
        """A member is in its epoch."""
        replica = self.cluster.replicas.get(member)
        if replica is not None and replica.epoch == epoch:
            replica.since = None
            if replica.doubted:
                replica.doubted = False
                self._state.refresh(member)
                self._state.start_held()

    def _prepare_failed(self, event: PrepareFailed) -> None:
        if self._changes.concerns(event.epoch, event.member):
            if event.reason is Reason.FILE_CHANGED:
                self.cluster.replicas[event.member].backed = False
            self._changes.discard(event.reason, event.at)

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
        self._changes.restored(event.epoch, event.member, event.at)

    # Requests

    def _leave(self, name: str) -> None:
        group = self.book.end(name)
        if group is not None:
            self._state.actions.append(Cancel(name, self.cluster.groups[group].epoch, group))

    def _damaged(self, event: Damaged) -> None:
        """KV of a request is wrong: its group computes it anew."""
        placement = self.cluster.placement(event.member)
        if placement is None or placement.epoch != event.epoch:
            return
        members = placement.group.members
        requests = [each for each in self.book.of(members) if each.name == event.request]
        for each in self._failures.spend_life(requests):
            self._state.actions.append(Recompute((each.name,), placement.epoch, members))
