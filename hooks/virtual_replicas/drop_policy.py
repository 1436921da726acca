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

from ...offload.policy.replicas import actions
from ...offload.policy.replicas.actions import Action
from ...offload.policy.replicas.decisions import Setup, decide
from ...offload.policy.replicas.demand import KVSize, prompt_pages
from ...offload.policy.replicas.events import Event, Finished, Load, Tick
from ...offload.policy.replicas.groups import alone
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
    """Simulates replicas with a controller. `ticks`: of the controller so far. See Note [What is played]."""

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
        self.pulls = LayerPulls(run, self.processes, self.active.on_layer_pulled)
        self.changes = EpochChanges(self)
        self.replicas = ReplicaLifecycle(self)
        self.ticks = 0
        super().__init__(run)
        run.every(run.tuning.period, self._tick)

    def _open(self) -> None:
        for member in range(self.run.fleet.replicas):
            self.replicas.join(member)

    # MemoryPolicy, called by groups

    def arrive(self, job: Job) -> None:
        """Passes a request to the controller, or fails it where no replica is left."""
        if self.replicas.failed is not None:
            self.run.finish(job, self.replicas.failed)
        else:
            self.requests.arrive(job)

    def ended(self, pipe: Pipeline, job: Job) -> None:
        """Ends a request that has all its tokens, and tells the controller, unless its client is gone."""
        self.requests.forget(job)
        if not job.over:
            self.requests.finish(job)
            self.tell(Finished(self.run.events.now, str(job.number)))

    def admit(self, pipe: Pipeline) -> None:
        """Begins requests as `SwapPolicy`; while KV is exchanged none is swapped in."""
        if pipe in self.changes.exchanging:
            RecomputePolicy.admit(self, pipe)
        else:
            super().admit(pipe)

    def finish_leaving(self, pipe: Pipeline, job: Job) -> None:
        """Removes a cancelled request that is in no microbatch now."""
        self.requests.take_out(pipe, job)

    def _swapped_out(self, pipe: Pipeline, job: Job) -> None:
        super()._swapped_out(pipe, job)
        self.requests.finish_cancel(pipe, job)

    def _swapped_in(self, pipe: Pipeline, job: Job) -> None:
        super()._swapped_in(pipe, job)
        self.requests.finish_cancel(pipe, job)

    # The controller

    def tell(self, event: Event) -> None:
        """Passes an event to the controller, and performs its actions. Nothing after the shutdown."""
        if not self.replicas.is_shut_down:
            for action in decide(self.controller, event, self.run.log):
                self._perform(action)

    def _tick(self) -> None:
        """Sends the loads of all running replicas to the controller, and then a tick."""
        now, kv, formed = self.run.events.now, self.kv, self.active
        self.ticks += 1
        for members, group in formed.groups.items():
            pipe = self.run.pipes[members]
            queued = prompt_pages((job.known for job in chain(pipe.waiting, self.host(pipe).away)), kv)
            for stage, (member, span) in enumerate(zip(members, group.spans, strict=True)):
                if member in self.run.silent:
                    continue
                part = len(span) / group.layers
                used, free = (int(tokens * part * kv.token / kv.page) for tokens in (pipe.used, max(0, pipe.free)))
                if pipe.stages.halted:
                    used = free = queued = 0  # it has dropped all requests
                pending = 0 if stage else queued  # the first stage reports for all
                self.tell(Load(now, member, formed.epochs[member], used, free, pending, self.ticks))
        self.tell(Tick(now))

    def _perform(self, action: Action) -> None:
        requests = self.requests
        match action:
            case actions.Dispatch():
                requests.give(requests.get(action.request), action.members)
            case actions.Recompute():
                for name in action.requests:
                    requests.restart(requests.get(name), action.members)
            case actions.Refuse():
                requests.finish(requests.get(action.request), action.reason.value)
            case actions.Cancel():
                requests.cancel(self.run.jobs[int(action.request)])
            case actions.Alone():
                self.active.detach(action.member)
                self.active.begin(alone(action.member, len(self.run.fleet.shape.layers)), action.epoch, ())
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
                pass  # the controller starts a held request later; without a drop, `make_room` swaps or recomputes
