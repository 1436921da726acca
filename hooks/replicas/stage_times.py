"""Times of a replica's microbatches: seconds of compute, errors of predictions, and the pipeline's bubble.

Note [Bubble]
    The bubble is the part of the stages' time in which they wait while their group has work: 1 - busy / open. A stage
    is busy from the first to the last operation of a microbatch's layers. A group of k stages with a microbatch in
    flight is open for k seconds in each second, which its first stage counts; so the time of links and sampling is
    bubble, too (as in the simulation, where links take no time). Groups of one replica count nothing.

Note [The clock of a GPU]
    Work is submitted long before it runs, so a time is taken as an event on the stream. It is converted to the host's
    clock by a reference event, recorded while the stream was idle, and the seconds on the device since then.
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
from .microbatch_plan import Chunk

Mark = Callable[[], float | None]  # seconds at which the device reached the mark; None: it has not yet


class Ran(NamedTuple):
    """A microbatch that has run. `begin`, `end`: in seconds; `sizes`: (tokens before, new tokens) of its chunks;
    `layers`: number of layers that were computed."""

    begin: float
    end: float
    sizes: tuple[tuple[int, int], ...]
    layers: int


class StageTimes:
    """Measures microbatches. Used by one thread. `busy`, `open`: seconds, see Note [Bubble]."""

    def __init__(
        self,
        layers: int,
        cost: ChunkCost | None,
        clock: Callable[[], float],
        mark: Callable[[], Mark],
        on_ran: Callable[[Ran], object] = lambda ran: None,
        tuning: Replicas = DEFAULT.replicas,
    ) -> None:
        """`layers`: of the model; `cost`: predicts the seconds of a microbatch in all layers; `clock`: of the host, in
        seconds; `mark`: records a mark on the device; `on_ran`: called with each microbatch once its time is known."""
        self.busy = 0.0
        self.open = 0.0
        self._layers = layers
        self._cost = cost
        self._clock = clock
        self._mark = mark
        self._on_ran = on_ran
        self._errors: deque[float] = deque(maxlen=tuning.judged)
        self._running: deque[tuple[Mark, Mark, Sequence[Chunk], int]] = deque()
        self._since: tuple[float, int] | None = None  # (since when `open` is not counted yet, open stages)

    def begin(self) -> Mark:
        """Marks the begin of a microbatch, before it is submitted."""
        return self._mark()

    def end(self, began: Mark, chunks: Sequence[Chunk], layers: int) -> None:
        """Marks the end of a microbatch, after it is submitted."""
        self._running.append((began, self._mark(), chunks, layers))
        self.poll()

    def poll(self) -> None:
        """Takes in the microbatches that have run."""
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
        """Whether the times of all submitted microbatches are known."""
        return not self._running

    def set_open_stages(self, stages: int) -> None:
        """Counts so many stages as open from now on: those of the group that this replica leads; 0: it has no work."""
        if self._since is None and stages < 2:
            return
        now = self._clock()
        if self._since is not None:
            since, before = self._since
            self.open += before * (now - since)
        self._since = (now, stages) if stages > 1 else None

    @property
    def error(self) -> float | None:
        """Mean relative error of the predicted seconds of the latest microbatches; None before the first."""
        return statistics.fmean(self._errors) if self._errors else None

    def _take(self, ran: Ran) -> None:
        seconds = ran.end - ran.begin
        if ran.layers < self._layers:
            self.busy += seconds
        if self._cost is not None and seconds > 0:
            whole = self._cost.batch(ran.sizes)
            self._errors.append(abs(whole * ran.layers / self._layers / seconds - 1))
        self._on_ran(ran)


class HostTimeMarks:
    """Marks of a device that computes synchronously, the CPU."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def __call__(self) -> Mark:
        """Returns a mark with the present time."""
        now = self._clock()
        return lambda: now


class CudaTimeMarks:
    """Marks in the current stream of a GPU. See Note [The clock of a GPU]."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._reference: tuple[Any, float] | None = None

    def __call__(self) -> Mark:
        """Records a mark in the current stream."""
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
    """Returns a function that records marks on a device."""
    return CudaTimeMarks(device, clock) if device.type == "cuda" else HostTimeMarks(clock)
