"""Reports a replica's load and heartbeat to the supervisor.

Note [Wished pages]
    An allocation on this device that still lacks pages at rung 7 of the ladder wishes for a drop
    (offload/governor/duplicates.py). Its pages are reported as pending for a while, like those of prompts that wait,
    and the controller, which knows all replicas and predicts the gain of a drop, decides.
"""

from __future__ import annotations

import threading

from msgspec.structs import replace

from ...offload.policy.replicas import events
from ...offload.policy.replicas.demand import KVSize, prompt_pages
from .replica_setup import ReplicaSetup
from .stage import Stage


class LoadReport:
    """Counts the iterations of the main loop, and sends the load periodically."""

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self._progress = 0
        self._told_at = -1.0
        self._told: events.Load | None = None
        self._lock = threading.Lock()
        self._wished: list[tuple[float, int]] = []  # until when, and how many pages

    def add_wish(self, pages: int) -> None:
        """Adds pages that were lacking on this device to the demand. Thread-safe. See Note [Wished pages]."""
        until = self._setup.clock() + self._setup.tuning.wished
        with self._lock:
            self._wished.append((until, pages))

    def beat(self, epoch: int, stage: Stage | None) -> None:
        """Counts an iteration, and sends the load if it is due. SupervisorLost."""
        self._progress += 1
        now = self._setup.clock()
        if epoch < 0 or not self._is_due(now):
            return
        used, free, pending = (0, 0, 0) if stage is None else pages_of(stage, self._setup.layers)
        pending += self._wishes(now)
        self._tell(events.Load(0.0, self._setup.me, epoch, used, free, pending, self._progress), now)

    def beat_mid_step(self) -> None:
        """Counts progress within a long iteration, and repeats the latest load if it is due: the cache and its locks
        must not be used here. SupervisorLost."""
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
        """Returns the pages that are wished for."""
        with self._lock:
            self._wished = [(until, pages) for until, pages in self._wished if until > now]
            return sum(pages for _, pages in self._wished)


def pages_of(stage: Stage, layers: int) -> tuple[int, int, int]:
    """Returns pages: (of KV on the device, free, pending). Pending are those for prompts that wait, and for KV that had
    to move to the host. Idle memory of the heap between two steps belongs to activations, and does not count as free.
    `layers`: of the model; pending prompts count with all of them."""
    cache = stage.cache
    page = cache.on.page_size
    cache.pool.try_to_free_sectors()  # of ended requests: otherwise freed only when the next request needs some
    waiting = () if stage.leader is None else stage.leader.requests.waiting
    size = KVSize(round(cache.token_bytes * layers / len(cache.layers)), page)
    away = cache.pages.client.displaced
    return cache.pages.nbytes // page - away, cache.on.available, prompt_pages(waiting, size) + away
