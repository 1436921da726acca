"""Steps of continuous batching that find no memory: the requests go on later, or one of them fails, and the loop lives.

In stock an error in a step fails every request and ends the loop. Here a step that found no memory for activations is
undone by computing its requests again (preemption.py). Where nothing can be scheduled the newest request gives up what
it has and is computed again later; one that has waited alone for long enough fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .preemption import PagePreemption


def computing(stock: Callable[..., None]) -> Callable[..., None]:
    """Stock's `_generation_step`, after which an OutOfMemoryError fails nothing but a request that ran alone."""

    @functools.wraps(stock)
    def step(self: Any, model: Any) -> None:
        try:
            stock(self, model)
        except torch.OutOfMemoryError as error:
            batch, preemption = self.inputs_and_outputs, self.offloading_manager
            if not isinstance(preemption, PagePreemption) or self.use_async_batching:
                raise
            requests, batch.requests_in_batch = batch.requests_in_batch, []
            if not preemption.begin_again(requests):
                _fail(self, requests[0].state, error)

    return step


def preparing(stock: Callable[..., bool]) -> Callable[..., bool]:
    """Stock's `prepare_next_batch`; where none could go on the newest request waits, and fails in the end."""

    @functools.wraps(stock)
    def prepare(self: Any) -> bool:
        while True:
            active, preemption = self.scheduler.active_requests, self.offloading_manager
            if isinstance(preemption, PagePreemption):
                for state, why in preemption.scheduler.late():
                    _fail(self, state, why)
            try:
                found = stock(self)
            except RuntimeError as error:
                if not isinstance(preemption, PagePreemption) or "No requests can be scheduled" not in str(error):
                    raise
                state = next(reversed(active.values()), None)
                if state is not None and len(active) == 1 and not preemption.may_wait():
                    _fail(self, state, _no_room(state.request_id))
                    continue
                if state is not None:
                    preemption.compute_again(state)
                if not active:
                    return False  # the loop looks again soon: other models may give memory
            else:
                if isinstance(preemption, PagePreemption):
                    preemption.scheduler.begins(found)
                    if found:
                        preemption.scheduled()
                return found

    return prepare


def _fail(processor: Any, state: Any, error: Exception) -> None:
    processor._handle_request_error(error, state)
    processor.scheduler.finish_request(state.request_id)


def _no_room(request: str) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"ballonet: no memory for request {request} to go on, although no other one runs: models and tensors have it. "
        "Give a larger budget (ballonet.set_budget) or host budget, or drop what is not needed"
    )
