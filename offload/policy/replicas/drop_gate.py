"""Whether a drop is worth it: the predicted time until the queue is drained with it, against that without.

Note [Gate]
    Memory for KV helps where requests wait for memory. Where they wait for their prompts to be computed, a pipeline
    only adds bubbles and the exchange of KV (a simulation of 14B with 8 replicas had swapping before dropping).
    Both cases are simulated round by round with the same cost model. In a round every running request decodes a token,
    and up to `chunk` tokens of prompts are computed with them in each microbatch. A group of k runs k microbatches in a
    round; each takes 1/k of its cost on a stage, so a round takes the sum of the costs divided by k, times 1 + bubble.
    A queued request starts when its prompt and its expected answer fit, in the order of the queue; requests that end
    make room. The queue is drained when the last prompt is computed.
    With the drop, requests that were running wait until their KV is exchanged, and so end later, while new prompts are
    computed meanwhile (§4.2).

    Limits: rounds that only decode are assumed to last as long as the first of them, until a request starts or ends; no
    request fails or is cancelled.

Note [Demand goes on]
    A drop lasts at least for the dwell. A queue that is drained sooner says little about it: the gain may only be that
    two replicas share an uneven load, while all later requests pay for the pipeline. (In a simulation of 14B with
    prompts of code eight replicas merged for 0.07 s, and the P99 TTFT was 1.22 times that of the best policy.) So
    requests like the queued ones are assumed to follow for the dwell, and the times to compute all of them are
    compared. The present groups count with their mean, as the dispatcher evens out their loads.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..tuning import DEFAULT
from ..tuning import Replicas as Tuning


class CostModel(Protocol):
    """Seconds of compute on a replica with all layers. A chunk is (tokens before it, tokens in it)."""

    def seconds(self, before: int, new: int) -> float:
        """Returns the seconds of one chunk alone."""
        ...

    def batch(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Returns the seconds of the chunks of one microbatch together."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of one group. `capacity`: tokens of KV; `stages`: replicas in it. `queued`: (tokens of the prompt,
    tokens that it is expected to generate) in order; `running`: (tokens of KV, tokens still to generate). `stall`:
    seconds until running requests go on, as their KV is exchanged."""

    capacity: int
    stages: int
    queued: Sequence[tuple[int, int]]
    running: Sequence[tuple[int, int]] = ()
    stall: float = 0.0


@dataclass(slots=True)
class _Request:
    prompt: int  # tokens to compute, of which `done` are
    new: int  # tokens to generate yet
    done: int = 0
    total: int = 0  # tokens of KV at its end


