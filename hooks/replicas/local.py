"""A group whose stages are all in one process and one thread: what happens in which order is the caller's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .follower import Follower
from .forming import Form, by_tokens
from .leader import Leader, Told
from .local_link import LocalLink
from .member import Member, cache_of, most_tokens, room_of
from .requests import Request
from .span_cache import SpanCache
from .span_runner import SpanRunner


class LocalGroup:
    """Stages in the order of their layers; the first one leads."""

    def __init__(
        self, epoch: int, members: Sequence[Member], spans: Sequence[range], told: Told, form: Form = by_tokens
    ) -> None:
        """`spans`: of layers, by member. ManageError, torch.OutOfMemoryError."""
        self.members = members
        self.spans = spans
        self.caches = [cache_of(member, layers) for member, layers in zip(members, spans, strict=True)]
        links = [LocalLink.pair() for _ in members]  # from each stage to the next one, round to the first
        self._before = [links[stage - 1][1] for stage in range(len(members))]
        runners = [
            SpanRunner(member.model, member.runs, cache, member.settings)
            for member, cache in zip(members, self.caches, strict=True)
        ]
        self.followers = [
            Follower(
                epoch, n, self.caches[n], runners[n], self._before[n], links[n][0], _bound(room_of, self.caches[n])
            )
            for n in range(1, len(members))
        ]
        several = len(members) > 1
        self.leader = Leader(
            epoch,
            self.caches[0],
            runners[0],
            members[0].settings,
            told,
            after=links[0][0] if several else None,
            last=self._before[0] if several else None,
            rooms=tuple(each.room for each in self.followers),
            most=min((most_tokens(cache) for cache in self.caches[1:]), default=float("inf")),
            form=form,
        )

    def add(self, request: Request) -> None:
        """Takes a request. RequestTooLarge, SLOError, ManageError."""
        self.leader.add(request)

    def ready(self, stage: int) -> bool:
        """Can a stage do something now? The first one, stage 0: is an answer there, or is there a place?"""
        if stage:
            return self._before[stage].has("plan")
        return self.answered or not self.leader.idle

    @property
    def answered(self) -> bool:
        """Is an answer there that the first stage has not taken in?"""
        several = len(self.members) > 1
        return self._before[0].has("answer") if several else self.leader.in_flight > 0

    def step(self) -> bool:
        """Every stage computes a microbatch if one is there, the last one first; then the first stage takes in an
        answer and begins the next microbatch. Did anything happen?"""
        happened = False
        for follower in reversed(self.followers):
            if self.ready(follower.stage):
                follower.run()
                happened = True
        if self.answered:
            happened = self.leader.collect() or happened
        return self.leader.launch() or happened

    def run(self, steps: int = 10_000) -> None:
        """Steps until nothing is left to do. RuntimeError after so many steps."""
        for _ in range(steps):
            if not self.step() and self.leader.idle:
                return
        raise RuntimeError(f"after {steps} steps there are requests yet: {sorted(self.leader.requests)}")

    def drain(self) -> None:
        """Brings what is in flight to its end; nothing new is planned from now on."""
        self.leader.plans = False
        while self.leader.in_flight or self.leader.queued:
            self.step()


def _bound(room: Callable[[SpanCache], int], cache: SpanCache) -> Callable[[], int]:
    return lambda: room(cache)
