"""Drops and restores: which groups merge, whether that is worth it, and which layers return (KunServe §4.1, §4.4).

Note [What a drop frees]
    A group of k holds the model once instead of k times: each merge frees one model, M. But a member that drops layers
    keeps one slot, as large as the largest layer that it dropped: dropped layers stream through it if the member has
    to run alone. So a configuration has freed

        merges x M - sum over members of one slot.

    Fig. 6 counts whole models, and so does `drop_plan`. To get R pages net, pass `gross_needed`, which adds what the
    slots may take.

Note [Fewest instances]
    The two groups with the fewest members merge, since each further stage costs latency (§4.1, Fig. 5). Each member
    holds at least one layer, so once the two smallest groups have more members than the model layers, none can merge.

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

Note [Next needed first]
    A member of a group has just computed its span, so once alone it next needs the layer after its span, and after the
    last layer the first. It pulls in that order, M(k - 1)/k in all. In a group each layer has one holder; members of
    undropped groups hold all. Where no peer answers, or none holds the layer, the layer comes from its backing (host
    copy or file).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from .groups import Group, Span, pulled, regroup
from .tuning import DEFAULT
from .tuning import ReplicaTuning as Tuning

# Which groups merge


@dataclass(frozen=True, slots=True)
class DropPlan:
    """Groups that merge into others, the new ones being `formed`. `pulls`: layers that a member must pull to hold its
    new span; empty where all spans lie inside the old ones."""

    formed: tuple[Group, ...]
    pulls: dict[int, tuple[int, ...]]


def drop_plan(groups: Iterable[Group], needed: int, pages: Sequence[int]) -> DropPlan:
    """Merges the two groups with fewest members until `needed` pages are freed or no two can merge. `pages` of each
    layer. Among groups of equal size the first in `groups` merge first. O(N log N). See Note [Fewest instances]."""
    model, merges = sum(pages), 0
    queue: list[tuple[int, int, tuple[Group, ...]]] = [(group.size, n, (group,)) for n, group in enumerate(groups)]
    heapq.heapify(queue)
    while len(queue) >= 2 and merges * model < needed:
        first = heapq.heappop(queue)
        if first[0] + queue[0][0] > len(pages):
            heapq.heappush(queue, first)
            break
        size, number, parts = queue[0]
        heapq.heapreplace(queue, (first[0] + size, min(first[1], number), (*first[2], *parts)))
        merges += 1
    formed: list[Group] = []
    pulls: dict[int, tuple[int, ...]] = {}
    for _, _, parts in sorted(queue, key=lambda entry: entry[1]):
        if len(parts) > 1:
            held = {member: span for group in parts for member, span in zip(group.members, group.spans, strict=True)}
            formed.append(regroup(held, pages))
            pulls.update(pulled(formed[-1], held))
    return DropPlan(tuple(formed), pulls)


def gross_needed(needed: int, pages: Sequence[int]) -> int | None:
    """Returns the pages to ask `drop_plan` for, so that at least `needed` are freed net; None where a merge may free
    nothing. A merge adds at most two slots of the largest layer: in a group that has dropped, all members have such a
    slot already, but perhaps the one that holds that layer."""
    model, worst = sum(pages), 2 * max(pages)
    return None if model <= worst else -(-needed * model // (model - worst))


def with_growth(groups: Iterable[Group], needed: int, growth: int, pages: Sequence[int]) -> int | None:
    """Returns `gross_needed` with the expected `growth` of demand, limited to what lone replicas free as pairs."""
    gross, more = gross_needed(needed, pages), gross_needed(needed + growth, pages)
    if gross is None or more is None:
        return None
    pairs = sum(not group.is_dropped for group in groups) // 2
    return max(gross, min(more, pairs * sum(pages)))


# Restores


@dataclass(frozen=True, slots=True)
class Pull:
    """A layer that a member pulls from the replica `source`, or from its own backing where that is None."""

    member: int
    layer: int
    source: int | None


def pull_order(span: Span, layers: int) -> tuple[int, ...]:
    """Returns the layers outside of a span, the one that is needed next first. See Note [Next needed first]."""
    return (*range(span.end, layers), *range(span.begin))


def restore_plan(member: int, held: Span, layers: int, peers: Iterable[Group]) -> tuple[Pull, ...]:
    """Returns the pulls of a member that holds `held`, each from the first of the `peers`' members with the layer."""
    sources: Mapping[int, int] = {
        layer: source
        for group in reversed([*peers])
        for source, span in zip(group.members, group.spans, strict=True)
        if source != member
        for layer in span.layers
    }
    return tuple(Pull(member, layer, sources.get(layer)) for layer in pull_order(held, layers))


def group_restore(group: Group) -> dict[int, tuple[Pull, ...]]:
    """Returns the pulls of all members of a group, each from the others."""
    return {
        member: restore_plan(member, span, group.layers, (group,))
        for member, span in zip(group.members, group.spans, strict=True)
    }


def homes(demands: Mapping[str, int], room: Mapping[int, int]) -> dict[str, int] | None:
    """Returns the member that each request of a group goes to when the group ends: largest demand first, to the member
    with most room, both in tokens of KV. None where a request fits none: then the group cannot end."""
    left, targets = dict(room), {}
    for request in sorted(demands, key=lambda demand: (-demands[demand], demand)):
        member = max(left, key=lambda other: (left[other], -other))
        if left[member] < demands[request]:
            return None
        left[member] -= demands[request]
        targets[request] = member
    return targets


# Whether a drop is worth it


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


# Rounds after which the end of a queue counts as never: minutes of decoding, a second to predict. Chosen.
_ROUNDS: Final = 20_000


def drain_seconds(work: Work, cost: CostModel, tuning: Tuning = DEFAULT) -> float:
    """Returns the seconds until the last queued prompt is computed; infinity where one never fits. See Note [Gate]."""
    replay = _Replay(work, tuning)
    for _ in range(_ROUNDS):
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


def judge(kept: Iterable[Work], dropped: Work, cost: CostModel, tuning: Tuning = DEFAULT) -> Verdict:
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
