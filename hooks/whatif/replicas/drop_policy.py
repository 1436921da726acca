"""Replicas that drop parameters, in virtual time: performs the actions of the controller.

Note [What is played]
    Every period each replica reports its load, and the controller gets a tick. Preparing an epoch takes as long as its
    links. At the commit the groups concerned finish their microbatches; then layers are dropped, and each member sends
    the KV that no longer belongs to its span, behind activations. Requests whose KV is on the way are stalled, others
    begin. For a restore the group gives up the memory that its layers need, and members pull the layers one by one from
    their holders; at the commit each request's KV goes to one member (epoch_changes.py). Where memory is short anyway,
    requests are swapped to the host (`SwapPolicy`); their KV there is exchanged like any other, and then swapped in.
    Faults are played too, where some are given (faults.py): a replica that has lost its group runs alone at once, and
    reads the layers that it lacks from its backing in each microbatch, which takes as long as the copy.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ....offload.policy.replicas import actions
from ....offload.policy.replicas.actions import Action
from ....offload.policy.replicas.decisions import Setup, decide
from ....offload.policy.replicas.demand import KVSize, prompt_pages
from ....offload.policy.replicas.events import Event, Finished, Load, Tick
from ....offload.policy.replicas.groups import alone
from .active_groups import ActiveGroups
from .epoch_changes import EpochChanges
from .jobs import Job
from .layer_pulls import LayerPulls
from .memory_policies import RecomputePolicy, SwapPolicy
from .open_requests import OpenRequests
from .pipeline import Pipeline
from .process_states import ProcessStates
from .replica_lifecycle import ReplicaLifecycle

if TYPE_CHECKING:
    from .fleet_run import FleetRun


class DropPolicy(SwapPolicy):
    """See Note [What is played]. `looks`: that the controller has had."""

    def __init__(self, run: FleetRun) -> None:
        fleet = run.fleet
        self.kv = KVSize(fleet.shape.kv, fleet.page)
        setup = Setup(
            fleet.layer_pages, self.kv, run.cost, replace(run.tuning, chunk=fleet.batch), fleet.page / fleet.network
        )
        run.log(setup)
        self.controller = setup.controller()
        self.run = run
        self.requests = OpenRequests(self)
        self.active = ActiveGroups(self)
        self.processes = ProcessStates(run)
        self.pulls = LayerPulls(run, self.processes, self.active.layer_came)
        self.changes = EpochChanges(self)
        self.replicas = ReplicaLifecycle(self)
        self.looks = 0
        super().__init__(run)
        run.every(run.tuning.period, self._look)

    def _open(self) -> None:
        for member in range(self.run.fleet.replicas):
            self.replicas.join(member)

    # What groups ask

    def arrive(self, job: Job) -> None:
        """The controller says where it goes."""
        if self.replicas.failed is not None:
            self.run.over(job, self.replicas.failed)
        else:
            self.requests.came(job)

    def ended(self, pipe: Pipeline, job: Job) -> None:
        """The controller is told, unless the client was gone."""
        self.requests.forget(job)
        if not job.over:
            self.requests.over(job)
            self.tell(Finished(self.run.events.now, str(job.number)))

    def admit(self, pipe: Pipeline) -> None:
        """As `SwapPolicy`, but while KV is exchanged only new requests begin."""
        if pipe in self.changes.exchanging:
            RecomputePolicy.admit(self, pipe)
        else:
            super().admit(pipe)

    def landed(self, pipe: Pipeline, job: Job) -> None:
        """A request that was cancelled is in no microbatch now."""
        self.requests.take_out(pipe, job)

    def _went(self, pipe: Pipeline, job: Job) -> None:
        super()._went(pipe, job)
        self.requests.copied(pipe, job)

    def _came(self, pipe: Pipeline, job: Job) -> None:
        super()._came(pipe, job)
        self.requests.copied(pipe, job)

    # The controller

    def tell(self, event: Event) -> None:
        """Tells the controller an event, and does what it answers. Nothing once there is none."""
        if not self.replicas.is_shut_down:
            for action in decide(self.controller, event, self.run.log):
                self._do(action)

    def _look(self) -> None:
        """Loads of all replicas that run, and then a look of the controller."""
        now, kv, formed = self.run.events.now, self.kv, self.active
        self.looks += 1
        for members, group in formed.groups.items():
            pipe = self.run.pipes[members]
            queued = prompt_pages((job.known for job in chain(pipe.waiting, self.host(pipe).away)), kv)
            for stage, (member, span) in enumerate(zip(members, group.spans, strict=True)):
                if member in self.run.silent:
                    continue
                part = len(span) / group.layers
                used, free = (int(each * part * kv.token / kv.page) for each in (pipe.used, max(0, pipe.free)))
                if pipe.stages.halted:
                    used = free = queued = 0  # it has forgotten all
                pending = 0 if stage else queued  # the first one tells it for all
                self.tell(Load(now, member, formed.epochs[member], used, free, pending, self.looks))
        self.tell(Tick(now))

    def _do(self, action: Action) -> None:
        requests = self.requests
        match action:
            case actions.Dispatch():
                requests.give(requests.named(action.request), action.members)
            case actions.Recompute():
                for name in action.requests:
                    requests.again(requests.named(name), action.members)
            case actions.Refuse():
                requests.over(requests.named(action.request), action.reason.value)
            case actions.Cancel():
                requests.cancel(self.run.jobs[int(action.request)])
            case actions.Alone():
                self.active.part(action.member)
                self.active.form(alone(action.member, len(self.run.fleet.shape.layers)), action.epoch, ())
            case actions.Prepare():
                self.changes.prepared.prepare(action)
            case actions.StartRestore():
                self.changes.prepared.start_restore(action)
            case actions.Discard():
                self.changes.prepared.discard(action.epoch)
            case actions.Commit():
                self.changes.commit(action.epoch, dict(action.homes))
            case actions.Fence():
                self.replicas.fence(action.member)
            case actions.Rejoin():
                self.replicas.rejoin(action.member)
            case actions.Hold() | actions.Decline():
                pass  # the controller keeps it, and says when it starts; and `make_room` is what else there is
