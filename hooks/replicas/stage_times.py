"""What the microbatches of a replica took: how long it computed, how far predictions were off, the pipeline's bubble.

Note [Bubble]
    The part of the time of all stages of pipelines in which they wait, while their group has work: 1 - busy / open. A
    stage is busy from the first to the last operation of a microbatch's layers. A group of k stages with a microbatch
    in flight is open for k seconds in each second, which its first stage counts; so what links and sampling take is
    bubble, too (the simulation, where links take no time, counts alike). Replicas that hold all layers count nothing.

Note [The clock of a GPU]
    Work is submitted long before it runs, so a moment is an event on the stream. Its time is that of the host's clock
    at a reference event, which is recorded while the stream has nothing to do, plus what passed on the device since.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...offload.policy.replicas.chunk_cost import ChunkCost
from ...offload.policy.tuning import DEFAULT, Replicas
from .plan import Chunk

Mark = Callable[[], float | None]  # seconds of the clock at which the device was there; None: it is not there yet


class Ran(NamedTuple):
    """A microbatch that has run. Seconds of the clock; `sizes`: (tokens before, new tokens) of its chunks; `layers`:
    computed."""

    begin: float
    end: float
    sizes: tuple[tuple[int, int], ...]
    layers: int


class StageTimes:
    """Used by one thread. `busy`, `open`: see Note [Bubble]."""

    def __init__(
        self,
        layers: int,
        cost: ChunkCost | None,
        clock: Callable[[], float],
        mark: Callable[[], Mark],
        told: Callable[[Ran], object] = lambda ran: None,
        tuning: Replicas = DEFAULT.replicas,
    ) -> None:
        """`layers`: of the model; `cost`: predicts what a microbatch takes in all of them; `clock`: of the host, in
        seconds; `mark`: the present moment on the device; `told`: of each microbatch, once it is known what it took."""
        self.busy = 0.0
        self.open = 0.0
        self._layers = layers
        self._cost = cost
        self._clock = clock
        self._mark = mark
        self._told = told
        self._errors: deque[float] = deque(maxlen=tuning.judged)
        self._running: deque[tuple[Mark, Mark, Sequence[Chunk], int]] = deque()
        self._since: tuple[float, int] | None = None  # when a group had work first, and its stages

    def begin(self) -> Mark:
        """A microbatch is computed from now on."""
        return self._mark()

    def end(self, began: Mark, chunks: Sequence[Chunk], layers: int) -> None:
        """All of it is submitted."""
        self._running.append((began, self._mark(), chunks, layers))
        self.poll()

    def poll(self) -> None:
        """Takes in what has run since."""
        while self._running:
            begin, end, chunks, layers = self._running[0]
            ended, began = end(), begin()
            if ended is None or began is None:
                return
            self._running.popleft()
            sizes = tuple((each.before, len(each.ids)) for each in chunks)
            self._take(Ran(began, ended, sizes, layers))

    @property
    def all_timed(self) -> bool:
        """Is nothing computed whose time is not known?"""
        return not self._running

    def set_open_stages(self, stages: int) -> None:
        """From now on so many stages are open: those of the group that this replica leads; 0: it has no work."""
        if self._since is None and stages < 2:
            return
        now = self._clock()
        if self._since is not None:
            since, before = self._since
            self.open += before * (now - since)
        self._since = (now, stages) if stages > 1 else None

    @property
    def error(self) -> float | None:
        """Mean relative error of what the latest microbatches were predicted to take; None before the first."""
        return statistics.fmean(self._errors) if self._errors else None

    def _take(self, ran: Ran) -> None:
        seconds = ran.end - ran.begin
        if ran.layers < self._layers:
            self.busy += seconds
        if self._cost is not None and seconds > 0:
            whole = self._cost.batch(ran.sizes)
            self._errors.append(abs(whole * ran.layers / self._layers / seconds - 1))
        self._told(ran)


class HostMarks:
    """Marks of a device that computes when it is told to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def __call__(self) -> Mark:
        """The present moment."""
        now = self._clock()
        return lambda: now


class CudaMarks:
    """Marks on the current stream of a GPU. See Note [The clock of a GPU]."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._reference: tuple[Any, float] | None = None

    def __call__(self) -> Mark:
        """The moment at which the stream gets here."""
        stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event(enable_timing=True)
        if self._reference is None:
            stream.synchronize()
        if self._reference is None or stream.query():
            event.record(stream)
            self._reference = event, self._clock()
            at = self._reference[1]
            return lambda: at
        event.record(stream)
        before, at = self._reference

        def reached() -> float | None:
            return at + before.elapsed_time(event) / 1e3 if event.query() else None

        return reached


def marks_of(device: torch.device, clock: Callable[[], float] = time.monotonic) -> Callable[[], Mark]:
    """What makes marks on a device."""
    return CudaMarks(device, clock) if device.type == "cuda" else HostMarks(clock)
