"""Other values than the defaults, and another clock, for what is composed at the edge: the manager of a device, and
all that it hands its parts to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ballonet.hooks.device import managers
from ballonet.hooks.device.managers import Composition

Parts = Mapping[str, Any]  # values of one part of Tuning, by name


class Clock:
    """Seconds that pass when a test says so: `now` is set, or `step` passes at each look."""

    def __init__(self, now: float = 0.0, step: float = 0.0) -> None:
        self.now = now
        self.step = step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class Tuned:
    """Called with values by part, `tuned(kv_reads={"again": 2}, clock=clock)`: those given before stay. No model is
    managed then."""

    def __init__(self, composition: Composition) -> None:
        self._composition = composition

    def __call__(
        self, *, clock: Callable[[], float] | None = None, waits: Callable[[], float] | None = None, **parts: Parts
    ) -> None:
        tuning = self._composition.tuning
        changed = {name: replace(getattr(tuning, name), **values) for name, values in parts.items()}
        now = self._composition
        self._composition = now._replace(
            tuning=replace(tuning, **changed), clock=clock or now.clock, waits=waits or now.waits
        )
        managers.compose_with(self._composition)


@contextmanager
def tuning(*, clock: Callable[[], float] | None = None, **parts: Parts) -> Iterator[Tuned]:
    """As the fixture `tuned`, where there are no fixtures. Within it these values hold."""
    before = managers.composed_with()
    try:
        tuned = Tuned(before)
        tuned(clock=clock, **parts)
        yield tuned
    finally:
        managers.compose_with(before)
