"""Stages of a group in virtual time: they compute microbatches one after the other and send states on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from .event_queue import EventQueue
from .fleet import VirtualFleet
from .jobs import Job
from .virtual_link import VirtualLink


@dataclass(eq=False, slots=True)
class VirtualMicrobatch:
    """One microbatch. `place`: see pipeline.py; `decodes`: requests that get a token; `chunks`: (request, its tokens
    with KV after this chunk); `seconds`: of compute in all layers; `tokens`: whose hidden states are sent on."""

    place: int
    decodes: list[Job]
    chunks: list[tuple[Job, int]]
    seconds: float
    tokens: int


@dataclass(eq=False, slots=True)
class _Stage:
    part: float  # fraction of all layers
    link: VirtualLink
    queue: deque[VirtualMicrobatch] = field(default_factory=deque)
    running: bool = False
    late: bool = False  # paused at the end of its microbatch


class Stages:
    """The stages of one group. `busy`: seconds of compute; `halted`: they compute nothing any more; `streamed`: bytes
    of layers that each reads from its backing for a microbatch."""

    def __init__(
        self,
        events: EventQueue,
        fleet: VirtualFleet,
        members: tuple[int, ...],
        spans: Sequence[int],
        links: Sequence[VirtualLink],
        silent: Container[int],
        finished: Callable[[VirtualMicrobatch], object],
        freed: Callable[[], object],
    ) -> None:
        """`spans`, `links`: number of layers and link of each member; `silent`: replicas that compute nothing, updated
        by the owner of the set; `finished`: called with each microbatch that the last stage has computed; `freed`:
        called when the first stage may take another."""
        self.busy = 0.0
        self.halted = False
        self.streamed = 0
        self._events = events
        self._fleet = fleet
        self._members = members
        self._stages = [_Stage(span / sum(spans), link) for span, link in zip(spans, links, strict=True)]
        self._silent = silent
        self._finished = finished
        self._freed = freed

    @property
    def takes(self) -> bool:
        """Whether the first stage can begin a microbatch now."""
        first = self._stages[0]
        return not (first.running or first.queue) and self._computes(0)

    def begin(self, microbatch: VirtualMicrobatch) -> None:
        """Has the first stage compute a microbatch."""
        self._stages[0].queue.append(microbatch)
        self._run(0)

    def halt(self) -> None:
        """Stops all stages for good, and drops microbatches in flight."""
        self.halted = True
        for stage in self._stages:
            stage.link.cancel(self)

    def wake(self, member: int) -> None:
        """Resumes the stage of a member that was paused."""
        stage = self._members.index(member)
        if self._stages[stage].late:
            self._stages[stage].late = False
            self._ran(stage)
        else:
            self._run(stage)
        if stage == 0:
            self._freed()

    def _computes(self, stage: int) -> bool:
        return not self.halted and self._members[stage] not in self._silent

    def _run(self, stage: int) -> None:
        here = self._stages[stage]
        if here.running or not here.queue or not self._computes(stage):
            return
        here.running = True
        seconds = max(here.queue[0].seconds * here.part, self.streamed / self._fleet.link)
        self.busy += seconds
        self._events.after(seconds, lambda: self._ran(stage))

    def _ran(self, stage: int) -> None:
        here = self._stages[stage]
        if not self._computes(stage):
            here.late = True
            return
        here.running = False
        done = here.queue.popleft()
        if stage + 1 < len(self._stages):
            nbytes = done.tokens * self._fleet.shape.hidden
            here.link.send(nbytes, lambda: self._arrived(stage + 1, done), urgent=True, owner=self)
        else:
            self._finished(done)
        self._run(stage)
        if stage == 0:
            self._freed()

    def _arrived(self, stage: int, microbatch: VirtualMicrobatch) -> None:
        self._stages[stage].queue.append(microbatch)
        self._run(stage)
