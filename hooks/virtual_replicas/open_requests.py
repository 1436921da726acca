"""The open requests of replicas that drop layers, in virtual time: the group of each, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...offload.policy.replicas.dispatch import Members
from ...offload.policy.replicas.events import Arrived, Left
from .jobs import Job
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .drop_policy import DropPolicy


class OpenRequests:
    """Requests that have not ended. `by_name`: all; `pipes`: the group of each; `early`: requests of groups that will
    begin soon."""

    def __init__(self, policy: DropPolicy) -> None:
        self.by_name: dict[str, Job] = {}
        self.pipes: dict[Job, Pipeline] = {}
        self.early: dict[Members, list[Job]] = {}
        self._policy = policy
        self._run = policy.run

    def arrive(self, job: Job) -> None:
        """Adds a request, and passes it to the controller."""
        self.by_name[str(job.number)] = job
        now = self._run.events.now
        self._policy.tell(Arrived(now, str(job.number), job.arrival.prompt, max(1, job.arrival.new)))

    def get(self, name: str) -> Job:
        """Returns the request of this name. KeyError."""
        return self.by_name[name]

    def finish(self, job: Job, error: str = "") -> None:
        """Ends a request. `error`: why it has failed; empty: it has not."""
        del self.by_name[str(job.number)]
        self._run.finish(job, error)

    def leave(self, job: Job, why: str) -> None:
        """Ends a request whose client is gone, or got the error `why`, and tells the controller. Nothing where it has
        ended."""
        if self.by_name.get(str(job.number)) is job:
            self.finish(job, why)
            self._policy.tell(Left(self._run.events.now, str(job.number)))

    def leave_all(self, why: str) -> None:
        """Ends all requests with an error, and tells the controller."""
        for job in [*self.by_name.values()]:
            self.leave(job, why)

    def end_all(self, why: str) -> None:
        """Ends all requests with an error, without telling the controller."""
        for job in [*self.by_name.values()]:
            self.finish(job, why)

    def assign(self, job: Job, pipe: Pipeline) -> None:
        """Notes the group of a request."""
        self.pipes[job] = pipe

    def forget(self, job: Job) -> None:
        """Notes that a request has no group any more."""
        del self.pipes[job]

    def give(self, job: Job, members: Members) -> None:
        """Gives a request to the group of these replicas, once that has begun."""
        if members in self.early:
            self.early[members].append(job)
        else:
            pipe = self._run.pipes[members]
            self.assign(job, pipe)
            pipe.add(job)

    def restart(self, job: Job, members: Members) -> None:
        """Computes a request anew in a group, after the tokens that its client has."""
        if (pipe := self.pipes.get(job)) is not None:
            self.take_out(pipe, job)
        job.reset()
        self.give(job, members)

    def cancel(self, job: Job) -> None:
        """Removes a request from its group, once it is in no microbatch and no copy."""
        pipe = self.pipes.get(job)
        if pipe is None:
            for waiting in self.early.values():
                if job in waiting:
                    waiting.remove(job)
        elif job.in_flight or job in self._policy.host(pipe).copies:
            job.leaving = True
        else:
            self.take_out(pipe, job)

    def finish_cancel(self, pipe: Pipeline, job: Job) -> None:
        """Removes a request that was cancelled during its copy."""
        if job.leaving and not job.in_flight and job not in self._policy.host(pipe).copies:
            self.take_out(pipe, job)

    def take_out(self, pipe: Pipeline, job: Job) -> None:
        """Removes a request, which is in no microbatch, from its group."""
        host = self._policy.host(pipe)
        if job in host.away:
            host.away.remove(job)
            host.room += self._policy.nbytes(job)
        else:
            pipe.remove(job)
            pipe.release(job)
        self.forget(job)
        job.reset()
        pipe.pump()
