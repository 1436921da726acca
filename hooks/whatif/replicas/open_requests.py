"""Requests of replicas that drop parameters, in virtual time: where each is, and how it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....offload.policy.replicas.dispatch import Members
from ....offload.policy.replicas.events import Arrived, Left
from .jobs import Job
from .pipeline import Pipeline

if TYPE_CHECKING:
    from .drop_policy import DropPolicy


class OpenRequests:
    """Requests that have not ended. `asked`: all, by name; `pipes`: the groups that have them; `early`: of groups that
    are about to be formed."""

    def __init__(self, policy: DropPolicy) -> None:
        self.asked: dict[str, Job] = {}
        self.pipes: dict[Job, Pipeline] = {}
        self.early: dict[Members, list[Job]] = {}
        self._policy = policy
        self._run = policy.run

    def came(self, job: Job) -> None:
        """The controller says where it goes."""
        self.asked[str(job.number)] = job
        now = self._run.events.now
        self._policy.tell(Arrived(now, str(job.number), job.arrival.prompt, max(1, job.arrival.new)))

    def named(self, name: str) -> Job:
        """Returns the one of this name. KeyError."""
        return self.asked[name]

    def over(self, job: Job, error: str = "") -> None:
        """Ends a request, with an error where it has failed."""
        del self.asked[str(job.number)]
        self._run.over(job, error)

    def leave(self, job: Job, why: str) -> None:
        """The client of a request is gone, or was told why nothing comes. Nothing happens where it has ended."""
        if self.asked.get(str(job.number)) is job:
            self.over(job, why)
            self._policy.tell(Left(self._run.events.now, str(job.number)))

    def leave_all(self, why: str) -> None:
        """The same with all requests."""
        for job in [*self.asked.values()]:
            self.leave(job, why)

    def end_all(self, why: str) -> None:
        """Ends all requests; nobody tells the controller."""
        for job in [*self.asked.values()]:
            self.over(job, why)

    def belongs(self, job: Job, pipe: Pipeline) -> None:
        """Notes that the group has the request."""
        self.pipes[job] = pipe

    def forget(self, job: Job) -> None:
        """Notes that no group has the request any more."""
        del self.pipes[job]

    def give(self, job: Job, members: Members) -> None:
        """Sends a request to these replicas, as soon as they are a group."""
        if members in self.early:
            self.early[members].append(job)
        else:
            pipe = self._run.pipes[members]
            self.belongs(job, pipe)
            pipe.add(job)

    def again(self, job: Job, members: Members) -> None:
        """The request starts anew, from the tokens that its client has."""
        if (pipe := self.pipes.get(job)) is not None:
            self.take_out(pipe, job)
        job.reset()
        self.give(job, members)

    def cancel(self, job: Job) -> None:
        """Has a request leave its group, once it is in no microbatch and no copy."""
        pipe = self.pipes.get(job)
        if pipe is None:
            for waiting in self.early.values():
                if job in waiting:
                    waiting.remove(job)
        elif job.flying or job in self._policy.host(pipe).copies:
            job.leaving = True
        else:
            self.take_out(pipe, job)

    def copied(self, pipe: Pipeline, job: Job) -> None:
        """A request that was cancelled while it was copied goes."""
        if job.leaving and not job.flying and job not in self._policy.host(pipe).copies:
            self.take_out(pipe, job)

    def take_out(self, pipe: Pipeline, job: Job) -> None:
        """The request, which is in no microbatch, is in no group any more."""
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
