"""Records the requests of a generation loop in timelines (offload/timeline/served.py) and in histograms of latencies
(measure/histogram.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from ...allocator.devices import Runtime
from ...offload.timeline.recorder import recorders_of
from ...offload.timeline.series import End
from ..measure.histogram import Latencies, RequestTimes


class RequestRecorder:
    """Records the requests of one loop. `loop`: the name of its model. `latencies`: of its model's requests."""

    def __init__(self, loop: str, latencies: Latencies, on: Runtime) -> None:
        self._loop = loop
        self._recorders = recorders_of(on)
        self._times = RequestTimes(latencies)

    def came(self, state: Any) -> None:
        """Records a new request, which waits."""
        came, prompt = round(state.created_time * 1e9), len(state.initial_tokens)
        self._times.came(state.request_id, state.created_time)
        self._recorders.served(lambda all_: all_.came(self._loop, state.request_id, came, prompt))

    def again(self, state: Any) -> None:
        """Records that a request that has begun waits again."""
        self._recorders.served(lambda all_: all_.again(self._loop, state.request_id))

    def batch(self, states: Iterable[Any], tokens: int) -> None:
        """Records a batch that is computed next. Names its thread after the model, for the log of decisions."""
        thread = threading.current_thread()
        if "_run_generation_loop" in thread.name:
            thread.name = f"batches of {self._loop}"
        requests, now = [(state.request_id, generated(state)) for state in states], time.monotonic_ns()
        for name, got in requests:
            self._times.got(name, now / 1e9, got)
        self._recorders.served(lambda all_: all_.batch(self._loop, now, requests, tokens))

    def rests(self) -> None:
        """Records that there is nothing to compute."""
        self._recorders.served(lambda all_: all_.rests(self._loop, time.monotonic_ns()))

    def ended(self, state: Any, end: End = "finished") -> None:
        """Records the end of a request: the first that is said of it."""
        if not self._times.live(state.request_id):
            return
        tokens, now = generated(state), time.monotonic_ns()
        self._times.ended(state.request_id, now / 1e9, tokens, end == "finished")
        self._recorders.served(lambda all_: all_.ended(self._loop, state.request_id, now, tokens, end))


def generated(state: Any) -> int:
    """Tokens generated for a request, including those before it was computed again."""
    before = len(state.initial_tokens) - state._true_initial_tokens if state._true_initial_tokens else 0
    return before + len(state.generated_tokens)