@dataclass(slots=True)
class _Replay:
    """A simulation of one group until its queue is drained."""

    work: Work
    tuning: Tuning
    now: float = 0.0
    free: int = 0
    queue: deque[_Request] = field(default_factory=deque)
    running: list[_Request] = field(default_factory=list)  # may decode
    stalled: list[_Request] = field(default_factory=list)  # their KV is on the way
    prefill: deque[_Request] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.queue.extend(_Request(prompt, max(1, new), 0, prompt + max(1, new)) for prompt, new in self.work.queued)
        old = [_Request(tokens, max(1, left), tokens, tokens + max(1, left)) for tokens, left in self.work.running]
        (self.stalled if self.work.stall > 0 else self.running).extend(old)
        self.free = self.work.capacity - sum(request.total for request in old)

    def admit(self) -> None:
        """Starts the queued requests that fit, in order."""
        if self.stalled and self.now >= self.work.stall:
            self.running.extend(self.stalled)
            self.stalled.clear()
        while self.queue and self.queue[0].total <= self.free:
            self.free -= self.queue[0].total
            self.prefill.append(self.queue.popleft())

    def round(self, cost: CostModel) -> None:
        """Advances by one round, or by the rounds that only decode until a request ends or a stall is over."""
        microbatches: list[list[tuple[int, int]]] = [[] for _ in range(self.work.stages)]
        for number, request in enumerate(self.running):
            microbatches[number % len(microbatches)].append((request.done, 1))
        only_decodes = not self.prefill
        computed = self._prompts(microbatches)
        seconds = sum(cost.batch(chunks) for chunks in microbatches if chunks) / self.work.stages
        if self.work.stages > 1:
            seconds *= 1 + self.tuning.bubble
        times = self._until_change(seconds) if only_decodes else 1
        self.now += times * seconds
        self._decode(times)
        self.running.extend(computed)

    def _prompts(self, microbatches: list[list[tuple[int, int]]]) -> list[_Request]:
        """Adds chunks of prompts to the microbatches. Returns the requests whose prompts they complete."""
        complete = []
        for chunks in microbatches:
            room = self.tuning.chunk
            while self.prefill and room:
                request = self.prefill[0]
                size = min(room, request.prompt - request.done)
                chunks.append((request.done, size))
                request.done += size
                room -= size
                if request.done == request.prompt:
                    complete.append(self.prefill.popleft())
        return complete

    def _until_change(self, seconds: float) -> int:
        """Returns the rounds until the first running request ends, or the stalled ones go on."""
        ends = min(request.new for request in self.running)
        if not self.stalled or seconds <= 0:
            return ends
        return max(1, min(ends, math.ceil((self.work.stall - self.now) / seconds)))

    def _decode(self, times: int) -> None:
        for request in self.running:
            request.new -= times
            request.done += times
        self.free += sum(ended.total for ended in self.running if ended.new <= 0)
        self.running = [left for left in self.running if left.new > 0]


def drain_seconds(work: Work, cost: CostModel, tuning: Tuning = DEFAULT.replicas) -> float:
    """Returns the seconds until the last queued prompt is computed; infinity where one never fits. See Note [Gate]."""
    replay = _Replay(work, tuning)
    for _ in range(tuning.rounds):
        replay.admit()
        if not replay.queue and not replay.prefill:
            return replay.now
        if replay.prefill or replay.running:
            replay.round(cost)
        elif replay.stalled:
            replay.now = work.stall
        else:
            break
    return math.inf


@dataclass(frozen=True, slots=True)
class Verdict:
    """Predicted seconds to drain the queue, and whether the drop is worth it."""

    dropped: float
    kept: float
    helps: bool


def judge(kept: Iterable[Work], dropped: Work, cost: CostModel, tuning: Tuning = DEFAULT.replicas) -> Verdict:
    """Compares the present groups (`kept`, weighted by their replicas) with the group into which they would merge. See
    Note [Demand goes on]."""
    parts = list(kept)
    seconds = _mean(parts, cost, tuning)
    if 0 < seconds < tuning.dwell:
        times = math.ceil(tuning.dwell / seconds) - 1
        parts = _dealt(parts, [*dropped.queued] * times)
        dropped = replace(dropped, queued=[*dropped.queued] * (times + 1))
        seconds = _mean(parts, cost, tuning)
    with_drop = drain_seconds(dropped, cost, tuning)
    return Verdict(with_drop, seconds, with_drop < seconds * (1 - tuning.gain))


def _mean(parts: Sequence[Work], cost: CostModel, tuning: Tuning) -> float:
    """Returns the seconds to drain the queues, as a mean over replicas."""
    return sum(drain_seconds(work, cost, tuning) * work.stages for work in parts) / sum(work.stages for work in parts)


def _dealt(parts: Sequence[Work], more: Sequence[tuple[int, int]]) -> list[Work]:
    """Returns the work with `more` requests appended, dealt evenly to the replicas."""
    first, total, dealt = 0, sum(work.stages for work in parts), []
    for work in parts:
        mine = [request for n in range(first, first + work.stages) for request in more[n::total]]
        dealt.append(replace(work, queued=[*work.queued, *mine]))
        first += work.stages
    return dealt
