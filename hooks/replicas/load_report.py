"""What a replica tells the supervisor of itself while it runs: that its main loop goes on, and how full it is.

Note [Wished pages]
    Who goes down the ladder of this device and lacks pages up to rung 7 wishes for a drop (duplicates.py of the
    governor). That is demand like that of prompts which wait, so it is told as such for a while, and the controller,
    which sees all replicas and predicts what a drop would gain, decides as it does for them.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from ...offload.policy.replicas import events
from ...offload.policy.replicas.demand import KVSize, prompt_pages
from .replica_setup import ReplicaSetup
from .stage import Stage


class LoadReport:
    """Counts the turns of the main loop, and tells the load now and then."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self._progress = 0
        self._told_at = -1.0
        self._told: events.Load | None = None
        self._lock = threading.Lock()
        self._wished: list[tuple[float, int]] = []  # until when, and how many pages

    def wish(self, pages: int) -> None:
        """Counts pages that were lacking on this device as demand. See Note [Wished pages]. Any thread."""
        until = self._setup.clock() + self._setup.tuning.wished
        with self._lock:
            self._wished.append((until, pages))

    def beat(self, epoch: int, stage: Stage | None) -> None:
        """Counts one more. SupervisorLost."""
        self._progress += 1
        now = self._setup.clock()
        if epoch < 0 or not self._is_due(now):
            return
        used, free, pending = (0, 0, 0) if stage is None else pages_of(stage, self._setup.layers)
        pending += self._wishes(now)
        self._tell(events.Load(0.0, self._setup.me, epoch, used, free, pending, self._progress), now)

    def goes_on(self) -> None:
        """Counts one more in the middle of a long turn, and tells the load as it was told last: the cache and its locks
        may not be asked there. SupervisorLost."""
        self._progress += 1
        now = self._setup.clock()
        if self._told is not None and self._is_due(now):
            self._tell(replace(self._told, progress=self._progress), now)

    def _is_due(self, now: float) -> bool:
        tuning = self._setup.tuning
        return now - self._told_at >= min(tuning.beat, tuning.period)

    def _tell(self, load: events.Load, now: float) -> None:
        self._told, self._told_at = load, now
        self._setup.supervisor.post(load)

    def _wishes(self, now: float) -> int:
        """Pages that are wished for."""
        with self._lock:
            self._wished = [(until, pages) for until, pages in self._wished if until > now]
            return sum(pages for _, pages in self._wished)


def pages_of(stage: Stage, layers: int) -> tuple[int, int, int]:
    """Pages of KV on the device, those that are free, and those that are waited for: by prompts, and by KV that had to
    leave for the host. What idles in the heap between two steps is no free memory: activations have it. `layers`: of
    the model, as the supervisor counts prompts by all of them."""
    cache = stage.cache
    page = cache.on.page_size
    cache.pool.try_to_free_sectors()  # of requests that have ended: nobody asks while nothing runs
    waiting = () if stage.leader is None else stage.leader.requests.waiting
    size = KVSize(round(cache.token_bytes * layers / len(cache.layers)), page)
    away = cache.pages.client.displaced
    return cache.pages.nbytes // page - away, cache.on.available, prompt_pages(waiting, size) + away
