"""From some groups to others, within one process: requests go over with their KV, one piece at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .kv_exchange import Arrivals, Piece, checksum, exported, moves, pieces
from .local import LocalGroup
from .local_link import LocalLink
from .requests import Request, state_of
from .span_cache import SpanCache
from .stage_link import tensor_of, text_of


@dataclass(slots=True)
class _Job:
    request: Request
    held: int
    old: LocalGroup
    new: LocalGroup
    waits: set[str] = field(default_factory=set)  # replicas that have not got all of it


class Regroup:
    """Requests of `old` groups continue in `new` ones, which serve others meanwhile. The same replicas may be in both,
    with other spans: each has a cache for either."""

    def __init__(
        self, old: Sequence[LocalGroup], new: Sequence[LocalGroup], home: Callable[[Request], int], most: int
    ) -> None:
        """Brings what is in flight in the old groups to its end. `home`: which of the new groups a request goes to;
        `most`: blocks of a piece."""
        self._arrivals = {id(cache): Arrivals(cache) for group in new for cache in group.caches}
        self._jobs: deque[_Job] = deque()
        self._cancelled: set[str] = set()
        self._sent: Iterator[bool] = iter(())
        self._most = most
        self._links: dict[tuple[str, str], tuple[LocalLink, LocalLink]] = {}
        for group in old:
            group.drain()
            for name in list(group.leader.requests):
                held = group.leader.held(name)
                request = group.leader.release(name)
                target = new[home(request)]
                if held:
                    self._jobs.append(_Job(request, held, group, target))
                else:
                    target.add(request)

    @property
    def left(self) -> int:
        """Requests that have not gone over."""
        return len(self._jobs)

    def step(self) -> bool:
        """Moves one piece. False where nothing is left."""
        if next(self._sent, False):
            return True
        if not self._jobs:
            return False
        self._sent = self._move(self._jobs[0])
        return self.step()

    def run(self) -> None:
        """Moves all that is left."""
        while self.step():
            pass

    def cancel(self, request: str) -> None:
        """Ends a request that has not gone over yet."""
        self._cancelled.add(request)

    def _move(self, job: _Job) -> Iterator[bool]:
        """One request; a step for each piece."""
        name = job.request.name
        old, new = _caches(job.old), _caches(job.new)
        job.waits = set(new)
        by_source = moves(
            {each: cache.layers for each, cache in old.items()}, {each: cache.layers for each, cache in new.items()}
        )
        for source, target, layers in by_source:
            for piece in pieces(old[source], name, job.held, layers, self._most):
                if self._carry(old[source], new[target], source, target, piece):
                    job.waits.discard(target)
                yield True
        for cache in old.values():
            cache.give(name)
        self._jobs.popleft()
        self._over(job)

    def _carry(self, old: SpanCache, new: SpanCache, source: str, target: str, piece: Piece) -> bool:
        tensor = exported(old, piece)
        piece = replace(piece, check=checksum(tensor))
        if source != target:
            there, here = self._links.setdefault((source, target), LocalLink.pair())
            there.send(tensor_of(piece.to_json()), "kv", False)
            there.send(tensor, "kv", False)
            piece, tensor = Piece.from_json(text_of(here.recv("kv"))), here.recv("kv")
        return self._arrivals[id(new)].take(piece, tensor)

    def _over(self, job: _Job) -> None:
        name, new = job.request.name, job.new
        if not job.waits and name not in self._cancelled:
            for follower in new.followers:
                follower.adopt(state_of(job.request, job.held))
            new.leader.adopt(job.request, job.held)
            return
        for cache in new.caches:
            cache.give(name)
        if name not in self._cancelled:
            new.add(job.request)


def _caches(group: LocalGroup) -> dict[str, SpanCache]:
    return {member.name: cache for member, cache in zip(group.members, group.caches, strict=True)}
