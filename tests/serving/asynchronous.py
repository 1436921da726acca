"""Asynchronous batching on a CPU: transformers' own loop with two batches in flight, its streams and events replaced.

A batch is computed when it is submitted, as operators on a CPU are; what it found can be read only after a wait for the
event that a device would have recorded behind the copy of it. Until then there are tokens that no model has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.generation.continuous_batching import input_outputs

POISON = 10**6  # a token of no vocabulary


class Event:
    """Marks of a stream that is done with everything at once, but for what is to happen when somebody has waited."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.arrives: Callable[[], object] | None = None

    def synchronize(self) -> None:
        if self.arrives is not None:
            self.arrives()
            self.arrives = None


class Stream(torch.cpu.Stream):
    def record_event(self, event: Event) -> None:
        """Does nothing."""

    def wait_event(self, event: Event) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing."""


class Torch:
    """The module `torch`, with this event."""

    Event = Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Pair(input_outputs.HostDeviceIOPair):
    """What is copied to the host arrives with the event behind it."""

    def transfer_outputs_d2h(self, stream: Any) -> None:
        ids, host = self.device_io.output_ids.clone(), self.host_io.output_ids
        host.fill_(POISON)
        self.d2h_over.arrives = lambda: host.copy_(ids)


def allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """`use_async_batching` works on a CPU."""
    if not hasattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types"):
        pytest.skip("this transformers takes its streams and events from torch.cuda alone")
    monkeypatch.setattr(input_outputs.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",))
    monkeypatch.setattr(input_outputs, "create_device_stream", lambda device: Stream())
    monkeypatch.setattr(input_outputs, "torch", Torch())
    monkeypatch.setattr(input_outputs, "HostDeviceIOPair", Pair)
