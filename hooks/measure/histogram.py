"""Histograms of durations, as Prometheus has them."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from ...offload.policy.tuning import DEFAULT


class Histogram:
    """Counts of durations by bucket. Any thread may add and read."""

    __slots__ = ("_bounds", "_counts", "_lock", "_total")

    def __init__(self, bounds: Sequence[float] = DEFAULT.watching.buckets) -> None:
        """`bounds`: the upper ends of the buckets, ascending, in seconds; one more bucket has all longer durations."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        """Counts one duration, in less than a microsecond, as it runs for each forward."""
        with self._lock:
            self._counts[bisect_left(self._bounds, seconds)] += 1
            self._total += seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: `bounds`, `counts` (of each bucket alone, one more than bounds), `seconds` (the
        sum)."""
        with self._lock:
            return {"bounds": list(self._bounds), "counts": list(self._counts), "seconds": self._total}


class Latencies:
    """How long the requests of one model took: from arrival to the first token (TTFT), and per token after that
    (TPOT)."""

    def __init__(self) -> None:
        self.ttft = Histogram()
        self.tpot = Histogram()


class RequestTimes:
    """Measures the requests of one generation loop for `latencies`."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._waiting: dict[str, float] = {}  # arrivals of requests without a token, in seconds
        self._decoding: dict[str, float] = {}  # when requests had their first token

    def came(self, name: str, when: float) -> None:
        """Notes that a new request waits. `when`, here and below: seconds of one clock."""
        self._waiting[name] = when
        self._decoding.pop(name, None)

    def live(self, name: str) -> bool:
        """Has the request come, and not ended?"""
        return name in self._waiting or name in self._decoding

    def got(self, name: str, when: float, tokens: int) -> None:
        """Notes that the request has so many tokens now; does nothing for an unknown request."""
        if tokens and (came := self._waiting.pop(name, None)) is not None:
            self._latencies.ttft.add(max(0.0, when - came))
            self._decoding[name] = when

    def ended(self, name: str, when: float, tokens: int, finished: bool) -> None:
        """Notes the end of the request. Only requests that `finished` count for the latency per token."""
        if finished:
            self.got(name, when, tokens)
        self._waiting.pop(name, None)
        first = self._decoding.pop(name, None)
        if finished and first is not None and tokens > 1:
            self._latencies.tpot.add(max(0.0, when - first) / (tokens - 1))
