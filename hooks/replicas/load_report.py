"""What a replica tells the supervisor of itself while it runs: that its main loop goes on, and how full it is."""

from __future__ import annotations

from ...offload.policy.replicas import events
from ...offload.policy.replicas.demand import KVSize, prompt_pages
from .setup import Setup
from .stage import Stage


class LoadReport:
    """Counts the turns of the main loop, and tells the load now and then."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._progress = 0
        self._told_at = -1.0

    def beat(self, epoch: int, stage: Stage | None) -> None:
        """Counts one more. SupervisorLost."""
        tuning = self._setup.tuning
        self._progress += 1
        now = self._setup.clock()
        if epoch < 0 or now - self._told_at < min(tuning.beat, tuning.period):
            return
        self._told_at = now
        used, free, pending = (0, 0, 0) if stage is None else pages_of(stage, self._setup.layers)
        self._setup.supervisor.post(events.Load(0.0, self._setup.me, epoch, used, free, pending, self._progress))


def pages_of(stage: Stage, layers: int) -> tuple[int, int, int]:
    """Pages of KV on the device, those that are free, and those that are waited for: by prompts, and by KV that had to
    leave for the host. What idles in the heap between two steps is no free memory: activations have it. `layers`: of
    the model, as the supervisor counts prompts by all of them."""
    cache = stage.cache
    page = cache.on.page_size
    cache.pool.try_to_free_sectors()  # of requests that have ended: nobody asks while nothing runs
    waiting = () if stage.leader is None else stage.leader.waiting
    size = KVSize(round(cache.token_bytes * layers / len(cache.layers)), page)
    away = cache.pages.client.displaced
    return cache.pages.nbytes // page - away, cache.on.available, prompt_pages(waiting, size) + away
